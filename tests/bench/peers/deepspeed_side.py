# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed as the benches drive it."""

import ours


class DeepSpeed:
    """ZeRO-3 in bf16, ranks over gloo, the gradient's norm clipped.

    zero  Of `zero_optimization`, beside what all sides have.
    more  Of the configuration, the same.
    """

    def __init__(self, model, zero, clip, more=None):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": clip,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": ours.LR, "weight_decay": ours.WEIGHT_DECAY},
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": False,
                "contiguous_gradients": True,
                **zero,
            },
            **(more or {}),
        }
        deepspeed.init_distributed(dist_backend="gloo")
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    def forward(self, tokens):
        return self.engine(tokens)

    def backward(self, loss):
        self.engine.backward(loss)

    def step(self):
        self.engine.step()

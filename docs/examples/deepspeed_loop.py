"""A training loop with DeepSpeed's ZeRO-3: optimizer states on NVMe, bfloat16, clipping, a warm-up."""

import deepspeed
import torch
from small_model import BATCH, Model, batch, loss_of

STEPS = 20
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
        "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

torch.manual_seed(0)
model = Model()
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=CONFIG
)
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

for step in range(STEPS):
    loss = loss_of(engine, batch(step * world + rank))
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.5f}", flush=True)

engine.save_16bit_model(".", "model.pt")

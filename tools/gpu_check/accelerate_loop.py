#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One rank of gpu_check: trains a small GPT-2 with Accelerate's FSDP2 plugin and prints its losses and norms in a JSON
line. Its environment is that of torchrun.

usage: accelerate_loop.py plain|forebay cuda|cpu
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # the model is created from a config

import accelerate
import torch
import transformers

STEPS, SEQUENCES, LENGTH, VOCAB = 20, 8, 32, 64


def make_accelerator(who, device):
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
    )
    maker = accelerate.Accelerator
    if who == "forebay":
        from forebay.integrations.accelerate import Accelerator as maker
    if device == "cuda":
        return maker(fsdp_plugin=plugin)
    accelerator = maker(cpu=True)  # Accelerate ignores the plugin on the CPU
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    plugin.cpu_offload = None
    return accelerator


def main():
    who, device = sys.argv[1:]
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    accelerator = make_accelerator(who, device)
    torch.manual_seed(1)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": VOCAB, "n_positions": LENGTH}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    losses, norms = [], []
    start = torch.arange(SEQUENCES)[:, None] * 7
    tokens = ((start + torch.arange(LENGTH)) % VOCAB).to(accelerator.device)
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    figures = {"losses": losses, "norms": norms, "optimizer": type(optimizer.optimizer).__name__}
    if who == "forebay":
        figures |= {"committed": optimizer.optimizer.committed_step, "mode": optimizer.optimizer.mode}
        optimizer.optimizer.detach()
    print(json.dumps(figures), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the GPT of train_gpt.py as torch's FSDP2 shards it, with Forebay or, with --plain, with
torch's own AdamW.

The parameters are float32, forward and backward compute with them in bfloat16; the `if args.plain:`
branch is all that differs. Start it with torchrun, one process per rank. Every rank writes
OUT/rank<R>.jsonl: one JSON object a line with "event": start, resume, step, kill, end (see
train_support.py).
"""

import argparse
import datetime
import json
import os
import pathlib
import time

import forebay
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import train_support as support
from train_gpt import Gpt, loss_of


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plain", action="store_true", help="torch.optim.AdamW instead of Forebay"
    )
    support.add_run_arguments(
        parser,
        kill="RANK:STEP:COUNT",
        kill_help="SIGKILL all ranks once RANK has so many gradients in that step; first start only",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


def train(args):
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    text = support.load_text(args.text)
    batches = support.Batches(
        text, batch=args.batch, seq=args.seq, rank=rank, world=world, seed=args.seed
    )

    torch.manual_seed(args.seed)
    model = Gpt(args.width, args.layers, args.heads, args.seq)
    torch.manual_seed(args.seed + 1 + rank)
    sharding = {
        "mesh": init_device_mesh("cpu", (world,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    for block in model.blocks:
        fully_shard(block, **sharding)
    fully_shard(model, **sharding)
    if args.plain:
        opt = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    else:
        opt = forebay.attach(model, forebay.AdamW(lr=args.lr))

    start = support.restore(getattr(opt, "extra_state", None), batches)
    log = support.Log(pathlib.Path(args.out), rank, resumed=start > 0)
    log.write(
        "resume" if start else "start",
        step=start,
        params=sum(param.numel() for param in model.parameters()),
        gradients=sum(1 for _ in model.parameters()),
        world=world,
        args=support.json_args(args),
    )
    if start == 0:
        support.arm_kill_of_all(args.kill, opt, model, rank, log)

    for step in range(start + 1, args.steps + 1):
        began_ns = time.monotonic_ns()
        loss = loss_of(model, batches.next())
        forward_ended_ns = time.monotonic_ns()
        loss.backward()
        backward_ended_ns = time.monotonic_ns()
        opt.extra_state = support.pack(step, batches)
        opt.step()
        opt.zero_grad()
        step_s = (time.monotonic_ns() - began_ns) / 1e9
        spans = {"forward_ns": [began_ns, forward_ended_ns], "backward_ns": [forward_ended_ns, backward_ended_ns]}
        log.write("step", step=step, loss=loss.item(), step_s=step_s, **spans)
        if rank == 0:
            print(f"step {step:4d}/{args.steps}  loss {loss.item():.4f}  {step_s:.2f} s", flush=True)

    if args.sha and rank == 0:
        digest = {"sha256": opt.state_sha256(), "step": args.steps}
        pathlib.Path(args.sha).write_text(json.dumps(digest) + "\n", encoding="utf-8")
    distributed.barrier()  # rank 0 reads the shards of all ranks
    log.write("end", step=args.steps)
    distributed.destroy_process_group()


if __name__ == "__main__":
    train(parse_args())

# SPDX-License-Identifier: Apache-2.0
"""One rank of cluster_two_nodes.py: a sharded model whose layers compute nothing for a time. Prints a JSON line: seconds of
each step, bytes that the link has sent in one, and blocks of its node in DRAM and in all.

usage: two_nodes_ranks.py HOST PORT RANK RANKS LINK PARAMS LAYERS COMPUTE_MS STEPS
"""

import json
import os
import pathlib
import statistics
import sys
import time

import forebay
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS_BEFORE = 2
FORWARD_SHARE = 1 / 3


class Timed(torch.autograd.Function):
    """Takes its time, each way."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds * FORWARD_SHARE)  # house: allow sleep: in the place of compute
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds * (1 - FORWARD_SHARE))  # house: allow sleep: likewise
        return gradient, torch.zeros(ctx.shape), None


class Layer(nn.Module):
    def __init__(self, elems, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(elems)), seconds

    def forward(self, x):
        return Timed.apply(x, self.weight, self.seconds)


def sent_by(link):
    """Bytes, of this network namespace."""
    lines = pathlib.Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    [numbers] = [line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{link}:")]
    return int(numbers[8])


def main(host, port, rank, ranks, link, params, layers, compute_ms, steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=int(rank), world_size=int(ranks))
    seconds = float(compute_ms) * 1e-3 / int(layers)
    model = nn.Sequential(*(Layer(int(params) // int(layers), seconds) for _ in range(int(layers))))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    opt = forebay.attach(model, forebay.AdamW(lr=1e-4), job="two", durability="memory")
    times, sent_before = [time.monotonic()], 0
    for step in range(STEPS_BEFORE + int(steps)):
        if step == STEPS_BEFORE:
            sent_before = sent_by(link)
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        opt.step()
        opt.zero_grad()
        times.append(time.monotonic())
    sent_bytes = sent_by(link) - sent_before
    took = [end - begin for begin, end in zip(times, times[1:])][STEPS_BEFORE:]
    [job] = forebay.status(os.environ["FOREBAY_SOCKET"])["jobs"]
    said = {"median": statistics.median(took), "steps": took, "sent": sent_bytes / int(steps)}
    print(json.dumps({**said, "resident": job["resident_blocks"], "blocks": job["blocks"]}), flush=True)
    opt.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on the daemon of FOREBAY_SOCKET, one process for each rank, and prints JSON lines, one for what
each rank meets: ["attached", rank, step, extra_state], ["answered", rank, step], ["ended", rank, code of the
error], ["digests", rank, step, SHA-256 of weights and states, that of the same training in a job at durability memory].

usage: durable_ranks.py shared|sharded[+lamb|+passes|+leases|+loads] LEVEL on | MORE [HOLD]

+lamb: with LAMB. +passes: two backward passes a step that were not announced, in bfloat16. +leases: ranks hold a lease
while they wait. +loads: behind each step they load the states that there are.
on: until the daemon is gone. MORE: so many steps beyond the one that attach gives, then the digests. HOLD: while there
is a file of this name, the ranks wait where they are next, ["held", rank, "backward" or "step", its text], behind that.
A step whose gradients were lost with a daemon that was killed is repeated: ["repeated", rank, step].
"""

import json
import os
import pathlib
import sys
import time

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import batch, loss_of, net  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

RANKS = 2
STEPS_MAX = 20_000  # a daemon that nobody kills
WIDTH = 48  # some ten blocks of the test's daemon; FOREBAY_WIDTH gives another


def say(*values):
    """A line at once, whole between those of other ranks."""
    os.write(1, (json.dumps(values) + "\n").encode())


def extra_state(rank, step):
    return f"rank {rank} at step {step}".encode()


def attached(mode, job, rank, level):
    """(model, its optimizer)."""
    model = net(width=int(os.environ.get("FOREBAY_WIDTH", WIDTH)))
    if mode.endswith("+passes"):
        model = model.bfloat16()
    options = {"rank": rank, "world_size": RANKS}
    if mode.startswith("sharded"):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        options = {}
    optimizer = forebay.Lamb if mode.endswith("+lamb") else forebay.AdamW
    by = optimizer(lr=1e-2, max_grad_norm=1.0)
    return model, forebay.attach(model, by, job=job, run="one", durability=level, **options)


def held(mode, opt, rank, behind, hold):
    try:
        text = hold.read_text()
    except (FileNotFoundError, AttributeError):
        return
    attachment = opt._engine.attachment
    lease = attachment.fetch(rank) if mode.endswith("+leases") else None
    say("held", rank, behind, text)
    while hold.exists():
        time.sleep(0.002)  # house: allow sleep: until the test goes on
    if lease is not None:
        attachment.release(lease)


def train(mode, model, opt, rank, last, hold=None):
    """Until step `last`: yields each."""
    step = opt.committed_step + 1
    while step <= last:
        loss_of(model, batch(RANKS * step + rank)).backward()
        if mode.endswith("+passes"):
            loss_of(model, batch(RANKS * (STEPS_MAX + step) + rank)).backward()
        held(mode, opt, rank, "backward", hold)
        try:
            opt.step(extra_state=extra_state(rank, step))
        except forebay.ForebayError as error:
            if error.code != "E_GRAD_DROPPED":
                raise
            say("repeated", rank, step)
            opt.zero_grad()
            continue
        opt.zero_grad()
        if mode.endswith("+loads"):
            opt.load_state_dict(opt.state_dict())
        yield step
        held(mode, opt, rank, "step", hold)
        step += 1


def run(rank, mode, level, more, hold, folder):
    if mode.startswith("sharded"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=RANKS)
    model, opt = attached(mode, "durable", rank, level)
    say("attached", rank, opt.committed_step, (opt.extra_state or b"").decode())
    if more is None:
        try:
            for step in train(mode, model, opt, rank, STEPS_MAX):
                say("answered", rank, step)
        except RuntimeError as error:  # of the daemon's end, or gloo's of a rank that met it first
            say("ended", rank, getattr(error, "code", ""))
        os._exit(0)
    last = opt.committed_step + more
    for step in train(mode, model, opt, rank, last, hold):
        say("answered", rank, step)
    digest = opt.state_sha256()
    opt.detach()
    model, opt = attached(mode, "whole", rank, "memory")
    assert opt.committed_step == 0 and [*train(mode, model, opt, rank, last)][-1] == last
    say("digests", rank, last, digest, opt.state_sha256())
    opt.detach()
    if mode.startswith("sharded"):
        dist.destroy_process_group()


def main(arguments):
    how, level, goal, *rest = arguments
    more = None if goal == "on" else int(goal)
    hold = pathlib.Path(rest[0]) if rest else None
    forked_ranks.start(run, RANKS, how, level, more, hold)


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on the daemon of FOREBAY_SOCKET, one process for each rank, and prints JSON lines, one for what
each rank meets: ["pid", rank, process id], ["attached", rank, step, extra_state], ["answered", rank, step], ["ended",
rank, code of the error], ["digests", rank, step, SHA-256 of weights and states, that of the same training in a job at
durability memory].

usage: durable_ranks.py shared|sharded[+lamb|+passes|+leases|+loads] LEVEL on | MORE | ordered

+lamb: with LAMB. +passes: two backward passes a step that were not announced, in bfloat16. +leases: ranks hold a lease
while they wait for an order, and a daemon that is to stop waits for them. +loads: behind each step they load the present
states.
on: until the daemon has ended. MORE: so many steps beyond the one that attach gives, then the digests. ordered: the steps
that a test orders (ordered_steps.py), then the digests.
A step whose gradients were lost with a daemon that was killed is repeated: ["repeated", rank, step].
"""

import contextlib
import os
import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import batch, loss_of, net  # noqa: E402
from ordered_steps import BEFORE_STEP, BEHIND_BACKWARD, Ordered, say  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

RANKS = 2
STEPS_MAX = 20_000  # reached only if the daemon is never killed
WIDTH = 48  # gives some ten blocks of the test's daemon; FOREBAY_WIDTH gives another width


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


@contextlib.contextmanager
def lease(mode, opt, rank):
    """Holds a lease in the mode +leases."""
    if not mode.endswith("+leases"):
        yield
        return
    attachment = opt._engine.attachment
    fetched = attachment.fetch(rank)
    yield
    attachment.release(fetched)


def take_step(mode, model, opt, rank, step, orders):
    """Returns False if the gradients were lost."""
    loss_of(model, batch(RANKS * step + rank)).backward()
    if mode.endswith("+passes"):
        loss_of(model, batch(RANKS * (STEPS_MAX + step) + rank)).backward()
    if orders is not None:
        with lease(mode, opt, rank):
            orders.at(BEHIND_BACKWARD)
        orders.at(BEFORE_STEP)
    try:
        opt.step(extra_state=extra_state(rank, step))
    except forebay.ForebayError as error:
        if error.code != "E_GRAD_DROPPED":
            raise
        say("repeated", rank, step)
        opt.zero_grad()
        return False
    opt.zero_grad()
    if mode.endswith("+loads"):
        opt.load_state_dict(opt.state_dict())
    return True


def train(mode, model, opt, rank, last):
    """Until step `last`: yields each."""
    for step in range(opt.committed_step + 1, last + 1):
        while not take_step(mode, model, opt, rank, step, None):
            pass
        yield step


def train_as_ordered(mode, model, opt, rank):
    """Yields each step."""
    orders = Ordered(rank)
    orders.hold_in_backward(model.layers[0])
    step = opt.committed_step + 1
    while True:
        with lease(mode, opt, rank):
            if not orders.await_step(step):
                return
        while not take_step(mode, model, opt, rank, step, orders):
            pass
        yield step
        step += 1


def run(rank, mode, level, goal, folder):
    say("pid", rank, os.getpid())
    if mode.startswith("sharded"):
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=RANKS)
    model, opt = attached(mode, "durable", rank, level)
    say("attached", rank, opt.committed_step, (opt.extra_state or b"").decode())
    if goal == "on":
        try:
            for step in train(mode, model, opt, rank, STEPS_MAX):
                say("answered", rank, step)
        except RuntimeError as error:  # the daemon's end, or gloo's if a peer met it first
            say("ended", rank, getattr(error, "code", ""))
        os._exit(0)
    if goal == "ordered":
        steps = train_as_ordered(mode, model, opt, rank)
    else:
        steps = train(mode, model, opt, rank, opt.committed_step + int(goal))
    for step in steps:
        say("answered", rank, step)
    last = opt.committed_step
    digest = opt.state_sha256()
    opt.detach()
    model, opt = attached(mode, "whole", rank, "memory")
    assert opt.committed_step == 0 and [*train(mode, model, opt, rank, last)][-1] == last
    say("digests", rank, last, digest, opt.state_sha256())
    opt.detach()
    if mode.startswith("sharded"):
        dist.destroy_process_group()


def main(arguments):
    mode, level, goal = arguments
    forked_ranks.start(run, RANKS, mode, level, goal)


if __name__ == "__main__":
    main(sys.argv[1:])

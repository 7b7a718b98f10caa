# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job with shared attachment, each a forked process, on the daemon of FOREBAY_SOCKET. Prints JSON lines:
["attached", rank, step], ["loss", rank, step, loss in hexadecimal], ["seen", rank, step, SHA-256 of the parameters as this
process sees them], ["error", rank, code, text], ["digest", rank, SHA-256 of weights and states].

usage: remote_ranks.py JOB RANKS STEPS [WORD]...

passes    each step has two backward passes
frozen    the embedding is frozen
load      before step 2 all ranks load a state_dict, and rank 0 writes into a parameter
extra     a counter is stored as extra_state
wait      after step 1 prints ["waiting", rank, pid], and continues when a line comes
wide=N    layers of this width
beside=S  rank 1 is on the daemon's node, of the principal's user, and attaches to the socket S of that node
"""

import hashlib
import json
import os
import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
from models import batch, loss_of, net  # noqa: E402
from remote_gateway import UID  # noqa: E402

LR = 1e-2


def say(*values):
    """A line at once, whole between those of other ranks."""
    os.write(1, (json.dumps(values) + "\n").encode())


def seen(model):
    """Of the parameters, read where the model has them."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()


def load(model, opt, rank):
    """A state_dict of another model's parameters, through the model's own."""
    other = net(seed=9, **({"width": model.norm.weight.numel()}))
    model.load_state_dict(other.state_dict())
    opt.load_state_dict(opt.state_dict())
    say("seen", rank, -1, seen(model))


def train(job, rank, ranks, steps, words):
    if rank == 1 and "beside" in words:
        os.setuid(UID)
    model = net(width=int(words.get("wide", 8)))
    if "frozen" in words:
        model.embedding.weight.requires_grad_(False)
    opt = forebay.attach(
        model,
        forebay.AdamW(lr=LR),
        job=job,
        rank=rank,
        world_size=ranks,
        memory=forebay.Memory(extra_state_bytes=64 if "extra" in words else 0),
        run="remote",
        socket=words["beside"] if rank == 1 and "beside" in words else None,
    )
    say("attached", rank, opt.committed_step)
    say("seen", rank, opt.committed_step, seen(model))
    while opt.committed_step < steps:
        step = opt.committed_step + 1
        if step == 2 and "load" in words:
            load(model, opt, rank)
        for turn in range(2 if "passes" in words else 1):
            loss = loss_of(model, batch(100 * step + 10 * turn + rank))
            loss.backward()
        opt.step()
        opt.zero_grad()
        say("loss", rank, step, float(loss.detach()).hex())
        say("seen", rank, step, seen(model))
        if step == 1 and "wait" in words:
            say("waiting", rank, os.getpid())
            os.read(0, 1)
    say("digest", rank, opt.state_sha256())
    opt.detach()


def rank_process(job, rank, ranks, steps, words):
    try:
        train(job, rank, ranks, steps, words)
    except forebay.ForebayError as error:
        say("error", rank, error.code, str(error))


def main(job, ranks, steps, *texts):
    words = dict(text.partition("=")[::2] for text in texts)
    children = []
    for rank in range(1, int(ranks)):
        child = os.fork()
        if child == 0:
            forked_ranks.make_pool()
            rank_process(job, rank, int(ranks), int(steps), words)
            os._exit(0)
        children.append(child)
    rank_process(job, 0, int(ranks), int(steps), words)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

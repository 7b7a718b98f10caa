# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on the daemon of FOREBAY_SOCKET, whose daemon `forebay run` starts, and prints JSON lines:
["attached", step, extra_state], ["answered", step, loss], at last ["digest", step, SHA-256 of weights and states].

usage: kept_training.py LAST [LEVEL]

It trains to step LAST, at the level of durability, if there is one. Each line of stdin is a number of steps: without a line
it waits, behind the backward of the next step; at the end of stdin it continues without one.
"""

import json
import os
import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
from models import batch, loss_of, net  # noqa: E402


def say(*values):
    os.write(1, (json.dumps(values) + "\n").encode())


def allowed():
    """Yields once for each step that the test allows."""
    for line in sys.stdin:
        for _ in range(int(line)):
            yield
    while True:
        yield


def main(last, level=None):
    model = net(width=48)
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2, max_grad_norm=1.0), job="kept", durability=level)
    say("attached", opt.committed_step, (opt.extra_state or b"").decode())
    turns = allowed()
    for step in range(opt.committed_step + 1, int(last) + 1):
        loss = loss_of(model, batch(step))
        loss.backward()
        next(turns)
        opt.step(extra_state=f"behind {step}".encode())
        opt.zero_grad()
        say("answered", step, loss.item().hex())
    say("digest", opt.committed_step, opt.state_sha256())
    opt.detach()


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Trains two jobs two steps, one of them durable, and detaches; waits for a line, meanwhile a test kills the daemon of
FOREBAY_SOCKET; attaches again and trains each one step more. Prints JSON lines: ["detached", committed steps...],
["attached", committed steps..., SHA-256 of each before, after], ["trained", committed steps...]."""

import json
import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
from models import net, train  # noqa: E402

LEVELS = {"durable": "step", "whole": "memory"}


def attached():
    """[(model, its optimizer)] of both jobs."""
    both = []
    for job, level in LEVELS.items():
        model = net()
        both.append((model, forebay.attach(model, forebay.AdamW(), job=job, run="one", durability=level)))
    return both


def trained(both, steps):
    for model, opt in both:
        train(model, opt, steps, first=opt.committed_step)


def say(what, both, *more):
    print(json.dumps([what, *(opt.committed_step for _, opt in both), *more]), flush=True)


if __name__ == "__main__":
    jobs = attached()
    trained(jobs, 2)
    digests = [opt.state_sha256() for _, opt in jobs]
    steps = [opt.committed_step for _, opt in jobs]
    for _, opt in jobs:
        opt.detach()
    print(json.dumps(["detached", *steps]), flush=True)
    sys.stdin.readline()
    jobs = attached()
    say("attached", jobs, digests, [opt.state_sha256() for _, opt in jobs])
    trained(jobs, 1)
    say("trained", jobs)
    for _, opt in jobs:
        opt.detach()

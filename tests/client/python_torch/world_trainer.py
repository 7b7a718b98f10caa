# SPDX-License-Identifier: Apache-2.0
"""A process without a process group: JOB. Attaches as it finds itself and prints "attached STEP", or the error's id and
text on one line; then a step for each line that it reads, with "trained STEP" or the error."""

import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
from world_ranks import attach, linear, train  # noqa: E402


def say(*words):
    print(*(str(word).replace("\n", " ") for word in words), flush=True)


def steps(model, opt):
    for _ in sys.stdin:
        try:
            train(opt, model, 0)
            say("trained", opt.committed_step)
        except forebay.ForebayError as error:
            say(error.code, error)


if __name__ == "__main__":
    model = linear()
    try:
        opt = attach(model, job=sys.argv[1])
    except forebay.ForebayError as error:
        say(error.code, error)
    else:
        say("attached", opt.committed_step)
        steps(model, opt)

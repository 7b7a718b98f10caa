# SPDX-License-Identifier: Apache-2.0
"""Attaches, trains and is killed, round after round: one child a round, SIGKILLed at a moment that
its number gives.

usage: kill_rounds.py ROUNDS      FOREBAY_SOCKET and FOREBAY_JOB say where; prints one line a round.
"""

import os
import signal
import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
from forebay import _attach  # noqa: E402, F401
from models import batch, loss_of, net, train  # noqa: E402


def child(number):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2), timeout=30)
    kind = number % 5
    if kind == 0:  # within forward: a lease is open
        model.layers[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    elif kind == 1:  # within backward: leases, delivered gradients and an open slot
        model.layers[0].norm.weight.register_post_accumulate_grad_hook(
            lambda _: os.kill(os.getpid(), signal.SIGKILL)
        )
    elif kind == 2:  # between backward and step
        loss_of(model, batch(number)).backward()
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == 3:  # with a child process that outlives the rank for a moment
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "0.2"])
    train(model, opt, 1)
    os.kill(os.getpid(), signal.SIGKILL)


for number in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        try:
            forked_ranks.make_pool()
            child(number)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"round {number} ended with status {status}")
    print(f"round {number}", flush=True)

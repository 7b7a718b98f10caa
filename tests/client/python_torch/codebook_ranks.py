# SPDX-License-Identifier: Apache-2.0
"""Two ranks, each a process, train a model whose forward reads and updates a buffer, on inputs of
their own, from the job's committed step to step 6. Runs one round after the other and prints of each
the ranks' exit codes, losses and SHA-256 as one JSON line.

usage: codebook_ranks.py JOB[:RANKS]...

RANKS   Those that die by SIGKILL in step 4, after backward: 0, 1 or 01.
"""

import json
import os
import pathlib
import signal
import sys
import tempfile

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
from forebay import _attach  # noqa: E402, F401
from torch import nn  # noqa: E402

STEPS = 6
KILL_STEP = 4
RANK_LOST = 3  # exit code


class Codebook(nn.Module):
    """Subtracts from its inputs a moving average of them, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(4, 4)
        self.register_buffer("code", torch.zeros(4))

    def forward(self, x):
        hidden = self.up(x)
        with torch.no_grad():
            self.code.lerp_(hidden.mean(dim=0), 0.1)
        return hidden - self.code


def train(job, rank, dies):
    model = Codebook()
    opt = forebay.attach(
        model, forebay.AdamW(lr=1e-2), job=job, rank=rank, world_size=2, timeout=30
    )
    losses = {}
    try:
        for step in range(opt.committed_step + 1, STEPS + 1):
            torch.manual_seed(1000 * rank + step)
            loss = model(torch.randn(8, 4)).square().mean()
            losses[step] = loss.item()
            loss.backward()
            if dies and step == KILL_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            opt.step()
        sha256 = opt.state_sha256()
        opt.detach()  # else the other rank's reads end with this process
    except forebay.UnavailableError as error:  # forward raises it too if the other rank was faster
        if error.code != "E_RANK_LOST":
            raise
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(RANK_LOST)
    return {"losses": losses, "sha256": sha256}


def start(job, rank, dies, out):
    """The process of a rank."""
    pid = os.fork()
    if pid == 0:
        try:
            forked_ranks.make_pool()
            out.write_text(json.dumps(train(job, rank, dies)))
            os._exit(0)
        finally:
            os._exit(1)
    return pid


with tempfile.TemporaryDirectory() as folder:
    for argument in sys.argv[1:]:
        job, _, killed = argument.partition(":")
        outs = [pathlib.Path(folder) / f"{rank}" for rank in (0, 1)]
        for out in outs:
            out.write_text("null")
        pids = [start(job, rank, str(rank) in killed, out) for rank, out in enumerate(outs)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps([codes, [json.loads(out.read_text()) for out in outs]]), flush=True)

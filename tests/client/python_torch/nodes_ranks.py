# SPDX-License-Identifier: Apache-2.0
"""The ranks of one node of a sharded job over several, each a forked process with gloo, on the daemon of
FOREBAY_SOCKET; where one of them ends badly the others are ended too, and all begin again, as a launcher has it.
Prints JSON lines: ["attached", scenario, rank, step], ["loss", scenario, rank, step, loss in hexadecimal], ["error",
scenario, rank, code, text], ["digest", scenario, rank, step, SHA-256 of weights and states], ["begin", scenario, how often before].

usage: nodes_ranks.py HOST PORT FIRST_RANK RANKS WORLD FOLDER SCENARIO...

HOST and PORT are rank 0's, which takes a port for each time that the ranks begin. A scenario is a job of its name, with
words behind it, joined by "+":

clip          to a norm that clips
hsdp          two replicas, of half the ranks each
bad=R         rank R's first attempt at step 2 has a gradient that is not finite
rate=R-..     these ranks call step 2 with another learning rate the first time
die=R,..@P    these ranks are killed in step 3 at point P, once: "call" (of step), "gather" (of what the nodes have
              prepared), "decide" (when they know what all have)
hold=R,..@P   these ranks say ["held", scenario, rank] at P, once, and wait until FOLDER/go.SCENARIO exists
differ=R      rank R writes other masters behind step 2, of what another node has too
level=L       its durability, in the place of memory
patience=S    gloo waits so many seconds
states        rank 0 saves them in FOLDER
launched      its run is what the launcher says of it
"""

import contextlib
import datetime
import json
import os
import pathlib
import signal
import sys
import time
import traceback

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import torch._dynamo  # noqa: E402, F401: fully_shard() does, in each rank if not here
import torch.distributed as dist  # noqa: E402
from forebay import _attach, _optimizer  # noqa: E402, F401: likewise attach()
from forebay.sharded import engine as _engine  # noqa: E402, F401
from forebay.sharded.nodes import Nodes  # noqa: E402
from models import batch, loss_of, net  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

STEPS = 4
BAD_STEP, DEATH_STEP = 2, 3
LR = 1e-2
BEGINS_MAX = 3  # attempts to begin a scenario


def say(*values):
    """A line at once, whole between those of other ranks."""
    os.write(1, (json.dumps(values) + "\n").encode())


class Scenario:
    """What one job does."""

    def __init__(self, text):
        self.name = text
        words = dict(word.partition("=")[::2] for word in text.split("+"))
        self.clips, self.has_replicas, self.saves = "clip" in words, "hsdp" in words, "states" in words
        self.bad_rank = int(words.get("bad", -1))
        self.rate_ranks = [int(rank) for rank in words.get("rate", "").split("-") if rank]
        ranks, _, self.point = words.get("die", words.get("hold", "@")).partition("@")
        self.ranks = [int(rank) for rank in ranks.split(",") if rank]
        self.dies, self.level = "die" in words, words.get("level", "memory")
        self.run = None if "launched" in words else "one"
        self.differing = int(words.get("differ", -1))
        self.patience = datetime.timedelta(seconds=int(words.get("patience", 1800)))


def stop_at(scenario, rank, point, step, folder):
    if point != scenario.point or rank not in scenario.ranks or step != DEATH_STEP:
        return
    if scenario.dies:
        os.kill(os.getpid(), signal.SIGKILL)
    say("held", scenario.name, rank)
    while not (pathlib.Path(folder) / f"go.{scenario.name}").exists():
        time.sleep(0.02)  # house: allow sleep: until the test says so


def model_of(scenario, size):
    model = net()
    mesh = None
    if scenario.has_replicas:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def call(scenario, opt, rank, step, is_first):
    """Calls once more if the first call is refused: the gradients persist."""
    if step == BAD_STEP and is_first and scenario.rate_ranks:
        opt.param_groups[0]["lr"] = 2 * LR if rank in scenario.rate_ranks else LR
        try:
            opt.step()
        except forebay.ForebayError as error:
            say("error", scenario.name, rank, error.code, str(error))
        opt.param_groups[0]["lr"] = LR
    opt.step()


def train(scenario, model, opt, rank, size, folder, is_first):
    has_been_bad = not is_first
    while opt.committed_step < STEPS:
        step = opt.committed_step + 1
        loss = loss_of(model, batch(size * step + rank))
        is_bad = rank == scenario.bad_rank and step == BAD_STEP and not has_been_bad
        has_been_bad = has_been_bad or is_bad
        (loss * float("inf") if is_bad else loss).backward()
        if step == DEATH_STEP and rank == scenario.differing:
            engine = opt._engine
            engine.attachment.write_state(min(engine.partition_of.values()), 0, "master", torch.ones(4), 60.0)
        if is_first:
            stop_at(scenario, rank, "call", step, folder)
        try:
            call(scenario, opt, rank, step, is_first)
        except forebay.ForebayError as error:
            say("error", scenario.name, rank, error.code, str(error))
            if scenario.differing >= 0:
                os._exit(0)
            if error.code != "E_NONFINITE":
                raise
            opt.zero_grad()
            continue
        opt.zero_grad()
        say("loss", scenario.name, rank, step, float(loss.detach()).hex())


def run(scenario, rank, size, folder, is_first):
    model = model_of(scenario, size)
    norm = 0.01 if scenario.clips else None
    job = scenario.name.translate(str.maketrans("+=,@-", "....."))
    attached = []
    gather = Nodes.all_gather

    def gathered(nodes, own):
        step = attached[0].committed_step + 1 if attached and is_first else 0
        stop_at(scenario, rank, "gather", step, folder)
        everyone = gather(nodes, own)
        stop_at(scenario, rank, "decide", step, folder)
        return everyone

    Nodes.all_gather = gathered
    try:
        opt = forebay.attach(
            model, forebay.AdamW(lr=LR, max_grad_norm=norm), job=job, run=scenario.run, durability=scenario.level
        )
    except forebay.ForebayError as error:
        say("error", scenario.name, rank, error.code, str(error))
        os._exit(0)
    say("attached", scenario.name, rank, opt.committed_step)
    attached.append(opt)
    train(scenario, model, opt, rank, size, folder, is_first)
    if scenario.saves:
        opt.save_state(pathlib.Path(folder) / f"{scenario.name}.safetensors")
    say("digest", scenario.name, rank, opt.committed_step, opt.state_sha256())
    opt.detach()


def rank_process(scenario, host, port, rank, size, folder, is_first):
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=size,
                            timeout=scenario.patience)
    run(scenario, rank, size, folder, is_first)
    dist.destroy_process_group()


def begin(scenario, begun, host, port, ranks, size, folder):
    """The ranks run to their ends. Returns whether all of them succeeded."""
    children = []
    for rank in ranks:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                forked_ranks.make_pool()
                rank_process(scenario, host, port, rank, size, folder, begun == 0)
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
            os._exit(status)
        children.append(child)
    statuses = []
    while children:
        child, status = os.wait()
        children.remove(child)
        statuses.append(status)
        if status != 0:
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return not any(statuses)


def main(host, port, first, count, size, folder, *names):
    at = int(port)
    for name in names:
        scenario = Scenario(name)
        for begun in range(BEGINS_MAX):
            at += 1
            say("begin", name, begun)
            if begin(scenario, begun, host, at, range(int(first), int(first) + int(count)), int(size), folder):
                break
        at = int(port) + (at - int(port)) // 16 * 16 + 16  # all nodes compute the same port


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of sharded jobs, each a process with gloo, on the daemon of FOREBAY_SOCKET, and
runs cases in them: functions of the other sharded_*.py. Prints
one JSON line per case and rank: [launch, case, rank, error], the error null where the case passed.

usage: sharded_ranks.py NAME:RANKS:RUN[:CASE...]...

Each argument is a launch, all of whose cases the same processes run, one after the other, and then
end without detach(). No CASE: all that need no launch of their own. RUN is what FOREBAY_RUN is set
to. The ranks of a launch whose NAME begins with "device" are on a GPU that late_device.py makes, those of
one that begins with "cuda" each on one of this machine's. Where a case fails the processes end, and new ones
continue with the next case.
"""

import contextlib
import datetime
import faulthandler
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
import traceback

import torch

torch.set_num_threads(1)
# train_support.py is in tools/. The archive of gpu_check has it in the folder of this file.
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "tools"))

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import late_device  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forebay import _attach  # noqa: E402, F401
from forebay.sharded import engine, fsdp  # noqa: E402, F401
from models import batch, loss_of, net  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402

GLOO_SUMS = torch.__version__ < (2, 9)  # gloo sums if asked for the mean: pytorch issue 162338
DEADLINE_S = 60
LR = 1e-3
STEPS = 5
CASES = {}  # name of a case: (function, numbers of ranks that run it)


def computes_on():
    """What the ranks compute on: "cpu" or "cuda"."""
    return torch.get_default_device().type


def case(*sizes):
    """For launches of so many ranks; none: it needs a launch of its own."""

    def register(function):
        CASES[function.__name__] = function, sizes
        return function

    return register


def cases_of(ranks):
    """What a launch with so many ranks runs."""
    return [name for name, (_, sizes) in CASES.items() if ranks in sizes]


def small_net(seed=1):
    return net(seed, layers=2)


def with_means(model):
    """Has FSDP2 divide the sums itself, as attach() does, where gloo does not."""
    for module in model.modules():
        if GLOO_SUMS and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


class Ranks:
    """What a case gets: its rank, the mesh of all ranks, a job of its own."""

    def __init__(self, launch, name, mesh):
        self.rank, self.size, self.mesh = dist.get_rank(), dist.get_world_size(), mesh
        self.job = f"{launch}.{name}"[:100]

    def shard(self, model, layers=None, **options):
        for layer in model.layers if layers is None else layers:
            fully_shard(layer, mesh=self.mesh, **options)
        return with_means(fully_shard(model, mesh=self.mesh, **options))

    def attach(self, model, optimizer=None, **options):
        values = {"job": self.job, "timeout": DEADLINE_S / 2, **options}
        return forebay.attach(model, optimizer or forebay.AdamW(lr=LR), **values)

    def batch(self, step):
        """This rank's."""
        return batch(100 * step + self.rank)

    def everyone(self, value):
        """What each rank passes."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values


class Twins:
    """An attached model, and torch's FSDP2 of the same with torch's AdamW. Their losses differ by
    `loss_bound` of themselves at most."""

    def __init__(self, ranks, make=small_net, loss=loss_of, loss_bound=1e-5, **sharding):
        self.ranks, self.loss, self.loss_bound = ranks, loss, loss_bound
        self.ours, self.theirs = (ranks.shard(make(), **sharding) for _ in range(2))
        self.first = 1

    def attach(self, optimizer=None, **options):
        self.opt = self.ranks.attach(self.ours, optimizer, **options)
        assert self.opt.mode == "sharded"
        self.torch_opt = torch.optim.AdamW(self.theirs.parameters(), lr=LR, foreach=True)
        return self

    def backward(self, step):
        """Of both, which have the same loss: every operation is the same, on weights that differ by
        a few roundings of float32 (1e-5; of 16 bits, the case gives the bound)."""
        tokens = self.ranks.batch(step)
        ours, theirs = self.loss(self.ours, tokens), self.loss(self.theirs, tokens)
        bound = self.loss_bound * abs(theirs.item())
        assert abs(ours.item() - theirs.item()) <= bound, (step, ours, theirs)
        ours.backward()
        theirs.backward()

    def step(self):
        self.opt.step()
        self.torch_opt.step()
        self.torch_opt.zero_grad()

    def train(self, steps=STEPS):
        for _ in range(steps):
            self.backward(self.first)
            self.step()
            self.first += 1
        return self

    def assert_close(self, atol=1e-6):
        """Of the same gradients both compute the same update, in another order: it differs by some 8
        roundings of 2^-24 of at most 32 lr, the weight by a rounding of its own. Of 6 steps that is
        below 1e-6 + 1e-6 |w|; gradients differ by no more than the weights do."""
        for (name, ours), theirs in zip(self.ours.named_parameters(), self.theirs.parameters()):
            ours, theirs = ours.full_tensor(), theirs.full_tensor()
            assert ours.isfinite().all(), name
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=atol, msg=lambda m: f"{name}: {m}")


def reshard(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full(model):
    """The whole parameters, by name."""
    reshard(model)
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def assert_same(ours, theirs):
    """Bit by bit: they are never NaN, and a zero keeps its sign in what copies."""
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


@contextlib.contextmanager
def refused(code, message, hint):
    """What it holds raises such an error; message and hint are patterns."""
    try:
        yield
    except forebay.ForebayError as error:
        assert re.fullmatch(code, error.code), error
        assert re.search(message, str(error)), error
        assert re.search(hint, error.hint), error
        return
    raise AssertionError(f"nothing was refused with {code}")


# ------------------------------------------------------------------------------------ the processes


def run_rank(launch, rank, size, names, store, out):
    """Runs the cases until one fails."""
    if launch.startswith("cuda"):
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
        # Both models of a pair must get the same gradients. Sums by atomics would add in another order each time.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(
        "gloo" if computes_on() == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=DEADLINE_S),
    )
    mesh = init_device_mesh(computes_on(), (size,))
    is_late = launch.startswith("device")
    if is_late:
        late_device.install(registers_read_only=rank % 2 == 0)  # tests both ways to map memory
    for name in names:
        error = None
        try:
            CASES[name][0](Ranks(launch, name, mesh))
            assert not is_late or late_device.mistakes() == 0
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps([launch, name, rank, error]) + "\n")
        if error:
            return


def start_rank(*args):
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)  # some torch versions' gloo prints to stdout
        faults = open(f"{args[-1]}.faults", "w", encoding="utf-8")
        faulthandler.enable(faults)
        try:
            forked_ranks.make_pool()
            run_rank(*args)
        finally:
            os._exit(0)  # no detach()
    return pid


def run_launch(launch, size, names, folder):
    """Prints the results of the cases; starts the ranks again behind one that fails."""
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    while names:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            outs = [pathlib.Path(place) / f"{rank}" for rank in range(size)]
            start = functools.partial(start_rank, launch)
            pids = [
                start(rank, size, names, f"{place}/store", out) for rank, out in enumerate(outs)
            ]
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            lines = [
                out.read_text(encoding="utf-8").splitlines() if out.exists() else [] for out in outs
            ]
            faults = [out.with_suffix(".faults").read_text(encoding="utf-8") for out in outs]
        done = min(len(of_rank) for of_rank in lines)
        failed = next(
            (at for at in range(done) if any(json.loads(of_rank[at])[3] for of_rank in lines)), done
        )
        for at, name in enumerate(names[: failed + 1]):
            for rank, of_rank in enumerate(lines):
                text = f"the process ended: {codes[rank]}\n{faults[rank]}"
                gone = json.dumps([launch, name, rank, text])
                print(of_rank[at] if at < len(of_rank) else gone, flush=True)
        names = names[failed + 1 :]


def main():
    import sharded_activations  # noqa: F401
    import sharded_calls  # noqa: F401
    import sharded_composition  # noqa: F401
    import sharded_refusals  # noqa: F401
    import sharded_training  # noqa: F401
    import sharded_passes  # noqa: F401
    import sharded_meta  # noqa: F401
    import sharded_devices  # noqa: F401
    import sharded_gathers  # noqa: F401
    import sharded_states  # noqa: F401
    import sharded_unreduced  # noqa: F401
    import sharded_writes  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        for argument in sys.argv[1:]:
            launch, size, os.environ["FOREBAY_RUN"], *names = argument.split(":")
            run_launch(launch, int(size), names or cases_of(int(size)), folder)


if __name__ == "__main__":
    sys.modules["sharded_ranks"] = sys.modules["__main__"]  # the cases register here
    main()

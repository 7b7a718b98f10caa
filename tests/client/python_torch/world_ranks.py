# SPDX-License-Identifier: Apache-2.0
"""Ranks of test_world.py: CASE FOLDER. Each rank asserts what it sees; the first that fails ends the parent with its
traceback. FOREBAY_SOCKET is the daemon's. Process groups meet in files of FOLDER."""

import datetime
import functools
import os
import pathlib
import sys

import torch

torch.set_num_threads(1)

sys.path.append(str(pathlib.Path(__file__).parents[2] / "support"))
import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rendezvous import Rendezvous  # noqa: E402
from torch import multiprocessing, nn  # noqa: E402

PATIENCE = datetime.timedelta(seconds=120)


def linear():
    torch.manual_seed(7)
    return nn.Linear(3, 2)


def inputs(rank):
    return torch.arange(6.0).reshape(2, 3) + rank


def backward(model, rank):
    model(inputs(rank)).square().mean().backward()


def train(opt, model, rank):
    backward(model, rank)
    opt.step()


def weights_of(ranks):
    """After a step of torch's SGD with the mean of the gradients that these ranks have, lr 1."""
    model = linear()
    gradients = [torch.autograd.grad(model(inputs(rank)).square().mean(), model.parameters()) for rank in ranks]
    means = [sum(each) / len(ranks) for each in zip(*gradients)]
    return [one.detach() - mean for one, mean in zip(model.parameters(), means)]


def assert_trained(model, ranks):
    for one, wanted in zip(model.parameters(), weights_of(ranks), strict=True):
        assert torch.equal(one.detach(), wanted), (one, wanted)


def attach(model, **options):
    return forebay.attach(model, forebay.SGD(lr=1.0), **options)


def refused(call, code, *words):
    try:
        call()
    except forebay.ForebayError as error:
        assert error.code == code, error
        for word in words:
            assert word in str(error), (word, str(error))
        return error
    raise AssertionError(f"{code} was not raised")


def join(method, rank, size):
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=PATIENCE)


def trains_with_the_others(rank, size, job):
    model = linear()
    opt = attach(model, job=job)
    train(opt, model, rank)
    assert opt.committed_step == 1
    assert_trained(model, range(size))
    dist.barrier()
    opt.detach()


def spawned(rank, method, job):
    """Nothing but the process group says that the ranks are of one run."""
    join(method, rank, 2)
    trains_with_the_others(rank, 2, job)
    model = linear()
    opt = attach(model, job=f"{job}.sharded", mode="sharded")
    train(opt, model, rank)
    for one, wanted in zip(model.parameters(), weights_of(range(2)), strict=True):
        assert torch.equal(one.full_tensor(), wanted), (one, wanted)
    dist.barrier()
    opt.detach()
    dist.destroy_process_group()


def contradictions(rank, folder):
    """Each call is refused on each rank before the daemon hears of it."""
    join(f"file://{folder}/contradictions", rank, 2)
    own = f"rank {rank} of 2"
    given = [
        ({"rank": 1 - rank}, f"the arguments say rank {1 - rank} of 2"),
        ({"world_size": 3}, f"the arguments say rank {rank} of 3"),
        ({"rank": 0, "world_size": 1}, "the arguments say rank 0 of 1"),
        ({"rank": rank, "world_size": 4}, f"the arguments say rank {rank} of 4"),
    ]
    for options, said in given:
        call = functools.partial(attach, linear(), job="none", **options)
        refused(call, "E_RANK", own, said, "the environment nothing", "new_group()")
    variables = [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": str(1 - rank), "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "4"},
        {"RANK": "many"},
    ]
    for wrong in variables:
        os.environ.update(wrong)
        said = ", ".join(f"{name}={text}" for name, text in wrong.items())
        refused(lambda: attach(linear(), job="none"), "E_RANK", own, f"the environment {said}", "unset RANK", "rank=")
        both = functools.partial(attach, linear(), job="none", rank=0, world_size=1)
        refused(both, "E_RANK", own, "the arguments say rank 0 of 1", said)
        for name in wrong:
            del os.environ[name]
    assert all(found["name"] != "none" for found in forebay.status()["jobs"])

    # Arguments that agree with the group are used, whatever the variables say. Variables that agree are used too.
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1"})
    opt = attach(linear(), job="confirmed", rank=rank, world_size=2)
    dist.barrier()
    opt.detach()
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2"})
    trains_with_the_others(rank, 2, "agreed")
    # The variables of an srun task do not describe ranks that the task has spawned.
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ.update({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"})
    os.environ.update({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"})
    trains_with_the_others(rank, 2, "task")
    dist.destroy_process_group()


def subgroups(rank, folder):
    """Four ranks train two models: a group of torch's for each, then the ranks of a node."""
    join(f"file://{folder}/subgroups", rank, 4)
    groups = [dist.new_group(ranks, timeout=PATIENCE) for ranks in ([0, 1], [2, 3])]
    own = groups[rank // 2]
    model = linear()
    numbers = {"rank": dist.get_rank(own), "world_size": dist.get_world_size(own)}
    opt = attach(model, job=f"pair{rank // 2}", **numbers)
    train(opt, model, rank)
    assert_trained(model, [rank // 2 * 2, rank // 2 * 2 + 1])
    dist.barrier()
    opt.detach()
    call = functools.partial(attach, linear(), job="pair2", rank=1 - numbers["rank"], world_size=2)
    refused(call, "E_RANK", f"rank {rank} of 4", f"the arguments say rank {1 - numbers['rank']} of 2")
    dist.destroy_process_group()

    join(f"file://{folder}/nodes", rank, 4)
    os.environ.update({"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"})
    model = linear()
    opt = attach(model, job=f"node{rank // 2}", rank=rank % 2, world_size=2)
    train(opt, model, rank)
    assert_trained(model, [rank // 2 * 2, rank // 2 * 2 + 1])
    dist.barrier()
    dist.destroy_process_group()


def group_after_attach(rank, folder):
    """Each rank attaches alone; the process group comes later."""
    model = linear()
    opt = attach(model, job=f"alone{rank}")
    train(opt, model, rank)  # a job of one rank trains without a group
    join(f"file://{folder}/later", rank, 2)
    dist.new_group([0], timeout=PATIENCE)
    # This rank is 0 of 1 in the group, which was not passed to attach().
    dist.new_group([1], timeout=PATIENCE)
    for _ in range(2):
        backward(model, rank)
        refused(opt.step, "E_RANK", "has attached as rank 0 of 1", f"has it as rank {rank} of 2", "detach()")
        opt.zero_grad()
    assert opt.committed_step == 1
    opt.detach()
    trains_with_the_others(rank, 2, "later")  # attaches again, as the hint says
    dist.destroy_process_group()

    # A group of the job's size, with the job's ranks, may be created after attach.
    model = linear()
    opt = attach(model, job="announced", rank=rank, world_size=2, run="announced")
    join(f"file://{folder}/announced", rank, 2)
    train(opt, model, rank)
    assert_trained(model, range(2))
    dist.barrier()
    opt.detach()
    dist.destroy_process_group()


def by_file(folder):
    multiprocessing.spawn(spawned, (f"file://{folder}/spawn", "file"), nprocs=2)


def by_tcp(folder):
    """The parent serves the store: its port is nobody else's."""
    rendezvous = Rendezvous()
    os.environ.update(rendezvous.environment())
    multiprocessing.spawn(spawned, (f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", "tcp"), nprocs=2)


def forked(body, ranks):
    return functools.partial(forked_ranks.start_in, rank_main=body, ranks=ranks)


CASES = {
    "by_file": by_file,
    "by_tcp": by_tcp,
    "contradictions": forked(contradictions, 2),
    "subgroups": forked(subgroups, 4),
    "group_after_attach": forked(group_after_attach, 2),
}

if __name__ == "__main__":
    CASES[sys.argv[1]](pathlib.Path(sys.argv[2]))

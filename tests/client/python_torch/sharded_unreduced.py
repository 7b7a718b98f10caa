# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: gradients that backward computed, and that FSDP2 has not reduced when step() is called."""

import itertools

import forebay
import torch
import torch.distributed as dist
from models import loss_of
from sharded_ranks import Twins, case, computes_on, full, refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH = 4
LR = 2.0**-8
jobs = itertools.count()


class Layer(nn.Module):
    """A module in it is sharded by itself, and used `uses` times."""

    def __init__(self, reentrant, uses):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.uses = reentrant, uses

    def compute(self, x):
        hidden = x
        for _ in range(self.uses):
            hidden = self.inner(hidden).tanh()
        return x + self.outer(hidden)

    def forward(self, x):
        if self.reentrant is None:
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.reentrant)


class Nested(nn.Module):
    """uses  of the layer, and of the module within it, in one forward."""

    def __init__(self, reentrant, uses):
        super().__init__()
        torch.manual_seed(0)
        self.uses = uses[0]
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), Layer(reentrant, uses[1])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.uses):
            x = self.layer(x)
        return self.last(x)


def rows_of(rank):
    generator = torch.Generator("cpu").manual_seed(rank)
    return torch.randn(4, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())


def loss_of_one(model, rows):
    return model(rows).sum()


def loss_of_two(model, rows):
    """Two forwards before one backward, as preference training has them."""
    return model(rows).sum() + 3 * model(2 * rows.flip(0)).sum()


class OneStep:
    """An attached model, whose steps are those of one process. Plain SGD takes lr times the gradient off the
    weights.

    reentrant  of the checkpoint in the layer; None: the layer is not checkpointed.
    """

    def __init__(self, ranks, reentrant, uses=(1, 1), mesh=None):
        self.ranks, self.uses, self.rows = ranks, uses, rows_of(ranks.rank)
        self.model = Nested(reentrant, uses)
        for module in (self.model.layer.inner, self.model.layer, self.model):
            fully_shard(module, mesh=mesh or ranks.mesh)
        self.opt = ranks.attach(self.model, forebay.SGD(lr=LR), job=f"{ranks.job}.{next(jobs)}")

    def backward(self, loss):
        loss(self.model, self.rows).backward()

    def assert_step(self, *losses):
        """That step() applies their gradients. An element is a sum of at most 64 terms below 32, in another
        order: 64 * 32 * 2^-24 is 1.3e-4. The weights are below 1: their rounding is 2^-25 / LR, 1e-5."""
        before, wanted = full(self.model), Nested(None, self.uses)
        wanted.load_state_dict(before)
        for rank in range(self.ranks.size):
            for loss in losses:
                (loss(wanted, rows_of(rank)) / self.ranks.size).backward()
        number = self.opt.committed_step
        self.opt.step()
        assert self.opt.committed_step == number + 1
        for name, after in full(self.model).items():
            gradient = wanted.get_parameter(name).grad
            torch.testing.assert_close((before[name] - after) / LR, gradient, rtol=0, atol=2e-4, msg=lambda m: f"{name}: {m}")

    def assert_refused(self, message, hint):
        number, before = self.opt.committed_step, full(self.model)
        with refused("E_GRAD_PARTIAL", message, hint):
            self.opt.step()
        with refused("E_GRAD_PARTIAL", "step\\(\\)", ""):
            self.opt.step()
        assert self.opt.committed_step == number
        after = full(self.model)
        assert all(torch.equal(before[name], after[name]) for name in before)


LOST = r"1 of 3 modules, first of layer\.inner:", "use_reentrant=False"


@case(1, 2)
def two_forwards_before_one_backward_of_reentrant_checkpoints(ranks):
    one = OneStep(ranks, reentrant=True)
    one.backward(loss_of_one)
    one.assert_step(loss_of_one)
    one.backward(loss_of_two)
    one.assert_refused(*LOST)
    one.backward(loss_of_one)  # begins the step from scratch
    one.assert_step(loss_of_one)
    one.backward(loss_of_two)
    one.assert_refused(*LOST)
    one.opt.zero_grad()
    one.backward(loss_of_one)
    one.assert_step(loss_of_one)
    one.backward(loss_of_two)
    one.model.zero_grad()  # skips the batch
    one.backward(loss_of_one)
    one.assert_step(loss_of_one)
    one.opt.detach()


@case(1, 2)
def what_the_hint_about_reentrant_checkpoints_says(ranks):
    for uses in ((1, 1), (1, 2), (2, 1)):
        one = OneStep(ranks, reentrant=False, uses=uses)
        for losses in ([loss_of_two], [loss_of_one, loss_of_two], [loss_of_two]):
            for loss in losses:
                one.backward(loss)
            one.assert_step(*losses)
        one.opt.detach()


@case(2)
def layers_used_twice_with_reentrant_checkpoints(ranks):
    """Each checkpoint is computed again by itself: a module in two of them loses a gradient, one that is used
    twice in one of them does not."""
    one = OneStep(ranks, reentrant=True, uses=(1, 2))
    one.backward(loss_of_one)
    one.assert_step(loss_of_one)
    one.opt.detach()
    one = OneStep(ranks, reentrant=True, uses=(2, 1))
    one.backward(loss_of_one)
    one.assert_refused(*LOST)


@case(2)
def clipping_before_a_step_that_is_refused(ranks):
    one = OneStep(ranks, reentrant=True)
    one.backward(loss_of_two)
    nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
    one.assert_refused(*LOST)
    one.backward(loss_of_one)
    one.assert_step(loss_of_one)
    one.opt.detach()


@case(2)
def a_step_before_the_backward_that_synchronizes(ranks):
    one = OneStep(ranks, reentrant=None)
    one.model.set_requires_gradient_sync(False)
    one.backward(loss_of_one)
    one.assert_refused("3 of 3 modules", "set_requires_gradient_sync")
    one.backward(loss_of_one)
    one.model.set_requires_gradient_sync(True)
    one.backward(loss_of_two)
    one.assert_step(loss_of_one, loss_of_two)
    one.model.layer.set_requires_gradient_sync(False, recurse=False)
    one.backward(loss_of_one)
    one.assert_refused("1 of 3 modules, first of layer:", "set_requires_gradient_sync")


@case(2)
def a_step_before_the_backward_that_adds_up_replicas(ranks):
    mesh = init_device_mesh(computes_on(), (2, 1), mesh_dim_names=("replicate", "shard"))
    one = OneStep(ranks, reentrant=None, mesh=mesh)
    one.model.set_requires_all_reduce(False)
    one.backward(loss_of_one)
    one.assert_refused("3 of 3 modules", "set_requires_all_reduce")
    one.model.set_requires_all_reduce(True)
    one.backward(loss_of_two)
    one.assert_step(loss_of_two)
    one.opt.detach()


@case(2)
def a_step_before_finalize_backward(ranks):
    one = OneStep(ranks, reentrant=None)
    if not hasattr(one.model, "set_manual_backward_finalization"):  # torch before 2.15
        return
    one.model.set_manual_backward_finalization(True)
    one.backward(loss_of_one)
    one.model.finalize_backward()
    one.assert_step(loss_of_one)
    one.backward(loss_of_one)
    one.assert_refused("1 of 3 modules, first of root:", "finalize_backward")


@case(2)
def a_gradient_that_is_left_on_one_rank_alone(ranks):
    """The rank that was refused ends, and the others do not wait for it."""
    one = OneStep(ranks, reentrant=None)
    one.backward(loss_of_one)
    dist.barrier()
    if ranks.rank == 0:
        whole = one.opt._engine.plan.units[0]._group.fsdp_params[0]._unsharded_param
        whole.grad = torch.ones(whole.shape)
        with refused("E_GRAD_PARTIAL", "1 of 3 modules", ""):
            one.opt.step()
        one.opt.detach()
    else:
        with refused("E_RANK_LOST", "rank 0 of job", ""):
            one.opt.step()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.never = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.down(self.up(x).relu())


class Experts(nn.Module):
    """A step skips an expert; one is frozen, and each has a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(Expert() for _ in range(4))
        self.layers[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for index, expert in enumerate(self.layers):
            if index != self.skipped:
                x = x + checkpoint(expert, x, use_reentrant=True)
        return self.head(x)


@case(1, 2)
def experts_frozen_layers_and_unused_parameters(ranks):
    """A parameter without a gradient is no error."""
    twins = Twins(ranks, Experts, loss_of).attach()
    for step in range(8):
        twins.ours.skipped = twins.theirs.skipped = step % 5
        twins.backward(step)
        if step % 2:
            twins.step()
    twins.assert_close()
    twins.opt.detach()

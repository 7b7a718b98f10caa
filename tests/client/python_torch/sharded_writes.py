# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: what writes into the parameters of a sharded attachment writes into the
daemon's memory, with the bits that torch's FSDP2 has after the same."""

import tempfile

import torch
from models import loss_of
from sharded_ranks import LR, Twins, assert_same, case, computes_on, full, refused, reshard, small_net
from sharded_training import Uneven, assert_computes_the_same, loss_of_uneven, wide_twins
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh


def up(model):
    return model.layers[0].up.weight


def shard(model):
    """Of rows that 2 and 3 ranks do not divide."""
    return model.embedding.weight.to_local()


def rows_of(tensors):
    for number, tensor in enumerate(tensors):
        tensor.mul_(1 + number / 8)


def masked(model):
    shard(model)[shard(model) > 0.5] = 0.25


WRITES = {
    "zero_": lambda m: up(m).zero_(),
    "data": lambda m: up(m).data.fill_(0.3),
    "copy_": lambda m: up(m).copy_(torch.full_like(up(m), 0.7)),
    "copy of itself": lambda m: up(m).copy_(up(m) * 1.1),
    "mul_": lambda m: up(m).mul_(0.9),
    "addcmul_": lambda m: up(m).addcmul_(up(m), up(m), value=0.5),
    "lerp_": lambda m: up(m).lerp_(up(m) * 2, 0.1),
    "normal_": lambda m: up(m).normal_(),
    "kaiming": lambda m: nn.init.kaiming_uniform_(up(m)),
    "trunc_normal": lambda m: nn.init.trunc_normal_(m.layers[1].down.weight, std=0.2),
    "ones": lambda m: nn.init.ones_(m.norm.weight),
    "shard": lambda m: shard(m).add_(0.1),
    "shard with out=": lambda m: torch.add(shard(m), 0.1, out=shard(m)),
    "rows": lambda m: shard(m)[1:3].fill_(0.3),
    "elements": lambda m: shard(m).__setitem__((1, slice(2, 5)), 0.1),
    "mask": masked,
    "columns": lambda m: shard(m).t()[2].copy_(torch.arange(len(shard(m))) / 16),
    "view": lambda m: shard(m).view(-1)[3:].uniform_(),
    "other type": lambda m: shard(m).view(torch.int32)[0].fill_(0x3F000001),
    "split": lambda m: rows_of(shard(m).split(2)),
    "unbind": lambda m: rows_of(shard(m).unbind(1)),
    "chunks of a view": lambda m: rows_of(shard(m).t().chunk(2)[1]),
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 0.9),
    "foreach of lists": lambda m: torch._foreach_add_(
        list(m.parameters()), [p * 0.3 for p in m.parameters()], alpha=0.5
    ),
    "foreach of shards": lambda m: torch._foreach_mul_(
        [p.to_local() for p in m.parameters()], 1.1
    ),
    "foreach of views": lambda m: torch._foreach_add_(
        [shard(m)[0], shard(m)[1:], up(m).to_local()], 0.1
    ),
}


def equalize(twins):
    """Gives ours the values of theirs."""
    twins.ours.load_state_dict(twins.theirs.state_dict())
    assert_computes_the_same(twins)
    return twins


def write_everything(twins):
    for name, write in WRITES.items():
        before = full(twins.ours)
        for model in (twins.ours, twins.theirs):
            torch.manual_seed(twins.ranks.rank)
            with torch.no_grad():
                write(model)
        assert_same(full(twins.ours), full(twins.theirs))
        after = full(twins.ours)
        assert any(not torch.equal(after[key], before[key]) for key in before), name
    assert_computes_the_same(twins)


@case(2)
def writes_into_parameters(ranks):
    twins = equalize(Twins(ranks).attach().train(1))
    write_everything(twins)
    twins.train(2).assert_close()
    twins.opt.detach()


@case(2)
def writes_into_wide_masters(ranks):
    twins = equalize(wide_twins(ranks).attach().train(1))
    write_everything(twins)
    twins.train(2).assert_close(atol=3 * 10 * LR * 2**-6)
    twins.opt.detach()


@case(3)
def writes_into_uneven_and_empty_shards(ranks):
    """Also after FSDP2 has created its padded forms of them."""
    twins = equalize(Twins(ranks, Uneven, loss_of_uneven).attach().train(1))
    for _ in range(2):
        for model in (twins.ours, twins.theirs):
            with torch.no_grad():
                for parameter in model.parameters():
                    local = parameter.to_local()
                    local.mul_(1.1)
                    local[:1].add_(0.2)
                    assert not local.new_zeros(local.shape).any()
        assert_computes_the_same(twins)
        for ours, theirs in zip(twins.ours.parameters(), twins.theirs.parameters()):
            assert torch.equal(ours.to_local()[:1] * 1, theirs.to_local()[:1])
        equalize(twins)
    twins.train(2).assert_close()
    twins.opt.detach()


@case(3)
def writes_by_replicas(ranks):
    """Groups gathered on a rank that owns nothing are gathered again too, after the owner's write; the
    owner's next write waits until such a rank, however late, comes to it too."""
    mesh = init_device_mesh(computes_on(), (ranks.size, 1), mesh_dim_names=("replicate", "shard"))
    ranks.mesh = mesh
    twins = equalize(Twins(ranks, reshard_after_forward=False).attach().train(1))
    weights = [(up(model), model.norm.bias) for model in (twins.ours, twins.theirs)]
    for number in range(20):
        for matrix, bias in weights:
            with torch.no_grad():
                matrix.mul_(1 - number / 100)
                bias.fill_(number / 10)
        (ours, _), (theirs, _) = weights
        assert torch.equal(ours.to_local() * 1, theirs.to_local()), number
        with torch.no_grad():
            reshard(twins.theirs)
            theirs = loss_of(twins.theirs, ranks.batch(number))
            assert torch.equal(loss_of(twins.ours, ranks.batch(number)), theirs), number
            for _ in range(0 if ranks.rank == 0 else 5):  # rank 0, the owner, skips this loop
                reshard(twins.ours)
                assert torch.equal(loss_of(twins.ours, ranks.batch(number)), theirs), number
    reshard(twins.ours)
    reshard(twins.theirs)
    twins.train(2).assert_close()
    twins.opt.detach()


@case(2)
def a_write_between_backward_and_step(ranks):
    """The step applies the gradient to what was written."""
    twins = equalize(Twins(ranks).attach().train(1))
    twins.backward(50)
    for model in (twins.ours, twins.theirs):
        reshard(model)
        with torch.no_grad():
            up(model).mul_(0.5)
    twins.step()
    twins.train(2).assert_close()
    twins.opt.detach()


# ----------------------------------------------------------------------------------------- loading


def loads(twins, folder):
    """Ways to give ours the values of theirs."""
    ours, theirs = twins.ours, twins.theirs
    whole = get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True))
    saved = {"model": theirs.state_dict()}
    checkpoint.save(saved, checkpoint_id=folder)

    def load_state_dict():
        ours.load_state_dict(theirs.state_dict())

    def by_layers():
        rest = {k: v for k, v in theirs.state_dict().items() if "layers" not in k}
        ours.load_state_dict(rest, strict=False)
        for layer, other in zip(ours.layers, theirs.layers):
            layer.load_state_dict(other.state_dict())

    def full_state_dict():
        set_model_state_dict(ours, dict(whole), options=StateDictOptions(full_state_dict=True))

    def broadcast():
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(ours, dict(whole) if twins.ranks.rank == 0 else {}, options=options)

    def sharded_state_dict():
        set_model_state_dict(ours, get_model_state_dict(theirs))

    def distributed_checkpoint():
        state = {"model": ours.state_dict()}
        checkpoint.load(state, checkpoint_id=folder)

    return (
        load_state_dict,
        by_layers,
        full_state_dict,
        broadcast,
        sharded_state_dict,
        distributed_checkpoint,
    )


def load_in_every_way(twins):
    ranks = twins.ranks
    with tempfile.TemporaryDirectory() as folder:
        folder = ranks.everyone(folder)[0]
        for load in loads(twins, f"{folder}/theirs"):
            with torch.no_grad():
                torch._foreach_mul_(list(twins.ours.parameters()), 0.5)
            assert not torch.equal(up(twins.ours).full_tensor(), up(twins.theirs).full_tensor())
            load()
            assert_computes_the_same(twins)
        checkpoint.save({"model": twins.ours.state_dict()}, checkpoint_id=f"{folder}/ours")
        fresh = ranks.shard(small_net(seed=9))
        checkpoint.load({"model": fresh.state_dict()}, checkpoint_id=f"{folder}/ours")
        assert_same(full(fresh), full(twins.ours))
        ranks.everyone(None)  # rank 0 deletes the folder


@case(2)
def loading(ranks):
    twins = Twins(ranks).attach().train(2)
    load_in_every_way(twins)
    twins.train(2).assert_close()
    twins.opt.detach()


@case(2)
def loading_of_wide_masters(ranks):
    twins = wide_twins(ranks).attach().train(2)
    load_in_every_way(twins)
    twins.train(2).assert_close(atol=4 * 10 * LR * 2**-6)
    twins.opt.detach()


# -------------------------------------------------------------------------------------- refusals


@case(2)
def writes_that_are_not_finite(ranks):
    """Nothing has changed, of several parameters none."""
    for dtype, too_large in ((torch.float16, 1e5), (torch.bfloat16, 3.4e38)):
        twins = wide_twins(ranks, dtype=dtype)
        twins.attach(job=f"{ranks.job}.{dtype}").train(1)
        before, digest = full(twins.ours), twins.opt.state_sha256()
        norm = twins.ours.norm.weight
        for write in (
            lambda: up(twins.ours).fill_(float("nan")),
            lambda: up(twins.ours).to_local()[-1:].fill_(float("inf")),
            lambda: up(twins.ours).mul_(float("-inf")),
            lambda: up(twins.ours).data.add_(too_large),
            lambda: torch._foreach_mul_([norm, up(twins.ours)], [2.0, float("nan")]),
        ):
            with torch.no_grad(), refused(
                "E_NONFINITE", "[0-9]+ of the values .* parameter layers.0.up.weight", "as it was"
            ):
                write()
        assert_same(full(twins.ours), before)
        assert twins.opt.state_sha256() == digest
        twins.train(1).assert_close(atol=2 * 10 * LR * 2**-6)
        twins.opt.detach()


@case(2)
def a_write_after_detach(ranks):
    """Through what was read from the model while it was attached."""
    twins = Twins(ranks).attach().train(1)
    early = twins.ours.state_dict()["layers.0.up.weight"]
    twins.opt.detach()
    before = full(twins.ours)
    with refused("E_NOT_READY", "its optimizer is detached", "attach the model again"):
        early.zero_()
    assert_same(full(twins.ours), before)

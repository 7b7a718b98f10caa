# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: what FSDP2 gathers ahead of the layer that computes, and what it gathers in
vain."""

import contextlib

import torch
import forebay
from forebay.sharded.engine import ShardedEngine
from models import loss_of, net
from sharded_ranks import Twins, assert_same, case, full, refused, reshard, small_net

LAYERS = 4


def deep_net():
    return net(1, layers=LAYERS)


@contextlib.contextmanager
def in_order(model):
    """Names of units as they are gathered, and of layers as they compute: "gather layers.0", ..."""
    order, before = [], ShardedEngine.padded

    def padded(engine, member):
        entry = f"gather {member.group.name}"
        if entry not in order:
            order.append(entry)
        return before(engine, member)

    handles = [
        layer.register_forward_hook(lambda *_, name=f"layers.{number}": order.append(f"compute {name}"))
        for number, layer in enumerate(model.layers)
    ]
    ShardedEngine.padded = padded
    try:
        yield order
    finally:
        ShardedEngine.padded = before
        for handle in handles:
            handle.remove()


def forward_order(ranks, model):
    with in_order(model) as order, torch.no_grad():
        model(ranks.batch(1))
    return order


def one_by_one():
    of_layers = [(f"gather layers.{i}", f"compute layers.{i}") for i in range(LAYERS)]
    return ["gather root"] + [entry for pair in of_layers for entry in pair]


def layer_bytes(model):
    return sum(4 * p.numel() for p in model.layers[0].parameters())


@case(2, 3)  # with one rank FSDP2 gathers nothing ahead
def layers_are_gathered_ahead_along_the_first_forward(ranks):
    """Two of them, after the first step; the same bits, and FSDP2's own order after detach."""
    twins = Twins(ranks, deep_net)
    twins.attach(memory=forebay.Memory(prefetch_bytes=2 * layer_bytes(twins.ours)))
    assert forward_order(ranks, twins.ours) == one_by_one()
    twins.train(2)
    order = forward_order(ranks, twins.ours)
    assert order == [
        "gather root",
        "gather layers.0",
        "gather layers.1",
        "gather layers.2",
        "compute layers.0",
        "gather layers.3",
        *(f"compute layers.{number}" for number in range(1, LAYERS)),
    ], order
    twins.train(3).assert_close()
    plain = ranks.shard(deep_net())
    opt = ranks.attach(plain, job=f"{ranks.job}.plain")
    for step in range(1, 6):
        loss_of(plain, ranks.batch(step)).backward()
        opt.step()
    assert_same(full(twins.ours), full(plain))
    opt.detach()
    twins.opt.detach()
    for layer in twins.ours.layers:
        assert layer._get_fsdp_state()._states_to_forward_prefetch == []


@case(2)
def less_room_than_a_layer_takes_gathers_none_ahead(ranks):
    model = ranks.shard(deep_net())
    opt = ranks.attach(model, memory=forebay.Memory(prefetch_bytes=layer_bytes(model) - 1))
    loss_of(model, ranks.batch(1)).backward()
    opt.step()
    assert forward_order(ranks, model) == one_by_one()
    opt.detach()
    with refused("E_OPTION", "prefetch_bytes is -1", "prefetch_bytes="):
        ranks.attach(ranks.shard(small_net()), memory=forebay.Memory(prefetch_bytes=-1))
    message = "prefetch_bytes is 0 on rank 0 and 1 on rank 1"
    with refused("E_OPTION", message, "every rank"):
        ranks.attach(ranks.shard(small_net()), memory=forebay.Memory(prefetch_bytes=ranks.rank))
    with refused("E_OPTION", 'prefetch_bytes without mode="sharded"', 'mode="sharded"'):
        ranks.attach(small_net(), memory=forebay.Memory(prefetch_bytes=1 << 20))


class Choosy(torch.nn.Module):
    """Its forward leaves out the layers in `without`."""

    def __init__(self):
        super().__init__()
        self.net = deep_net()
        self.layers = self.net.layers
        self.without = ()

    def forward(self, tokens):
        x = self.net.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = x if number in self.without else layer(x)
        return self.net.head(self.net.norm(x))


@case(2)
def what_was_gathered_in_vain_is_not_used_when_it_is_old(ranks):
    """A layer that was prefetched and left out, before the weights change."""
    model, plain = (ranks.shard(Choosy()) for _ in range(2))
    opt = ranks.attach(model, memory=forebay.Memory(prefetch_bytes=1 << 20))
    with torch.no_grad():
        for number in range(LAYERS):
            loss_of(model, ranks.batch(number))
    loss_of(model, ranks.batch(1)).backward()
    opt.step()
    for step in range(2, 6):
        model.without = (step % LAYERS, (step + 1) % LAYERS)
        with torch.no_grad():
            loss_of(model, ranks.batch(step))
        reshard(model)
        reshard(plain)
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                ours.mul_(1.01)
                theirs.to_local().copy_(ours.to_local())
            model.without = ()
            assert torch.equal(loss_of(model, ranks.batch(step)), loss_of(plain, ranks.batch(step)))
        model.without = (step % LAYERS,)
        loss_of(model, ranks.batch(step)).backward()
        opt.step()
    assert opt.committed_step == 5
    opt.detach()

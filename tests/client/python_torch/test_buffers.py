# Goal    Buffers that the state_dict holds (BatchNorm's running statistics) come back with the
#         committed step: rank 0's, on every rank, beside the user's extra_state.
# Method  Train, attach again with a fresh model, compare bit by bit; two ranks with different data;
#         buffers that have no room, or are others than the job's, are refused with both numbers.

import forebay
import pytest
import torch
from test_two_ranks import both
from torch import nn


class Normed(nn.Module):
    """BatchNorm, a boolean buffer, a scalar one, and one that no state_dict holds."""

    def __init__(self, width=4, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 1)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.zeros(5000), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.up(x * self.mask)))


def train(model, opt, steps, rank=0, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(100 * rank + step)
        model(torch.randn(8, 3)).square().mean().backward()
        opt.step(extra_state=bytes([rank, step]))


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def assert_same_buffers(model, want, *, but=()):
    for name, value in model.named_buffers():
        if name not in but:
            assert value.dtype == want[name].dtype and torch.equal(value, want[name]), name


def test_a_restart_has_the_buffers_and_the_extra_state_of_the_committed_step(node):
    model = Normed()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train(model, opt, 3)
    want, sha256 = buffers(model), opt.state_sha256()
    assert want["norm.num_batches_tracked"] == 3 and want["norm.running_mean"].any()
    model(torch.randn(8, 3))  # a forward of a step that is never committed
    assert opt.state_sha256() != sha256
    opt.detach()
    again = Normed(seed=2)
    again.cache.fill_(7)
    opt = forebay.attach(again, forebay.AdamW(lr=1e-2))
    assert (opt.committed_step, opt.extra_state) == (3, bytes([0, 2]))
    assert_same_buffers(again, want, but=("cache",))
    assert again.cache[0] == 7
    assert opt.state_sha256() == sha256
    train(again, opt, 1, first=3)


def test_every_rank_starts_from_those_of_rank_0(node):
    models = [Normed(), Normed()]
    opts = both(lambda r: forebay.attach(models[r], rank=r, world_size=2, timeout=30))
    both(lambda r: train(models[r], opts[r], 2, rank=r))
    want = buffers(models[0])
    assert not torch.equal(want["norm.running_mean"], models[1].norm.running_mean)
    for opt in opts:
        opt.detach()
    models = [Normed(seed=5), Normed(seed=6)]
    opts = both(lambda r: forebay.attach(models[r], rank=r, world_size=2, timeout=30))
    for rank, model in enumerate(models):
        assert_same_buffers(model, want)
        assert opts[rank].extra_state == bytes([rank, 1])
    assert opts[0].state_sha256() == opts[1].state_sha256()


def test_buffers_without_room_are_refused_at_attach_with_both_numbers(node):
    model = Normed()
    with pytest.raises(forebay.UsageError, match=r"buffers take \d+ bytes.*room for 100") as info:
        forebay.attach(model, extra_state_bytes=100)
    assert info.value.code == "E_EXTRA_STATE" and "extra_state_bytes=" in info.value.hint
    with pytest.raises(forebay.UsageError, match="16777216, more than 16777200"):
        forebay.attach(model, extra_state_bytes=16 << 20)
    model.half()


def test_buffers_and_extra_state_share_the_room(node):
    model = Normed()
    opt = forebay.attach(model, extra_state_bytes=400)
    with pytest.raises(forebay.UsageError, match="extra_state has 300 bytes.*room for 400") as info:
        opt.step(extra_state=bytes(300))
    assert info.value.code == "E_EXTRA_STATE"
    opt.step(extra_state=bytes(50))
    assert opt.extra_state == bytes(50)


def test_other_buffers_than_the_jobs_are_refused(node):
    model = Normed()
    opt = forebay.attach(model)
    train(model, opt, 1)
    opt.detach()
    other = Normed()
    other.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))
    with pytest.raises(forebay.UsageError, match="mask torch.bool.*here mask torch.float32") as info:
        forebay.attach(other)
    assert info.value.code == "E_LAYOUT"
    other.half()

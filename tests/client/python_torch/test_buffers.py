# SPDX-License-Identifier: Apache-2.0
# Goal    Buffers that the state_dict holds (BatchNorm's running statistics) are restored with the committed step: each rank
#         gets its own buffers, and the user's extra_state.
# Method  Train, attach again with a fresh model, compare bit by bit; two ranks with different data, killed and started again.
#         Buffers that have no room, or differ from the job's buffers, are refused with both numbers.

import json
import os
import signal
import subprocess
import sys

import forebay
import pytest
import torch
from test_processes import HERE, environment
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
    model(torch.randn(8, 3))  # the step of this forward is never committed
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


def test_every_rank_gets_its_own_back(node):
    models = [Normed(), Normed()]
    opts = both(lambda r: forebay.attach(models[r], rank=r, world_size=2, timeout=30))
    both(lambda r: train(models[r], opts[r], 2, rank=r))
    want, sha256s = [buffers(model) for model in models], [opt.state_sha256() for opt in opts]
    assert not torch.equal(want[0]["norm.running_mean"], want[1]["norm.running_mean"])
    for opt in opts:
        opt.detach()
    models = [Normed(seed=5), Normed(seed=6)]
    opts = both(lambda r: forebay.attach(models[r], rank=r, world_size=2, timeout=30))
    for rank, model in enumerate(models):
        assert_same_buffers(model, want[rank])
        assert opts[rank].extra_state == bytes([rank, 1])
    assert [opt.state_sha256() for opt in opts] == sha256s


def test_a_new_rank_starts_from_those_of_rank_0(node):
    model = Normed()
    opt = forebay.attach(model)
    train(model, opt, 2)
    want = buffers(model)
    opt.detach()
    models = [Normed(seed=5), Normed(seed=6)]
    both(lambda r: forebay.attach(models[r], rank=r, world_size=2, timeout=30))
    for model in models:
        assert_same_buffers(model, want)


def test_a_forward_that_reads_what_it_updates_resumes_with_the_same_bits(node):
    job = os.environ["FOREBAY_JOB"]
    kills = {"0": [-signal.SIGKILL, 3], "1": [3, -signal.SIGKILL], "01": [-signal.SIGKILL] * 2}
    rounds = [job]
    for killed in kills:
        rounds += [f"{job}.{killed}:{killed}", f"{job}.{killed}"]
    printed = subprocess.run(
        [sys.executable, str(HERE / "codebook_ranks.py"), *rounds],
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout
    (codes, whole), *others = [json.loads(line) for line in printed.splitlines()]
    assert codes == [0, 0] and whole[0]["sha256"] != whole[1]["sha256"], "the buffers differ"
    for want, (killed, _), (codes, resumed) in zip(kills.values(), others[::2], others[1::2]):
        assert (killed, codes) == (want, [0, 0])
        for ours, uninterrupted in zip(resumed, whole):
            losses = uninterrupted["losses"]
            assert ours["losses"] == {step: losses[step] for step in ("4", "5", "6")}
            assert ours["sha256"] == uninterrupted["sha256"]


def test_buffers_without_room_are_refused_at_attach_with_both_numbers(node):
    model = Normed()
    with pytest.raises(forebay.UsageError, match=r"buffers take \d+ bytes.*room for 100") as info:
        forebay.attach(model, memory=forebay.Memory(extra_state_bytes=100))
    assert info.value.code == "E_EXTRA_STATE" and "extra_state_bytes=" in info.value.hint
    with pytest.raises(forebay.UsageError, match="503316480, more than 503316464"):
        forebay.attach(model, memory=forebay.Memory(extra_state_bytes=480 << 20))
    model.half()


def test_buffers_have_room_by_default_beside_64_kib_of_extra_state(node):
    model = Normed()
    model.register_buffer("table", torch.zeros(50_000))
    opt = forebay.attach(model)
    model.table.fill_(7)
    opt.step(extra_state=bytes(64 << 10))
    opt.detach()
    model.table.zero_()
    opt = forebay.attach(model)
    assert opt.extra_state == bytes(64 << 10) and model.table[-1] == 7
    large = Normed()
    large.register_buffer("table", torch.zeros(1).expand(130_000_000))
    with pytest.raises(forebay.UsageError, match=r"take 52000\d+ bytes.*room for 503316464") as info:
        forebay.attach(large)
    assert info.value.code == "E_EXTRA_STATE"
    assert info.value.hint.startswith("register_buffer(..., persistent=False)")


def test_buffers_of_a_size_that_counts_come_back_and_what_stays_the_same_is_not_packed_again(node):
    model = Normed()
    model.register_buffer("table", torch.arange(10_000_000.0))
    model.register_buffer("queue", torch.zeros(1000))
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))

    def packed_anew():
        before = packed()
        opt.step(extra_state=b"bc")
        return {name for name, part in packed().items() if part is not before.get(name)}

    def packed():
        return dict(zip((name for name, _ in opt._buffers.named()), opt._buffers._packed))

    opt.step(extra_state=b"a")
    model.table[7] = 0
    assert packed_anew() == {"table"}
    assert packed_anew() == set()
    model.queue.data[-1] = 3  # torch's version counter misses this write
    assert packed_anew() == {"queue"}
    want, sha256 = buffers(model), opt.state_sha256()
    opt.detach()
    again = Normed(seed=2)
    again.register_buffer("table", torch.zeros(10_000_000))
    again.register_buffer("queue", torch.zeros(1000))
    opt = forebay.attach(again, forebay.AdamW(lr=1e-2))
    assert (opt.committed_step, opt.extra_state) == (4, b"bc")
    assert_same_buffers(again, want)
    assert opt.state_sha256() == sha256


def test_buffers_beyond_the_limit_of_dram_are_refused_with_what_they_take(node):
    model = Normed()
    model.register_buffer("table", torch.zeros(100_000_000))
    with pytest.raises(forebay.ForebayError, match=r"extra_state [a-z ]*381\.\d MiB") as info:
        forebay.attach(model)
    assert info.value.code == "E_DRAM_LIMIT"


def test_the_size_of_buffers_is_known_without_reading_them(node):
    model = Normed()
    model.register_buffer("table", torch.zeros(1).expand(1 << 45))  # larger than any memory
    with pytest.raises(forebay.UsageError, match=r"take 1407374883\d+ bytes") as info:
        forebay.attach(model)
    assert info.value.code == "E_EXTRA_STATE"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (torch.zeros(3, device="meta"), "torch.strided on device meta"),
        (torch.zeros(3).to_sparse(), "torch.sparse_coo on device cpu"),
    ],
)
def test_a_buffer_that_cannot_be_read_is_refused_by_name(node, value, place):
    model = Normed()
    model.register_buffer("table", value)
    with pytest.raises(forebay.UsageError, match=f"buffer table is {place}") as info:
        forebay.attach(model)
    assert info.value.code == "E_UNSUPPORTED" and "persistent=False" in info.value.hint
    model.table = torch.zeros(3)
    opt = forebay.attach(model)
    model.table = value  # a buffer that is replaced after attach is refused too
    with pytest.raises(forebay.UsageError, match=f"buffer table is {place}"):
        opt.step()
    model.table = torch.ones(3)
    opt.step()


def test_a_step_called_again_commits_the_buffers_of_its_first_call(node):
    models = [Normed(), Normed()]
    opts = both(lambda r: forebay.attach(models[r], rank=r, world_size=2, timeout=30))

    def times_out(**extra):
        opts[0]._engine.timeout = 0.1  # rank 1 has not called step
        with pytest.raises(forebay.ForebayTimeoutError):
            opts[0].step(**extra)
        opts[0]._engine.timeout = 30

    models[0](torch.randn(8, 3)).square().mean().backward()
    times_out(extra_state=b"first")
    want = buffers(models[0])
    models[0].norm.running_mean.add_(1)
    with pytest.raises(forebay.UsageError, match="still under way") as info:
        opts[0].step(extra_state=b"other")
    assert info.value.code == "E_STEP"
    times_out(extra_state=b"first")
    times_out()
    opts[1].step()
    with torch.no_grad():
        models[0](torch.randn(8, 3))  # reads the completion of step 1
    opts[0].step(extra_state=b"too late")
    assert (opts[0].committed_step, opts[0].extra_state) == (1, b"first")
    for opt in opts:
        opt.detach()
    again = Normed(seed=2)
    assert forebay.attach(again).extra_state == b"first"
    assert_same_buffers(again, want)


def test_buffers_and_extra_state_share_the_room(node):
    model = Normed()
    opt = forebay.attach(model, memory=forebay.Memory(extra_state_bytes=400))
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

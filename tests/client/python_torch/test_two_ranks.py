# SPDX-License-Identifier: Apache-2.0
# Goal    Ranks train on the mean of their gradients, wait for each other, and continue after the loss of a rank.
# Method  Two ranks are two threads of this process, each with its own model and attachment. Torch's side is one model that is
#         stepped with the mean of the two gradients.

import concurrent.futures
import os
import signal
import time

import forebay
import pytest
import torch
from models import assert_close, batch, loss_of, net

STEPS = 4


def attach(rank, model, **options):
    return forebay.attach(
        model, forebay.AdamW(lr=1e-2), rank=rank, world_size=2, timeout=30, **options
    )


def both(work):
    """work(rank) on two threads; the error that came first, which the other rank may wait for in vain."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, rank) for rank in (0, 1)]
        done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        failed = next((future for future in done if future.exception() is not None), futures[0])
        failed.result()
        return [future.result() for future in futures]


def attach_both(models, last=None):
    """At once, or one behind the other."""

    def attached(rank):
        if rank == last:
            time.sleep(0.3)  # house: allow sleep: nothing says that an attach waits
        return attach(rank, models[rank])

    return both(attached)


def train_ranks(models, opts, steps, first=0):
    def run(rank):
        for step in range(first, first + steps):
            loss_of(models[rank], batch(10 * step + rank)).backward()
            opts[rank].extra_state = bytes([rank, step])
            opts[rank].step()

    both(run)


def train_mean(model, opt, steps, first=0):
    for step in range(first, first + steps):
        sum(loss_of(model, batch(10 * step + rank)) / 2 for rank in (0, 1)).backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("last", [0, 1])
def test_the_mean_of_both_gradients_is_applied_to_what_rank_0_began_with(node, last):
    models = [net(seed=1), net(seed=2)]
    opts = attach_both(models, last)
    plain = net(seed=1)
    for model in models:
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert torch.equal(ours, theirs)
    train_ranks(models, opts, STEPS)
    train_mean(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), STEPS)
    for model in models:
        assert_close(model, plain, STEPS)
    assert opts[0].state_sha256() == opts[1].state_sha256()


def test_extra_state_and_committed_step_come_back(node):
    models = [net(), net()]
    opts = attach_both(models)
    assert [opt.extra_state for opt in opts] == [None, None]
    train_ranks(models, opts, 3)
    sha = opts[0].state_sha256()
    for opt in opts:
        opt.detach()
    opts = attach_both([net(seed=8), net(seed=9)])
    assert [opt.committed_step for opt in opts] == [3, 3]
    assert [opt.extra_state for opt in opts] == [bytes([0, 2]), bytes([1, 2])]
    assert opts[1].state_sha256() == sha


def test_resumed_training_has_the_bits_of_an_uninterrupted_one(node, monkeypatch):
    models = [net(), net()]
    opts = attach_both(models)
    train_ranks(models, opts, 4)
    want = opts[0].state_sha256()

    monkeypatch.setenv("FOREBAY_JOB", os.environ["FOREBAY_JOB"] + ".again")
    models = [net(), net()]
    again = attach_both(models)
    train_ranks(models, again, 2)
    loss_of(models[0], batch(20)).backward()  # rank 0 delivered some of step 3 and is lost
    again[0]._engine.attachment.detach()
    again[1].detach()
    models = [net(seed=5), net(seed=6)]
    again = attach_both(models)
    assert [opt.committed_step for opt in again] == [2, 2]
    train_ranks(models, again, 2, first=2)
    assert again[0].state_sha256() == want


def test_different_learning_rates_are_refused(node):
    models = [net(), net()]
    opts = attach_both(models)
    train_ranks(models, opts, 1)
    opts[1].param_groups[0]["lr"] = 1e-3

    def run(rank):
        loss_of(models[rank], batch(rank)).backward()
        with pytest.raises(forebay.ForebayError) as info:
            opts[rank].step()
        return info.value.code

    assert both(run) == ["E_STEP", "E_STEP"]
    opts[1].param_groups[0]["lr"] = 1e-2
    both(lambda rank: opts[rank].step())  # the refused step has retained the gradients
    assert opts[0].committed_step == 2
    opts[1].param_groups[0]["lr"] = 1e-3
    assert both(run) == ["E_STEP", "E_STEP"]
    for opt in opts:  # zero_grad() skips the batch
        opt.zero_grad()
    opts[1].param_groups[0]["lr"] = 1e-2
    train_ranks(models, opts, 1, first=2)
    assert [opt.committed_step for opt in opts] == [3, 3]


def test_one_rank_alone_waits_until_its_time_is_up(node):
    models = [net(), net()]
    opts = attach_both(models)
    loss_of(models[0], batch(0)).backward()
    limit, opts[0]._engine.timeout = opts[0]._engine.timeout, 0.5
    with pytest.raises(forebay.ForebayTimeoutError) as info:
        opts[0].step()
    assert info.value.code == "E_TIMEOUT"
    opts[0]._engine.timeout = limit
    loss_of(models[1], batch(1)).backward()

    def finish(rank):
        opts[rank].step()
        return opts[rank].committed_step

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        late = pool.submit(finish, 1)
        assert late.result() == 1, "rank 0 had called step already"
    loss_of(models[0], batch(2))  # reads the completion of step 1
    assert opts[0].committed_step == 1
    opts[0].step()  # asks for step 1 again, which is committed and changes nothing
    assert opts[0].committed_step == 1
    assert opts[0].state_sha256() == opts[1].state_sha256()
    train_ranks(models, opts, 1)
    assert [opt.committed_step for opt in opts] == [2, 2]


def test_a_step_that_ctrl_c_ended_is_asked_for_again(node):
    models = [net(), net()]
    opts = attach_both(models)
    for rank in (0, 1):
        loss_of(models[rank], batch(rank)).backward()
    sent = opts[0].stats()["commands"]

    def interrupt():
        end = time.monotonic() + 30
        while opts[0].stats()["commands"] == sent and time.monotonic() < end:
            time.sleep(0.01)  # house: allow sleep: a poll with a deadline
        os.kill(os.getpid(), signal.SIGINT)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            opts[0].step(extra_state=b"first")
        pool.submit(opts[1].step).result(30)
        loss_of(models[0], batch(2))  # reads the completion of step 1
        assert opts[0].committed_step == 1
        opts[0].step(extra_state=b"first")
    assert [opt.committed_step for opt in opts] == [1, 1]
    train_ranks(models, opts, 1)
    assert opts[0].state_sha256() == opts[1].state_sha256()

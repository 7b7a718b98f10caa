# SPDX-License-Identifier: Apache-2.0
# Goal    Memory that is retained for the next daemon survives another configuration, damage, a rank that has not returned and a
#         full store. A job continues or is refused with an error. No other job and no start of a daemon fails because of it.
# Method  Real daemons under the stand-in for the service manager. The test can change the manager's store between two daemons.

import os
import pathlib
import random
import re
import signal
import struct
import threading
import time

import forebay
import pytest
import torch
from daemon_process import ROOT, missing
from kept_record import (CURRENT, DECISION, FIXED_WORDS, STEP, VERSION, await_decision, current_half, record, steps,
                         words)
from kill_at_once import kill_at_once
from models import net, train
from ordered_steps import BETWEEN_STEPS, DEADLINE_S
from test_daemon_restart import (
    NOT_AT_REST,
    SEED,
    Service,
    assert_goes_on,
    jobs_of,
    room_of_one_without_states,
    trained,
    without_swap,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

WAITS = forebay.Durability(daemon_wait=60)
FAULTY_DISK = ROOT / "build" / "tests" / "libfaulty_disk.so"


def train_two_jobs(service, *jobs):
    for job in jobs:
        _, opt = trained(service, job, 2)
        opt.detach()


class HangingSwap:
    """The swap of a service, whose writes hang while `hangs` is set. Make it before the service starts."""

    def __init__(self, service):
        self._order = pathlib.Path(service.folder) / "order"
        self._text = f"hang {service.folder}"
        variables = {"LD_PRELOAD": str(FAULTY_DISK), "FOREBAY_TEST_DISK": str(self._order)}
        service.manager.environment.update(variables)

    def set(self, hangs):
        new = self._order.with_suffix(".new")
        new.write_text(self._text if hangs else "work")
        new.rename(self._order)


def test_a_job_that_made_room_for_another_goes_on_in_its_update(folder):
    """Its record has no slots for the evicted blocks: the next daemon zeroes some before anything else."""
    assert FAULTY_DISK.exists(), "cmake --build build --target faulty_disk"
    service = Service(folder, "dram.limit=90MiB", "swap.capacity=256MiB", "io.engine=threads")
    swap = HangingSwap(service)

    def attached(job):
        model = net(width=448)
        where = {"run": "one", "socket": f"{folder}/s", "durability": WAITS}
        return model, forebay.attach(model, forebay.AdamW(), job=job, **where)

    with service.manager as manager:
        manager.start()
        model, opt = attached("first")
        train(model, opt, 2)
        other, other_opt = attached("second")
        train(other, other_opt, 2)
        [job] = [job for job in forebay.status(f"{folder}/s")["jobs"] if job["name"] == "first"]
        assert 0 < job["resident_blocks"] < job["blocks"]
        for step in (2, 3):
            swap.set(hangs=True)
            trainer = threading.Thread(target=train, args=(model, opt, 1), kwargs={"first": step})
            trainer.start()
            await_decision(manager, step + 1)
            manager.end(signal.SIGKILL)
            of_first = steps(record(manager, 1))
            assert (of_first[STEP], of_first[DECISION]) == (step, step + 1)
            swap.set(hangs=False)
            manager.start()
            assert f"job first goes on in the middle of the update of step {step + 1}" in service.log()
            trainer.join(DEADLINE_S)
            assert not trainer.is_alive()
        train(other, other_opt, 2, first=2)
        assert opt.state_sha256() == other_opt.state_sha256()
        opt.detach()
        other_opt.detach()
    assert "critical" not in service.log()


def test_other_swap_paths_do_not_cost_a_kept_job(folder):
    service = Service(folder, *room_of_one_without_states(folder))
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "job", 2)
        before = opt.state_sha256()
        good = manager.command
        for end in (signal.SIGKILL, signal.SIGTERM):
            manager.end(end)
            manager.command = without_swap(good)
            with pytest.raises(RuntimeError, match="no READY=1"):
                manager.start()
            assert "E_CONFIG" in service.log() and "this daemon has no swap" in service.log()
            manager.command = good
            manager.start()
            assert opt.state_sha256() == before
        assert_goes_on(service, model, opt, before)


def test_a_record_of_a_newer_daemon_is_not_freed(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "job", 2)
        before = opt.state_sha256()
        manager.end(signal.SIGKILL)
        fd = record(manager, 1)
        version = words(fd)[VERSION]
        stored = [name for name, _ in manager.store]
        os.pwrite(fd, struct.pack("<Q", version + 1), 8 * VERSION)
        with pytest.raises(RuntimeError, match="no READY=1"):
            manager.start()
        refusal = f"a record of version {version + 1}, made by a newer forebayd; this one reads version {version}"
        assert "E_CONFIG" in service.log() and refusal in service.log()
        assert [name for name, _ in manager.store] == stored
        os.pwrite(fd, struct.pack("<Q", version), 8 * VERSION)
        manager.start()
        assert opt.state_sha256() == before
        assert_goes_on(service, model, opt, before)


@pytest.mark.parametrize("word", FIXED_WORDS)
def test_a_damaged_record_costs_its_own_job_alone(folder, word):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        train_two_jobs(service, "damaged", "whole")
        manager.end(signal.SIGKILL)
        fd = record(manager, 1)
        os.pwrite(fd, struct.pack("<Q", words(fd)[word] ^ 0x5004), 8 * word)
        manager.start()
        assert jobs_of(service) == {"whole": 2}
        assert "E_CORRUPT" in service.log() or "E_JOB_FAILED" in service.log()
        _, opt = trained(service, "damaged", 1)
        opt.detach()


@pytest.mark.parametrize("what", ["tail", "entries", "staging"])
def test_damage_of_what_changes_is_no_crash(folder, what):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        train_two_jobs(service, "damaged", "whole")
        manager.end(signal.SIGKILL)
        if what == "staging":
            [fd] = [fd for name, fd in manager.store if name.startswith("forebay.staging.")]
            os.dup2(os.open("/dev/null", os.O_RDWR), fd)
        else:
            fd = record(manager, 1)
            if what == "tail":
                os.pwrite(fd, struct.pack("<Q", words(fd)[CURRENT] - 8), 8 * CURRENT)
            else:
                begin, size = current_half(fd)
                os.pwrite(fd, b"\xff" * 64, begin + size - 64)
        manager.start()
        assert jobs_of(service)["whole"] == 2
        for job in jobs_of(service):
            _, opt = trained(service, job, 1)
            opt.detach()


def test_a_restart_while_a_rank_is_not_back_yet(folder):
    """Two ranks after a kill; one is held while the daemon is asked to stop. It waits for that one, which may return."""
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        with service.ranks("durable_ranks", "shared", "memory", "ordered") as ranks:
            ranks.take(1)
            held = ranks.pids()[0]
            os.kill(held, signal.SIGSTOP)
            manager.kill()
            ranks.go_on(BETWEEN_STEPS)
            end = time.monotonic() + DEADLINE_S
            while jobs_sessions(service) < 1:
                assert time.monotonic() < end, service.log()
                time.sleep(0.01)  # house: allow sleep: a poll with a deadline
            manager.begin_restart()
            os.kill(held, signal.SIGCONT)
            manager.end_restart()
            ranks.hear_answers(2)
            status, error = ranks.end()
        assert status == 0, f"{error}\n{service.log()}"
        assert NOT_AT_REST not in service.log(), service.log()
        ranks.assert_digests(2)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_ends_while_there_is_no_daemon_is_not_waited_for(folder, end):
    """The other one hears it, from this daemon or one after it; a restarted run waits for all of its ranks."""
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        with service.ranks("durable_ranks", "shared", "memory", "on") as ranks:
            ranks.hear_answers(1)
            pids = ranks.pids()
            os.kill(ranks.process.pid, signal.SIGSTOP)  # a running parent would end the other rank
            manager.end(end)
            os.kill(pids[0], signal.SIGSTOP)
            os.kill(pids[1], signal.SIGKILL)
            manager.start()
            manager.kill()
            os.kill(pids[0], signal.SIGCONT)
            lost = ranks.until(lambda line: line[0] == "ended")
            assert lost is not None and lost[2] == "E_RANK_LOST", service.log()
            os.kill(ranks.process.pid, signal.SIGCONT)
            status, _ = ranks.end()
        assert status != 0
        with service.ranks("durable_ranks", "shared", "memory", 3) as ranks:
            status, error = ranks.end()
        assert status == 0, f"{error}\n{service.log()}"
        [first, second] = ranks.of("digests")
        assert first[3] == first[4] == second[3] == second[4]


@pytest.mark.parametrize("when", ["before it", "after it"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_detach_stays_one_over_a_restart(folder, end, when):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        where = {"job": "two", "world_size": 2, "run": "one", "socket": f"{folder}/s", "durability": WAITS}
        models = [net(), net()]
        opts = [forebay.attach(model, forebay.AdamW(), rank=rank, **where) for rank, model in enumerate(models)]
        if when == "before it":
            opts[1].detach()
        manager.end(end)
        manager.start()
        if when == "after it":
            opts[1].detach()
        with pytest.raises(forebay.ForebayError, match="rank 1 of job two has detached") as refused:
            train(models[0], opts[0], 1)
        assert refused.value.code == "E_RANK_LOST"
        # The gradients of rank 0 lead to no step, so the daemon's restart does not wait for the job.
        manager.restart()
        assert NOT_AT_REST not in service.log(), service.log()
        opts[0].detach()


@pytest.mark.parametrize("kills", [1, 2])
@pytest.mark.parametrize("first", ["it", "its successor"])
def test_a_process_that_was_away_does_not_end_its_successor(folder, kills, first):
    """One that was stopped, say, while another one attached in its place and trained on."""
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "job", 2)
        manager.kill()
        successor, its_opt = trained(service, "job", 1)
        if kills == 2:
            manager.kill()
        if first == "its successor":
            train(successor, its_opt, 1, first=3)
        with pytest.raises(forebay.ForebayError, match="the committed step is") as refused:
            train(model, opt, 1, first=2)
        assert refused.value.code == "E_RANK_LOST"
        train(successor, its_opt, 2, first=3)
        its_opt.detach()
        with pytest.raises(forebay.ForebayError, match="E_DAEMON_GONE"):
            opt.detach()  # opt's session was with the previous daemon


def test_a_process_that_was_replaced_detaches_alone(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        _, opt = trained(service, "job", 2)
        manager.kill()
        successor, its_opt = trained(service, "job", 1)
        opt.detach()  # opt's first call since the kill
        train(successor, its_opt, 1, first=3)
        its_opt.detach()


def test_restarts_while_ranks_are_on_their_way_back(folder):
    """Attached, and not known yet to have mapped their memory: the daemon retains what they had mapped before."""
    chance = random.Random(SEED)
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        with service.ranks("durable_ranks", "sharded", "memory", 100000) as ranks:
            ranks.hear_answers(1)
            pids = ranks.pids()
            reader = threading.Thread(target=ranks.end)  # ranks block if their output is not read
            reader.start()
            for _ in range(40):
                time.sleep(chance.uniform(0, 0.08))  # house: allow sleep: any moment of a return
                manager.end(signal.SIGTERM)
                kept = [name for name in manager.names() if name.startswith("forebay.gradients.")]
                assert len(kept) == 2 and ranks.process.poll() is None, f"seed {SEED}: {kept}\n{service.log()}"
                manager.start()
            before = jobs_of(service)["durable"]
            end = time.monotonic() + DEADLINE_S
            while jobs_of(service)["durable"] < before + 3:
                assert ranks.process.poll() is None and time.monotonic() < end, service.log()
                time.sleep(0.01)  # house: allow sleep: a poll with a deadline
            kill_at_once(ranks.process.pid, *pids)
            reader.join(DEADLINE_S)


def test_a_job_that_does_not_come_to_rest_goes_on_as_after_a_kill(folder):
    """The daemon has asked all its ranks, and one does not answer: SIGTERM again ends the wait."""
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "busy", 2)
        _, other = trained(service, "idle", 3)
        other.detach()
        before = opt.state_sha256()
        # The job has gradients, so it is not between two steps.
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        manager.begin_restart()
        await_handled(manager.process.pid, signal.SIGTERM)
        manager.process.send_signal(signal.SIGTERM)
        manager.end_restart()
        assert jobs_of(service) == {"busy": 2, "idle": 3}
        assert NOT_AT_REST in service.log()
        opt.zero_grad()  # drops the gradients, which the restart has lost
        assert opt.state_sha256() == before
        train(model, opt, 1, first=2)
        assert jobs_of(service) == {"busy": 3, "idle": 3}
        opt.detach()


def test_a_store_without_room_for_another_record_costs_no_job(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.fds_max = 9  # four descriptors of each job, and one of the staging slots
        manager.start()
        train_two_jobs(service, "a", "b")
        manager.restart()
        assert jobs_of(service) == {"a": 2, "b": 2}


def await_handled(pid, sign):
    """Until this signal is no longer pending: the next one is another."""

    def is_pending():
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"^ShdPnd:\s+(\w+)", status, re.M)[1], 16) & 1 << sign - 1

    end = time.monotonic() + DEADLINE_S
    while is_pending():
        assert time.monotonic() < end
        time.sleep(0.01)  # house: allow sleep: a poll with a deadline


def jobs_sessions(service):
    [job] = forebay.status(f"{service.folder}/s")["jobs"]
    return job["sessions"]

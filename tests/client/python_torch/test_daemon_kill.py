# SPDX-License-Identifier: Apache-2.0
# Goal    A daemon that is killed and started again under a training run costs it no committed step and no bit: ranks go
#         on by themselves; where gradients were under way, each rank gets E_GRAD_DROPPED and repeats its batch.
# Method  Two ranks on a real daemon, which a stand-in for the service manager kills with SIGKILL and starts again
#         several times: behind a step, whose update may run, or behind backward, where the ranks are held meanwhile; and
#         while they are under way. Then SHA-256 of weights and states beside the same training in a job that saw no
#         kill.

import json
import random
import threading
import time

import forebay
import pytest
from daemon_process import missing
from forebay.states import state_dict
from models import train
from test_daemon_restart import (
    DEADLINE_S,
    RANKS,
    SEED,
    Service,
    assert_goes_on,
    jobs_of,
    room_of_one_without_states,
    room_without_states,
    trained,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

KILLS = 4
STEPS = 40
KILLED_STEPS = 24  # a kill is behind one of these, and a little later: never in the attach behind the last step

CASES = [
    ("shared", "memory", "dram"),
    ("shared", "step", "swap"),
    ("sharded+leases", "memory", "swap"),
    ("sharded", "memory", "dram"),
    ("sharded", "epoch=3", "dram"),
    ("shared+lamb", "memory", "swap"),
    ("sharded+passes", "memory", "dram"),
    ("shared+loads", "memory", "dram"),
]


class Ranks:
    """The ranks' process, and what it says."""

    def __init__(self, service, mode, level, steps, *hold, **variables):
        self.process = service.start("durable_ranks", mode, level, steps, *hold, **variables)
        self.watchdog = threading.Timer(DEADLINE_S, self.process.kill)
        self.watchdog.start()
        self.lines = []

    def until(self, is_last):
        """Reads lines until one is the last; None: there are no more."""
        for text in self.process.stdout:
            self.lines.append(json.loads(text))
            if is_last(self.lines[-1]):
                return self.lines[-1]
        return None

    def until_all_have_answered(self):
        """A step; then the processes of the ranks."""
        left = set(range(RANKS))
        self.until(lambda line: line[0] == "answered" and (left.discard(line[1]) or not left))
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as children:
            pids = [int(child) for child in children.read().split()]
        assert not left and len(pids) == RANKS
        return pids

    def of(self, what):
        return [line for line in self.lines if line[0] == what]

    def end(self):
        self.until(lambda _: False)
        error = self.process.stderr.read()
        status = self.process.wait(DEADLINE_S)
        self.watchdog.cancel()
        return status, error


@pytest.mark.parametrize(("mode", "level", "place"), CASES)
def test_a_kill_of_the_daemon_costs_no_committed_step(folder, mode, level, place, tmp_path):
    # A model with more weights than a cache of them.
    variables = {"FOREBAY_WIDTH": "128"} if mode == "sharded+leases" else {}
    chance = random.Random(f"{SEED} {mode} {level} {place}")
    room = ["dram.limit=1GiB"] if place == "dram" else room_without_states(folder, mode, level, **variables)
    service = Service(folder, *room)
    hold = tmp_path / "hold"
    where = []
    with service.manager as manager:
        manager.start()
        ranks = Ranks(service, mode, level, STEPS, hold, **variables)
        for kill in range(KILLS):
            step = chance.randrange(1 + kill * KILLED_STEPS // KILLS, (kill + 1) * KILLED_STEPS // KILLS)
            # Behind the step, or behind the backward of the next one.
            last = ["answered", 0, step]
            if ranks.until(lambda line, last=last: line == last) is None:
                break
            if kill % 2 == 1:
                time.sleep(chance.uniform(0, 0.03))  # house: allow sleep: anywhere in the steps that follow
                manager.kill()
                continue
            (tmp_path / "next").write_text(str(kill))
            (tmp_path / "next").rename(hold)
            # The other one is held too, or waits for this one, or is still under way.
            held = ranks.until(lambda line, kill=kill: line[0] == "held" and line[3] == str(kill))
            if held is None:
                break
            where.append(held)
            manager.kill()
            hold.unlink()
        status, error = ranks.end()
        assert status == 0, f"seed {SEED}: {error}\n{service.log()}"
        [job] = [job for job in forebay.status(f"{folder}/s")["jobs"] if job["name"] == "durable"]
        log = service.log()
    in_update = log.count("job durable goes on in the middle of the update of step")
    assert len(where) == KILLS // 2 and log.count("job durable goes on at step") + in_update == KILLS, log
    assert (job["weights_on_swap_bytes"] > 0) == (mode == "sharded+leases")
    assert job["resident_blocks"] == (job["blocks"] if place == "dram" else 0)
    for rank in range(RANKS):
        assert [line[2] for line in ranks.of("answered") if line[1] == rank] == list(range(1, STEPS + 1))
    # Where one had delivered something, all repeat the step.
    repeated = [line[2] for line in ranks.of("repeated")]
    assert all(repeated.count(step) == RANKS for step in repeated), repeated
    assert len(repeated) >= RANKS * sum(line[2] == "backward" for line in where), where
    digests = ranks.of("digests")
    assert len(digests) == RANKS
    for _, _, step, digest, uninterrupted in digests:
        assert step == STEPS and digest == uninterrupted, f"seed {SEED}"


@pytest.mark.parametrize("place", ["dram", "swap"])
def test_a_kill_after_a_restart_before_the_ranks_are_back(folder, place):
    """Nobody asks the daemons between: the record that was handed over with the job is what the last one goes on from."""
    room = ["dram.limit=1GiB"] if place == "dram" else room_of_one_without_states(folder)
    service = Service(folder, *room)
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "job", 2)
        before = opt.state_sha256()
        for end in (manager.restart, manager.kill, manager.kill, manager.restart, manager.kill):
            end()
            assert jobs_of(service) == {"job": 2}
        assert opt.state_sha256() == before
        train(model, opt, 1, first=2)
        manager.restart()
        train(model, opt, 1, first=3)
        manager.kill()
        assert jobs_of(service) == {"job": 4}
        [job] = forebay.status(f"{folder}/s")["jobs"]
        assert job["resident_blocks"] == (job["blocks"] if place == "dram" else 0)
        opt.detach()


@pytest.mark.parametrize("level", ["memory", "step"])
@pytest.mark.parametrize("end", ["restart", "kill"])
def test_states_of_more_updates_than_the_job_has_steps(folder, end, level, monkeypatch):
    """They come from another training. A daemon that ends while they are written: the rank goes on with it."""
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "job", 2, durability=level)
        other = trained(service, "beside", 3)[1]
        digest = other.state_sha256()
        states = opt.state_dict()
        for state in states["state"].values():
            state["step"] += 1000
        writes = []

        def write(*words):
            writes.append(words)
            if len(writes) == 3:
                getattr(manager, end)()
            plain(*words)

        plain = state_dict._write
        monkeypatch.setattr(state_dict, "_write", write)
        opt.load_state_dict(states)
        assert len(writes) > 3
        before = opt.state_sha256()
        getattr(manager, end)()
        assert jobs_of(service) == {"job": 2, "beside": 3}
        assert opt.state_sha256() == before
        train(model, opt, 1, first=2)
        assert {int(state["step"]) for state in opt.state_dict()["state"].values()} == {1003}
        assert other.state_sha256() == digest
        opt.detach()
        other.detach()
        assert " error " not in service.log(), service.log()


def test_a_job_goes_on_where_nothing_is_kept_any_more(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "job", 2)
        before = opt.state_sha256()
        manager.fds_max = 0
        manager.kill()
        # Nobody finds it again: this daemon does not write on the record.
        assert manager.names() == []
        assert_goes_on(service, model, opt, before)
        manager.kill()
        assert jobs_of(service) == {}


def test_a_durable_job_stays_durable_over_a_kill_and_a_restart(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        _, opt = trained(service, "job", 3, durability="step")
        opt.detach()
        manager.kill()
        manager.restart()
        _, opt = trained(service, "other", 1, durability="step")  # another ledger is made
        opt.detach()
        manager.stop()
        manager.start()
        assert jobs_of(service) == {"job": 3, "other": 1}

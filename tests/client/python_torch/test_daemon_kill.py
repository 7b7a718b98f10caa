# SPDX-License-Identifier: Apache-2.0
# Goal    A daemon that is killed and started again under a training run costs the run no committed step and no bit. Ranks
#         continue by themselves. If gradients were under way, each rank gets E_GRAD_DROPPED and repeats its batch.
# Method  Two ranks on a real daemon take each step from the test. A stand-in for the service manager kills the daemon with
#         SIGKILL and starts it again at each place of a step: after a step, whose update may run; in backward and behind it,
#         while ranks wait for the test; while one rank waits in step() for the other; and while both ranks run. Then SHA-256 of
#         weights and states is compared with the same training in a job that saw no kill.

import random

import forebay
import pytest
from daemon_process import missing
from forebay.states import state_dict
from models import train
from ordered_steps import BETWEEN_STEPS, PLACES, RANKS, UNDER_WAY
from test_daemon_restart import (
    SEED,
    Service,
    assert_goes_on,
    go_to,
    jobs_of,
    room_of_one_without_states,
    room_without_states,
    trained,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

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


@pytest.mark.parametrize(("mode", "level", "place"), CASES)
def test_a_kill_of_the_daemon_costs_no_committed_step(folder, mode, level, place):
    # The model has more weights than a cache has room for.
    variables = {"FOREBAY_WIDTH": "128"} if mode == "sharded+leases" else {}
    chance = random.Random(f"{SEED} {mode} {level} {place}")
    room = ["dram.limit=1GiB"] if place == "dram" else room_without_states(folder, mode, level, **variables)
    service = Service(folder, *room)
    killed_at = dict(enumerate(chance.sample(PLACES, len(PLACES)), 2))
    last = 1 + len(PLACES) + 1
    with service.manager as manager:
        manager.start()
        with service.ranks("durable_ranks", mode, level, "ordered", **variables) as ranks:
            ranks.take(1)
            for step, where in killed_at.items():
                go_to(manager, ranks, where, step)
                manager.kill()
                ranks.go_on(where)
                ranks.hear_answers(step)
            ranks.take(last)
            status, error = ranks.end()
        assert status == 0, f"seed {SEED}: {error}\n{service.log()}"
        [job] = [job for job in forebay.status(f"{folder}/s")["jobs"] if job["name"] == "durable"]
        log = service.log()
    in_update = log.count("job durable goes on in the middle of the update of step")
    assert log.count("job durable goes on at step") + in_update == len(PLACES), log
    assert (job["weights_on_swap_bytes"] > 0) == (mode == "sharded+leases")
    assert job["resident_blocks"] == (job["blocks"] if place == "dram" else 0)
    ranks.assert_answered(last)
    # If the daemon had gradients of the step, all ranks repeat the step.
    repeated = [line[2] for line in ranks.of("repeated")]
    for step, where in killed_at.items():
        times = {BETWEEN_STEPS: (0,), UNDER_WAY: (0, RANKS)}.get(where, (RANKS,))
        assert repeated.count(step) in times, f"killed {where} of step {step}, repeated: {repeated}"
    assert set(repeated) <= set(killed_at)
    ranks.assert_digests(last)


@pytest.mark.parametrize("place", ["dram", "swap"])
def test_a_kill_after_a_restart_before_the_ranks_are_back(folder, place):
    """Nobody asks the daemons between: the last one continues from the record that was handed over with the job."""
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
    """They come from another training. The daemon ends while they are written: the rank continues the write."""
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
        # No later daemon can find the record, so this daemon does not continue to write the record.
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
        _, opt = trained(service, "other", 1, durability="step")  # creates another ledger
        opt.detach()
        manager.stop()
        manager.start()
        assert jobs_of(service) == {"job": 3, "other": 1}

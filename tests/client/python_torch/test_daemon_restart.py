# SPDX-License-Identifier: Apache-2.0
# Goal    A daemon that its service manager restarts under a training run costs the run only time: no error, no lost or repeated
#         step, and the same bits as without the restart.
# Method  Two ranks on a real daemon, shared and under FSDP2, with states in DRAM, on swap, weights on swap, and durable. They
#         take each step from the test. A stand-in for the service manager (its store of descriptors speaks systemd's protocol)
#         ends the daemon with SIGTERM at each place of a step in turn and starts it again. Then SHA-256 of weights and states
#         is compared with the same training in a job that saw no restart. FOREBAY_SEED gives other orders of the places,
#         FOREBAY_RESTARTS more restarts.

import functools
import os
import random
import re
import sys
import tempfile

import forebay
import pytest
from daemon_process import FOREBAYD, ROOT, missing
from kept_record import await_gradients
from models import net, train
from ordered_steps import DEADLINE_S, HELD_PLACES, PLACES, RANKS, Ranks
from preloaded import preloaded
from test_processes import environment

sys.path.append(str(ROOT / "tests" / "tools"))
from service_manager import ServiceManager  # noqa: E402

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

SEED = int(os.environ.get("FOREBAY_SEED", "1"))
RESTARTS = int(os.environ.get("FOREBAY_RESTARTS", len(PLACES)))
STEPS = 1 + RESTARTS + 1  # one step before the first restart, one after the last
NOT_AT_REST = "go on as after a kill"  # logged by a daemon that has not waited for all jobs


class Service:
    """A forebayd under the stand-in, with swap on a disk; `settings` beside those of all tests."""

    def __init__(self, folder, *settings):
        self.folder = folder
        values = [f"socket.path={folder}/s", "memlock=best_effort", "update.workers=2", "swap.probe=never"]
        values += ["update.block_elems=4096", "log.level=info"]
        values += [f"swap.paths={folder}", "swap.capacity=128MiB", "swap.staging=2MiB", *settings]
        command = [FOREBAYD]
        for value in values:
            command += ["--set", value]
        self.manager = ServiceManager(folder, command)

    def start(self, script, *arguments, **variables):
        """A run of a script on it."""
        variables["FOREBAY_SOCKET"] = f"{self.folder}/s"
        return preloaded(script, environment).start(arguments, variables)

    def ranks(self, script, *arguments, **variables):
        """Ranks of a script, which take steps as ordered."""
        return Ranks(self.folder, functools.partial(self.start, script, *arguments), **variables)

    def log(self):
        return self.manager.log.read_text()


def settings_without_states(folder, refused):
    """By which a job gets what it cannot do without: the bytes that the daemon's own error names, as one percent of
    the limit. `refused` attaches it to a service that is too small, and gives the error."""
    with tempfile.TemporaryDirectory(prefix="fb", dir=folder) as other:
        service = Service(other, "dram.limit=7500KiB")
        with service.manager:
            service.manager.start()
            error = refused(service)
    found = re.search(r"E_DRAM_LIMIT.*?the job needs [^(]*\((\d+) bytes\)", error)
    assert found, error
    return [f"dram.limit={100 * int(found[1])}", "dram.job_percent=1"]


def room_without_states(folder, mode, level, **variables):
    def refused(service):
        ranks = service.start("durable_ranks", mode, level, 1, **variables)
        _, error = ranks.communicate(timeout=DEADLINE_S)
        assert ranks.returncode != 0
        return error

    return settings_without_states(folder, refused)


CASES = [
    ("shared", "memory", "dram"),
    ("shared", "memory", "swap"),
    ("shared", "step", "dram"),
    ("sharded", "memory", "dram"),
    ("sharded", "memory", "swap"),
    ("sharded", "epoch=3", "dram"),
    ("shared+loads", "memory", "dram"),
    ("sharded+loads", "memory", "dram"),
]


def places_of(chance, count):
    """So many, each as often as the others."""
    places = [PLACES[number % len(PLACES)] for number in range(count)]
    chance.shuffle(places)
    return places


def go_to(manager, ranks, place, step):
    """Returns when the ranks have reached the place, and the daemon has their gradients if it is to have some."""
    ranks.go_to(place, step)
    if place in HELD_PLACES:
        await_gradients(manager, step)


def restart_at(manager, ranks, place, step):
    """The ranks continue once the daemon has heard that it is to stop."""
    go_to(manager, ranks, place, step)
    manager.begin_restart()
    ranks.go_on(place)
    manager.end_restart()
    ranks.hear_answers(step)


@pytest.mark.parametrize(("mode", "level", "place"), CASES)
def test_a_restart_of_the_daemon_costs_time_alone(folder, mode, level, place):
    chance = random.Random(f"{SEED} {mode} {level} {place}")
    room = ["dram.limit=1GiB"] if place == "dram" else room_without_states(folder, mode, level)
    service = Service(folder, *room)
    with service.manager as manager:
        manager.start()
        with service.ranks("durable_ranks", mode, level, "ordered") as ranks:
            ranks.take(1)
            for step, where in enumerate(places_of(chance, RESTARTS), 2):
                restart_at(manager, ranks, where, step)
            ranks.take(STEPS)
            status, error = ranks.end()
        assert status == 0, f"seed {SEED}: {error}\n{service.log()}"
        [job] = [job for job in forebay.status(f"{folder}/s")["jobs"] if job["name"] == "durable"]
        log = service.log()
    assert job["resident_blocks"] == (job["blocks"] if place == "dram" else 0)
    ranks.assert_answered(STEPS)
    assert ranks.of("repeated") == []
    ranks.assert_digests(STEPS)
    assert log.count("job durable goes on at step") == RESTARTS, log
    assert not re.search(rf"^\S+ (error|critical) |{NOT_AT_REST}", log, re.M), log


LARGE = ["swap.staging=6MiB", "swap.capacity=256MiB", "update.block_elems=131072"]
LARGE_LAYERS = {"FOREBAY_LAYERS": "6"}


def large_training(folder, limit, restarts):
    """(the daemon's log, what the first rank says in the end), with a restart at each of these places."""
    with tempfile.TemporaryDirectory(prefix="fb", dir=folder) as place:
        service = Service(place, *LARGE, f"dram.limit={limit}")
        with service.manager as manager:
            manager.start()
            arguments = (RANKS, "ordered", "exact", "bfloat16")
            with service.ranks("weights_on_swap", *arguments, **LARGE_LAYERS) as ranks:
                ranks.take(1)
                for step, where in enumerate(restarts, 2):
                    if where is None:
                        ranks.take(step)
                    else:
                        restart_at(manager, ranks, where, step)
                ranks.take(STEPS)
                status, error = ranks.end()
            log = service.log()
    assert status == 0, f"seed {SEED}: {error}\n{log}"
    ranks.assert_answered(STEPS)
    return log, ranks.lines[-1]


def smallest_limit_of_large_training(folder):
    with tempfile.TemporaryDirectory(prefix="fb", dir=folder) as place:
        service = Service(place, *LARGE, "dram.limit=12MiB")
        with service.manager as manager:
            manager.start()
            ranks = service.start("weights_on_swap", RANKS, 1, "exact", "bfloat16", **LARGE_LAYERS)
            _, error = ranks.communicate(timeout=DEADLINE_S)
    return max(map(int, re.findall(r"dram.limit to at least (\d+) bytes", error)))


def test_a_job_whose_weights_are_on_swap_goes_on(folder):
    """In the smallest limit, where each lease keeps a slot of the cache; updates under compute, a write in place."""
    places = places_of(random.Random(SEED), RESTARTS)
    _, (digest, losses, in_dram, *_) = large_training(folder, 1 << 30, [None] * RESTARTS)
    log, (restarted, others, job, *_) = large_training(folder, smallest_limit_of_large_training(folder), places)
    assert log.count("goes on at step") == RESTARTS and NOT_AT_REST not in log, log
    assert in_dram["weights_on_swap_bytes"] == 0 < job["weights_on_swap_bytes"]
    assert (restarted, others) == (digest, losses), f"seed {SEED}"


def trained(service, job, steps, **options):
    """(model, its optimizer) of one rank, after so many steps."""
    model = net()
    opt = forebay.attach(model, forebay.AdamW(), job=job, run="one", socket=f"{service.folder}/s", **options)
    train(model, opt, steps)
    return model, opt


def room_of_one_without_states(folder):
    """The same for the job of trained()."""

    def refused(service):
        with pytest.raises(forebay.ForebayError) as error:
            trained(service, "job", 0)
        return str(error.value)

    return settings_without_states(folder, refused)


def assert_goes_on(service, model, opt, before):
    """The only job, which was trained for two steps; `before`: its SHA-256."""
    assert opt.state_sha256() == before
    train(model, opt, 1, first=2)
    assert jobs_of(service) == {"job": 3}
    opt.detach()


def jobs_of(service):
    return {job["name"]: job["committed_step"] for job in forebay.status(f"{service.folder}/s")["jobs"]}


def without_swap(command):
    """Its settings are pairs of --set and a value."""
    pairs = zip(command[1::2], command[2::2], strict=True)
    return [command[0], *(word for pair in pairs if not pair[1].startswith("swap.") for word in pair)]


def test_jobs_of_the_disk_and_of_memory_with_one_number_are_both_there(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        _, opt = trained(service, "durable", 2, durability="step")
        opt.detach()
        manager.stop()
        whole, manager.command = manager.command, without_swap(manager.command)
        manager.start()
        model, opt = trained(service, "other", 3)  # as "durable" the first of its node
        manager.command = whole
        manager.restart()
        train(model, opt, 1, first=3)
        assert jobs_of(service) == {"durable": 2, "other": 4}
        opt.detach()
        manager.stop()
        manager.start()
        assert jobs_of(service) == {"durable": 2}


def test_a_job_in_memory_gives_way_to_one_of_its_name_on_the_disk(folder):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        _, opt = trained(service, "first", 1)
        opt.detach()
        _, opt = trained(service, "job", 2, durability="step")
        opt.detach()
        manager.stop()
        whole, manager.command = manager.command, without_swap(manager.command)
        manager.start()
        model, opt = trained(service, "job", 3)
        manager.command = whole
        manager.restart()
        assert "job job does not go on" in service.log() and "at step 2" in service.log()
        with pytest.raises(forebay.ForebayError) as gone:
            train(model, opt, 1, first=3)
        assert gone.value.code == "E_DAEMON_GONE"
        with pytest.raises(forebay.ForebayError, match="E_DAEMON_GONE"):
            opt.detach()
        assert jobs_of(service) == {"job": 2}
        arenas = forebay.status(f"{folder}/s")["memory"]["arenas"]
        assert {arena["kind"] for arena in arenas if arena["job"]} <= {"weights", "state", "step"}


@pytest.mark.parametrize("end", ["restart", "kill"])
def test_a_start_that_fails_leaves_what_was_there(folder, end):
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()
        model, opt = trained(service, "job", 2)
        before = opt.state_sha256()
        good = manager.command
        # The folder of this socket does not exist. The daemon finds that out after it has adopted the memory.
        for bad in ("socket.path=/nowhere/s", "swap.paths=/nowhere/swap"):
            key = bad.partition("=")[0]
            manager.command = [bad if word.startswith(f"{key}=") else word for word in good]
            with pytest.raises(RuntimeError, match="no READY=1"):
                getattr(manager, end)() if manager.process.poll() is None else manager.start()
            assert any(name.startswith("forebay.weights") for name in manager.names())
        manager.command = good
        manager.start()
        assert_goes_on(service, model, opt, before)

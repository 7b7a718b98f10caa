# SPDX-License-Identifier: Apache-2.0
# Goal    The daemon's death undoes no step that was answered at durability step, and at most N steps at epoch=N. The job
#         continues with the same bits as without the death. A job has one level for its life, and the level needs swap.
# Method  Two ranks on a real daemon with persisted swap, shared and under FSDP2. The daemon is killed with SIGKILL in the
#         middle of a step, then started again on its swap, and the ranks too. Committed step, extra_state and, after more
#         steps, SHA-256 of weights and states are compared with an uninterrupted job. FOREBAY_SEED gives other moments of the
#         kill.

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time

import forebay
import pytest
from daemon_process import FOREBAYD, Daemon, missing
from models import net, train
from preloaded import preloaded
from test_processes import environment

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

SEED = int(os.environ.get("FOREBAY_SEED", "1"))
DEADLINE_S = 180  # a flush takes seconds if the disk is busy
RANKS = 2
FIRST_KILL, LAST_KILL = 4, 9  # steps answered before a kill: more than the 3 of epoch=3
MORE = 4  # steps after the daemon's restart


@pytest.fixture
def start(monkeypatch):
    """Starts a daemon on the same swap each time; forebay.attach(model, ...) finds it without arguments."""
    monkeypatch.setattr(forebay, "_core", sys.modules["forebay._core"], raising=False)
    # A folder on a disk: a tmpfs survives no power cut.
    place = os.environ.get("TMPDIR", "/var/tmp")
    daemons = []
    with tempfile.TemporaryDirectory(prefix="fb", dir=place) as folder:

        def start_one(*settings):
            on_swap = [f"swap.paths={folder}", "swap.capacity=128MiB", "swap.staging=2MiB"]
            daemons.append(Daemon(folder, "update.block_elems=4096", *(settings or on_swap)))
            monkeypatch.setenv("FOREBAY_SOCKET", daemons[-1].socket)
            return daemons[-1]

        yield start_one
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
            daemon.process.wait(DEADLINE_S)


class Ranks:
    """A launch of durable_ranks.py. `stop` it, however the test ends."""

    def __init__(self, *arguments):
        variables = {"FOREBAY_SOCKET": os.environ["FOREBAY_SOCKET"]}
        self.process = preloaded("durable_ranks", environment).start(arguments, variables)
        self._watchdog = threading.Timer(DEADLINE_S, self.process.kill)
        self._watchdog.start()

    def lines(self):
        """What the ranks say, as lists, until all of them have ended."""
        for line in self.process.stdout:
            yield json.loads(line)

    def stop(self):
        self._watchdog.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()


def wait_until(moment):
    while time.monotonic() < moment:
        os.sched_yield()


def kill_within_a_step(daemon, mode, level):
    """Trains the job, kills the daemon within a step; the newest step that was answered to a rank."""
    chance = random.Random(f"{SEED} {mode} {level}")
    kill_at, part_of_a_step = chance.randint(FIRST_KILL, LAST_KILL), chance.random()
    ranks = Ranks(mode, level, "on")
    began, answered, ends = time.monotonic(), 0, []
    try:
        for what, rank, *values in ranks.lines():
            if what == "attached":
                assert values == [0, ""]
                began = time.monotonic()
            elif what == "ended":
                ends += values
            elif what == "answered" and rank == 0 and values[0] == kill_at:
                now = time.monotonic()
                wait_until(now + part_of_a_step * (now - began) / kill_at)
                daemon.process.kill()
                daemon.process.wait(DEADLINE_S)
            if what == "answered":
                answered = max(answered, values[0])
    finally:
        ranks.stop()
    assert ranks.process.returncode == 0 and "E_DAEMON_GONE" in ends, f"{ends}, kill at step {kill_at}"
    return answered


def go_on(mode, level):
    """Attaches to the job again, trains it on; (step found, last step, digests)."""
    ranks = Ranks(mode, level, MORE)
    try:
        said = list(ranks.lines())
    finally:
        ranks.stop()
    assert ranks.process.returncode == 0
    found = {rank: values for what, rank, *values in said if what == "attached"}
    [step] = {values[0] for values in found.values()}
    assert found == {rank: [step, f"rank {rank} at step {step}"] for rank in range(RANKS)}
    answered = [values[0] for what, rank, *values in said if what == "answered" and rank == 0]
    assert answered == list(range(step + 1, step + MORE + 1))
    digests = [values for what, _, *values in said if what == "digests"]
    assert len(digests) == RANKS
    return step, step + MORE, digests


def job_named(name):
    [job] = [job for job in forebay.status()["jobs"] if job["name"] == name]
    return job


def row_of(name):
    """Of `forebay jobs`: ranks, step, durability, durable step."""
    command = [FOREBAYD.with_name("forebay"), "jobs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return re.search(rf"^{name} .*", done.stdout, re.M)[0].split()[2:6]


@pytest.mark.parametrize("level", ["step", "epoch=3"])
@pytest.mark.parametrize("mode", ["shared", "sharded"])
def test_a_killed_daemon_undoes_no_more_than_the_level_allows(start, mode, level):
    undone_max = 0 if level == "step" else 3
    answered = kill_within_a_step(start(), mode, level)

    daemon = start()
    job = job_named("durable")
    assert (job["sessions"], job["world_size"], job["durability"]) == (0, RANKS, level)
    durable = job["durable_step"]
    # The durable step is one more than was answered if the kill came between the step and its answer.
    assert answered - undone_max <= durable <= answered + 1, f"seed {SEED}"
    assert job["committed_step"] == durable and not job["failed"]
    assert row_of("durable") == [f"0/{RANKS}", str(durable), level, str(durable)]

    found, last, digests = go_on(mode, level)
    assert found == durable
    for step, digest, uninterrupted in digests:
        assert step == last and digest == uninterrupted, f"seed {SEED}"
    job = job_named("durable")
    assert job["committed_step"] == last
    assert last - undone_max <= job["durable_step"] <= last
    assert row_of("whole")[1:] == [str(last), "memory", "-"]
    daemon.stop()


def test_a_job_keeps_its_level(start):
    daemon = start()
    model = net()
    opt = forebay.attach(model, forebay.AdamW(), job="kept", durability="step")
    train(model, opt, 2)
    for other in ("memory", "epoch=3"):
        with pytest.raises(forebay.UsageError) as refused:
            forebay.attach(net(), forebay.AdamW(), job="kept", durability=other)
        assert refused.value.code == "E_OPTION" and refused.value.hint
        message = str(refused.value).splitlines()[0]
        assert other in message and re.search(r"\bstep\b", message) and "kept" in message
    train(model, opt, 1, first=2)
    opt.detach()
    for same in ("step", None):
        opt = forebay.attach(net(), forebay.AdamW(), job="kept", durability=same)
        assert opt.committed_step == 3
        opt.detach()
    assert job_named("kept")["durable_step"] == 3
    daemon.stop()


@pytest.mark.parametrize("level", ["step", "epoch=3"])
def test_a_daemon_without_swap_refuses_a_durable_level(start, level):
    daemon = start("dram.limit=256MiB")
    with pytest.raises(forebay.ForebayError) as refused:
        forebay.attach(net(), forebay.AdamW(), job="lost", durability=level)
    assert "swap" in refused.value.hint, refused.value
    assert forebay.status()["jobs"] == []
    model = net()
    opt = forebay.attach(model, forebay.AdamW(), job="lost", durability="memory")
    train(model, opt, 1)
    assert job_named("lost")["durability"] == "memory"
    opt.detach()
    daemon.stop()

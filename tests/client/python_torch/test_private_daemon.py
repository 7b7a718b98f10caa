# SPDX-License-Identifier: Apache-2.0
# Goal    The daemon of `forebay run` may end under a training run. The next daemon continues the jobs if the ended daemon could
#         hand them over. Otherwise the next daemon has what is durable.
# Method  Ranks under a real `forebay run` take each step from the test. The daemon gets SIGTERM at each place of a step in
#         turn, or SIGKILL between two jobs. SHA-256 of weights and states is compared with the same training in a job that saw
#         no restart. FOREBAY_SEED gives other orders of the places, FOREBAY_RESTARTS more restarts.

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from daemon_process import FOREBAYD, missing
from ordered_steps import DEADLINE_S, Ranks
from test_daemon_restart import NOT_AT_REST, RESTARTS, SEED, STEPS, places_of, room_without_states
from test_processes import HERE, environment

FOREBAY = FOREBAYD.parent / "forebay"

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")


def children(pid):
    """{process id: name} of its children."""
    pids = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child): pathlib.Path(f"/proc/{child}/comm").read_text().strip() for child in pids}


class Run:
    """`forebay run` of a Python script beside this file, with swap in `folder`; a context: its end ends it."""

    def __init__(self, folder, settings, *script, **variables):
        values = ["update.workers=2", "update.block_elems=4096", "swap.staging=2MiB", *settings]
        flags = ["--swap", folder, "--swap-size", "128MiB", "--verbose"]
        flags += [word for value in values for word in ("--set", value)]
        self.folder = pathlib.Path(folder)
        self.log_path = self.folder / "log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [FOREBAY, "run", *flags, "--", sys.executable, HERE / script[0], *script[1:]],
                env={**environment(), "XDG_RUNTIME_DIR": str(folder), **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.watchdog = threading.Timer(DEADLINE_S, self.process.terminate)
        self.watchdog.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def log(self):
        return self.log_path.read_text()

    def await_ready(self, count):
        """Until so many daemons have been ready."""
        end = time.monotonic() + DEADLINE_S
        while self.log().count("forebayd ready") < count:
            assert time.monotonic() < end, self.log()
            time.sleep(0.01)  # house: allow sleep: a poll with a deadline

    def end_daemon(self, number):
        (supervisor,) = children(self.process.pid)
        (daemon,) = (pid for pid, name in children(supervisor).items() if name == "forebayd")
        os.kill(daemon, number)

    def lines(self):
        return (json.loads(line) for line in self.process.stdout)


CASES = [("shared", "memory", "dram"), ("shared", "step", "dram"), ("sharded", "memory", "swap")]


@pytest.mark.parametrize(("mode", "level", "place"), CASES)
def test_ranks_go_on_when_it_is_asked_to_stop(folder, mode, level, place):
    chance = random.Random(f"{SEED} {mode} {level} {place}")
    room = ["dram.limit=1GiB"] if place == "dram" else room_without_states(folder, mode, level)
    with contextlib.ExitStack() as stack:
        run = None

        def start(**variables):
            nonlocal run
            run = stack.enter_context(Run(folder, room, "durable_ranks.py", mode, level, "ordered", **variables))
            return run.process

        ranks = stack.enter_context(Ranks(folder, start))
        ranks.take(1)
        for step, where in enumerate(places_of(chance, RESTARTS), 2):
            ranks.go_to(where, step)
            run.end_daemon(signal.SIGTERM)
            ranks.go_on(where)
            run.await_ready(step)
            ranks.hear_answers(step)
        ranks.take(STEPS)
        status, _ = ranks.end()
        assert status == 0, f"seed {SEED}: {run.log()}"
        log = run.log()
    ranks.assert_answered(STEPS)
    assert ranks.of("repeated") == []
    ranks.assert_digests(STEPS)
    assert log.count("job durable goes on at step") == RESTARTS, log
    assert log.count("exit status 0; it is started again") == RESTARTS, log
    assert log.count("is kept at step") == RESTARTS, f"in the end nobody is to go on: {log}"
    assert not re.search(rf"^\S+ (error|critical) |^error\[|{NOT_AT_REST}", log, re.M), log
    assert list(run.folder.glob("forebay-run-*")) == []


def test_after_a_crash_the_next_attach_finds_both_jobs(folder):
    with Run(folder, ["dram.limit=1GiB"], "attach_after_crash.py") as run:
        lines = run.lines()
        assert next(lines) == ["detached", 2, 2]
        run.end_daemon(signal.SIGKILL)
        run.await_ready(2)
        run.process.stdin.write("\n")
        run.process.stdin.flush()
        (what, durable, whole, before, after) = next(lines)
        assert (what, durable, whole) == ("attached", 2, 2)
        assert before == after, "of two steps, of both jobs"
        assert next(lines) == ["trained", 3, 3]
        assert run.process.wait(DEADLINE_S) == 0, run.log()
        assert "signal 9 (Killed); it is started again" in run.log()
    assert list(run.folder.glob("forebay-run-*")) == []

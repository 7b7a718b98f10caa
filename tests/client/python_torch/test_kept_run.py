# SPDX-License-Identifier: Apache-2.0
# Goal    The trainings of `forebay run --keep` stand at their newest committed step, however the run ends. --resume continues
#         them with the bits of an uninterrupted run.
# Method  A training under a real `forebay run` is ended in the middle of a step by a signal or by SIGKILL of its processes;
#         then --resume runs the same script. Losses and SHA-256 of weights and states are compared with an uninterrupted run.
#         Each end by itself, with a client in C++, is in tests/tools/kept_run_test.py.

import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from daemon_process import FOREBAYD, missing
from kill_at_once import kill_at_once
from test_processes import HERE, environment

FOREBAY = FOREBAYD.parent / "forebay"
DEADLINE_S = 600
LAST = 6

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

# Settings by which all states are in DRAM, or all on swap.
ROOM = {"dram": ["--dram", "256MiB"], "swap": ["--dram", "24MiB"]}


def children(pid):
    """{process id: name} of its children."""
    pids = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child): pathlib.Path(f"/proc/{child}/comm").read_text().strip() for child in pids}


class Folder:
    """Swap, state and runtime of one user."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.swap = self.folder / "swap"
        self.swap.mkdir()
        self.environment = {**environment(), "XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": f"{folder}/state"}
        self.environment.pop("FOREBAY_RUN", None)
        self.environment.pop("FOREBAY_SOCKET", None)

    def forebay(self, *words):
        done = subprocess.run(
            [FOREBAY, "run", *words], env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def steps(self):
        """Returns {job: durable step} of the kept run."""
        (run,) = json.loads(self.forebay("--kept", "--json"))
        return {training["job"]: training["step"] for training in run["trainings"]}

    def new(self, place, *level, keep=("--keep", "one")):
        flags = [*ROOM[place], "--swap", self.swap, "--swap-size", "64MiB", "--set", "update.block_elems=4096"]
        flags += ["--set", "update.workers=1", "--set", "swap.staging=2MiB", *keep]
        return Run(self, flags, *level)

    def resumed(self, *level):
        return Run(self, ["--resume", "one"], *level)


class Run:
    """`forebay run` of the training; a context: its end ends it."""

    def __init__(self, folder, flags, *level):
        self.log_path = folder.folder / "log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [FOREBAY, "run", *flags, "--", sys.executable, HERE / "kept_training.py", str(LAST), *level],
                env=folder.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=os.setpgrp,
            )
        self.watchdog = threading.Timer(DEADLINE_S, self.process.terminate)
        self.watchdog.start()
        self.losses = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def next(self, what):
        line = self.process.stdout.readline()
        assert line, self.log()
        found, *values = json.loads(line)
        assert found == what, (found, self.log())
        return values

    def train(self, steps):
        """So many steps; then it waits behind the backward of the next one."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        for _ in range(steps):
            step, loss = self.next("answered")
            self.losses[step] = loss

    def finish(self):
        """(step, digest), once it has trained all remaining steps."""
        self.process.stdin.close()
        for line in self.process.stdout:
            what, step, value = json.loads(line)
            if what == "digest":
                assert self.process.wait(DEADLINE_S) == 0, self.log()
                return step, value
            self.losses[step] = value
        raise AssertionError(self.log())

    def log(self):
        return self.log_path.read_text()

    def processes(self):
        """{name: process id} of the second process, of the daemon and of the command."""
        (supervisor,) = children(self.process.pid)
        by_name = {name: pid for pid, name in children(supervisor).items()}
        daemon = by_name.pop("forebayd")
        (command,) = by_name.values()
        return {"run": self.process.pid, "supervisor": supervisor, "daemon": daemon, "command": command}

    def ended(self):
        status = self.process.wait(DEADLINE_S)
        # Reads until the second process has ended too, because that process has the pipe open.
        self.process.stdout.read()
        return status


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(losses, digest) of the run that nothing has ended."""
    folder = Folder(os.fspath(tmp_path_factory.mktemp("whole")))
    with folder.new("dram", keep=()) as run:
        assert run.next("attached") == [0, ""]
        _, digest = run.finish()
    return run.losses, digest


def check_resumed(folder, whole, ended, step, *level):
    """The rest is trained from `step` on, with the bits of the whole run."""
    assert folder.steps() == ({"kept": step} if step else {})
    with folder.resumed(*level) as run:
        assert run.next("attached") == [step, f"behind {step}" if step else ""]
        last, digest = run.finish()
    losses, whole_digest = whole
    before = {at: loss for at, loss in ended.losses.items() if at <= step}
    assert (last, digest) == (LAST, whole_digest)
    assert {**before, **run.losses} == losses and min(run.losses, default=LAST + 1) == step + 1
    assert f"training kept stands at step {LAST}, durable on {folder.swap}\n" in run.log()
    folder.forebay("--forget", "one")
    assert list(folder.swap.iterdir()) == []


def kill(run, *names):
    kill_at_once(*(pid for name, pid in run.processes().items() if name in names))


def test_a_training_goes_on_after_signals_and_kills(folder, whole):
    """A new run that gets SIGTERM, resumed ones whose command is killed, and daemon and command at once."""
    folder = Folder(folder)
    with folder.new("swap") as run:
        run.next("attached")
        run.train(2)
        run.process.terminate()
        run.ended()
        assert f"training kept stands at step 2, durable on {folder.swap}\n" in run.log(), run.log()
    for step, killed in ((2, ["command"]), (3, ["daemon", "command"])):
        with folder.resumed() as part:
            assert part.next("attached") == [step, f"behind {step}"]
            part.train(1)
            run.losses.update(part.losses)
            kill(part, *killed)
            part.ended()
    check_resumed(folder, whole, run, 4)


@pytest.mark.parametrize(("level", "step"), [("memory", 0), ("epoch=2", 2)])
def test_a_kill_of_all_its_processes_goes_back_to_the_durable_step(folder, whole, level, step):
    folder = Folder(folder)
    with folder.new("dram", level) as run:
        run.next("attached")
        run.train(3)
        kill(run, "run", "supervisor", "daemon", "command")
        run.ended()
    check_resumed(folder, whole, run, step, level)

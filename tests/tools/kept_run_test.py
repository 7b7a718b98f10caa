# SPDX-License-Identifier: Apache-2.0
"""Goal    `forebay run --keep` retains each training at its newest step, however the run ends; it says at start what it
        cannot retain, and retains nothing of a run that has not begun. --resume, --kept and --forget refuse what
        contradicts the run, with both values.
Method  Real processes of build/bin; a client in C++ trains one step of a small job.
"""

import contextlib
import json
import os
import re
import signal

import pytest
from forebay_command import FOREBAY, Started, await_end, begin_own_group, folders_of_run, forebay
from kill_at_once import kill_at_once

CLIENT = FOREBAY.parent.parent / "tests/held_client"
TRAIN = ("sh", "-c", f'"{CLIENT}" "$FOREBAY_SOCKET" 0 1 step')
SMALL = ("--set", "update.block_elems=4096")


class Node:
    """Folders of one user: swap, runtime, state."""

    def __init__(self, environment, runtime, swap, state):
        self.environment = {**environment, "XDG_STATE_HOME": str(state)}
        self.environment.pop("FOREBAY_RUN", None)
        self.folders = (self.environment, runtime, swap)
        self.swap = swap
        self.state = state / "forebay"

    def run(self, *words, command=TRAIN, **variables):
        return forebay("run", *words, "--", *command, env={**self.environment, **variables})

    def keep(self, name, *words, size="64MiB", dram="256MiB", command=TRAIN):
        flags = ("--dram", dram, "--swap", self.swap, "--swap-size", size, *SMALL)
        return self.run("--keep", name, *flags, *words, command=command)

    def kept(self):
        shown = forebay("run", "--kept", "--json", env=self.environment)
        assert shown.returncode == 0, shown.stderr
        return json.loads(shown.stdout)

    def forget(self, name):
        return forebay("run", "--forget", name, env=self.environment)

    def names(self):
        runs = self.state / "runs"
        return sorted(path.name for path in runs.iterdir()) if runs.exists() else []

    def disk_bytes(self):
        return sum(path.stat().st_blocks * 512 for path in self.swap.rglob("*") if path.is_file())


@pytest.fixture
def node(tmp_path):
    with folders_of_run(tmp_path, "kept") as (environment, runtime, swap):
        yield Node(environment, runtime, swap, tmp_path / "state")


@pytest.fixture
def kept(node):
    """With a run named one at step 1."""
    done = node.keep("one")
    assert done.returncode == 0, done.stderr
    yield node
    if "one" in node.names():
        assert node.forget("one").returncode == 0


def refused(done, *texts):
    assert done.returncode == 1, done.stderr
    for text in texts:
        assert text in done.stderr, done.stderr


def test_a_kept_run_stands_at_its_step_and_its_disk_space_goes_with_its_name(node):
    done = node.keep("one")
    assert done.returncode == 0, done.stderr
    assert f"training job stands at step 1, durable on {node.swap}\n" in done.stderr
    assert "go on: forebay run --resume one -- COMMAND; give it up: forebay run --forget one\n" in done.stderr
    (run,) = node.kept()
    assert (run["name"], run["in_use"], run["trainings"]) == ("one", False, [{"job": "job", "step": 1}])
    assert (run["dram_bytes"], run["swap_bytes"], run["swap"]) == (256 << 20, 64 << 20, [str(node.swap)])
    table = forebay("run", "--kept", env=node.environment).stdout
    row = f"one ended job at step 1 256.0 MiB 64.0 MiB {node.swap}"
    assert " ".join(table.split("\n")[1].split()) == row
    assert node.disk_bytes() >= 64 << 20
    forgotten = node.forget("one")
    assert (forgotten.returncode, forgotten.stdout) == (0, "one is forgotten: job at step 1; 64.0 MiB are free\n")
    assert node.disk_bytes() == 0 and node.names() == [] and node.kept() == []
    assert forebay("run", "--kept", env=node.environment).stdout == "no runs are kept\n"


def test_a_name_is_kept_once(kept):
    again = kept.keep("one")
    refused(
        again,
        "error[E_OPTION]: --keep one: a run of this name is kept: job at step 1\n",
        "hint: go on with it: forebay run --resume one -- COMMAND; give it up: forebay run --forget one",
    )
    assert kept.kept()[0]["trainings"] == [{"job": "job", "step": 1}]


@pytest.mark.parametrize("name", ["a/b", "..", ".a", "a b", "x" * 65])
def test_what_is_no_name_is_refused(node, name):
    refused(node.keep(name), "error[E_OPTION]: ", "names no kept run")
    refused(node.forget(name), "error[E_OPTION]: ", "names no kept run")
    assert node.names() == []


def test_a_run_that_is_not_kept_names_those_that_are(kept):
    for done in (kept.run("--resume", "two"), kept.forget("two")):
        refused(done, "error[E_OPTION]: no run is kept as two; kept are: one\n")


def test_resume_goes_on_with_the_run_without_any_option(kept):
    shown = ("sh", "-c", f'"{FOREBAY}" jobs --json; "{FOREBAY}" mem --json; echo "\\"$FOREBAY_RUN\\""')
    before = json.loads((kept.state / "runs/one/run.json").read_text())
    done = kept.run("--resume", "one", command=shown)
    assert done.returncode == 0, done.stderr
    decoder = json.JSONDecoder()
    found, text = [], done.stdout.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    (job,), memory, run = found
    assert (job["name"], job["committed_step"], job["durable_step"]) == ("job", 1, 1)
    assert memory["limit_bytes"] == 256 << 20
    assert run == before["run"] != ""
    assert "training job stands at step 1" in done.stderr


def test_resume_refuses_what_contradicts_the_run(kept, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    cases = [
        (("--swap", other), f"the run's swap is on {kept.swap}; --swap names {other}"),
        (
            ("--swap", kept.swap, "--swap-size", "32MiB"),
            "the run has 64.0 MiB (67108864 bytes) on each swap path; --swap-size is 32.0 MiB (33554432 bytes)",
        ),
        (
            ("--dram", "128MiB"),
            "the run was kept with 256.0 MiB (268435456 bytes) of DRAM; now it would have 128.0 MiB (134217728 bytes)",
        ),
        (
            ("--set", "dram.limit=128MiB"),
            "the run was kept with 256.0 MiB (268435456 bytes) of DRAM; now it would have 128.0 MiB (134217728 bytes)",
        ),
        (("--set", "swap.capacity=32MiB"), "swap.capacity of a kept run is not free"),
        (("--set", "jobs.at_stop=free"), "jobs.at_stop of a kept run is not free"),
    ]
    for words, message in cases:
        refused(kept.run("--resume", "one", *words), "error[E_OPTION]: ", message, "hint: ")
    variable = kept.run("--resume", "one", FOREBAY_RUN="mine")
    refused(variable, "its trainings are of run ", "; FOREBAY_RUN is mine\nhint: unset FOREBAY_RUN")
    assert [run["trainings"] for run in kept.kept()] == [[{"job": "job", "step": 1}]]
    assert list(other.iterdir()) == []


def test_resume_takes_more_dram_and_the_same_swap(kept):
    same = ("--swap", kept.swap, "--swap-size", "65536KiB")
    more = kept.run("--resume", "one", *same, "--dram", "300MiB", command=("true",))
    assert more.returncode == 0, more.stderr
    assert kept.kept()[0]["dram_bytes"] == 300 << 20
    refused(kept.run("--resume", "one", "--dram", "256MiB"), "kept with 300.0 MiB")


def test_options_that_exclude_each_other_are_usage_errors(node):
    assert node.run("--keep", "one").returncode == 2  # no swap
    for option in ("--keep", "--resume", "--forget"):  # empty, as from an unset shell variable
        empty = node.run(option, "", "--swap", node.swap)
        assert empty.returncode == 2 and "the name is empty" in empty.stderr, empty.stderr
    both = node.run("--keep", "one", "--resume", "one", "--swap", node.swap)
    assert both.returncode == 2 and "--keep excludes --resume" in both.stderr
    assert forebay("run", "--json", env=node.environment).returncode == 2


def test_room_is_asked_for_at_start(node):
    # The disk lacks space for the swap.
    whole = node.keep("one", size="1024TiB")
    refused(whole, "error[E_SWAP_NOSPC]: ", "1024.0 TiB")
    assert node.names() == [] and list(node.swap.iterdir()) == []
    # The swap lacks space for the training.
    little = node.keep("one", "--set", "swap.ledger=128KiB", size="1MiB", command=("sh", "-c", f"{TRAIN[2]}; exit 0"))
    needed = re.search(
        r"error\[E_SWAP_NOSPC\]: durability epoch=1000000 needs .* bytes\) in all: .*\n"
        r"hint: raise --swap-size / swap.capacity by (\d+)\.0 MiB, or ",
        little.stderr,
    )
    assert needed, little.stderr
    assert "no training has begun: nothing is kept as one\n" in little.stderr
    assert node.names() == [] and list(node.swap.iterdir()) == []
    enough = node.keep("one", "--set", "swap.ledger=128KiB", size=f"{1 + int(needed[1])}MiB")
    assert enough.returncode == 0, enough.stderr
    assert node.forget("one").returncode == 0
    # A swap path that does not exist is refused, and no run is created.
    nowhere = node.run("--keep", "one", "--swap", node.swap / "none")
    refused(nowhere, "error[E_SWAP_PATH]: ", "No such file or directory")
    assert node.names() == []


@pytest.mark.parametrize(("command", "status"), [(("true",), 0), (("sh", "-c", "exit 3"), 3), (("/no/such",), 127)])
def test_a_run_without_a_training_is_not_kept(node, command, status):
    done = node.keep("one", command=command)
    assert done.returncode == status
    assert "no training has begun: nothing is kept as one\n" in done.stderr
    assert node.names() == [] and list(node.swap.iterdir()) == []


def test_a_daemon_that_does_not_start_leaves_no_name(node):
    refused(node.keep("one", "--set", "update.workers=-1"), "error[E_CONFIG]")
    assert node.names() == [] and list(node.swap.iterdir()) == []


def test_a_run_that_is_in_use_is_neither_resumed_nor_forgotten(kept):
    flags = ("--resume", "one")
    started = Started(kept.folders, flags=flags, run=())
    assert kept.kept()[0]["in_use"] is True
    for done in (kept.run("--resume", "one"), kept.forget("one")):
        refused(done, "error[E_BUSY]: kept run one is in use\n")
    started.process.stdin.close()
    assert started.wait() == 5
    await_end(started.daemon)
    assert kept.kept()[0]["in_use"] is False


def test_settings_and_config_come_back_with_the_run(node, tmp_path):
    config = tmp_path / "forebay.toml"
    config.write_text("[jobs]\ndurability = 'step'\n[update]\nworkers = 1\n")
    done = node.run("--keep", "one", "--swap", node.swap, "--swap-size", "64MiB", "--config", config, *SMALL)
    assert done.returncode == 0, done.stderr
    shown = ("sh", "-c", f'"{FOREBAY}" jobs --json')
    resumed = node.run("--resume", "one", command=shown)
    (job,) = json.loads(resumed.stdout)
    assert (job["durability"], job["durable_step"]) == ("step", 1)
    assert node.forget("one").returncode == 0


class Held(Started):
    """A run named one, whose training is at step 1 and continues."""

    def __init__(self, node, log, *words, name=("--keep", "one")):
        new = ("--dram", "256MiB", "--swap", node.swap, "--swap-size", "64MiB", *SMALL)
        flags = (*name, *(new if name[0] == "--keep" else ()), *words)
        script = (
            f'"{CLIENT}" "$FOREBAY_SOCKET" 0 1 step >&2 || exit 9; '
            f'"{CLIENT}" "$FOREBAY_SOCKET" 0 1 hold >&2 & echo $$ $!; wait'
        )
        self.log = log
        with open(log, "wb") as messages:
            super().__init__(node.folders, script, flags=flags, run=(), stderr=messages, begin=begin_own_group)

    def processes(self):
        return {
            **{"run": self.process.pid, "supervisor": self.supervisor, "daemon": self.daemon},
            **{"command": self.pids[0], "rank": self.pids[1]},
        }

    def kill(self, *names):
        kill_at_once(*(pid for name, pid in self.processes().items() if name in names))

    def ended(self):
        """Its status, once all its processes have ended."""
        pids = self.processes()
        status = self.wait()
        for pid in pids.values():
            await_end(pid)
        return status


def terminated(held):
    for pid in held.processes().values():
        # The first process passes the signal on, so the command may already have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


ENDS = {
    "SIGTERM": (lambda held: held.process.send_signal(signal.SIGTERM), 1),
    "SIGINT": (lambda held: held.process.send_signal(signal.SIGINT), 1),
    "SIGHUP": (lambda held: held.process.send_signal(signal.SIGHUP), 1),
    "SIGTERM to each process": (terminated, 1),
    "the command is killed": (lambda held: held.kill("command"), 1),
    "the rank is killed": (lambda held: held.kill("rank"), 1),
    "its first process is killed": (lambda held: held.kill("run"), 1),
    "its second process is killed": (lambda held: held.kill("supervisor"), 0),
    "all are killed": (lambda held: held.kill("run", "supervisor", "daemon", "command", "rank"), 0),
}


@pytest.mark.parametrize(("end", "step"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("level", ["memory", "step"])
def test_each_end_leaves_the_newest_step(node, tmp_path, end, step, level):
    held = Held(node, tmp_path / "log", "--set", f"jobs.durability={level}")
    end(held)
    held.ended()
    step = 1 if level == "step" else step
    (run,) = node.kept()
    messages = held.log.read_text()
    durable = [{"job": "job", "step": step}] if step else []
    assert run["trainings"] == durable and not run["in_use"], messages
    resumed = node.run("--resume", "one")
    assert f"training job stands at step {step + 1}, durable on {node.swap}\n" in resumed.stderr
    assert node.forget("one").returncode == 0
    assert node.run(command=("true",)).returncode == 0  # removes the folders of killed runs


def test_a_resumed_run_ends_like_a_new_one(kept, tmp_path):
    for step, killed in ((2, ["command"]), (3, ["daemon", "command", "rank"])):
        held = Held(kept, tmp_path / "log", name=("--resume", "one"))
        held.kill(*killed)
        held.ended()
        assert kept.kept()[0]["trainings"] == [{"job": "job", "step": step}]


def test_without_a_home_there_is_no_name(node):
    bare = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_STATE_HOME")}
    flags = ("--keep", "one", "--swap", node.swap, "--swap-size", "64MiB")
    done = forebay("run", *flags, "--", "true", env=bare)
    refused(done, "error[E_OPTION]: there is no folder for the names of kept runs\nhint: set XDG_STATE_HOME")

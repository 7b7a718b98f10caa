# SPDX-License-Identifier: Apache-2.0
"""The forebay command of build/bin, for tests of it."""

import contextlib
import os
import pathlib
import select
import signal
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOREBAY = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build/bin")) / "forebay"
BENCH = FOREBAY.with_name("forebay-bench")
DEADLINE_S = 60
BENCH_KEYS = [  # keys of a line of --json
    *("bench", "case", "value", "unit", "limit", "limit_what", "share", "samples", "spread"),
    *("bytes_read", "bytes_written"),
]


def forebay(*words, deadline_s=DEADLINE_S, **options):
    return run_program(FOREBAY, *words, deadline_s=deadline_s, **options)


def forebay_bench(*words, deadline_s=DEADLINE_S, **options):
    return run_program(BENCH, *words, deadline_s=deadline_s, **options)


def run_program(program, *words, deadline_s, **options):
    return subprocess.run(
        [program, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        stdin=subprocess.DEVNULL,
        check=False,
        **options,
    )


def make_folders(tmp_path, name):
    """(environment, runtime folder, swap folder); the caller empties and removes the last one."""
    runtime, swap = tmp_path / "runtime", ROOT / "build" / f"test-{name}-{os.getpid()}"
    runtime.mkdir()
    swap.mkdir(parents=True)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    environment.pop("FOREBAY_SOCKET", None)
    return environment, runtime, swap


@contextlib.contextmanager
def folders_of_run(tmp_path, name):
    """(environment, runtime folder, swap folder); both folders must be empty again at the end."""
    environment, runtime, swap = make_folders(tmp_path, name)
    yield environment, runtime, swap
    left = [*runtime.rglob("*"), *swap.rglob("*")]
    for folder in (runtime, swap):
        for path in folder.iterdir():
            subprocess.run(["rm", "-rf", path], check=True)
    swap.rmdir()
    assert left == [], f"left behind: {left}"


def run_flags(swap):
    return ["run", "--dram", "256MiB", "--swap", swap, "--swap-size", "64MiB", "--"]


def await_end(pid):
    """Returns once the process has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], DEADLINE_S)[0], f"process {pid} still runs"
    finally:
        os.close(pidfd)


def parent_of(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    return int(fields.split()[1])


def take_signals():
    """In a new process, before its program: who started the tests may ignore some, and a shell cannot trap those."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def begin_own_group():
    """As take_signals(); the program also has a process group of its own (kill_at_once.py)."""
    take_signals()
    os.setpgrp()


class Started:
    """A `forebay run` whose command has begun: it prints its own pid, then runs permanently. `flags` are for run,
    on top of `run` (run_flags' by default), `begin` is called before the program, the other options are for Popen."""

    def __init__(
        self,
        folders,
        script="echo $$; while :; do read -r line || exit 5; done",
        flags=(),
        run=None,
        begin=take_signals,
        **options,
    ):
        environment, _, swap = folders
        usual = run_flags(swap)[1:-1] if run is None else run
        self.process = subprocess.Popen(
            [FOREBAY, "run", *map(str, (*usual, *flags, "--")), "sh", "-c", script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=begin,
            **options,
        )
        self.pids = [int(word) for word in self.process.stdout.readline().split()]
        self.supervisor = parent_of(self.pids[0])
        self.daemon = self.daemons()[0]

    def daemons(self):
        """Process ids: one, or none where it has ended and was waited for."""
        children = pathlib.Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children")
        pids = map(int, children.read_text(encoding="ascii").split())
        return [pid for pid in pids if pid not in self.pids]

    def wait(self):
        status = self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()
        self.process.stdin.close()
        return status

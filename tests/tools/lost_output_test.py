# SPDX-License-Identifier: Apache-2.0
"""Goal    No command loses its output without a word: a full disk is an error with status 1; a closed reader ends the
        command with status 1 and no word.
Method  Real processes of build/bin. Standard output is /dev/full, or a pipe whose reader was closed before, with SIGPIPE
        as a shell leaves it and ignored.
"""

import json
import os
import shlex
import signal
import subprocess

import pytest
from forebay_command import DEADLINE_S, FOREBAY, folders_of_run, forebay, run_flags

BIN = FOREBAY.parent
TRAIN = f'"{BIN.parent}/tests/held_client" "$FOREBAY_SOCKET" 0 1 step'
CLUSTER = "--nodes 2 --gpus 2 --layers 4 --width 512"
# Commands that need no daemon.
ALONE = [
    *("forebay --help", "forebay run --help", "forebay --version", "forebay explain", "forebay explain --json"),
    *("forebay explain E_RANK", "forebay doctor /does/not/exist", f"forebay plan {CLUSTER}"),
    *(f"forebay plan {CLUSTER} --json", "forebay bench adam --list"),
    *("forebayd --help", "forebayd --version", "forebay-gateway --help", "forebay-gateway --version"),
]
OF_DAEMON = [
    *("status", "status --json", "mem", "mem --json", "swap", "swap --json", "jobs", "jobs --json"),
    *("trace job", "trace job --json", "trace job --perfetto", "plan --job job", "plan --job job --json"),
    *("plan --params 1000000", "plan --params 1000000 --json", "scrub", "scrub --json"),
]


@pytest.fixture
def folders(tmp_path):
    with folders_of_run(tmp_path, "lost-output") as made:
        yield made


@pytest.fixture
def daemon(folders):
    """The environment of a private daemon's clients; a job has trained on this daemon."""
    environment, _, swap = folders
    script = f'{TRAIN} && echo "$FOREBAY_SOCKET" && read -r end'
    running = subprocess.Popen(
        [FOREBAY, *map(str, run_flags(swap)), "sh", "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    socket = running.stdout.readline().strip()
    assert socket
    yield {**environment, "FOREBAY_SOCKET": socket}
    running.communicate("end\n", timeout=DEADLINE_S)


def ends(command, stdout, **options):
    """Exit status and stderr."""
    program, *words = shlex.split(command)
    done = subprocess.run(
        [BIN / program, *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        **options,
    )
    return done.returncode, done.stderr


def on_full_disk(command, **options):
    with open("/dev/full", "wb") as full:
        return ends(command, full, **options)


def without_reader(command, **options):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return ends(command, writer, **options)
    finally:
        os.close(writer)


def ignore_pipe():
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def check(command, **options):
    status, errors = on_full_disk(command, **options)
    assert status == 1, (command, errors)
    error, hint = errors.splitlines()[-2:]
    assert error == "error[E_LIMIT]: write to standard output: No space left on device", (command, errors)
    assert hint.startswith("hint: make room where standard output goes"), hint
    for prepare in (None, ignore_pipe):
        assert without_reader(command, preexec_fn=prepare, **options) == (1, ""), command


@pytest.mark.parametrize("command", ALONE)
def test_a_command_says_that_its_output_is_lost(command):
    if not (BIN / command.split()[0]).exists():
        pytest.skip(f"{command.split()[0]} was not built: the machine has no UCX")
    check(command)


def test_a_command_that_asks_the_daemon_says_so_too(daemon):
    for words in OF_DAEMON:
        check(f"forebay {words}", env=daemon)


def test_a_job_is_deleted_whether_or_not_somebody_reads_it(daemon):
    assert without_reader("forebay jobs --delete job --json", env=daemon) == (1, "")
    assert json.loads(forebay("jobs", "--json", env=daemon).stdout) == []


def test_a_bench_ends_at_the_first_case_that_it_cannot_print(folders):
    environment, _, swap = folders
    check(f"forebay bench disk --json --samples 1 --swap {shlex.quote(str(swap))}", env=environment)


def test_scrub_of_a_stopped_daemon(folders):
    _, runtime, swap = folders
    settings = f"--set swap.paths={swap} --set swap.capacity=64MiB --set dram.limit=256MiB --set memlock=best_effort"
    command = [BIN / "forebayd", *shlex.split(settings), "--set", f"socket.path={runtime}/s"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert any("forebayd ready" in line for line in running.stderr)
        running.send_signal(signal.SIGINT)
    check(f"forebayd --scrub {settings}")
    for path in (*swap.iterdir(), *runtime.iterdir()):
        path.unlink()


def test_launch_ends_its_command(tmp_path):
    ssh, hosts = tmp_path / "ssh", tmp_path / "hosts"
    ssh.write_text('#!/bin/sh\nfor last; do host=$command command=$last; done\n[ "$host" = -G ] && exit 1\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    hosts.write_text("a slots=1\n")
    command = f"forebay launch --hostfile {hosts} --ssh {ssh} -- sh -c 'echo begun; exec sleep 600'"
    check(command)

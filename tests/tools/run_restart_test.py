# SPDX-License-Identifier: Apache-2.0
"""Goal    `forebay run` starts its daemon again when it ends by itself, tells when it does and when it gives up, and leaves
        nothing behind after it either.
Method  Real processes of build/bin: the daemon is killed under a command that runs. Each wait has a deadline.
"""

import json
import os
import signal
import time

import pytest
from forebay_command import DEADLINE_S, Started, await_end, folders_of_run, forebay

STARTS_AGAIN_MAX = 5


@pytest.fixture
def folders(tmp_path):
    with folders_of_run(tmp_path, "restart") as made:
        yield made


class Watched(Started):
    """One whose messages are read."""

    def __init__(self, folders, tmp_path, **options):
        self.folders = folders
        self.messages_path = tmp_path / "messages"
        with open(self.messages_path, "wb") as messages:
            super().__init__(folders, stderr=messages, **options)

    def messages(self):
        return self.messages_path.read_text()

    def await_message(self, text, count=1):
        end = time.monotonic() + DEADLINE_S
        while self.messages().count(text) < count:
            assert time.monotonic() < end, self.messages()
            time.sleep(0.01)  # house: allow sleep: a poll with a deadline
        return self.messages()

    def end_daemon(self, number):
        """By a signal; returns when the next one is ready."""
        ready = self.messages().count("forebayd ready")
        os.kill(self.daemon, number)
        self.await_message("forebayd ready", ready + 1)
        before, (self.daemon,) = self.daemon, self.daemons()
        assert self.daemon != before

    def status(self):
        environment, runtime, _ = self.folders
        (socket,) = runtime.glob("*/forebay.sock")
        shown = forebay("status", "--json", "--socket", socket, env=environment)
        assert shown.returncode == 0, shown.stderr
        return json.loads(shown.stdout)

    def wait(self):
        status = super().wait()
        for pid in (*self.pids, self.daemon, self.supervisor):
            await_end(pid)
        return status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_a_daemon_that_ends_is_started_again(folders, tmp_path, number):
    watched = Watched(folders, tmp_path)
    before = watched.status()
    watched.end_daemon(number)
    after = watched.status()
    assert after["info"]["pid"] == watched.daemon != before["info"]["pid"]
    same = ("socket_path", "adam_target")
    assert [after[key] for key in same] == [before[key] for key in same]
    assert after["memory"]["limit_bytes"] == before["memory"]["limit_bytes"]
    assert [path["path"] for path in after["swap"]] == [path["path"] for path in before["swap"]]
    (line,) = [line for line in watched.messages().splitlines() if "ended" in line]
    how = "exit status 0" if number in (signal.SIGTERM, signal.SIGINT) else f"signal {number.value} "
    assert line.startswith(f"forebayd ended while the command ran: {how}"), line
    assert line.endswith("; it is started again"), line
    watched.process.stdin.close()
    assert watched.wait() == 5


def test_one_that_ends_again_and_again_is_given_up(folders, tmp_path):
    watched = Watched(folders, tmp_path)
    for _ in range(STARTS_AGAIN_MAX):
        watched.end_daemon(signal.SIGKILL)
    os.kill(watched.daemon, signal.SIGKILL)
    messages = watched.await_message("\nhint: ")
    assert messages.count("; it is started again\n") == STARTS_AGAIN_MAX
    assert (
        "error[E_DAEMON_GONE]: forebayd ended while the command ran: signal 9 (Killed), after it was started again 5 "
        "times within 60 s\nhint: its messages are above"
    ) in messages
    assert watched.daemons() == []
    watched.process.stdin.close()
    assert watched.wait() == 5, "the command's own"


def test_one_that_is_not_ready_again_is_given_up(folders, tmp_path):
    config = tmp_path / "forebay.toml"
    config.write_text("[update]\nworkers = 1\n")
    watched = Watched(folders, tmp_path, flags=("--config", config))
    config.write_text("[update]\nworkers = -1\n")
    os.kill(watched.daemon, signal.SIGKILL)
    messages = watched.await_message("started again but not ready yet\nhint: its message is above")
    assert messages.count("; it is started again\n") == 1
    assert "error[E_CONFIG]" in messages and "error[E_DAEMON_GONE]" in messages
    watched.process.stdin.close()
    assert watched.wait() == 5


KILLS = {
    "run": lambda watched: watched.process.kill(),
    "its group": lambda watched: os.killpg(watched.process.pid, signal.SIGKILL),
    "the second process": lambda watched: os.kill(watched.supervisor, signal.SIGKILL),
}


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
def test_nothing_is_left_after_a_kill_of_one_that_has_started_again(folders, tmp_path, kill):
    _, _, swap = folders
    watched = Watched(folders, tmp_path, start_new_session=True)
    watched.end_daemon(signal.SIGKILL)
    (file,) = swap.glob("*/forebay.swap")
    assert file.stat().st_blocks * 512 >= 64 << 20
    kill(watched)
    assert watched.wait() != 0

# SPDX-License-Identifier: Apache-2.0
"""Goal    Where an end of a remote session dies, hangs, loses its link or talks nonsense for longer than anybody waits, the
        other ends it: the trainer gets an error of ours, the daemon has its memory back, the gateway serves others, and
        the job continues from its step.
Method  As test_remote.py, with a keepalive of two seconds; ranks wait for another one to return, and for their daemon, a
        second. Ranks wait between two steps while their world is changed.
"""

import os
import pathlib
import signal
import sys
import time

import forebay
import pytest
import remote_ranks
from network_nodes import ADDRESSES, LINK
from remote_gateway import PORT, UID
from test_remote import DEADLINE_S, Place, errors

KEEPALIVE_MS = 2000
SESSION_WAIT_MS = 1000
END_DEADLINE_S = 20  # far above the keepalive
GONE = ("E_REMOTE", "E_DAEMON_GONE", "E_RANK_LOST")


@pytest.fixture(scope="module")
def place(gateway_network, tmp_path_factory):
    waits = {"keepalive": KEEPALIVE_MS, "session_wait": SESSION_WAIT_MS}
    made = Place(gateway_network, tmp_path_factory.mktemp("place"), "log.level=info", **waits)
    yield made
    made.stop()


class Waiting:
    """A rank that has trained its first step and waits."""

    def __init__(self, place, job, *words, ranks=1):
        if place.gateway.process.poll() is not None:  # a failed test may have ended the gateway
            place.gateway.start()
        wait = {"FOREBAY_DAEMON_WAIT": "1"}
        self.output = place.start(remote_ranks.main, job, ranks, 4, "wait", *words, **wait)
        await_true(lambda: self._said("waiting") == ranks, lambda: self.output.text)
        self.pid = next(line[2] for line in self.output.said if line[0] == "waiting")

    def _said(self, kind):
        return sum(line[0] == kind for line in self.output.said)

    def agent(self):
        """The process between it and the gateway."""
        children = []
        for task in pathlib.Path(f"/proc/{self.pid}/task").iterdir():
            children += (task / "children").read_text(encoding="ascii").split()
        [agent] = [int(child) for child in children if b"connect" in _command(child)]
        return agent

    def go_on(self):
        self.output.process.stdin.write("go\n")
        self.output.process.stdin.flush()

    def errors(self):
        """The errors that it reports when it continues."""
        self.go_on()
        return errors(self.output.wait(DEADLINE_S))


def _command(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


def await_true(condition, text=lambda: ""):
    end = time.monotonic() + END_DEADLINE_S
    while not condition():
        assert time.monotonic() < end, text()
        time.sleep(0.02)  # house: allow sleep: a poll with a deadline


def job_of(place, name):
    """As root sees it: the job is the principal's."""
    return next(job for job in forebay.status(place.daemon.socket)["jobs"] if job["name"] == f"{UID}:{name}")


def await_end(place, job):
    """The daemon has let go of the job's sessions, and of their memory."""

    def has_ended():
        arenas = forebay.status(place.daemon.socket)["memory"]["arenas"]
        own = [arena for arena in arenas if arena["job"] == f"{UID}:{job}" and arena["kind"] in ("grad", "ring")]
        return job_of(place, job)["sessions"] == 0 and not own

    await_true(has_ended, lambda: place.gateway.text())


def finishes(place, job):
    """Another process continues the job, from step 1."""
    lines = place.ranks(job, 1, 4)
    assert [line for line in lines if line[0] == "attached"] == [["attached", 0, 1]], lines
    assert not errors(lines)
    return [line[2] for line in lines if line[0] == "digest"]


@pytest.fixture(scope="module")
def digest(place):
    """Of a job that nothing has happened to."""
    [line] = [line for line in place.ranks("healthy", 1, 4) if line[0] == "digest"]
    return line[2]


def test_a_trainer_that_is_killed_leaves_nothing(place, digest):
    rank = Waiting(place, "trainer")
    agent = rank.agent()
    os.kill(rank.pid, signal.SIGKILL)
    await_end(place, "trainer")
    await_true(lambda: not pathlib.Path(f"/proc/{agent}").exists())
    assert "may come back" not in place.daemon.log.read_text(), "its agent has said that it is no more"
    assert finishes(place, "trainer") == [digest]


def test_an_agent_that_is_killed_is_an_error_of_its_trainer(place, digest):
    rank = Waiting(place, "agent")
    os.kill(rank.agent(), signal.SIGKILL)
    await_end(place, "agent")
    assert [line[2] for line in rank.errors()] in [[code] for code in GONE]
    assert finishes(place, "agent") == [digest]


def test_an_agent_that_hangs_is_ended_by_the_gateway(place, digest):
    rank, other = Waiting(place, "hangs"), Waiting(place, "beside")
    agent = rank.agent()
    os.kill(agent, signal.SIGSTOP)
    try:
        await_end(place, "hangs")
    finally:
        os.kill(agent, signal.SIGCONT)
    assert [line[2] for line in rank.errors()] in [[code] for code in GONE]
    assert other.errors() == []
    assert finishes(place, "hangs") == [digest]


def test_a_gateway_that_hangs_is_an_error_of_the_trainer(place, digest):
    rank = Waiting(place, "stopped")
    place.gateway.process.send_signal(signal.SIGSTOP)
    try:
        [error] = rank.errors()
        assert error[2] == "E_DAEMON_GONE" and "none took this session back" in error[3]
    finally:
        place.gateway.process.send_signal(signal.SIGCONT)
    await_end(place, "stopped")
    assert finishes(place, "stopped") == [digest]


def test_a_gateway_that_is_killed_harms_neither_daemon_nor_job(place, digest):
    rank = Waiting(place, "killed")
    place.gateway.kill()
    await_end(place, "killed")
    [error] = rank.errors()
    assert error[2] in GONE
    place.gateway.start()
    assert finishes(place, "killed") == [digest]


def test_a_link_that_drops_ends_the_session_on_both_sides(place, digest):
    rank = Waiting(place, "link")
    place.nodes[1].run("ip", "link", "set", LINK, "down")
    try:
        found = rank.errors()
        await_end(place, "link")
    finally:
        place.nodes[1].run("ip", "link", "set", LINK, "up")
    assert [line[2] for line in found] in [[code] for code in GONE]
    assert finishes(place, "link") == [digest]


def test_a_link_that_drops_within_a_transfer_ends_the_session(place):
    output = place.start(remote_ranks.main, "transfer", 1, 10**6, "wide=1024", FOREBAY_DAEMON_WAIT="1")
    await_true(lambda: sum(line[0] == "loss" for line in output.said) > 2, lambda: output.text)
    place.nodes[0].run("ip", "link", "set", LINK, "down")
    try:
        found = errors(output.wait(DEADLINE_S))
        await_end(place, "transfer")
    finally:
        place.nodes[0].run("ip", "link", "set", LINK, "up")
    assert [line[2] for line in found] in [[code] for code in GONE]
    assert not errors(place.ranks("after", 1, 2))


def _ports(place):
    """On which the gateway listens: for TLS, and UCX's own."""
    inodes = set()
    pid = gateway_pid(place)
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return ports


def gateway_pid(place):
    """nsenter becomes the gateway."""
    return place.gateway.process.pid


NONSENSE = """
import socket, sys
for one in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", bytes(range(256)) * 64, bytes(4096), b"\\xff" * 4096,
            b"\\x16\\x03\\x01\\xff\\xff" + b"a" * 70000):
    try:
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as s:
            s.settimeout(0.2)
            s.sendall(one)
            s.recv(1)
    except OSError:
        pass
"""


def test_nonsense_on_its_ports_ends_no_session(place, digest):
    rank = Waiting(place, "nonsense")
    ports = _ports(place)
    assert PORT in ports and len(ports) > 1
    for port in ports:
        place.nodes[1].run(sys.executable, "-c", NONSENSE, ADDRESSES[0], port)
    assert rank.errors() == []
    assert place.gateway.process.poll() is None, place.gateway.text()

"""Nodes in network namespaces of this machine's, joined by a link, each with a daemon of its own."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

from daemon_process import Daemon

HERE = pathlib.Path(__file__).parent
PORT = 29577  # within the namespaces: nobody else's
NAMES = ("fbnode0", "fbnode1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NODE_RANKS = 2


def missing():
    """Why there can be no namespaces here; None where there can."""
    if shutil.which("ip") is None:
        return "no command ip (Debian's iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    made = subprocess.run(["ip", "netns", "add", "fbprobe"], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "fbprobe"], check=True)
    return None


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def namespaces():
    """Two, joined by a link: `eth0` in each."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # of a killed test
    try:
        for name in NAMES:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", NAMES[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Node:
    """One of them: its daemon, and what runs there."""

    def __init__(self, number, folder, *settings):
        self.number, self.folder, self.settings = number, pathlib.Path(folder), settings
        self.folder.mkdir(exist_ok=True)
        self._inside = ["ip", "netns", "exec", NAMES[number]]
        self.start_daemon()

    def start_daemon(self):
        self.daemon = Daemon(self.folder, *self.settings, launcher=self._inside)

    def kill_daemon(self):
        self.daemon.process.kill()
        self.daemon.process.wait()

    def ranks(self, folder, *scenarios):
        """Its ranks of the scenarios of nodes_ranks.py."""
        first = self.number * NODE_RANKS
        place = [ADDRESSES[0], PORT, first, NODE_RANKS, NODE_RANKS * len(NAMES), folder]
        return self._start(sys.executable, HERE / "nodes_ranks.py", *place, *scenarios)

    def _start(self, *command):
        environment = {
            **os.environ,
            "FOREBAY_SOCKET": self.daemon.socket,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        words = [*self._inside, *map(str, command)]
        pipe = subprocess.PIPE
        return Output(subprocess.Popen(words, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True))


class Output:
    """What a launcher's processes print, as it comes: JSON lines apart from others."""

    def __init__(self, process):
        self.process, self.said, self.text = process, [], ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        for line in self.process.stdout:
            self.text += line
            with contextlib.suppress(ValueError):
                self.said.append(json.loads(line))

    def wait(self, timeout):
        """What it has said, where it ends well."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.text}") from None
        self._thread.join(timeout)
        assert self.process.returncode == 0, self.text
        return self.said

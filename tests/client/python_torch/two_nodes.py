# SPDX-License-Identifier: Apache-2.0
"""The daemon and the ranks of one node of network_nodes.py, and what they say."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

from daemon_process import Daemon
from network_nodes import ADDRESSES, LINK
from test_daemon_restart import Service

HERE = pathlib.Path(__file__).parent
PORT = 29577  # unused by other processes of the nodes' network
NODE_RANKS = 2


class NodeOfJob:
    """What a job has on one node."""

    def __init__(self, node, number, folder):
        self.number, self.folder, self._node = number, pathlib.Path(folder), node
        self.folder.mkdir(exist_ok=True)
        self.start_daemon()

    def start_daemon(self):
        self.daemon = Daemon(self.folder, launcher=self._node.command())

    @property
    def socket(self):
        return self.daemon.socket

    def ranks(self, folder, *scenarios):
        """Its ranks of the scenarios of nodes_ranks.py."""
        place = [ADDRESSES[0], PORT, self.number * NODE_RANKS, NODE_RANKS, NODE_RANKS * len(ADDRESSES), folder]
        command = self._node.command(sys.executable, HERE / "nodes_ranks.py", *place, *scenarios, folder=HERE)
        environment = {
            **os.environ,
            "FOREBAY_SOCKET": self.socket,
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
        }
        pipe = subprocess.PIPE
        return Output(subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True))


class KeptNode(NodeOfJob):
    """One with swap, whose daemon is a service: its memory is retained if it is killed."""

    def start_daemon(self):
        self.service = Service(self.folder, "dram.limit=1GiB")
        self.manager = self.service.manager
        self.manager.start()

    @property
    def socket(self):
        return f"{self.folder}/s"

    def lose_memory(self):
        """As in a power cut, or where nothing keeps it."""
        self.manager.process.kill()
        self.manager.process.wait()
        self.manager.forget()
        self.manager.start()


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

    def until(self, begin, count, timeout):
        """Waits until it has said so many lines that begin so."""
        end = time.monotonic() + timeout
        while sum(line[: len(begin)] == begin for line in self.said) < count:
            assert time.monotonic() < end and self._thread.is_alive(), self.text
            time.sleep(0.02)  # house: allow sleep: a poll with a deadline

    def wait(self, timeout):
        """Returns the output if the process succeeds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.text}") from None
        self._thread.join(timeout)
        assert self.process.returncode == 0, self.text
        return self.said


def values_of_tests(request):
    """The parameters of the collected tests of this file: scenarios that no test looks at need not run."""
    tests = [item for item in request.session.items if item.path == request.path]
    return {value for item in tests if hasattr(item, "callspec") for value in item.callspec.params.values()}

"""Goal    Ranks whose daemon is on another node train as ranks beside it do: the same losses, the same bits, and at any
        time the parameters that the daemon has; what is wrong with who they are is an error of their own.
Method  Two network namespaces of this machine, joined by a link: daemon and gateway in one, ranks in the other. Ranks
        beside a daemon of their own are the reference.
"""

import json
import os
import pathlib
import subprocess
import sys

import network_nodes
import pytest
import remote_gateway
import two_nodes
from daemon_process import Daemon, missing
from network_nodes import ADDRESSES
from remote_gateway import PORT, PRINCIPAL

HERE = pathlib.Path(__file__).parent
DEADLINE_S = 120
ADDRESS = f"ucx://{ADDRESSES[0]}:{PORT}"
SHARED = ("plain", "passes", "frozen", "load")
SHARDED = ("plain", "clip", "bad=1")


class Place:
    """A daemon and its gateway in one namespace; ranks run in the other."""

    def __init__(self, nodes, folder, *settings, **gateway):
        self.nodes, self.folder = nodes, pathlib.Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.daemon = Daemon(self.folder, *settings, launcher=nodes[0].command())
        self.authority = remote_gateway.Authority(self.folder / "ca")
        self.own = self.authority.issue("gateway", [ADDRESSES[0], "worker-0"])
        certificate = self.authority.issue(PRINCIPAL)
        self.client = remote_gateway.make_client_folder(self.folder / "client", self.authority, *certificate)
        self.gateway = remote_gateway.Gateway(self.folder, self.settings(**gateway), nodes[0].command())

    def settings(self, bind=f"{ADDRESSES[0]}:{PORT}", **more):
        return remote_gateway.settings_text(bind, self.daemon.socket, *self.own, self.authority, **more)

    def environment(self, address=ADDRESS, client=None, **more):
        return {
            **os.environ,
            "FOREBAY_SOCKET": address,
            "FOREBAY_REMOTE": str(client or self.client),
            "FOREBAY_GATEWAY": str(remote_gateway.GATEWAY),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def start(self, *words, **environment):
        """The ranks of a script of this folder, on the other node."""
        command = self.nodes[1].command(sys.executable, HERE / words[0], *words[1:], folder=HERE)
        pipe = subprocess.PIPE
        return two_nodes.Output(
            subprocess.Popen(
                command,
                env=self.environment(**environment),
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def ranks(self, *words, **environment):
        return self.start("remote_ranks.py", *words, **environment).wait(DEADLINE_S)

    def stop(self):
        self.gateway.stop()
        self.daemon.stop()


def locally(folder, *words):
    """What the same ranks say beside a daemon of their own."""
    daemon = Daemon(folder)
    environment = {**os.environ, "FOREBAY_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / words[0]), *map(str, words[1:])]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=HERE
    )
    daemon.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def errors(lines):
    return [line for line in lines if line[0] == "error"]


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Two nodes; without root, namespaces or UCX there are none."""
    if reason := missing() or network_nodes.missing() or remote_gateway.missing():
        pytest.skip(reason)
    with network_nodes.two_nodes(tmp_path_factory.mktemp("network")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def place(network, tmp_path_factory):
    made = Place(network, tmp_path_factory.mktemp("place"))
    yield made
    made.stop()


@pytest.mark.parametrize("how", SHARED)
def test_remote_ranks_train_and_see_what_local_ones_do(place, tmp_path, how):
    words = ("remote_ranks.py", how, 2, 4, how)
    remote = place.start(*words).wait(DEADLINE_S)
    local = locally(tmp_path, *words)
    assert len(local) > 0 and sorted(map(str, remote)) == sorted(map(str, local))


def test_sharded_remote_ranks_train_as_local_ones_do(place, tmp_path):
    words = ("nodes_ranks.py", "127.0.0.1", two_nodes.PORT, 0, 2, 2, tmp_path, *SHARDED)
    remote = place.start(*words).wait(DEADLINE_S)
    local = locally(tmp_path, *words)
    assert sum(line[0] == "digest" for line in local) == 2 * len(SHARDED)
    assert sorted(map(str, remote)) == sorted(map(str, local))

# SPDX-License-Identifier: Apache-2.0
"""Goal    Ranks whose daemon is on another node train as ranks beside it do: the same losses, the same bits, and at any
        time the parameters that the daemon has; what is wrong with who they are is an error of their own.
Method  Two network namespaces of this machine, joined by a link: daemon and gateway in one, ranks in the other. Ranks
        beside a daemon of their own are the reference.
"""

import codecs
import os
import pathlib

import forebay
import network_nodes
import nodes_ranks
import pytest
import remote_gateway
import remote_ranks
import torch
import two_nodes
import weights_on_swap
from daemon_process import Daemon
from network_nodes import ADDRESSES, LINK
from remote_gateway import PORT, PRINCIPAL, UID

DEADLINE_S = 120
SHARED = ("plain", "passes", "frozen", "load")
SHARDED = ("plain", "clip+hsdp")
SWAPPED = ("2", "2", "exact", "bfloat16")  # arguments of weights_on_swap.py
SWAP = ("swap.capacity=256MiB", "swap.staging=6MiB", "update.block_elems=131072")


class Place:
    """A daemon and its gateway in one namespace; ranks run in the other."""

    def __init__(self, nodes, folder, *settings, port=PORT, **gateway):
        self.nodes, self.folder, self.port = nodes, pathlib.Path(folder), port
        self.folder.mkdir(exist_ok=True)
        self.daemon = self.start_daemon(*settings)
        self.authority = remote_gateway.Authority(self.folder / "ca")
        self.own = self.authority.issue("gateway", [ADDRESSES[0], "worker-0"])
        certificate = self.authority.issue(PRINCIPAL)
        self.client = remote_gateway.make_client_folder(self.folder / "client", self.authority, *certificate)
        self.gateway = remote_gateway.Gateway(self.folder, self.settings(**gateway), nodes[0].command())

    def start_daemon(self, *settings):
        return Daemon(self.folder, *settings, launcher=self.nodes[0].command())

    def settings(self, bind=None, **more):
        bind = bind or f"{ADDRESSES[0]}:{self.port}"
        return remote_gateway.settings_text(bind, self.daemon.socket, *self.own, self.authority, **more)

    def environment(self, address=None, client=None, **more):
        return {
            **os.environ,
            "FOREBAY_SOCKET": address or f"ucx://{ADDRESSES[0]}:{self.port}",
            "FOREBAY_REMOTE": str(client or self.client),
            "FOREBAY_GATEWAY": str(remote_gateway.GATEWAY),
            **more,
        }

    def start(self, function, *words, **environment):
        """A function of a module here in a process on the other node: remote_ranks.main, as a rule."""
        return two_nodes.Output(
            network_nodes.Forked(self.nodes[1], self.environment(**environment), function, *words)
        )

    def ranks(self, *words, **environment):
        return self.start(remote_ranks.main, *words, **environment).wait(DEADLINE_S)

    def stop(self):
        self.gateway.stop()
        self.daemon.stop()


def locally(node, folder, function, *words, settings=()):
    """What the same ranks say beside a daemon of their own."""
    daemon = Daemon(folder, *settings)
    environment = {**os.environ, "FOREBAY_SOCKET": daemon.socket, "GLOO_SOCKET_IFNAME": "lo"}
    said = two_nodes.Output(network_nodes.Forked(node, environment, function, *words)).wait(DEADLINE_S)
    daemon.stop()
    return said


def errors(lines):
    return [line for line in lines if line[0] == "error"]


@pytest.fixture(scope="module")
def place(gateway_network, tmp_path_factory):
    made = Place(gateway_network, tmp_path_factory.mktemp("place"))
    yield made
    made.stop()


@pytest.mark.parametrize("how", SHARED)
def test_remote_ranks_train_and_see_what_local_ones_do(place, tmp_path, how):
    words = (f"shared.{how}", 2, 4, how)
    remote = place.ranks(*words, LOCAL_WORLD_SIZE="1")  # as if each rank had its own node
    local = locally(place.nodes[1], tmp_path, remote_ranks.main, *words)
    assert len(local) > 0 and sorted(map(str, remote)) == sorted(map(str, local))


@pytest.mark.parametrize("how", ["passes", "load"])
def test_a_job_may_have_ranks_beside_its_daemon_and_elsewhere(gateway_network, folder, tmp_path, how):
    words = (f"mixed.{how}", 2, 4, how)
    os.chmod(folder, 0o711)
    place = Place(gateway_network, folder, port=PORT + 5)
    os.chmod(place.daemon.socket, 0o666)
    mixed = place.ranks(*words, f"beside={place.daemon.socket}")
    place.stop()
    local = locally(place.nodes[1], tmp_path, remote_ranks.main, *words)
    assert len(local) > 0 and sorted(map(str, mixed)) == sorted(map(str, local))


def test_sharded_remote_ranks_train_as_local_ones_do(place, tmp_path):
    words = ("127.0.0.1", two_nodes.PORT, 0, 2, 2, tmp_path, *SHARDED)
    remote = place.start(nodes_ranks.main, *words, GLOO_SOCKET_IFNAME="lo").wait(DEADLINE_S)
    local = locally(place.nodes[1], tmp_path, nodes_ranks.main, *words)
    # Ranks may report "attached" twice: if gloo ends a rank badly, all ranks start again.
    said = [{str(line) for line in lines if line[0] != "attached"} for lines in (remote, local)]
    assert said[0] == said[1] and sum("digest" in line for line in said[0]) == 2 * len(SHARDED)


def of_the_user(*words):
    codecs.lookup("ascii")  # loads the codec while the interpreter's files are readable
    os.setuid(UID)
    nodes_ranks.main(*words)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_sharded_job_of_one_daemon_may_have_ranks_on_two_nodes(
    gateway_network, folder, tmp_path, monkeypatch, is_remote
):
    """One of them is the daemon's, whose rank reaches it on its socket or through the gateway too. Each has a launcher."""
    monkeypatch.delenv("FOREBAY_RUN")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's value if it got no id
    scenarios = ("launched+die=1@call", "clip+hsdp")
    os.chmod(folder, 0o711)
    place = Place(gateway_network, folder, port=PORT + 4)
    os.chmod(place.daemon.socket, 0o666)
    (tmp_path / "mixed").mkdir()
    words = [(ADDRESSES[0], two_nodes.PORT, first, 1, 2, tmp_path / "mixed", *scenarios) for first in (0, 1)]
    environment = place.environment(None if is_remote else place.daemon.socket, GLOO_SOCKET_IFNAME=LINK)
    function = nodes_ranks.main if is_remote else of_the_user
    beside = two_nodes.Output(network_nodes.Forked(place.nodes[0], environment, function, *words[0]))
    elsewhere = place.start(nodes_ranks.main, *words[1], GLOO_SOCKET_IFNAME=LINK)
    mixed = [line for output in (beside, elsewhere) for line in output.wait(DEADLINE_S)]
    place.stop()
    words = ("127.0.0.1", two_nodes.PORT, 0, 2, 2, tmp_path, *scenarios)
    local = locally(place.nodes[1], tmp_path, nodes_ranks.main, *words)
    said = [{str(line) for line in lines if line[0] in ("loss", "digest")} for lines in (mixed, local)]
    assert said[0] == said[1] and sum("digest" in line for line in said[0]) == 2 * len(scenarios), beside.text + elsewhere.text


def test_a_node_of_a_job_over_two_may_have_its_daemon_elsewhere(gateway_network, tmp_path):
    """Ranks 2 and 3 reach one on the node of ranks 0 and 1, which have another."""
    digests = []
    # A new place has no jobs of other tests.
    place = Place(gateway_network, tmp_path / "remote", port=PORT + 6)
    for number, is_remote in enumerate((True, False)):
        port, folder = two_nodes.PORT + 50 * number, tmp_path / str(number)
        for name in ("first", "second"):
            (folder / name).mkdir(parents=True)
        daemons = [Daemon(folder / "first", launcher=place.nodes[0].command())]
        variables = {"GLOO_SOCKET_IFNAME": LINK}
        if not is_remote:
            daemons.append(Daemon(folder / "second", launcher=place.nodes[1].command()))
            variables["FOREBAY_SOCKET"] = daemons[1].socket
        words = [(ADDRESSES[0], port, first, 2, 4, folder, *SHARDED) for first in (0, 2)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": LINK, "FOREBAY_SOCKET": daemons[0].socket}
        beside = two_nodes.Output(network_nodes.Forked(place.nodes[0], environment, nodes_ranks.main, *words[0]))
        elsewhere = place.start(nodes_ranks.main, *words[1], **variables)
        lines = [line for output in (beside, elsewhere) for line in output.wait(DEADLINE_S)]
        assert not errors(lines)
        digests.append(sorted(line[1:] for line in lines if line[0] == "digest"))
        for daemon in daemons:
            daemon.stop()
    place.stop()
    assert digests[0] == digests[1] and len(digests[0]) == 4 * len(SHARDED)


def swapped(*words):
    weights_on_swap.main(list(words))


def test_weights_on_swap_come_into_a_window_that_is_a_cache(gateway_network, folder):
    folder = pathlib.Path(folder)
    (folder / "local").mkdir()
    made = Place(
        gateway_network, folder / "remote", f"swap.paths={folder}/remote", *SWAP, "dram.limit=18MiB", port=PORT + 7
    )
    [remote] = made.start(swapped, *SWAPPED, GLOO_SOCKET_IFNAME="lo").wait(DEADLINE_S)
    made.stop()
    settings = (f"swap.paths={folder}/local", *SWAP)
    [local] = locally(gateway_network[1], folder / "local", swapped, *SWAPPED, settings=settings)
    assert remote[:2] == local[:2], "digest and losses"
    assert remote[2]["weights_on_swap_bytes"] > 0 and local[2]["weights_on_swap_bytes"] == 0
    assert remote[2]["uid"] == UID


def see(*_):
    """Which jobs the status shows."""
    remote_ranks.say("jobs", sorted((job["uid"], job["name"]) for job in forebay.status()["jobs"]))


def test_a_principal_sees_and_names_its_own_jobs_alone(place):
    model = torch.nn.Linear(2, 2)
    opt = forebay.attach(model, job="of.root", socket=place.daemon.socket)
    assert not errors(place.ranks("own", 1, 1))
    [[_, jobs]] = place.start(see).wait(DEADLINE_S)
    assert [UID, "own"] in jobs and {uid for uid, _ in jobs} == {UID}
    assert not errors(place.ranks("of.root", 1, 1)), "a name of its own"
    opt.detach()

"""Goal    A job over two nodes goes on, to the bit, where a daemon is killed in the middle of a step and its memory was
        kept; where it was lost, all nodes go back to the newest step that is durable on both. A restart of a daemon
        and a link that is down for a while cost time alone.
Method  Two network namespaces, a daemon in each under a stand-in for the service manager; ranks that wait before a message
        of step 3 while the daemon is killed, restarted or cut off. SHA-256 of weights and states beside a run that saw
        nothing of the kind.
"""

import contextlib
import pathlib
import subprocess
import threading

import network_nodes
import pytest
from daemon_process import missing
from two_nodes import NODE_RANKS, KeptNode

RANKS = 2 * NODE_RANKS
DEADLINE_S = 120
ENDED = 3  # of a launcher's tries


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Two nodes; without root or namespaces there are none."""
    if reason := missing() or network_nodes.missing():
        pytest.skip(reason)
    with network_nodes.two_nodes(tmp_path_factory.mktemp("network")) as nodes:
        yield nodes


class Job:
    """One scenario on both nodes, which is held where its name says so."""

    def __init__(self, nodes, folder, scenario):
        self.folder, self.scenario = folder, scenario
        self.ranks = [node.ranks(folder, scenario) for node in nodes]
        words = dict(word.partition("=")[::2] for word in scenario.split("+"))
        held = [int(rank) for rank in words.get("hold", "@").partition("@")[0].split(",") if rank]
        for number, ranks in enumerate(self.ranks):
            ranks.until("held", sum(rank // NODE_RANKS == number for rank in held), DEADLINE_S)

    def go_on(self):
        pathlib.Path(self.folder, f"go.{self.scenario}").touch()

    def end(self):
        """The steps at which its ranks have attached; it has the bits of any other."""
        lines = [line for ranks in self.ranks for line in ranks.wait(DEADLINE_S)]
        digests = [line[3:] for line in lines if line[0] == "digest"]
        assert len(digests) == RANKS and digests == [digests[0]] * RANKS
        self.digest = digests[0]
        return sorted(line[3] for line in lines if line[0] == "attached")


@pytest.fixture(scope="module")
def nodes(network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("daemons")
    with contextlib.ExitStack() as stack:
        made = []
        for number, node in enumerate(network):
            made.append(KeptNode(node, number, folder / str(number)))
            stack.enter_context(made[-1].manager)
        yield made


@pytest.fixture(scope="module")
def expected(nodes, tmp_path_factory):
    """What such jobs end with."""
    job = Job(nodes, tmp_path_factory.mktemp("plain"), "plain")
    assert job.end() == [0] * RANKS
    return job.digest


# Before it has said what it has prepared, and when all are known: of one node, or of both.
@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("point", ["gather", "decide"])
def test_a_daemon_that_is_killed_keeps_what_it_has_prepared(nodes, expected, tmp_path, killed, point):
    held = ",".join(str(node * NODE_RANKS + rank) for node in killed for rank in range(NODE_RANKS))
    job = Job(nodes, tmp_path, f"kill+hold={held}@{point}")
    for node in killed:
        nodes[node].manager.kill()
    job.go_on()
    assert job.end() == [0] * RANKS, "no rank has begun again"
    assert job.digest == expected
    for node in killed:
        assert "with what it had prepared behind" in nodes[node].service.log()


# Ranks of the node whose memory is lost end; the other node has committed step 3 by then, and has made it durable where
# every step is.
@pytest.mark.parametrize("level", ["step", "epoch=2"])
@pytest.mark.parametrize("lost", [0, 1])
def test_all_nodes_go_back_where_one_has_lost_its_memory(nodes, expected, tmp_path, lost, level):
    held = ",".join(str(lost * NODE_RANKS + rank) for rank in range(NODE_RANKS))
    job = Job(nodes, tmp_path, f"lose+level={level}+hold={held}@decide")
    job.ranks[1 - lost].until("loss", NODE_RANKS * 3, DEADLINE_S)
    nodes[lost].lose_memory()
    job.go_on()
    assert job.end() == [0] * RANKS + [2] * RANKS
    assert job.digest == expected
    assert "goes back from step 3 to step 2" in nodes[1 - lost].service.log()
    assert sum("went back from step 3 to step 2" in ranks.text for ranks in job.ranks) == 1


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_restart_of_a_daemon_costs_time_alone(nodes, expected, tmp_path, restarted):
    job = Job(nodes, tmp_path, f"restart+hold={NODE_RANKS * restarted}@call")
    restart = threading.Thread(target=nodes[restarted].manager.restart)
    restart.start()
    job.go_on()
    assert job.end() == [0] * RANKS
    restart.join(DEADLINE_S)
    assert job.digest == expected


def set_link(network, state):
    network[1].run("ip", "link", "set", network_nodes.LINK, state)


def test_a_link_that_comes_back_costs_time_alone(network, nodes, expected, tmp_path):
    job = Job(nodes, tmp_path, "outage+hold=2,3@gather")
    set_link(network, "down")
    job.go_on()
    with pytest.raises(subprocess.TimeoutExpired):
        job.ranks[0].process.wait(1)
    set_link(network, "up")
    assert job.end() == [0] * RANKS
    assert job.digest == expected


def test_ranks_that_gave_up_on_the_link_begin_again(network, nodes, expected, tmp_path):
    job = Job(nodes, tmp_path, "cut+patience=4+hold=2,3@gather")
    set_link(network, "down")
    job.go_on()
    for ranks in job.ranks:
        ranks.until("begin", 2, DEADLINE_S)
    set_link(network, "up")
    assert job.end() == [0] * RANKS + [2] * RANKS
    assert job.digest == expected

# SPDX-License-Identifier: Apache-2.0
"""Goal    A job over two nodes continues, to the bit, if a daemon is killed in the middle of a step and its memory was
        retained; if it was lost, all nodes return to the newest step that is durable on both. A restart of a daemon
        and a link that is down for a while cost time alone.
Method  Two network namespaces, a daemon in each under a stand-in for the service manager; ranks that wait before a message
        of step 3 while the daemon is killed, restarted or cut off. SHA-256 of weights and states beside a run that saw
        nothing of the kind.
"""

import contextlib
import pathlib
import threading

import network_nodes
import pytest
from two_nodes import NODE_RANKS, KeptNode, values_of_tests

RANKS = 2 * NODE_RANKS
DEADLINE_S = 120


def ranks_of(*nodes):
    return ",".join(str(node * NODE_RANKS + rank) for node in nodes for rank in range(NODE_RANKS))


# Daemons are killed before their node has sent what it has prepared, or after all nodes' messages are known.
KILLS = {
    f"kill+hold={ranks_of(*nodes)}@{point}": nodes for point in ("gather", "decide") for nodes in ((0,), (1,), (0, 1))
}
REPLICAS = f"hsdp+kill+hold={ranks_of(1)}@gather"
# The ranks of the node whose memory is lost end. The other node has committed step 3 by then. It has also made step 3 durable
# if every step is durable.
LOSSES = {
    f"lose+level={level}+hold={ranks_of(node)}@decide": node
    for node, level in ((0, "step"), (1, "step"), (1, "epoch=2"))
}
NOTHING_LEFT = f"lose+hold={ranks_of(1)}@decide"
RESTARTS = {f"restart+hold={ranks_of(node)}@call": node for node in (0, 1)}
OUTAGE = f"outage+hold={ranks_of(1)}@gather"
CUT = f"cut+patience=4+hold={ranks_of(1)}@gather"


class Run:
    """All of them one after the other, and what ranks and daemons have said."""

    def __init__(self, network, folder, asked):
        self.network, self.folder = network, pathlib.Path(folder)
        self.kills = [scenario for scenario in KILLS if scenario in asked]
        scenarios = {
            "plain": None,
            "hsdp": None,
            **dict.fromkeys([*self.kills, REPLICAS], self._kill),
            **dict.fromkeys((*LOSSES, NOTHING_LEFT), self._lose),
            **dict.fromkeys(RESTARTS, self._restart),
            OUTAGE: self._cut_for_a_second,
            CUT: self._cut_until_all_begin_again,
        }
        with contextlib.ExitStack() as stack:
            self.nodes = []
            for number, node in enumerate(network):
                self.nodes.append(KeptNode(node, number, self.folder / str(number)))
                stack.enter_context(self.nodes[-1].manager)
            self.ranks = [node.ranks(folder, *scenarios) for node in self.nodes]
            for scenario, act in scenarios.items():
                if act is not None:
                    self._await_held(scenario)
                    act(scenario)
            self.lines = [line for ranks in self.ranks for line in ranks.wait(DEADLINE_S)]
            self.logs = [node.service.log() for node in self.nodes]
        self.texts = [ranks.text for ranks in self.ranks]
        self.expected = self.digests("plain")[0]

    def attached(self, scenario):
        """At which steps."""
        return sorted(line[3] for line in self.lines if line[:2] == ["attached", scenario])

    def digests(self, scenario):
        return [line[3:] for line in self.lines if line[:2] == ["digest", scenario]]

    def assert_as_expected(self, scenario):
        assert self.digests(scenario) == [self.expected] * RANKS

    def _await_held(self, scenario):
        held = scenario.partition("hold=")[2].partition("@")[0].split(",")
        for number, ranks in enumerate(self.ranks):
            count = sum(int(rank) // NODE_RANKS == number for rank in held)
            ranks.until(["held", scenario], count, DEADLINE_S)

    def _go_on(self, scenario):
        (self.folder / f"go.{scenario}").touch()

    def _kill(self, scenario):
        for node in KILLS.get(scenario, (1,)):
            self.nodes[node].manager.kill()
        self._go_on(scenario)

    def _lose(self, scenario):
        lost = LOSSES.get(scenario, 1)
        self.ranks[1 - lost].until(["loss", scenario], NODE_RANKS * 3, DEADLINE_S)
        self.nodes[lost].lose_memory()
        self._go_on(scenario)

    def _restart(self, scenario):
        restart = threading.Thread(target=self.nodes[RESTARTS[scenario]].manager.restart)
        restart.start()
        self._go_on(scenario)
        restart.join(DEADLINE_S)

    def _set_link(self, state):
        self.network[1].run("ip", "link", "set", network_nodes.LINK, state)

    def _cut_for_a_second(self, scenario):
        self._set_link("down")
        self._go_on(scenario)
        threading.Event().wait(1)
        assert len(self.digests_so_far(scenario)) == 0
        self._set_link("up")

    def digests_so_far(self, scenario):
        return [line for ranks in self.ranks for line in ranks.said if line[:2] == ["digest", scenario]]

    def _cut_until_all_begin_again(self, scenario):
        self._set_link("down")
        self._go_on(scenario)
        for ranks in self.ranks:
            ranks.until(["begin", scenario], 2, DEADLINE_S)
        self._set_link("up")


@pytest.fixture(scope="module")
def run(network, tmp_path_factory, request):
    return Run(network, tmp_path_factory.mktemp("daemons"), values_of_tests(request))


@pytest.mark.parametrize("scenario", KILLS)
def test_a_daemon_that_is_killed_keeps_what_it_has_prepared(run, scenario):
    assert run.attached(scenario) == [0] * RANKS, "no rank has begun again"
    run.assert_as_expected(scenario)


def test_so_does_one_of_replicas(run):
    assert run.attached(REPLICAS) == [0] * RANKS
    assert run.digests(REPLICAS) == run.digests("hsdp") != []


def test_the_log_says_what_was_kept(run):
    text = "with what it had prepared behind step 2, after the daemon before was killed"
    for number, log in enumerate(run.logs):
        assert log.count(text) == sum(number in nodes for nodes in (*map(KILLS.get, run.kills), (1,)))


@pytest.mark.parametrize("scenario", LOSSES)
def test_all_nodes_go_back_where_one_has_lost_its_memory(run, scenario):
    assert run.attached(scenario) == [0] * RANKS + [2] * RANKS
    run.assert_as_expected(scenario)


def test_going_back_is_said_by_daemon_and_trainer(run):
    for number, log in enumerate(run.logs):
        assert log.count("goes back from step 3 to step 2, which is durable") == sum(lost != number for lost in LOSSES.values())
    warnings = [text.count("went back from step 3 to step 2") for text in run.texts]
    assert warnings == [len(LOSSES), 0], "of rank 0 alone"


def test_where_no_step_is_common_all_ranks_raise_those_of_each_node(run):
    errors = [line[2:] for line in run.lines if line[:2] == ["error", NOTHING_LEFT] and line[3] == "E_STEP"]
    assert sorted(rank for rank, _, _ in errors) == list(range(RANKS))
    assert all("ranks 0, 1 at step 3" in text for _, _, text in errors)
    assert all("ranks 2, 3 have no parameters of it" in text for _, _, text in errors)


@pytest.mark.parametrize("scenario", RESTARTS)
def test_a_restart_of_a_daemon_costs_time_alone(run, scenario):
    assert run.attached(scenario) == [0] * RANKS
    run.assert_as_expected(scenario)


def test_a_link_that_comes_back_costs_time_alone(run):
    assert run.attached(OUTAGE) == [0] * RANKS
    run.assert_as_expected(OUTAGE)


def test_ranks_that_gave_up_on_the_link_begin_again(run):
    assert run.attached(CUT) == [0] * RANKS + [2] * RANKS
    run.assert_as_expected(CUT)

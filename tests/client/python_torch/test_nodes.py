# SPDX-License-Identifier: Apache-2.0
"""Goal    A sharded job over two nodes trains as on one with the same ranks: the same losses and, to the bit, the same
        parameters and states, with clipping and replicas too, through gradients that are not finite and the death of
        ranks before each message of a step.
Method  Two network namespaces of this machine, joined by a link, a daemon in each, gloo between them. The same ranks on
        one daemon are the reference.
"""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import two_nodes
from daemon_process import Daemon
from two_nodes import NODE_RANKS, NodeOfJob, values_of_tests

HERE = pathlib.Path(__file__).parent
RANKS = 2 * NODE_RANKS
DEADLINE_S = 240
HOW = ("plain+states", "clip", "clip+hsdp")
# The error that all ranks raise in each scenario: its id and a pattern of its text.
REFUSALS = {
    "bad=3": ("E_NONFINITE", ""),
    "rate=2": ("E_STEP", "ranks (2 and 3|3 and 2) called step 2 with different scalars: lr of parameter group 0"),
    "rate=2-3": ("E_STEP", "ranks 0 and 2 called step 2 with different scalars"),
}
DIFFERENCE = "hsdp+differ=3"
# Ranks that die before each message, on either node. Also both ranks of a node, so that the node has prepared a step that the
# other node commits or drops.
DEATHS = [f"die={rank}@{point}" for point in ("call", "gather", "decide") for rank in (0, 3)]
DEATHS += ["die=2,3@gather", "die=0,1@decide", "die=2,3@decide"]


class Run:
    """What the ranks of both nodes have said, and what those of one node with as many ranks have."""

    def __init__(self, network, folder, asked):
        self.folder = pathlib.Path(folder)
        nodes = on_each(network, self.folder)
        scenarios = [*HOW, *REFUSALS, *(deaths for deaths in DEATHS if deaths in asked), DIFFERENCE]
        ranks = [node.ranks(folder, *scenarios) for node in nodes]
        self.lines = [*itertools.chain(*(one.wait(DEADLINE_S) for one in ranks))]
        for node in nodes:
            node.daemon.stop()
        (self.folder / "one").mkdir()
        self.reference = self._on_one_node(self.folder / "one")

    def _on_one_node(self, folder):
        daemon = Daemon(folder)
        place = ["127.0.0.1", two_nodes.PORT, 0, RANKS, RANKS, folder]
        with subprocess.Popen(
            [sys.executable, HERE / "nodes_ranks.py", *map(str, place), *HOW],
            env={**os.environ, "FOREBAY_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            said = two_nodes.Output(process).wait(DEADLINE_S)
        daemon.stop()
        return said


def named(lines, kind, scenario):
    """What the lines of a kind say, by rank and step."""
    return {(line[2], line[3]): line[4:] for line in lines if line[:2] == [kind, scenario]}


def on_each(network, folder):
    return [NodeOfJob(node, number, f"{folder}/{number}") for number, node in enumerate(network)]


@pytest.fixture(scope="module")
def run(network, tmp_path_factory, request):
    return Run(network, tmp_path_factory.mktemp("nodes"), values_of_tests(request))


@pytest.mark.parametrize("how", HOW)
def test_two_nodes_train_as_one_does(run, how):
    losses, digests = named(run.lines, "loss", how), named(run.lines, "digest", how)
    assert len(losses) == 4 * RANKS and losses == named(run.reference, "loss", how)
    assert len(digests) == RANKS and digests == named(run.reference, "digest", how)


def test_states_of_both_nodes_are_saved_in_one_file(run):
    from safetensors.torch import load_file

    two, one = (load_file(folder / f"{HOW[0]}.safetensors") for folder in (run.folder, run.folder / "one"))
    assert two.keys() == one.keys() and len(two) > 0
    assert all(torch.equal(two[name], one[name]) for name in one)


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_refused_on_one_node_is_raised_by_all_and_repeated(run, why):
    code, text = REFUSALS[why]
    errors = named(run.lines, "error", why)
    assert sorted(errors) == [(rank, code) for rank in range(RANKS)]
    assert all(re.search(text, line[0]) for line in errors.values())
    assert named(run.lines, "digest", why) == named(run.reference, "digest", HOW[0])


def test_replicas_that_differ_are_named_by_all_ranks(run):
    errors = named(run.lines, "error", DIFFERENCE)
    assert sorted(errors) == [(rank, "E_CORRUPT") for rank in range(RANKS)]
    text = r"the replicas of \S+ on the nodes of ranks 0 and 2 have other weights after step 3: step 4 is not applied"
    assert all(re.search(text, line[0]) for line in errors.values())


@pytest.mark.parametrize("deaths", DEATHS)
def test_all_go_on_from_one_step_where_ranks_die(run, deaths):
    attached = [line[3] for line in run.lines if line[:2] == ["attached", deaths]]
    ranks, point = deaths.removeprefix("die=").split("@")
    # A rank that dies after it knows what all have prepared leaves the step to the other ranks, which commit it.
    step = 3 if point == "decide" else 2
    assert sorted(attached) == [0] * RANKS + [step] * RANKS, ranks
    assert named(run.lines, "digest", deaths) == named(run.reference, "digest", HOW[0])

# SPDX-License-Identifier: Apache-2.0
"""Runs huggingface_ranks.py: one process that has imported transformers, accelerate and peft, for all tests."""

import importlib.util
import json
import pathlib
import time
from dataclasses import dataclass

import pytest
import torch
from preloaded import preloaded
from test_processes import environment

DEADLINE_S = 120
PACKAGES = ("accelerate", "peft", "transformers")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

needs_huggingface = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def start(arguments, variables):
    done = preloaded("huggingface_ranks", environment).run(arguments, variables, DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done


@dataclass
class Run:
    """What the ranks of a run have written."""

    folder: pathlib.Path
    ranks: list  # what the scenario has found, by rank
    weights: dict  # rank 0's weights, by name


class Runs:
    """Runs scenarios in folders of their own, each in a job of its own."""

    def __init__(self, folder, daemon):
        self.folder, self.daemon, self.done = pathlib.Path(folder), daemon, {}

    def once(self, scenario, ranks=1, **options):
        """What several tests compare with is run once."""
        key = json.dumps([scenario, ranks, options], sort_keys=True)
        if key not in self.done:
            self.done[key] = self(scenario, ranks, **options)
        return self.done[key]

    def __call__(self, scenario, ranks=1, **options):
        name = f"huggingface.{time.monotonic_ns()}"
        folder = self.folder / name
        folder.mkdir()
        variables = {"FOREBAY_SOCKET": self.daemon.socket, "FOREBAY_JOB": name, "FOREBAY_RUN": name}
        variables |= options.pop("variables", {})
        start([scenario, ranks, folder, json.dumps(options)], variables)
        found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        weights = folder / "weights.pt"
        return Run(folder, found, torch.load(weights) if weights.exists() else {})


@pytest.fixture(scope="module")
def runs(tmp_path_factory, daemon):
    return Runs(tmp_path_factory.mktemp("huggingface"), daemon)


def assert_same_training(ours, plain, steps, lr=1e-2):
    """Element by element, with the bound of models.assert_close(): both compute the same formula in float32 with
    another order of roundings. A bias of attention's keys changes no output: its gradient is rounding alone, and is left
    out."""
    assert ours.weights.keys() == plain.weights.keys()
    for name, theirs in plain.weights.items():
        bound = 64 * steps * (2**-24 * 8 * lr * 10 + 2**-23 * theirs.abs().max().item())
        differences = (ours.weights[name] - theirs).abs()
        if name.endswith("c_attn.bias"):
            differences = torch.cat(differences.chunk(3)[::2])  # queries and values, without keys
        if name.endswith("key.bias"):
            continue
        difference = differences.max().item()
        assert difference <= bound, f"{name}: {difference} > {bound}"


def assert_same_numbers(ours, theirs, bound=1e-5):
    """Lists of numbers, or of dicts of them; `bound` of the value at most lies between two."""
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs):
        if isinstance(own, dict):
            assert own.keys() == other.keys()
            own, other = ([one[key] for key in sorted(one)] for one in (own, other))
        assert own == pytest.approx(other, rel=bound), (own, other)

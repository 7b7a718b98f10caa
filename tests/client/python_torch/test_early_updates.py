# SPDX-License-Identifier: Apache-2.0
# Goal    Updates before the decision of a step change no bit of the result, whatever happens before the decision: clipped
#         gradients, other learning rates than announced, NaN, unannounced passes, repeated attempts, parameters without a
#         gradient, reads and writes of states.
# Method  Ranks over gloo on the real daemon run one schedule of such events: with early updates, draining or not, and with all
#         states in DRAM. SHA-256 of losses, norms, weights and states is compared. FOREBAY_STEPS=10000 is the long run.

import functools
import json
import os
import re
import tempfile

import pytest
from daemon_process import Daemon, missing
from preloaded import preloaded
from test_processes import environment

# The test needs only a daemon's binary. tools/test builds the binary first; pytest alone may find none.
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

SCRIPT = preloaded("early_updates", environment)
STEPS = int(os.environ.get("FOREBAY_STEPS", "12"))
SEED = int(os.environ.get("FOREBAY_SEED", "7"))
# Bytes of dram.limit above the smallest limit; for "weights" also above the gradients that are on swap in that limit.
MORE = {"gradients on swap": 0, "weights on swap": 0, "weights in DRAM": 5 << 20, "all in DRAM": 1 << 30}


@functools.cache
def smallest_limit(*arguments):
    _, error = run(8 << 20, *arguments)
    [needed] = set(re.findall(r"raise --dram / dram.limit to at least (\d+) bytes", error))
    return int(needed)


@functools.cache
def run(dram_bytes, ranks, seed, *options):
    """(What the script prints, or None; what it writes to stderr.) `options` are sorted, so that no run is repeated."""
    with tempfile.TemporaryDirectory(prefix="fb", dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        daemon = Daemon(
            folder,
            f"dram.limit={dram_bytes}",
            f"swap.paths={folder}",
            "swap.capacity=128MiB",
            "swap.staging=2MiB",
            "update.block_elems=16384",
        )
        arguments = [str(ranks), str(STEPS), str(seed), *options]
        try:
            done = SCRIPT.run(arguments, {"FOREBAY_SOCKET": daemon.socket}, 60 + STEPS)
        finally:
            daemon.stop()
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return (json.loads(lines[-1]) if done.returncode == 0 else None), done.stderr


def train(place, options):
    """Both ways in the limit of the larger one."""
    both = sorted({*options, "early"})
    limit = MORE[place]
    if place != "all in DRAM":
        limit += smallest_limit(2, SEED, *both)
    if place.startswith("weights"):
        spilled, error = run(smallest_limit(2, SEED, *both), 2, SEED, *both)
        assert spilled is not None, error
        limit += spilled[2]["gradients_on_swap_bytes"]
    made, error = run(limit, 2, SEED, *sorted(options))
    assert made is not None, error
    return made


@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("gradients on swap", []),
        ("gradients on swap", ["accumulate"]),
        ("gradients on swap", ["unannounced"]),
        ("weights on swap", []),
        ("weights on swap", ["groups"]),
        ("weights in DRAM", []),
    ],
)
def test_no_bit_depends_on_when_blocks_are_updated(place, more):
    losses, states, job, _ = train("all in DRAM", more)
    assert job["resident_blocks"] == job["blocks"] and job["weights_on_swap_bytes"] == 0
    for options in [["early", "drain"]] if more else [["early", "drain"], ["early"]]:
        made = train(place, options + more)
        assert made[:2] == [losses, states], options
        assert (made[2]["weights_on_swap_bytes"] > 0) == (place != "weights in DRAM")
        assert (made[2]["gradients_on_swap_bytes"] > 0) == (place == "gradients on swap")
        assert (made[2]["gradient_written_bytes"] > 0) == (place == "gradients on swap")
        assert made[2]["resident_blocks"] < made[2]["blocks"]
        assert made[2]["early_updates"] > 0
        assert made[3] == 0 or "unannounced" not in more
        assert made[2]["dropped_updates"] > 0 or more

# SPDX-License-Identifier: Apache-2.0
# Goal    A sharded model whose weights and gradients do not fit in DRAM trains with the same bits as in enough DRAM, in the
#         smallest limit that the daemon names, and survives its trainers.
# Method  Ranks over gloo on the real daemon train in a small limit and in a large one. Losses, gradients' norms and SHA-256 of
#         weights and states are compared. The limit is taken from the error's hint; the daemon's memory is what the kernel
#         counts. With FOREBAY_FULL_SIZE awkward models have their full size: 12 GiB of DRAM, 16 GiB of disk.

import functools
import json
import os
import re
import tempfile

import pytest
from daemon_process import Daemon, missing
from forebay._report import size
from preloaded import preloaded
from test_processes import environment

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

SCRIPT = preloaded("weights_on_swap", environment)
FULL_SIZE = "FOREBAY_FULL_SIZE" in os.environ
DEADLINE_S = 3600 if FULL_SIZE else 200
STEPS = 4


@functools.cache
def run(dram_bytes, ranks, format, dtype, *more):
    """Of a daemon with such a limit: (what the script prints, or None; what it writes to stderr)."""
    place = os.environ.get("TMPDIR", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="fb", dir=place) as folder:
        daemon = Daemon(
            folder,
            f"dram.limit={dram_bytes}",
            f"swap.paths={folder}",
            f"swap.capacity={'16GiB' if FULL_SIZE else '256MiB'}",
            "swap.staging=6MiB",
            "update.block_elems=131072",
        )
        arguments = [str(ranks), str(STEPS), format, dtype, *more]
        try:
            done = SCRIPT.run(arguments, {"FOREBAY_SOCKET": daemon.socket}, DEADLINE_S)
        finally:
            daemon.stop()
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return (json.loads(lines[-1]) if done.returncode == 0 else None), done.stderr


def smallest_limit(*arguments):
    result, error = run(12 << 20, *arguments)
    assert result is None
    found = re.search(r"E_DRAM_LIMIT.*two partitions of each rank; the others are on swap", error)
    assert found, error
    [needed] = set(re.findall(r"raise --dram / dram.limit to at least (\d+) bytes", error))
    return int(needed)


@pytest.mark.parametrize(
    ("ranks", "format", "dtype"),
    [(1, "fp32", "float32"), (2, "exact", "bfloat16"), (3, "int8", "bfloat16")],
)
def test_in_the_smallest_limit_it_has_the_bits_that_it_has_in_dram(ranks, format, dtype):
    large, error = run(1 << 30, ranks, format, dtype)
    assert large is not None, error
    digest, losses, job, _, path = large
    assert job["weights_on_swap_bytes"] == job["state_written_bytes"] == job["gradient_written_bytes"] == 0
    assert path["written_in_all"] == path["written_bytes"], "the labels of its file"

    needed = smallest_limit(ranks, format, dtype)
    small, error = run(needed, ranks, format, dtype)
    assert small is not None, error
    waits = None
    if ranks == 2 or FULL_SIZE:  # the short form tests one case only
        waits, error = run(needed, ranks, format, dtype, "wait")
        assert waits is not None, error
    width = 4 if dtype == "float32" else 2
    for small_digest, small_losses, job, used_bytes, path in filter(None, (small, waits)):
        assert job["weights_on_swap_bytes"] == job["params"] * width, "all of them"
        assert job["resident_blocks"] == 0
        assert job["gradients_on_swap_bytes"] > job["params"] * width / 2
        assert 0 < job["gradient_read_bytes"] <= job["gradient_written_bytes"]
        assert used_bytes <= needed
        assert (small_digest, small_losses) == (digest, losses)
        assert path["written_in_all"] == path["written_bytes"] > job["state_written_bytes"], "in the first start"
    if waits is not None:
        job = waits[2]
        # Every step writes the same number of bytes.
        assert job["state_written_bytes"] == STEPS * job["last_step_written_bytes"] > 0
        # Fetches in the order of the previous step are read ahead. Each rank has its own order.
        assert job["weight_fetches_ahead"] > job["weight_fetches"] / 2
    # With early updates the job also writes the blocks that a clipped step has updated again. A forward that begins before the
    # update has ended is not ahead of the update, so the number of fetches ahead depends on the moment.
    job = small[2]
    # All blocks but the last one of each rank are full, so that a block has at most this share of the bytes of a step.
    anew = job["dropped_updates"] / (job["blocks"] - ranks)
    assert STEPS <= job["state_written_bytes"] / job["last_step_written_bytes"] <= STEPS + anew
    assert job["weight_fetches_ahead"] > job["weight_fetches"] / 3


def test_attach_prints_what_is_on_swap_and_the_whole_sum():
    needed = smallest_limit(2, "exact", "bfloat16")
    small, said = run(needed, 2, "exact", "bfloat16")
    assert small is not None, said
    job = small[2]
    on_swap, gradients = size(job["weights_on_swap_bytes"]), size(job["gradients_on_swap_bytes"])
    assert f"a cache of {size(job['weights_cache_bytes'])} for {on_swap} on swap" in said
    assert f"{job['blocks']} of {job['blocks']} blocks of them on swap, sums of gradients ({gradients} on swap)" in said
    assert (
        f"forebay: swap: {size(job['swap_bytes'])} taken; a step of one pass reads {size(job['step_read_bytes'])} and "
        f"writes {size(job['step_written_bytes'])}, and at most {gradients} more each way for gradients" in said
    )
    # The smallest limit leaves no byte unused: the sum of the node is the limit.
    sums = re.search(r": the job ([\d.]+) MiB; the daemon itself ([\d.]+) MiB; of ([\d.]+) MiB", said)
    assert sums, said
    whole, own, limit = map(float, sums.groups())
    assert abs(whole + own - limit) <= 0.2, sums[0]
    assert f"of {size(needed)}" in sums[0]
    _, said = run(1 << 30, 2, "exact", "bfloat16")
    assert "the daemon itself" in said and "forebay: swap:" not in said and "on swap" not in said


# Weights are in DRAM with states on swap, or both are on swap. The run that waits for the update has no early updates.
@pytest.mark.parametrize("has_room_for_weights", [True, False])
def test_waiting_for_the_update_changes_no_bit(has_room_for_weights):
    limit = (44 if FULL_SIZE else 36) << 20 if has_room_for_weights else smallest_limit(2, "exact", "bfloat16")
    drains, error = run(limit, 2, "exact", "bfloat16")
    assert drains is not None, error
    waits, error = run(limit, 2, "exact", "bfloat16", "wait")
    assert waits is not None, error
    assert waits[:2] == drains[:2]
    for _, _, job, _, _ in (drains, waits):
        assert (job["weights_on_swap_bytes"] == 0) == has_room_for_weights
        assert job["resident_blocks"] < job["blocks"] / 2
        assert job["published_step"] == job["committed_step"] == STEPS, "states were read"
    # A step that waits is answered at its publication. The step's time includes the decision in both runs.
    for _, _, job, _, _ in (drains, waits):
        assert 0 < job["last_decision_seconds"] < job["last_step_seconds"]


def test_on_a_device_that_copies_late_it_has_them_too():
    large, error = run(1 << 30, 2, "exact", "bfloat16")
    assert large is not None, error
    late, error = run(smallest_limit(2, "exact", "bfloat16"), 2, "exact", "bfloat16", "late")
    assert late is not None, error
    assert late[:2] == large[:2]


def test_a_rank_that_is_killed_loses_nothing():
    large, error = run(1 << 30, 2, "exact", "bfloat16")
    assert large is not None, error
    needed = smallest_limit(2, "exact", "bfloat16")
    killed, error = run(needed, 2, "exact", "bfloat16", "2")
    assert killed is not None, error
    assert killed[0] == large[0], "the same bits"
    assert killed[2]["committed_step"] == STEPS


# Weights without states; more than a hundred partitions, most of them unused in a step, in an order that no step
# repeats; a parameter that is most of the model.
@pytest.mark.parametrize("model", ["adapters", "experts", "embedding"])
def test_an_awkward_model_has_the_bits_that_it_has_in_dram(model):
    large, error = run((12 if FULL_SIZE else 1) << 30, 2, "exact", "bfloat16", model)
    assert large is not None, error
    assert large[2]["weights_on_swap_bytes"] == 0
    needed = smallest_limit(2, "exact", "bfloat16", model)
    small, error = run(needed, 2, "exact", "bfloat16", model)
    assert small is not None, error
    digest, losses, job, used_bytes, _ = small
    assert [digest, losses] == large[:2]
    # Two partitions a rank of the full-size embedding model are more than all weights.
    if model != "embedding" or not FULL_SIZE:
        assert job["weights_on_swap_bytes"] == job["params"] * 2, "all of them"
    assert job["resident_blocks"] == 0
    assert used_bytes <= needed

"""What rank 0 prints on stderr of a sharded job: what its parameters and its memory take."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ._plan import DTYPE_NAMES

if TYPE_CHECKING:
    from ._shard_plan import ShardedPlan

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def say(line: str) -> None:
    print(f"forebay: {line}", file=sys.stderr, flush=True)


def size(count: int) -> str:
    """As the command line writes bytes.

    >>> size(1536), size(10)
    ('1.5 KiB', '10 B')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} B"


def costs(
    plan: ShardedPlan,
    job: str,
    status: Mapping[str, Any],
    sums_are_float32: bool,
    activation_bytes: int,
) -> Iterator[str]:
    """What each parameter takes, and what the job takes of this node's memory and swap."""
    (found,) = (one for one in status["jobs"] if one["name"] == job)
    kinds: dict[str, int] = {}
    for arena in status["memory"]["arenas"]:
        if arena["job"] == job:
            kinds[arena["kind"]] = kinds.get(arena["kind"], 0) + arena["allocated_bytes"]
    ranks = f"{found['world_size']} rank{'s' * (found['world_size'] > 1)}"
    width = plan.grad_dtype.itemsize
    may_widen = not sums_are_float32 and width < 4 and not found["gradients_on_swap_bytes"]
    sums = f"{width} (4 more from a second backward pass on)" if may_widen else str(width)
    if sums_are_float32:
        sums = "4"
    few = found["trainable_params"] < found["params"]
    trained = f" ({found['trainable_params']:,} of them trained)" if few else ""
    yield (
        f"job {job} is sharded over {ranks}: {found['params']:,} parameters{trained}, "
        f"{found['optimizer']}, {found['format']}. Bytes a parameter: weights {plan.dtype.itemsize} "
        f"({DTYPE_NAMES[plan.dtype]}), gradients {width} to the daemon "
        f"({DTYPE_NAMES[plan.grad_dtype]}) and {sums} in their sums"
    )
    swapped = found["blocks"] - found["resident_blocks"]
    activations = f", activations {size(activation_bytes)}" if activation_bytes else ""
    weights_swapped = found["weights_on_swap_bytes"]
    weights = f" (a cache for {size(weights_swapped)} on swap)" if weights_swapped else ""
    new = found["new_weights_bytes"]
    new_weights = f", new weights until their step is decided {size(new)}" if new else ""
    gradients = found["gradients_on_swap_bytes"]
    spilled = f" ({size(gradients)} on swap)" if gradients else ""
    where = f", {swapped} of {found['blocks']} blocks of them on swap" if swapped else ""
    yield (
        f"this node's DRAM: weights {size(kinds.get('weights', 0))}{weights}, "
        f"states {size(kinds.get('state', 0))}{where}, sums of gradients{spilled} and extra_state "
        f"{size(kinds.get('step', 0) - found['new_weights_bytes'])}{new_weights}, gradients on their way "
        f"{size(kinds.get('grad', 0) - activation_bytes)}{activations}; of "
        f"{size(status['memory']['limit_bytes'])}"
    )
    if not found["swap_bytes"]:
        return
    read, written = found["step_read_bytes"], found["step_written_bytes"]
    more = f", and at most {size(gradients)} more each way for gradients" if gradients else ""
    yield (
        f"swap: {size(found['swap_bytes'])} taken; a step of one pass reads {size(read)} and writes "
        f"{size(written)}{more}{_disk_time(status, read + gradients, written + gradients)}"
    )


def _disk_time(status: Mapping[str, Any], read: int, written: int) -> str:
    """Of a node whose swap paths were measured."""
    rates = [(path["read_rate"], path["write_rate"]) for path in status["swap"]]
    reads, writes = (sum(one) for one in zip(*rates, strict=True))
    if not all(one and other for one, other in rates):
        return ""
    return f": {read / reads + written / writes:.2f} s of the disk, as measured"

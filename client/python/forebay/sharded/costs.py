# SPDX-License-Identifier: Apache-2.0
"""Lines that rank 0 prints on stderr about a sharded job: what its parameters and its memory take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._plan import DTYPE_NAMES
from .._report import size
from . import fsdp
from .copy_ahead import HELD

if TYPE_CHECKING:
    from torch import nn

    from .fsdp import Unit
    from .shard_plan import ShardedPlan

ROOT_SHARE_MOST = 1 / 20  # share of the trained parameters that a root group may hold without a line about it


def costs(
    plan: ShardedPlan,
    job: str,
    status: Mapping[str, Any],
    takes: Mapping[str, Any],
    sums_are_float32: bool,
) -> Iterator[str]:
    """What each parameter takes, and what the job takes of this node's memory and swap: `takes`, the sum
    that `forebay plan --job` prints."""
    (found,) = (one for one in status["jobs"] if one["name"] == job)
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
    yield _dram(takes, found["world_size"])
    if not takes["swap"]:
        return
    read, written, spilled = (takes[one] for one in ("step_read", "step_written", "gradients_on_swap"))
    more = f", and at most {size(spilled)} more each way for gradients" if spilled else ""
    every, durable = takes["durable_every"], takes["durable_written"]
    which = "each step" if every == 1 else f"every {every} steps one"
    kept = f"; {which} becomes durable, and writes {size(durable)} more" if durable else ""
    yield (
        f"swap: {size(takes['swap'])} taken; a step of one pass reads {size(read)} and writes "
        f"{size(written)}{more}{_disk_time(status, read + spilled, written + spilled)}{kept}"
    )


def _dram(takes: Mapping[str, Any], world_size: int) -> str:
    """Every term of the sum: those of the job, then the daemon's own, then other jobs'."""
    on_swap = takes["weights_on_swap"]
    cache = f", a cache of {size(takes['weights_cache'])} for {size(on_swap)} on swap" if on_swap else ""
    swapped = takes["blocks"] - takes["resident_blocks"]
    where = f", {swapped} of {takes['blocks']} blocks of them on swap" if swapped else ""
    spilled = takes["gradients_on_swap"]
    spill = f" ({size(spilled)} on swap)" if spilled else ""
    new = takes["new_weights"]
    new_weights = f", new weights until their step is decided {size(new)}" if new else ""
    activations = takes["activations"] * world_size
    kept = f", activations {size(activations)}" if activations else ""
    terms = ("weights", "weights_cache", "states", "sums", "new_weights", "extra_state", "sessions", "tables")
    whole = sum(takes[term] for term in terms)
    others = f", other jobs {size(takes['others'])}" if takes["others"] else ""
    return (
        f"this node's DRAM: weights {size(takes['weights'])}{cache}, states {size(takes['states'])}"
        f"{where}, sums of gradients{spill} {size(takes['sums'])}{new_weights}, extra_state "
        f"{size(takes['extra_state'])}, gradients on their way {size(takes['sessions'] - activations)}"
        f"{kept}, tables {size(takes['tables'])}: the job {size(whole)}; the daemon itself "
        f"{size(takes['node'])}{others}; of {size(takes['limit'])}"
    )


def gathered(
    units: Sequence[Unit], staying: Sequence[Unit], prefetch_bytes: int, copies_ahead: bool
) -> str:
    """What FSDP2 holds of whole groups in each process, at most. `staying`: those that stay gathered
    from forward to backward; `prefetch_bytes`: of Memory; `copies_ahead`: of the plan. Rank 0's, where ranks
    have other groups."""
    moving = sorted((one.gathered_bytes for one in units if one not in staying), reverse=True)
    in_use, ahead = (*moving, 0, 0)[:2]
    ahead, how = max(ahead, min(prefetch_bytes, sum(moving[1:]))), "gathered"
    if copies_ahead:
        copied = sorted((one.gathered_bytes for one in units), reverse=True)[:HELD]
        ahead, how = sum(copied), "copied"
    stay = sum(one.gathered_bytes for one in staying)
    kept = f", and {size(stay)} that stay from forward to backward" if stay else ""
    dtypes = " and ".join(sorted({DTYPE_NAMES[one.param_dtype] for unit in units for one in unit.shards}))
    return (
        f"beside that each trainer holds FSDP2's gathered groups itself, of rank 0 at most "
        f"{size(in_use + ahead + stay)} in {dtypes}: {size(in_use)} in use, {size(ahead)} {how} "
        f"ahead{kept}"
    )


def large_roots(model: nn.Module, units: Sequence[Unit]) -> Iterator[str]:
    """A line about each root group that holds much of what is trained, if it would hold less with the largest of its modules
    as groups of their own. Modules that share a parameter (tied embeddings) stay in one group."""
    elems = {id(one.parameter): one.parameter.numel() for unit in units for one in unit.shards if one.trained}
    total = sum(elems.values())
    modules = dict(fsdp.ungrouped_modules(model))
    held = {name: set(map(id, module.parameters())) & elems.keys() for name, module in modules.items()}
    users = Counter(one for params in held.values() for one in params)
    for unit in fsdp.root_units(model, units):
        of_root = {id(one.parameter) for one in unit.shards} & elems.keys()
        count = rest = sum(elems[one] for one in of_root)
        sizes = {
            name: sum(elems[one] for one in params)
            for name, params in held.items()
            if params <= of_root and all(users[one] == 1 for one in params)
        }
        apart = []
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if rest > ROOT_SHARE_MOST * total:
                apart.append(name)
                rest -= sizes[name]
        if not apart or rest > ROOT_SHARE_MOST * total:
            continue
        calls = " and ".join(f"fully_shard({name})" for name in apart)
        yield (
            f"group {unit.name} holds {count:,} of {total:,} trained parameters ({count / total:.0%}). It is gathered first "
            f"and reduced last: compute hides little of its update and of its copies. Write {calls} before the call for the "
            f"root, or sharding=forebay.Sharding(wrap=[..., {', '.join(apart)}])"
        )


def _disk_time(status: Mapping[str, Any], read: int, written: int) -> str:
    """Of a node whose swap paths were measured."""
    rates = [(path["read_rate"], path["write_rate"]) for path in status["swap"]]
    reads, writes = (sum(one) for one in zip(*rates, strict=True))
    if not all(one and other for one, other in rates):
        return ""
    return f": {read / reads + written / writes:.2f} s of the disk, as measured"

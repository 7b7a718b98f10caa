# SPDX-License-Identifier: Apache-2.0
"""Which elements of which parameters each rank holds: boxes, and partitions that consist of them. Plain
numbers; knows neither torch nor FSDP."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

# A box of a parameter: first element, elements of a run, stride between runs, number of runs (protocol/partition.h).
Box = tuple[int, int, int, int]
BOXES_OF_A_SHARD_MAX = 4096


@dataclass(frozen=True)
class Held:
    """What one rank holds of one parameter, of the whole of which these are name, shape and so on."""

    name: str
    shape: tuple[int, ...]
    group: str
    param_group: int
    trainable: bool
    boxes: tuple[Box, ...]  # ascending; none: an empty shard


@dataclass
class Source:
    """Where a rank's shard lies: elements of a partition."""

    partition: int
    first: int
    elems: int


@dataclass
class ShardPlan:
    """The layout of all ranks, computed from what each holds. Equal on every rank."""

    group_names: list[str] = field(default_factory=list)
    # Name, shape, group, parameter group, trainable: as _core.attach takes them.
    params: list[tuple[str, list[int], int, int, bool]] = field(default_factory=list)
    # Group, owner, replica, boxes with the parameter in front.
    partitions: list[tuple[int, int, int, list[tuple[int, int, int, int, int]]]] = field(
        default_factory=list
    )
    index: dict[str, int] = field(default_factory=dict)  # parameter name -> index
    # Partition and elements of each box of a parameter.
    places: dict[tuple[str, Box], Source] = field(default_factory=dict)
    # The ranks that hold each box, ascending; the first owns it.
    holders: dict[tuple[str, Box], list[int]] = field(default_factory=dict)
    first_rank: int = 0  # the rank of owner 0
    has_replicas: bool = False  # ranks of other nodes hold some of the partitions too

    def of_node(self, ranks: range) -> ShardPlan:
        """What these ranks hold, of which the first is owner 0; `holders` and `places` have that alone. What
        a rank of another node owns is replica 1 here, which counts in no norm.

        Errors  ValueError  a rank holds replicas and other parts of one group.
        """
        plan = ShardPlan(self.group_names, self.params, index=self.index, first_rank=ranks.start)
        replicas: set[tuple[str, Box]] = set()
        for (name, box), holders in self.holders.items():
            here = [rank for rank in holders if rank in ranks]
            if here:
                plan.has_replicas |= len(here) < len(holders)
                plan.holders[name, box] = here
                if here[0] != holders[0]:
                    replicas.add((name, box))
        plan._place(replicas)
        return plan

    def _place(self, replicas: Collection[tuple[str, Box]] = ()) -> None:
        """Partitions and places, from the holders."""
        owned: dict[tuple[int, int], list[tuple[int, Box]]] = {}
        for (name, box), ranks in self.holders.items():
            param = self.index[name]
            owner = ranks[0] - self.first_rank
            owned.setdefault((self.params[param][2], owner), []).append((param, box))
        for group, owner in sorted(owned):
            boxes = sorted(owned[group, owner])
            of_others = {(self.params[param][0], box) in replicas for param, box in boxes}
            if len(of_others) > 1:
                raise ValueError(
                    f"rank {owner + self.first_rank} holds parts of {self.group_names[group]} that a rank of "
                    "another node holds too, and parts that none does"
                )
            first = 0
            for param, box in boxes:
                elems = elems_of([box])
                self.places[self.params[param][0], box] = Source(len(self.partitions), first, elems)
                first += elems
            replica = int(of_others.pop())
            self.partitions.append((group, owner, replica, [(param, *box) for param, box in boxes]))


def boxes_of(shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> tuple[Box, ...]:
    """The boxes of a block of a row-major tensor, in the block's own row-major order.

    ranges  [begin, end) in each dimension.

    Errors  ValueError  more than BOXES_OF_A_SHARD_MAX boxes.

    >>> boxes_of([4, 6], [(2, 4), (0, 6)])
    ((12, 12, 12, 1),)
    >>> boxes_of([4, 6], [(2, 4), (3, 6)])
    ((15, 3, 6, 2),)
    """
    if any(begin >= end for begin, end in ranges):
        return ()
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = [dim for dim, (begin, end) in enumerate(ranges) if end - begin < shape[dim]]
    if not cut:
        count = math.prod(shape)
        return ((0, count, count, 1),)
    inner = cut[-1]  # a run: this dimension's range and all behind it
    run = (ranges[inner][1] - ranges[inner][0]) * strides[inner]
    # Dimensions before it that are whole, and one more, make equal strides.
    outer = inner
    while outer > 0 and (outer == inner or outer not in cut):
        outer -= 1
    runs = math.prod(end - begin for begin, end in ranges[outer:inner])
    stride = math.prod(shape[inner:]) if runs > 1 else run
    heads = [range(*ranges[dim]) for dim in range(outer)]
    if math.prod(map(len, heads)) > BOXES_OF_A_SHARD_MAX:
        raise ValueError(f"a shard of {list(shape)} has more than {BOXES_OF_A_SHARD_MAX} boxes")
    tail = sum(ranges[dim][0] * strides[dim] for dim in range(outer, inner + 1))
    return tuple(
        (sum(at * step for at, step in zip(head, strides)) + tail, run, stride, runs)
        for head in itertools.product(*heads)
    )


def elems_of(boxes: Iterable[Box]) -> int:
    """How many elements the boxes have."""
    return sum(run * runs for _, run, _, runs in boxes)


def make_shard_plan(
    held: Sequence[Sequence[Held]], meshes: Sequence[Sequence[int]] | None = None
) -> ShardPlan:
    """The layout from what each rank holds, in the order of its own model.

    A box that several ranks hold (replicas) belongs to the lowest of them; the others fetch that one.

    meshes  Of each rank, the ranks of the meshes of its parameters. None: they have all ranks.

    Errors  ValueError  two ranks disagree about a parameter: its shape, group, parameter group or
                        whether it is trained. Or they train it apart, each in a mesh of its own.
    """
    plan = ShardPlan()
    part_of = _parts(meshes or [range(len(held))] * len(held))
    first_of: dict[str, int] = {}  # rank that holds a part of the parameter
    of_name: dict[str, Held] = {}
    members: dict[str, dict[str, None]] = {}  # members of each group, in order
    for rank, of_rank in enumerate(held):
        for one in of_rank:
            known = of_name.setdefault(one.name, one)
            if _whole(known) != _whole(one):
                raise ValueError(
                    f"parameter {one.name} is {_whole(known)} on a lower rank and {_whole(one)} on "
                    f"rank {rank}"
                )
            first = first_of.setdefault(one.name, rank)
            if part_of[first] != part_of[rank]:
                raise ValueError(
                    f"parameter {one.name} is on rank {first} and on rank {rank}, and no mesh has both"
                )
            members.setdefault(one.group, {})[one.name] = None
            for box in one.boxes:
                plan.holders.setdefault((one.name, box), []).append(rank)
    plan.group_names = list(members)
    for group, names in enumerate(members.values()):
        # Frozen ones last: gradients and their sums end before them.
        for name in sorted(names, key=lambda name: not of_name[name].trainable):
            one = of_name[name]
            plan.index[name] = len(plan.params)
            plan.params.append((name, list(one.shape), group, one.param_group, one.trainable))
    plan._place()
    return plan


def _parts(meshes: Sequence[Sequence[int]]) -> list[int]:
    """For each rank the lowest that a chain of meshes joins it with."""
    lowest = list(range(len(meshes)))
    before: list[int] = []
    while before != lowest:
        before = list(lowest)
        for rank, mesh in enumerate(meshes):
            joined = {rank, *mesh}
            low = min(lowest[one] for one in joined)
            for one in joined:
                lowest[one] = low
    return lowest


def _whole(held: Held) -> tuple[tuple[int, ...], str, int, bool]:
    return held.shape, held.group, held.param_group, held.trainable

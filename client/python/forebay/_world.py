# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many this process is. The one rule of shared attachment:

1. rank= and world_size= of attach() count first. Beside a process group they must be the numbers of this process in the
   default group, in another group that it belongs to, or on its node (LOCAL_RANK, LOCAL_WORLD_SIZE): a job of some ranks.
2. Without them the default process group counts. RANK and WORLD_SIZE must agree with it where they are set. The
   variables of srun and mpirun are not compared: one of their tasks may spawn the ranks.
3. Without both the variables count: torchrun's, else those of srun or mpirun. A process that has none is alone.

Sharded attachment takes the default process group (sharded/shard_plan.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ._launcher import environment_of, whole_number
from ._run import PROCESS, run_token
from .errors import usage_error

STORE_KEY = "forebay.run"
INIT_HINT = "torch.distributed.init_process_group() before attach()"
SUBGROUP_HINT = "torch.distributed.new_group() makes a group of the ranks of one job: pass rank and size that it has"

_common_run: str | None = None  # the token that the ranks of a process group had in common


@dataclass(frozen=True)
class World:
    """The numbers that a process attaches with."""

    rank: int
    world_size: int
    is_given: bool  # as arguments

    def check_group(self) -> None:
        """Errors: E_RANK if a process group that is younger than the attachment has other numbers."""
        group = group_numbers()
        own = self.rank, self.world_size
        if group is None or own == group or (self.is_given and own in _numbers_of_process()):
            return
        raise usage_error(
            "E_RANK",
            f"this process has attached as {_text(own)}; the process group, which is younger, has it as {_text(group)}",
            f"{INIT_HINT}; now detach() and attach again. {SUBGROUP_HINT}",
        )


def find(rank: Any, world_size: Any) -> World:
    """The numbers of this process by the rule above. None: the caller has not said it.

    Errors  E_RANK  arguments, process group and variables contradict each other, or do not say which rank this is.
    """
    is_given = rank is not None or world_size is not None
    group = group_numbers()
    if group is None:
        launched = {**environment_of(), **os.environ}
        if rank is None:
            rank = launched.get("RANK") or _rank_without_variable(world_size, launched)
        if world_size is None:
            world_size = launched.get("WORLD_SIZE")
        return World(_number("rank", rank, 0, 0), _number("world_size", world_size, 1, 1), is_given)
    own = _number("rank", rank, 0, group[0]), _number("world_size", world_size, 1, group[1])
    _refuse_contradiction(own, group, is_given)
    return World(*own, is_given)


def group_numbers() -> tuple[int, int] | None:
    """Rank and size of the default process group; None: there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def run_of_process() -> str:
    """The run token of this process. If nobody names the run, the ranks of a process group have one in common by the
    group's store: the first rank's that asks."""
    global _common_run
    token = run_token()
    if not token.startswith(PROCESS) or group_numbers() is None:
        return token
    token = _common_run or token
    try:
        store = dist.distributed_c10d._get_default_store()
        if store is not None:  # MPI's has none
            token = _common_run = bytes(store.compare_set(STORE_KEY, "", token)).decode()
    except RuntimeError:  # the process that served the store has ended
        pass
    return token


def _number(name: str, value: Any, least: int, default: int) -> int:
    """The argument, or the launcher's variable, as a number that the wire has room for; None: the default."""
    number = default if value is None else whole_number(value)
    if number is None or not least <= number < 1 << 32:
        raise usage_error(
            "E_RANK",
            f"{name} ({name.upper()}) is {value!r}, not a whole number from {least} on",
            "torchrun sets RANK and WORLD_SIZE; alone leave them out",
        )
    return number


def _rank_without_variable(world_size: Any, launched: Mapping[str, str]) -> int:
    """The rank of a process without RANK and without a process group.

    world_size  The argument of attach().

    Errors  E_RANK  there are other ranks, and nothing says which one this is.
    """
    size = whole_number(launched.get("WORLD_SIZE") if world_size is None else world_size) or 1
    local = [whole_number(launched.get(name)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    local_rank, local_size = local
    if local_rank is not None and local_size == size and 0 <= local_rank < size:
        return local_rank  # all ranks are on this node
    is_alone = size == 1 and (world_size is not None or ((local_rank or 0) <= 0 and (local_size or 1) <= 1))
    if is_alone:
        return 0
    names = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in launched]
    said = [f"{name}={launched[name]}" for name in names]
    if world_size is not None:
        said.insert(0, f"world_size={world_size}")
    raise usage_error(
        "E_RANK",
        f"this process is one of several ({', '.join(said)}), and nothing says which: RANK is not set, and there is no "
        "process group",
        f"{INIT_HINT}, or set RANK and WORLD_SIZE, or pass rank= and world_size= to attach()",
    )


def _refuse_contradiction(own: tuple[int, int], group: tuple[int, int], is_given: bool) -> None:
    """Errors: E_RANK; names arguments, variables and process group."""
    variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if is_given:
        if own in _numbers_of_process():
            return
        hint = f"leave rank and world_size out, or pass those of a process group. {SUBGROUP_HINT}"
    else:
        of_group = dict(zip(("RANK", "WORLD_SIZE"), group))
        if all(whole_number(text) == of_group[name] for name, text in variables.items()):
            return
        hint = (
            "unset RANK and WORLD_SIZE, or set them as the process group has them, or pass rank= and world_size= of the "
            "process group to attach()"
        )
    environment = ", ".join(f"{name}={text}" for name, text in variables.items())
    raise usage_error(
        "E_RANK",
        f"arguments, environment and process group contradict each other: this process is {_text(group)} of the process "
        f"group; the arguments say {_text(own) if is_given else 'nothing'}, the environment {environment or 'nothing'}",
        hint,
    )


def _numbers_of_process() -> set[tuple[int | None, int | None]]:
    """Rank and size of this process in each process group that it belongs to, and on its node."""
    own = dist.get_rank()
    groups = dist.distributed_c10d._world.pg_group_ranks.values()
    launched = {**environment_of(), **os.environ}
    on_node = [whole_number(launched.get(name)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    return {(on_node[0], on_node[1]), *((ranks[own], len(ranks)) for ranks in groups if own in ranks)}


def _text(numbers: tuple[int, int]) -> str:
    return f"rank {numbers[0]} of {numbers[1]}"

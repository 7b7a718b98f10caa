"""A job over several nodes: which ranks are on this one, and what its ranks tell each other."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from . import _ranks
from .errors import UnavailableError, unsupported, usage_error

PAUSE_S = 0.05
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")  # another on each node


@dataclass(frozen=True)
class Nodes:
    """The ranks of the process group, and those of this node, which follow each other."""

    world_ranks: int
    own: range
    group: dist.ProcessGroup  # of all ranks, on CPUs: no work of a GPU waits for it

    def all_gather(self, own: bytes) -> list[bytes]:
        """What every rank sends, by rank. A collective."""
        return _ranks.gather(own, self.group)


def find(socket: str, daemon_wait: float | None) -> Nodes | None:
    """Which ranks are on this node; None: all. A collective over the default process group.

    daemon_wait  As attach() has it: a daemon that does not answer is waited for.

    Errors  E_NO_DAEMON and others where a rank cannot reach its daemon.
            E_OPTION where ranks of one node reach several daemons.
            E_UNSUPPORTED where the ranks of a node do not follow each other.
    """
    # Two network namespaces of one machine are two nodes, as containers are.
    node = BOOT_ID.read_text(encoding="ascii") + os.readlink("/proc/self/ns/net")
    for _ in range(2):  # a daemon that is started again while they ask is another one
        pid = _ranks.together(lambda: _daemon_pid(socket, daemon_wait))
        daemons = _ranks.gather((node, pid))
        if not _has_several_daemons(daemons):
            break
    _refuse_several_daemons(daemons)
    own = [rank for rank, (of, _) in enumerate(daemons) if of == node]
    if len(own) == len(daemons):
        return None
    _refuse_gaps([of for of, _ in daemons])
    group = dist.new_group(backend="gloo", timeout=_patience())
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return Nodes(len(daemons), range(own[0], own[-1] + 1), group)


def _daemon_pid(socket: str, daemon_wait: float | None) -> int:
    from . import _core

    end = time.monotonic() + _core.first_daemon_wait(daemon_wait)
    while True:
        try:
            return int(_core.status(socket)["info"]["pid"])
        except UnavailableError:
            if time.monotonic() >= end:
                raise
        time.sleep(PAUSE_S)


def _patience() -> timedelta | None:
    """How long ranks wait for each other, as the script has it for its own process group. None: torch's default."""
    world = dist.group.WORLD
    for device in getattr(world, "_device_types", ()):
        options = getattr(world._get_backend(device), "options", None)  # type: ignore[union-attr]
        if isinstance(patience := getattr(options, "_timeout", None), timedelta):
            return patience
    return None


def _has_several_daemons(daemons: Sequence[tuple[str, int]]) -> bool:
    return len(set(daemons)) > len({node for node, _ in daemons})


def _refuse_several_daemons(daemons: Sequence[tuple[str, int]]) -> None:
    if _has_several_daemons(daemons):
        own = daemons[dist.get_rank()]
        here = [daemon for daemon in daemons if daemon[0] == own[0]]
        same = here.count(own)
        raise usage_error(
            "E_OPTION",
            f"the ranks of a node reach several daemons; of the {len(here)} ranks of this node {same} "
            f"reach this one (process {own[1]})",
            "give all ranks of a node the same socket= or FOREBAY_SOCKET",
        )


def _refuse_gaps(nodes: Sequence[str]) -> None:
    seen: set[str] = set()
    for rank, node in enumerate(nodes):
        if rank > 0 and node != nodes[rank - 1] and node in seen:
            raise unsupported(
                f"ranks {rank - 1} and {rank} are on two nodes, and the node of rank {rank} has lower ranks "
                "too: the ranks of a node do not follow each other",
                "mpirun --map-by slot, srun --distribution=block; torchrun does so",
            )
        seen.add(node)

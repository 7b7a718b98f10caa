# SPDX-License-Identifier: Apache-2.0
"""A job over several nodes: which ranks are on this one, and what its ranks tell each other."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from .._run import LAUNCHERS
from ..errors import UnavailableError, unsupported, usage_error
from . import collectives

PAUSE_S = 0.05
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")  # another on each machine


@dataclass(frozen=True)
class Place:
    """The machine of a rank, and the daemon that the rank reaches from this machine."""

    machine: str
    daemon: str  # as it names itself
    pid: int  # the daemon's


@dataclass(frozen=True)
class Nodes:
    """The ranks of the process group, and those of this rank's daemon, which follow each other: those of its node,
    and those elsewhere that reach it through a gateway."""

    world_ranks: int
    own: range
    group: dist.ProcessGroup  # all ranks, on CPUs: no GPU work waits for the group

    def all_gather(self, own: bytes) -> list[bytes]:
        """What every rank sends, by rank. A collective."""
        return collectives.gather(own, self.group)


def run_of_all(run: str) -> str:
    """Rank 0's where the launchers of the nodes may each have a token of their own; else this rank's, which its daemon
    compares. A collective over the default process group."""
    runs = collectives.gather(run)
    return runs[0] if all(of_rank.startswith(LAUNCHERS) for of_rank in runs) else run


def find(socket: str, daemon_wait: float | None) -> Nodes | None:
    """Which ranks have this one's daemon; None: all. A collective over the default process group.

    daemon_wait  As forebay.Durability has it: a daemon that does not answer is waited for.

    Errors  E_NO_DAEMON and others where a rank cannot reach its daemon.
            E_OPTION where ranks of one machine reach several daemons.
            E_UNSUPPORTED where the ranks of a daemon do not follow each other.
    """
    places: list[Place] = []
    for _ in range(3):  # a daemon restarted between two answers changes its place
        before, places = places, collectives.gather(collectives.together(lambda: _place(socket, daemon_wait)))
        if places == before or len({place.daemon for place in places}) == 1:
            break
    _refuse_several_daemons(places)
    daemon = places[dist.get_rank()].daemon
    daemons = [place.daemon for place in places]
    own = [rank for rank, of in enumerate(daemons) if of == daemon]
    if len(own) == len(daemons):
        return None
    _refuse_gaps(daemons)
    group = dist.new_group(backend="gloo", timeout=_patience())
    assert isinstance(group, dist.ProcessGroup)  # the group contains this rank
    return Nodes(len(daemons), range(own[0], own[-1] + 1), group)


def _place(socket: str, daemon_wait: float | None) -> Place:
    from .. import _core

    end = time.monotonic() + _core.first_daemon_wait(daemon_wait)
    while True:
        try:
            info = _core.status(socket)["info"]
            break
        except UnavailableError:
            if time.monotonic() >= end:
                raise
        time.sleep(PAUSE_S)
    # Two network namespaces of one machine count as two, as containers do.
    machine = BOOT_ID.read_text(encoding="ascii") + os.readlink("/proc/self/ns/net")
    return Place(machine, str(info["identity"]), int(info["pid"]))


def _patience() -> timedelta | None:
    """How long ranks wait for each other, as the script has it for its own process group. None: torch's default."""
    world = dist.group.WORLD
    for device in getattr(world, "_device_types", ()):
        options = getattr(world._get_backend(device), "options", None)  # type: ignore[union-attr]
        if isinstance(patience := getattr(options, "_timeout", None), timedelta):
            return patience
    return None


def _refuse_several_daemons(places: Sequence[Place]) -> None:
    if len(set(places)) > len({place.machine for place in places}):
        own = places[dist.get_rank()]
        here = [place for place in places if place.machine == own.machine]
        raise usage_error(
            "E_OPTION",
            f"the ranks of a machine reach several daemons; of the {len(here)} ranks of this machine {here.count(own)} "
            f"reach this one (process {own.pid})",
            "give all ranks of a machine the same socket= or FOREBAY_SOCKET",
        )


def _refuse_gaps(daemons: Sequence[str]) -> None:
    seen: set[str] = set()
    for rank, daemon in enumerate(daemons):
        if rank > 0 and daemon != daemons[rank - 1] and daemon in seen:
            raise unsupported(
                f"ranks {rank - 1} and {rank} have two daemons, and that of rank {rank} has lower ranks too: "
                "the ranks of a node do not follow each other",
                "mpirun --map-by slot, srun --distribution=block; torchrun does so. Ranks that are to have one daemon "
                "need the same FOREBAY_SOCKET",
            )
        seen.add(daemon)

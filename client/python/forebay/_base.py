# SPDX-License-Identifier: Apache-2.0
"""Common parts of an attachment's modules: how far a step has come, its clock, ranges in torch.profiler's trace, reads of
states."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from .errors import ForebayError

if TYPE_CHECKING:
    from ._core import Attachment

TIMELINE_ENTRIES = 4096
UNBOUNDED = (-math.inf, math.inf)


class Clock:
    """Wall time that the training thread spends inside our hooks and calls."""

    def __init__(self) -> None:
        self.exposed_ns = 0
        self.reported_ns = 0  # part of exposed_ns that the last stats() reported
        # The newest committed step, from the end of the step before it; 0 before the first step.
        self.step_ns = self.step_exposed_ns = 0
        self._step_began = time.monotonic_ns(), 0
        # (kind, group, began_ns, ended_ns), CLOCK_MONOTONIC
        self.timeline: collections.deque[tuple[str, str, int, int]] = collections.deque(
            maxlen=TIMELINE_ENTRIES
        )

    def add(self, kind: str, group: str, began_ns: int) -> None:
        ended_ns = time.monotonic_ns()
        self.exposed_ns += ended_ns - began_ns
        self.timeline.append((kind, group, began_ns, ended_ns))

    def add_short(self, began_ns: int) -> None:
        self.exposed_ns += time.monotonic_ns() - began_ns

    def end_step(self) -> None:
        """A step was committed."""
        now = time.monotonic_ns(), self.exposed_ns
        self.step_ns, self.step_exposed_ns = now[0] - self._step_began[0], now[1] - self._step_began[1]
        self._step_began = now


class Backward(enum.Enum):
    """How far the backward of this attempt at a step has come."""

    NONE = enum.auto()
    RUNNING = enum.auto()
    UNFINISHED = enum.auto()  # an exception or Ctrl-C ended it
    FINISHED = enum.auto()


@dataclass(frozen=True)
class StepCall:
    """What step() asks for."""

    number: int
    extra_state: bytes | None  # the user's
    buffers: list[bytes]  # as they were when the step was called first


def profiled(what: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """A range in torch.profiler's trace, where one is running."""
    if torch._C._autograd._profiler_enabled():
        return record_function(f"{what} {name}".rstrip())
    return contextlib.nullcontext()


def raise_unless_step_raises(error: ForebayError) -> None:
    """torch's backward has no error for a gradient that is NaN: step() raises it, on every rank, and
    the step can then be repeated."""
    if error.code != "E_NONFINITE":
        raise error


def read_elements(
    attachment: Attachment, name: str, state: str, elements: range, timeout: float
) -> tuple[torch.Tensor, int]:
    """These elements of a parameter's state, and how many updates the parameter has had."""
    with profiled("forebay.read_state", name):
        view, updates = attachment.read_state(name, state, elements.start, len(elements), timeout)
    return torch.from_dlpack(view), updates  # type: ignore[attr-defined]

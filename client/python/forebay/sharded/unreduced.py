# SPDX-License-Identifier: Apache-2.0
"""Gradients that a backward has computed and FSDP2 has not reduced: they wait on each rank, and a step with a part of
them is refused."""

from __future__ import annotations

from collections.abc import Sequence

from .._report import say, size
from ..errors import UsageError, usage_error
from .fsdp import Unit


def report(units: Sequence[Unit]) -> bool:
    """Says how many bytes wait on each rank. False: none do."""
    waits = sum(unit.unreduced_bytes for unit in units if not unit.was_skipped)
    if waits > 0:
        say(
            f"a backward has left {size(waits)} of gradients on each rank, which FSDP2 has not "
            "reduced: with set_requires_gradient_sync(False) every rank keeps all of them whole"
        )
    return waits > 0


def find(units: Sequence[Unit]) -> list[Unit]:
    return [unit for unit in units if unit.has_gradients]


def error(left: Sequence[Unit], units: Sequence[Unit]) -> UsageError:
    """Of a step; `left` is what find() has found of `units`."""
    return usage_error(
        "E_GRAD_PARTIAL",
        f"step() while FSDP2 has not reduced gradients of {len(left)} of {len(units)} modules, "
        f"first of {left[0].name}: its parameters would be updated with a part of their gradient, or with none",
        f"{left[0].hint_to_reduce()}; then run forward and backward of the step again",
    )

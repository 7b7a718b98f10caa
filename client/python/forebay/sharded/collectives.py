# SPDX-License-Identifier: Apache-2.0
"""The ranks of a process group attach together: all raise the error of one, so that none waits
for a rank that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .. import errors
from ..errors import ForebayError, make_error, usage_error

T = TypeVar("T")


def gather(held: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank of the process group passes; None: of the default one."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, held, group=group)
    return everyone


def together(work: Callable[[], T]) -> T:
    """Calls work() on every rank. A collective over the default process group.

    Errors  what this rank's call raises; else what the lowest rank met whose call has.
    """
    met: Exception | None = None
    try:
        done = work()
    except Exception as error:
        met = error
    reports = gather(None if met is None else _report(met))
    if met is not None:
        raise met
    for rank, report in enumerate(reports):
        if report is not None:
            family, code, message, hint = report
            raise make_error(getattr(errors, family), code, f"rank {rank}: {message}", hint)
    return done


def refuse_different(name: str, value: Any) -> None:
    """Errors: E_OPTION where the ranks pass different values. A collective."""
    values = gather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise usage_error(
                "E_OPTION",
                f"{name} is {values[0]!r} on rank 0 and {other!r} on rank {rank}",
                "pass the same to attach() on every rank",
            )


def _report(error: Exception) -> tuple[str, str, str, str]:
    """Family, code, message and hint, for the other ranks."""
    if not isinstance(error, ForebayError):
        hint = f"see what rank {dist.get_rank()} prints"
        return "UsageError", "E_RANK", f"{type(error).__name__}: {error}", hint
    text = str(error).removeprefix(f"error[{error.code}]: ").split("\nhint: ")[0]
    families = [one.__name__ for one in type(error).mro() if hasattr(errors, one.__name__)]
    return families[0], error.code, text, error.hint

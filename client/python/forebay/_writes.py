# SPDX-License-Identifier: Apache-2.0
"""Writes into the parameters of a shared attachment, by whatever writes. A page of the daemon's memory that this process
writes becomes its own (client/window_registry.h), and this process computes with it. The next step() sends the elements
that differ from the daemon's before it applies the gradient, and the pages are the daemon's again."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ._base import read_elements
from ._plan import DTYPE_NAMES, Parameter
from .errors import ForebayError, UsageError, unsupported, usage_error
from .states.state_dict import PIECE_ELEMS, together, without_interrupts

if TYPE_CHECKING:
    from ._core import Attachment
    from ._plan import Plan
    from .states.state_dict import StateDicts

# After these errors a rank's parameters are the daemon's again. After other errors the next step() sends them.
REFUSED = {"E_NONFINITE", "E_OPTION", "E_RANK", "E_UNSUPPORTED"}


@dataclass(frozen=True)
class Piece:
    """A run of elements of one parameter. _written() yields runs whose first and last element differ from the
    daemon's."""

    parameter: Parameter
    first: int  # offset in the parameter, in elements of the job's type
    own: torch.Tensor  # the written values, in the job's type
    daemons: torch.Tensor

    def is_written(self) -> torch.Tensor:
        """Says of each element whether its bits differ."""
        return _bits(self.own) != _bits(self.daemons)


def send(opt: StateDicts) -> None:
    """Makes what was written the job's: on every rank, each with the same parameters; the values are rank 0's.

    Errors  E_NONFINITE    a value is NaN or infinite. The parameters are as they were before the writes.
            E_UNSUPPORTED  a frozen parameter whose bits the job keeps. As above.
            E_STEP         the outcome of a step is unknown. As above.
            E_OPTION       the ranks have written different parameters. As above.
            E_TIMEOUT      another rank has written none.
    """
    attachment, engine = opt._live(), opt._engine
    if not attachment.has_written_weights:
        return
    pieces = list(_written(opt._plan, attachment))
    if not pieces:
        return attachment.drop_written_weights()
    if engine.under_way is not None:
        raise _refusal(attachment, _names(pieces), f"while the outcome of step {engine.under_way.number} is unknown")
    # releases leases of a forward without a backward yet: a write waits for leases
    engine.release_all()
    call = f"step() after a write into {_names(pieces)}"
    same = "have written different parameters", "write the same on every rank, between the same steps"

    def check() -> str:
        for piece in pieces:
            _check(piece)
        return " ".join(dict.fromkeys(piece.parameter.name for piece in pieces))

    def write() -> None:
        for piece in pieces if attachment.rank == 0 else ():
            _send_piece(piece, attachment, engine.timeout)

    try:
        together(opt, check, call, str, same)
    except ForebayError as error:
        if error.code in REFUSED:
            attachment.drop_written_weights()
        raise
    with without_interrupts():
        together(opt, write, call)
        attachment.drop_written_weights()
    for piece in pieces if attachment.rank > 0 else ():  # rank 0's values may be others
        torch.autograd.graph.increment_version(piece.parameter.tensor)


def refuse_within_step(opt: StateDicts) -> None:
    """Errors: E_STEP where another thread has written while step() ran."""
    attachment = opt._live()
    if attachment.has_written_weights:
        pieces = list(_written(opt._plan, attachment))
        # The step has changed what is on the same pages.
        among = f"parameter {pieces[0].parameter.name} or one of those beside it" if pieces else "the weights"
        raise _refusal(attachment, among, "while step() ran, which was applied")


def _refusal(attachment: Attachment, names: str, when: str) -> UsageError:
    attachment.drop_written_weights()
    return usage_error(
        "E_STEP",
        f"a write into {names} {when}: the parameters are the daemon's again",
        "write when step() has returned, before the next forward",
    )


def _written(plan: Plan, attachment: Attachment) -> Iterator[Piece]:
    """Yields what differs from the daemon's bytes, in the order of the layout."""
    own = torch.from_dlpack(attachment.window())  # type: ignore[attr-defined]
    daemons = torch.from_dlpack(attachment.daemon_window())  # type: ignore[attr-defined]
    width, groups = plan.dtype.itemsize, attachment.groups
    begins = [groups[one.group][0] + one.offset * width for one in plan.parameters]
    for low, high in attachment.written_weights():
        first = max(0, bisect.bisect_right(begins, low) - 1)
        for parameter, begin in zip(plan.parameters[first:], begins[first:]):
            if begin >= high:
                break
            end = min(high, begin + parameter.elems * width)
            for at in range(max(low, begin), end, PIECE_ELEMS * width):
                part = slice(at, min(at + PIECE_ELEMS * width, end))
                piece = Piece(
                    parameter, (at - begin) // width, own[part].view(plan.dtype), daemons[part].view(plan.dtype)
                )
                places = piece.is_written().nonzero()
                if len(places) > 0:
                    least, most = int(places[0]), int(places[-1]) + 1
                    yield Piece(parameter, piece.first + least, piece.own[least:most], piece.daemons[least:most])


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)


def _names(pieces: list[Piece]) -> str:
    names = list(dict.fromkeys(piece.parameter.name for piece in pieces))
    if len(names) > 1:
        return f"{len(names)} parameters, the first of them {names[0]}"
    return f"parameter {names[0]}"


def _check(piece: Piece) -> None:
    """Errors: E_NONFINITE, E_UNSUPPORTED where the daemon cannot take the values."""
    name, dtype = piece.parameter.name, piece.parameter.tensor.dtype
    # Two finite numbers of 16 bits that the job stores as one of 32 bits form a finite number.
    if dtype != piece.own.dtype and (piece.own.dtype != torch.float32 or dtype not in DTYPE_NAMES):
        raise unsupported(
            f"a write into parameter {name}: it was frozen at attach, and is {dtype} among weights of "
            f"{piece.own.dtype}; the parameters are the daemon's again",
            "opt.detach() first",
        )
    bad = int((~torch.isfinite(piece.own.view(dtype))).sum())
    if bad > 0:
        raise usage_error(
            "E_NONFINITE",
            f"{bad} of the values written into parameter {name} are NaN or infinite as {DTYPE_NAMES[dtype]}",
            "check the values; the parameters are as they were before the writes",
        )


def _send_piece(piece: Piece, attachment: Attachment, timeout: float) -> None:
    """A master that has more bits than the parameter stays where nothing was written."""
    parameter, values = piece.parameter, piece.own.float()
    has_master = parameter.trainable and piece.own.dtype != torch.float32
    if has_master and not bool((written := piece.is_written()).all()):
        elements = range(piece.first, piece.first + len(values))
        masters, _ = read_elements(attachment, parameter.name, "master", elements, timeout)
        values = torch.where(written, values, masters)
    first = parameter.offset + piece.first
    attachment.write_state(parameter.group, first, "master", values.contiguous(), timeout)

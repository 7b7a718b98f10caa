# SPDX-License-Identifier: Apache-2.0
"""An optimizer of torch's, given to attach(): which of ours it is, and its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import optimizers
from .errors import unsupported, usage_error
from .optimizers import Optimizer

if TYPE_CHECKING:
    from ._optimizer import ForebayOptimizer

# Keyed by the exact class, because a subclass may step in another way.
KINDS: dict[type, type[Optimizer]] = {
    torch.optim.Adam: optimizers.Adam,
    torch.optim.AdamW: optimizers.AdamW,
    torch.optim.Adagrad: optimizers.Adagrad,
    torch.optim.SGD: optimizers.SGD,
}


HOOKS = [
    f"_optimizer_{call}_{when}_hooks"
    for call in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


class Groups(list[dict[str, Any]]):
    """The groups of an optimizer of torch's, its own dicts: step() reads what a scheduler of this
    optimizer sets in them."""


def adopt(optimizer: Any, param_groups: Any) -> tuple[Any, Any, dict[str, Any] | None]:
    """The description of an optimizer of torch's, its groups, and its state_dict where it has stepped; what
    is none stays as it is.

    Errors  E_UNSUPPORTED  no optimizer of ours steps as it does.
            E_OPTION       other groups were passed beside it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or getattr(optimizer, "is_forebay", False):
        return optimizer, param_groups, None
    kind = KINDS.get(type(optimizer))
    if kind is None:
        name = type(optimizer).__name__
        raise unsupported(
            f"attach with {type(optimizer).__module__}.{name}: the daemon computes the step, and has "
            "no such rule",
            "one of torch.optim's AdamW, Adam, Adagrad, SGD, or forebay.Lion, forebay.Lamb"
            + ('; forebay.AdamW(format="int8") has moments of 8 bits' if "8bit" in name else ""),
        )
    if param_groups is not None:
        raise usage_error(
            "E_OPTION",
            f"param_groups beside torch's {type(optimizer).__name__}, which has groups of its own",
            f"leave param_groups out, or forebay.{kind.__name__}(lr=...)",
        )
    defaults = optimizer.defaults
    if kind is optimizers.Adam and defaults.get("decoupled_weight_decay", False):
        kind = optimizers.AdamW
    known = [name for name in kind.__dataclass_fields__ if name in defaults]
    optimizer._opt_called = True  # type: ignore[attr-defined]  # its schedulers ask whether it steps
    has_moved = any(_has_moved(state) for state in optimizer.state.values())
    states = optimizer.state_dict() if has_moved else None
    return kind(**{name: defaults[name] for name in known}), Groups(optimizer.param_groups), states


def take_over(opt: ForebayOptimizer, theirs: Any, states: dict[str, Any] | None) -> ForebayOptimizer:
    """The hooks of an optimizer of torch's, and its states in a new job; those of one that has steps are newer."""
    if isinstance(theirs, torch.optim.Optimizer) and theirs is not opt:
        for name in HOOKS:  # the dicts themselves: a caller's handle removes its hook from them
            setattr(opt, name, getattr(theirs, name))
    if states is not None and opt.committed_step == 0:
        try:
            opt.load_state_dict(states)
        except BaseException:
            opt.detach()
            raise
    return opt


def _has_moved(state: dict[str, Any]) -> bool:
    if "step" in state:
        return float(state["step"]) > 0
    return any(value is not None for value in state.values())

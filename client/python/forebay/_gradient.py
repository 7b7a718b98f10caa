# SPDX-License-Identifier: Apache-2.0
"""p.grad of an attached parameter while the daemon has the gradient: a tensor without storage that
answers its norm, takes what a further backward adds, and remembers a scale and bounds. So torch's
clip_grad_norm_, clip_grad_value_ and GradScaler work; what else reads or changes it is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from .errors import unsupported

aten = torch.ops.aten
_NORM = aten.linalg_vector_norm.default
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
_CLAMPS = (aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default)
_FOREACH_CLAMPS = (aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar)
_ZEROS = aten.zero_.default
_FOREACH_ZEROS = aten._foreach_zero_.default
_VIEWS = (aten.detach.default, aten.alias.default, aten.view.default)


class Delivered(Protocol):
    """Where the gradient went."""

    name: str  # name of the parameter

    def norm(self) -> float:
        """Scaled; of this rank's part where it is sharded, of all passes."""

    def is_finite(self) -> bool:
        """The whole gradient, not of the parameter alone."""

    def add(self, gradient: torch.Tensor) -> None:
        """What a further backward pass has brought."""

    def multiply(self, factor: float) -> None:
        """Scales it: the step applies the product."""

    def clear(self) -> None:
        """Makes it zero, whatever was done to it."""

    def clamp(self, low: float, high: float) -> None:
        """Brings each element into [low, high], in the step."""


class GradientProxy(torch.Tensor):
    """This rank's part of a gradient that the daemon has."""

    delivered: Delivered

    @staticmethod
    def __new__(cls, delivered: Delivered, like: Any) -> GradientProxy:
        tensor: GradientProxy = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )
        tensor.__dict__["delivered"] = delivered
        return tensor

    def __init__(self, delivered: Delivered, like: Any) -> None:
        pass

    @property
    def data(self) -> torch.Tensor:
        """As torch has it."""
        return self.detach()

    @data.setter
    def data(self, _values: Any) -> None:
        raise unsupported(
            f"p.grad.data = ... of parameter {self.delivered.name}: its gradient has been delivered to the daemon",
            "opt.zero_grad() first, then set p.grad of all parameters; or change it in a hook: p.register_hook",
        )

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"<gradient of {self.delivered.name}: delivered to forebay>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        proxy = args[0] if args else None
        if isinstance(proxy, GradientProxy):
            if function in _VIEWS:
                return GradientProxy(proxy.delivered, _view_of(proxy, function, args[1:]))
            if function is _NORM and _is_euclidean(args[1:]):
                return _norm_of(proxy)
            if function is aten.add_.Tensor and _is_addend(args[1]) and not kwargs:
                proxy.delivered.add(args[1])
                return proxy
            if function in (aten.mul_.Tensor, aten.mul_.Scalar):
                proxy.delivered.multiply(float(args[1]))
                return proxy
            if function in (aten.div_.Tensor, aten.div_.Scalar):
                divisor = float(args[1])
                proxy.delivered.multiply(1 / divisor if divisor else math.copysign(math.inf, divisor))
                return proxy
            if function is _ZEROS:
                proxy.delivered.clear()
                return proxy
            if function in _CLAMPS:
                low, high = _bounds_of(function, args[1:], kwargs or {})
                proxy.delivered.clamp(low, high)
                return proxy
        proxies = _proxies(proxy)
        if function is aten._foreach_norm.Scalar and proxies and _is_euclidean(args[1:]):
            return [_norm_of(one) for one in proxies]
        if function in (aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar) and proxies:
            for one in proxies:
                one.delivered.multiply(float(args[1]))
            return None
        if function is _FOREACH_ZEROS and proxies:
            for one in proxies:
                one.delivered.clear()
            return None
        if function in _FOREACH_CLAMPS and proxies:
            low, high = _bounds_of(function, args[1:], kwargs or {})
            for one in proxies:
                one.delivered.clamp(low, high)
            return None
        if function is _UNSCALE and proxies:  # GradScaler
            found_inf, factor = args[1], float(args[2])
            if not proxies[0].delivered.is_finite():
                found_inf.fill_(1.0)
            for one in proxies:
                one.delivered.multiply(factor)
            return None
        raise _refusal(function, args)


def _norm_of(proxy: GradientProxy) -> torch.Tensor:
    return torch.tensor(proxy.delivered.norm(), dtype=torch.float32, device=proxy.device)


def _proxies(values: Any) -> list[GradientProxy]:
    """Those of a list that holds nothing else; else none."""
    if not isinstance(values, (list, tuple)):
        return []
    return list(values) if all(isinstance(one, GradientProxy) for one in values) else []


def _view_of(proxy: torch.Tensor, function: Any, args: tuple[Any, ...]) -> Any:
    if function is not aten.view.default:
        return proxy
    meta = torch.empty_strided(proxy.size(), proxy.stride(), dtype=proxy.dtype, device="meta")
    return function(meta, *args)


def _bounds_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[float, float]:
    low, high = -math.inf, math.inf
    if function in (aten.clamp_max_.default, aten._foreach_clamp_max_.Scalar):
        (high,) = args
    elif function in (aten.clamp_min_.default, aten._foreach_clamp_min_.Scalar):
        (low,) = args
    else:
        given = dict(zip(("min", "max"), args)) | dict(kwargs)
        low = low if given.get("min") is None else given["min"]
        high = high if given.get("max") is None else given["max"]
    return float(low), float(high)


def _is_addend(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, GradientProxy)


def _is_euclidean(args: tuple[Any, ...]) -> bool:
    """Whether it is the 2-norm of the whole: ord, dim."""
    return (not args or float(args[0]) == 2.0) and (len(args) < 2 or args[1] is None)


def _refusal(function: Any, args: tuple[Any, ...]) -> Exception:
    found = next((one for one in args if isinstance(one, GradientProxy)), None)
    for one in args if found is None else ():
        if isinstance(one, (list, tuple)):
            found = next((inner for inner in one if isinstance(inner, GradientProxy)), found)
    name = "?" if found is None else found.delivered.name
    return unsupported(
        f"{getattr(function, '__name__', function)}() on the gradient of parameter {name}: it has "
        "been delivered to the daemon",
        "its 2-norm, a factor and bounds for all gradients are what it takes (clip_grad_norm_, "
        "clip_grad_value_, GradScaler); "
        "opt.zero_grad() leaves a batch out; what else needs p.grad can look at it in a hook: "
        "p.register_hook before attach",
    )

# SPDX-License-Identifier: Apache-2.0
"""The hooks of one attached model: fetch before a group's forward and backward, deliver its
gradient, release. They refer to the Engine weakly."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ._engine import Engine, Member
from ._guards import InertOnCopy, outside_graphs
from ._plan import Parameter
from .errors import unsupported


class BeforeForward(InertOnCopy):
    """Fetches the groups of one module; delivers their gradients once the backward has reached the
    module's inputs."""

    def __init__(self, engine: Engine, numbers: Sequence[int]) -> None:
        self._engine, self._numbers = weakref.ref(engine), numbers

    @outside_graphs
    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        in_backward = torch._C._current_graph_task_id() != -1  # a recomputation
        if not in_backward and not torch.is_grad_enabled():
            return  # only this rank's step changes the weights, and returns afterwards
        began = time.monotonic_ns()
        if in_backward:
            engine.enter_backward()
        if torch.is_grad_enabled():
            after_backward = AfterBackward(self._engine, self._numbers)
            for node in graph_nodes((args, kwargs), set()):
                node.register_prehook(after_backward)
        # Counts the forward in all groups before the first fetch, because AfterForward runs also if a fetch fails.
        for number in self._numbers:
            engine.groups[number].forwards += 1
        engine.clock.add_short(began)
        engine.fetch(self._numbers)


class AfterForward(InertOnCopy):
    """Releases the groups, also after an exception and after the early stop of a recomputation;
    fetches them again before the backward of what the module returned. A hook of the graph's node,
    unlike a full backward hook, puts no view around the output, and fires also where no input needs
    a gradient."""

    def __init__(self, engine: Engine, numbers: Sequence[int]) -> None:
        self._engine, self._numbers = weakref.ref(engine), numbers

    @outside_graphs
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        began = time.monotonic_ns()
        if torch.is_grad_enabled():
            before_backward = BeforeBackward(self._engine, self._numbers)
            for node in graph_nodes(output, set()):
                node.register_prehook(before_backward)
        for number in self._numbers:
            group = engine.groups[number]
            group.forwards = max(0, group.forwards - 1)
            engine.release_unused(group)
        engine.clock.add_short(began)


class BeforeBackward:
    """Fetches the groups again; they stay until their last gradient has arrived, at most until the
    end of the backward."""

    def __init__(self, engine: Callable[[], Engine | None], numbers: Sequence[int]) -> None:
        self._engine, self._numbers = engine, numbers

    def __call__(self, _gradients: Any) -> None:
        engine = self._engine()
        if engine is None:
            return
        engine.enter_backward()
        for number in self._numbers:
            group = engine.groups[number]
            if group.expected == 0 or group.arrived < group.awaited:
                group.in_backward = True
        engine.fetch(self._numbers)


class AfterBackward:
    """Delivers what a module's backward has brought of its groups' gradients."""

    def __init__(self, engine: Callable[[], Engine | None], numbers: Sequence[int]) -> None:
        self._engine, self._numbers = engine, numbers

    def __call__(self, _gradients: Any) -> None:
        engine = self._engine()
        if engine is None or engine.attachment is None:
            return
        began = time.monotonic_ns()
        engine.enter_backward()
        for number in self._numbers:
            engine.flush(engine.attachment, engine.groups[number])
        engine.clock.add_short(began)


class BeforeAccumulate:
    """Refuses a gradient that cannot be delivered, before torch adds it to p.grad."""

    __torch_unserializable__ = True  # a pickled parameter is a copy, without hooks and without a warning

    def __init__(self, engine: Engine, member: Member) -> None:
        self._engine, self._member = weakref.ref(engine), weakref.ref(member)

    def __call__(self, gradient: torch.Tensor) -> None:
        engine, member = self._engine(), self._member()
        if engine is None or member is None:
            return
        engine.enter_backward()
        engine.refuse_late_gradient(member)
        present = member.tensor.grad
        if present is not None and present is not member.delivered:
            raise unsupported(
                f"the gradient of parameter {member.name} was set by hand before backward",
                "leave p.grad alone, or p.grad = None",
            )


class AfterAccumulate:
    """Moves the gradient out of p.grad."""

    def __init__(self, engine: Engine, member: Member) -> None:
        self._engine, self._member = weakref.ref(engine), weakref.ref(member)

    def __call__(self, _parameter: torch.Tensor) -> None:
        engine, member = self._engine(), self._member()
        if engine is None or member is None:
            return
        began = time.monotonic_ns()
        with torch.no_grad():
            engine.collect_gradient(member)
        engine.clock.add("grad", member.group.name, began)


def graph_nodes(value: Any, seen: set[Any]) -> set[Any]:
    """The graph nodes of the tensors in a module's output."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            seen.add(value.grad_fn)
    elif isinstance(value, dict):
        for item in value.values():
            graph_nodes(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            graph_nodes(item, seen)
    elif hasattr(value, "__dataclass_fields__"):
        for item in vars(value).values():
            graph_nodes(item, seen)
    return seen


def install(
    engine: Engine, hook_points: Iterable[tuple[nn.Module, Sequence[int]]]
) -> list[RemovableHandle]:
    """Puts every hook; returns the handles that remove them."""
    handles: list[RemovableHandle] = []
    for module, numbers in hook_points:
        handles.append(
            module.register_forward_pre_hook(
                BeforeForward(engine, numbers), prepend=True, with_kwargs=True
            )
        )
        handles.append(
            module.register_forward_hook(AfterForward(engine, numbers), always_call=True)
        )
    for member in engine.members():
        if member.trainable:
            before, after = BeforeAccumulate(engine, member), AfterAccumulate(engine, member)
            handles.append(member.tensor.register_hook(before))  # type: ignore[no-untyped-call]
            handles.append(
                member.tensor.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
            )
    return handles


def drop_empty_gradients(parameters: Iterable[Parameter]) -> list[RemovableHandle]:
    """Gives parameters without elements no p.grad: torch's foreach calls take GradientProxies alone."""

    def drop(tensor: torch.Tensor) -> None:
        tensor.grad = None

    return [
        one.tensor.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for one in parameters
        if one.is_empty and one.tensor.requires_grad
    ]

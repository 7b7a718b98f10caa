"""The hooks of one attached model: fetch before a group's forward and backward, deliver its
gradient, release.

Ownership  The optimizer owns the Engine, with its groups and members. Hooks and graph nodes refer to
           it weakly, so that a dropped optimizer is freed although its model lives.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import enum
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from ._gradient import GradientProxy
from ._guards import InertOnCopy, late_gradient, outside_graphs
from .errors import DETACH, ForebayError, unsupported, usage_error

if TYPE_CHECKING:
    from ._activations import Activations
    from ._core import Attachment
    from ._plan import Parameter
    from ._progress import Node
    from ._world import World

TIMELINE_ENTRIES = 4096
UNBOUNDED = (-math.inf, math.inf)


class Clock:
    """Wall time that the training thread spends inside our hooks and calls."""

    def __init__(self) -> None:
        self.exposed_ns = 0
        self.reported_ns = 0  # of them, at the last stats()
        # Of the newest committed step, from the end of the one before; 0 before the first.
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
    frame: bytes  # with the buffers as they were when the step was called first


class Group:
    """One group of this process: how often it is in use, and what of its gradient has arrived."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.members: list[Member] = []  # in the order of the group
        self.expected = 0  # gradients of a backward
        self.forwards = 0  # that are running
        self.in_backward = False
        self.lease: int | None = None
        self.arrived = 0  # gradients of this attempt, of all backwards
        self.delivered = 0  # of them, those that were there at the last flush
        self.awaited = 0  # of them, those that will be there when this backward has brought all

    def forget_gradients(self) -> None:
        self.arrived = self.delivered = self.awaited = 0
        for member in self.members:
            member.forget_gradient()


class Member(abc.ABC):
    """One parameter within its group, and what its GradientProxy speaks for."""

    engine: weakref.ref[Engine] | None = None

    def __init__(self, parameter: Parameter, index: int, group: Group) -> None:
        self.name, self.tensor = parameter.name, parameter.tensor
        self.trainable = parameter.trainable
        self.index, self.group = index, group  # index: in the order of the layout
        self.arrived = False  # a gradient of this attempt
        self.gradient_pass = 0  # in which pass the newest one did; passes count from 1
        self.scale, self.bounds = 1.0, UNBOUNDED  # of the gradient, by the caller
        self.delivered = self._proxy()

    @abc.abstractmethod
    def check(self) -> None:
        """Errors: E_UNSUPPORTED where the parameter's bytes no longer are the daemon's."""

    @abc.abstractmethod
    def make_private(self) -> None:
        """Gives the parameter memory of its own, with the present values."""

    def _proxy(self) -> torch.Tensor:
        return GradientProxy(self, self.tensor)

    @property
    def is_proxied(self) -> bool:
        """Whether p.grad speaks for what was delivered."""
        return self.tensor.grad is self.delivered

    @property
    def is_assigned(self) -> bool:
        """Whether p.grad is a tensor of the caller's."""
        return self.trainable and self.tensor.grad is not None and not self.is_proxied

    def is_cleared(self, zeros: bool) -> bool:
        """Whether the caller has put nothing in the place of a gradient that arrived, or zeros."""
        return self.tensor.grad is None or (zeros and self.is_proxied and self.scale == 0)

    def forget_gradient(self) -> None:
        self.arrived, self.gradient_pass = False, 0
        self.scale, self.bounds = 1.0, UNBOUNDED
        self.tensor.grad = None

    def live(self) -> Engine:
        engine = None if self.engine is None else self.engine()
        if engine is None or engine.attachment is None:
            raise usage_error(
                "E_NOT_READY",
                f"parameter {self.name} was attached, and its optimizer is detached",
                "attach the model again",
            )
        return engine

    # ---------------------------------------------------------------- of the gradient, delivered

    @property
    def is_edited(self) -> bool:
        return self.scale != 1.0 or self.bounds != UNBOUNDED

    def norm(self) -> float:
        self._refuse_clamped("the norm")
        return self.live().norm_of(self) * self.scale

    def is_finite(self) -> bool:
        return self.live().gradient_is_finite()

    def add(self, gradient: torch.Tensor) -> None:
        self.live().deliver(self, gradient)

    def multiply(self, factor: float) -> None:
        self._refuse_clamped("a factor")
        self.scale *= factor

    def clear(self) -> None:
        self.scale, self.bounds = 0.0, UNBOUNDED

    def clamp(self, low: float, high: float) -> None:
        if not (low < 0 < high):
            raise unsupported(
                f"clamp of the gradient of parameter {self.name} to [{low}, {high}]: the daemon takes "
                "bounds below and above 0",
                "torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)",
            )
        self.bounds = max(low, self.bounds[0]), min(high, self.bounds[1])

    def _refuse_clamped(self, what: str) -> None:
        if self.bounds != UNBOUNDED:
            raise unsupported(
                f"{what} of the gradient of parameter {self.name} after it was clamped to "
                f"{list(self.bounds)}",
                "scale and take norms before clip_grad_value_",
            )


class WindowMember(Member):
    """A parameter that is a view of the daemon's memory."""

    def __init__(
        self, parameter: Parameter, index: int, group: Group, window: torch.Tensor
    ) -> None:
        super().__init__(parameter, index, group)
        self.address = window.data_ptr()
        self._kind = window.dtype, window.shape, window.device

    def check(self) -> None:
        if self.tensor.data_ptr() != self.address:
            raise unsupported(
                f"parameter {self.name} no longer uses the daemon's memory: it was moved (half(), "
                "to(), .data = ...)",
                f"{DETACH}; an attached parameter keeps its type, device and memory",
            )

    def make_private(self) -> None:
        self.tensor.grad = None
        self.tensor.data = self.tensor.detach().clone()

    def fits(self) -> bool:
        """Whether the parameter is as it was attached, but for its values and their memory."""
        return (self.tensor.dtype, self.tensor.shape, self.tensor.device) == self._kind

    def bind(self, window: torch.Tensor) -> None:
        """The parameter is a view of the daemon's memory again; other values than the daemon's are writes."""
        values, self.tensor.data, self.address = self.tensor.data, window, window.data_ptr()
        self.tensor.grad = None
        if not torch.equal(values, window):
            window.copy_(values)


class Engine:
    """What the hooks share. One thread trains; autograd runs a CPU backward on the thread that
    calls it."""

    mode = "shared"
    is_over_nodes = False

    def __init__(self, attachment: Attachment, groups: list[Group], timeout: float) -> None:
        self.attachment: Attachment | None = attachment
        self.groups, self.timeout, self.rank = groups, timeout, attachment.rank
        self.world_size = 1  # ranks of the job
        self.activations: Activations | None = None  # where attach was given room for them
        self.clock = Clock()
        self.under_way: StepCall | None = None  # a step that was asked for and whose outcome is unknown
        self.node: Node | None = None
        self.world: World | None = None  # shared attachment: its process group is looked at in each step
        self._backward = Backward.NONE
        # Autograd owns the callback at the end of a backward: it dies with a backward that fails.
        self._end_of_backward: Callable[[], EndOfBackward | None] = lambda: None
        self._arrived_before = 0  # gradients that were there as the backward began
        self._gradient_pass = 1  # of this attempt, as the daemon counts them
        self._asked_norm = False  # in this attempt
        for member in self.members():
            member.engine = weakref.ref(self)

    def members(self) -> Iterator[Member]:
        """All of them, group by group."""
        for group in self.groups:
            yield from group.members

    # -------------------------------------------------------------------------------- the weights

    def fetch(self, numbers: Iterable[int]) -> None:
        """Leases the groups that are not leased yet."""
        if self.attachment is None:
            return  # a graph that outlived detach()
        for number in numbers:
            group = self.groups[number]
            if group.lease is None:
                for member in group.members:
                    member.check()
                began = time.monotonic_ns()
                with profiled("forebay.fetch", group.name):
                    group.lease = self.attachment.fetch(number, self.timeout)
                self.clock.add("fetch", group.name, began)

    def release_unused(self, group: Group) -> None:
        if group.forwards == 0 and not group.in_backward and group.lease is not None:
            lease, group.lease = group.lease, None
            if self.attachment is not None:
                self.attachment.release(lease)

    def values_of(self, parameter: Parameter) -> torch.Tensor:
        """The present values of the whole parameter, contiguous."""
        return parameter.tensor

    def read_elements(self, name: str, state: str, elements: range) -> tuple[torch.Tensor, int]:
        """These elements of a parameter's state, and how many updates the parameter has had. Over several
        nodes a collective."""
        from .states.reader import read_elements

        assert self.attachment is not None
        return read_elements(self.attachment, name, state, elements, self.timeout)

    def updates_of(self, name: str) -> int:
        """How many updates a parameter has had."""
        assert self.attachment is not None
        state = self.attachment.states[0]
        return self.attachment.read_state(name, state, 0, 0, self.timeout)[1]

    def after_step(self) -> None:
        """The weights are those of another step."""

    def end(self) -> None:
        """The model is not attached any more."""

    def release_all(self) -> None:
        for group in self.groups:
            group.in_backward, group.forwards = False, 0
            self.release_unused(group)
        if self.attachment is not None:  # also what an interrupt has kept from `lease`
            self.attachment.release_all()

    # ------------------------------------------------------------------------------- the backward

    @property
    def backward(self) -> Backward:
        """The state now; the first look after a failed backward finds it."""
        if self._backward == Backward.RUNNING and self._end_of_backward() is None:
            self._backward = Backward.UNFINISHED
        return self._backward

    def enter_backward(self) -> None:
        """Called by each hook that runs within a backward. The first of a backward asks autograd for
        a call at its end; a backward within a backward (reentrant checkpointing) belongs to the
        outer one. After an unfinished backward the next attempt at the step begins."""
        state = self.backward
        if state == Backward.RUNNING or self.attachment is None:
            return
        self.refuse_while_under_way("backward")
        if state == Backward.UNFINISHED or self.is_cleared(zeros=True):
            self.begin_attempt(self.attachment)
        end = EndOfBackward(self)
        self._end_of_backward = weakref.ref(end)
        self._backward = Backward.RUNNING
        self._arrived_before = self._arrived()
        for group in self.groups:
            group.awaited = group.arrived + group.expected
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def finish_backward(self) -> None:
        """Delivers what is there; what has no gradient by now has none in this step, unless a later
        backward brings it."""
        attachment = self.attachment
        if attachment is None:
            return
        for group in self.groups:
            self.flush(attachment, group)
            group.in_backward = False
            self.release_unused(group)
        self.show_gradients()
        self._backward = Backward.FINISHED

    def show_gradients(self) -> None:
        """Every trained parameter has a gradient that the caller can ask and scale, whatever this
        rank has brought of it: other ranks may have brought more. Where it has brought none at all
        (torch.autograd.grad) they stay as they are."""
        if self._arrived() == 0:
            return
        for member in self.members():
            if member.trainable and member.tensor.grad is None:
                member.tensor.grad = member.delivered

    def check_reduced(self, attachment: Attachment) -> None:
        """Errors: E_GRAD_PARTIAL if a gradient that backward computed was not delivered. The step begins anew,
        on all ranks."""

    def refuse_while_under_way(self, what: str) -> None:
        """Errors: E_STEP."""
        if self.under_way is not None:
            raise usage_error(
                "E_STEP",
                f"{what} while the outcome of step {self.under_way.number} is unknown",
                "call step() again with the same arguments first",
            )

    def is_cleared(self, zeros: bool) -> bool:
        """Whether the caller has cleared all that this rank has brought, as model.zero_grad() does.

        zeros  Also by zeros, to which a further backward would add.
        """
        arrived = [member for member in self.members() if member.arrived]
        return bool(arrived) and all(member.is_cleared(zeros) for member in arrived)

    def begin_attempt(self, attachment: Attachment) -> None:
        """Drops what this attempt has: the daemon discards what it has of it on any rank. Ours
        first: it is forgotten also where the client's call fails."""
        self.forget_gradients()
        for group in self.groups:
            group.in_backward = False
            self.release_unused(group)
        with profiled("forebay.drop", ""):
            attachment.drop_gradients()

    def forget_gradients(self) -> None:
        self._backward, self._gradient_pass, self._asked_norm = Backward.NONE, 1, False
        for group in self.groups:
            group.forget_gradients()

    # ------------------------------------------------------------------------------ the gradients

    def collect_gradient(self, member: Member) -> None:
        """Moves p.grad to the daemon's memory; the client delivers each piece that is complete."""
        tensor = member.tensor
        if self.attachment is None or member.is_proxied:
            return  # torch has added to it: GradientProxy has brought it here
        gradient, tensor.grad = tensor.grad, None
        if gradient is None:  # frozen since the forward
            return
        if gradient.requires_grad:
            raise unsupported(
                f"backward(create_graph=True) reached parameter {member.name}",
                "use torch.autograd.grad for gradients of gradients",
            )
        self.deliver(member, gradient)
        tensor.grad = member.delivered

    def collect_assigned(self) -> None:
        """Delivers gradients that the caller has set by hand. Errors: E_UNSUPPORTED where the daemon has
        another one of the parameter."""
        assigned = [member for member in self.members() if member.is_assigned]
        for member in assigned:
            if member.arrived:
                raise unsupported(
                    f"the gradient of parameter {member.name} was replaced after backward: the daemon has "
                    "the one that backward brought",
                    "opt.zero_grad() first, then set p.grad of all parameters; or change it in a hook: "
                    "p.register_hook",
                )
        if not assigned and self._arrived() == 0:
            self._refuse_old_gradients()
        for member in assigned:
            self.collect_gradient(member)
        if assigned:
            self.finish_backward()

    def _refuse_old_gradients(self) -> None:
        """Errors: E_UNSUPPORTED where the caller has put back what zero_grad() or step() dropped."""
        for member in self.members():
            if member.trainable and member.is_proxied:
                raise unsupported(
                    f"p.grad of parameter {member.name} is that of an earlier backward, which the daemon has dropped",
                    "keep values instead: a copy made in p.register_hook, then p.grad = copy for each parameter",
                )

    def deliver(self, member: Member, gradient: torch.Tensor) -> None:
        """The client delivers each piece that is complete. A second gradient of a parameter begins a
        further pass: what follows, of any parameter, is of that one."""
        attachment, group, tensor = self.attachment, member.group, member.tensor
        assert attachment is not None
        self.refuse_late_gradient(member)
        local = dense(member, gradient).to(tensor.dtype).expand(tensor.shape).contiguous()
        with profiled("forebay.deliver", member.name):
            try:
                if member.gradient_pass == self._gradient_pass:
                    attachment.begin_pass()
                    self._gradient_pass += 1
                attachment.add_gradient(member.index, local, self.timeout)
            except ForebayError as error:
                raise_unless_step_raises(error)
        member.arrived, member.gradient_pass = True, self._gradient_pass
        group.arrived += 1
        if group.arrived == group.awaited:
            self.flush(attachment, group)
            group.in_backward = False
            self.release_unused(group)

    def refuse_late_gradient(self, member: Member) -> None:
        """Errors: E_UNSUPPORTED where the gradient cannot be added to what the daemon has."""
        if self._asked_norm:
            after = "a norm was asked for (clip_grad_norm_, p.grad.norm()), which other ranks may have"
        elif member.is_edited:
            after = "its gradient was scaled or clamped"
        elif member.arrived and not member.is_proxied:
            after = "its gradient was cleared, and others were not: the daemon has it"
        else:
            return
        if self._arrived() == self._arrived_before:  # this backward has brought nothing
            self._backward = Backward.FINISHED
        raise late_gradient(member.name, after)

    def flush(self, attachment: Attachment, group: Group) -> None:
        """Delivers what has arrived of the group's gradient since the last time."""
        if group.arrived == group.delivered:
            return
        group.delivered = group.arrived
        try:
            with profiled("forebay.deliver", group.name):
                attachment.flush_gradients(group.number)
        except ForebayError as error:
            raise_unless_step_raises(error)

    def norm_of(self, member: Member) -> float:
        """Of the job's gradient, over all ranks and passes: waits until they have asked too or called
        step."""
        self._check_finished(member.name)
        return self.norm(member.index)

    def gradient_is_finite(self) -> bool:
        """The whole of the job's, as norm_of()."""
        self._check_finished("any parameter")
        return math.isfinite(self.norm(None))

    def norm(self, index: int | None) -> float:
        """NaN where a gradient of any rank is not finite, as with torch: step() then raises
        E_NONFINITE."""
        assert self.attachment is not None
        self._asked_norm = True
        try:
            with profiled("forebay.norm", ""):
                return self.attachment.grad_norm(index, self.timeout)
        except ForebayError as error:
            raise_unless_step_raises(error)
        return math.nan

    def _check_finished(self, what: str) -> None:
        if self.backward == Backward.RUNNING:
            raise unsupported(
                f"the norm of the gradient of {what} within backward: other ranks and parameters "
                "have not brought theirs",
                "ask for norms between backward and opt.step()",
            )

    @property
    def gradient_edit(self) -> tuple[float, float, float]:
        """By what the caller has scaled the gradient, and the bounds it was clamped to. Errors:
        E_UNSUPPORTED where not all alike."""
        edited = [member for member in self.members() if member.is_proxied]
        for member in edited:
            first = edited[0]
            if repr(member.scale) != repr(first.scale):  # NaN is itself here
                raise unsupported(
                    f"the gradients of {first.name} and {member.name} were scaled by "
                    f"{first.scale} and {member.scale}: the daemon scales the whole gradient",
                    "clip_grad_norm_(model.parameters(), ...), all of them at once, and those of a loss that the optimizer has",
                )
            if member.bounds != first.bounds:
                raise unsupported(
                    f"the gradients of {first.name} and {member.name} were clamped to "
                    f"{list(first.bounds)} and {list(member.bounds)}: the daemon clamps the whole "
                    "gradient",
                    "clip_grad_value_(model.parameters(), ...), all of them at once, and those of a loss that the optimizer has",
                )
        return (edited[0].scale, *edited[0].bounds) if edited else (1.0, *UNBOUNDED)

    def delivered_groups(self) -> int:
        """Groups of which the daemon has a gradient of this attempt."""
        return sum(group.delivered > 0 for group in self.groups)

    def _arrived(self) -> int:
        return sum(group.arrived for group in self.groups)


class EndOfBackward:
    """What autograd calls when a backward has come to its end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        engine = self._engine()
        if engine is not None:
            began = time.monotonic_ns()
            engine.finish_backward()
            engine.clock.add_short(began)


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


def dense(member: Member, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient; one that is sparse with zeros in its rows."""
    if gradient.layout is torch.strided:
        return gradient
    warnings.warn(
        f"the gradient of parameter {member.name} is sparse: it is made dense, and rows without a "
        "gradient get the update of a zero (decay and momentum)",
        stacklevel=2,
    )
    return gradient.to_dense()


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
            return  # only this rank's own step changes the weights, and returns when it has
        began = time.monotonic_ns()
        if in_backward:
            engine.enter_backward()
        if torch.is_grad_enabled():
            after_backward = AfterBackward(self._engine, self._numbers)
            for node in graph_nodes((args, kwargs), set()):
                node.register_prehook(after_backward)
        # All of them first: AfterForward runs also if a fetch fails.
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

# SPDX-License-Identifier: Apache-2.0
"""The state of one attached model: its groups and parameters, what is leased, what of the gradient has arrived.

Ownership  The optimizer owns the Engine, with its groups and members. Hooks and graph nodes refer to
           it weakly, so that a dropped optimizer is freed although its model lives.
"""

from __future__ import annotations

import abc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ._base import UNBOUNDED, Backward, Clock, StepCall, profiled, raise_unless_step_raises, read_elements
from ._gradient import GradientProxy
from ._guards import late_gradient
from ._plan import Parameter, Plan, part_of
from .errors import DETACH, ForebayError, unsupported, usage_error

if TYPE_CHECKING:
    from ._activations import Activations
    from ._core import Attachment
    from ._metrics import Node
    from ._world import World


class Group:
    """One group of this process: how often it is in use, and what of its gradient has arrived."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.members: list[Member] = []  # members in the order of the group
        self.expected = 0  # gradients of a backward
        self.forwards = 0  # number of running forwards
        self.in_backward = False
        self.lease: int | None = None
        self.arrived = 0  # gradients of this attempt, of all backwards
        self.delivered = 0  # gradients that had arrived at the last flush
        self.awaited = 0  # gradients that will have arrived at the end of this backward

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
        self.gradient_pass = 0  # pass of the newest gradient; passes count from 1
        self.scale, self.bounds = 1.0, UNBOUNDED  # edit of the gradient by the caller
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
        self.activations: Activations | None = None  # set if attach has reserved room for them
        self.clock = Clock()
        self.under_way: StepCall | None = None  # a step that was asked for and whose outcome is unknown
        self.node: Node | None = None
        self.world: World | None = None  # shared attachment: its process group is looked at in each step
        self._backward = Backward.NONE
        # Autograd owns the callback at the end of a backward: it dies with a backward that fails.
        self._end_of_backward: Callable[[], EndOfBackward | None] = lambda: None
        self._arrived_before = 0  # gradients that had arrived as the backward began
        self._gradient_pass = 1  # pass of this attempt, counted as by the daemon
        self._asked_norm = False  # True: this attempt asked for a norm
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
        # releases also a lease that an interrupt kept from being stored in a group's `lease`
        if self.attachment is not None:
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
        """Delivers the present gradients; a parameter without a gradient by now has none in this step,
        unless a later backward brings it."""
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
        """Errors: E_GRAD_PARTIAL if a gradient that backward computed was not delivered. The step restarts
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
        if self._arrived() == self._arrived_before:  # this backward brought no gradient
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


def windows_of(plan: Plan, attachment: Attachment) -> list[torch.Tensor]:
    """One tensor per parameter, each with a storage of its own that starts and ends with it: saving
    one parameter saves no more than it."""
    windows = []
    weights = [_from_dlpack(attachment.weights(number)) for number in range(len(plan.group_names))]
    for parameter in plan.parameters:
        view = part_of(weights[parameter.group], parameter)
        windows.append(_from_dlpack(torch.utils.dlpack.to_dlpack(view)))  # type: ignore[attr-defined]
    return windows


def _from_dlpack(view: Any) -> torch.Tensor:
    tensor: torch.Tensor = torch.from_dlpack(view)  # type: ignore[attr-defined]
    return tensor

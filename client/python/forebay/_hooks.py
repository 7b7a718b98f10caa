"""The hooks of one attached model: fetch before a group's forward and backward, deliver its
gradient, release."""

import collections
import time

import torch

from ._guards import GradientTaken, InertOnCopy, second_gradient
from .errors import ForebayError, unsupported

TIMELINE_ENTRIES = 4096


class Clock:
    """Wall time that the training thread spends inside our hooks and calls."""

    def __init__(self):
        self.exposed_ns = 0
        self.timeline = collections.deque(
            maxlen=TIMELINE_ENTRIES
        )  # (kind, group, began_ns, ended_ns), monotonic

    def add(self, kind, group, began_ns):
        ended_ns = time.monotonic_ns()
        self.exposed_ns += ended_ns - began_ns
        self.timeline.append((kind, group, began_ns, ended_ns))

    def add_short(self, began_ns):
        self.exposed_ns += time.monotonic_ns() - began_ns


class Group:
    """One group of this process: how often it is in use, and what of its gradient has arrived."""

    def __init__(self, number, name, elems, padded_elems):
        self.number, self.name, self.elems, self.padded_elems = number, name, elems, padded_elems
        self.members = []  # Member, in the order of the group
        self.expected = 0  # gradients of a step
        self.uses = 0  # forwards that are running
        self.in_backward = False
        self.lease = None
        self.slot = None  # the open gradient slot, a flat tensor
        self.arrived = 0

    def forget(self):
        self.slot, self.arrived = None, 0
        for member in self.members:
            member.arrived = False


class Member:
    """One parameter within its group."""

    def __init__(self, parameter, group, window):
        self.name, self.tensor, self.trainable = (
            parameter.name,
            parameter.tensor,
            parameter.trainable,
        )
        self.group, self.begin = group, parameter.offset
        self.end = parameter.offset + parameter.tensor.numel()
        self.address = window.data_ptr()
        self.arrived = False
        self.taken = (
            GradientTaken(parameter.name, parameter.tensor) if parameter.trainable else None
        )


class Engine:
    """What the hooks share. One thread trains; autograd runs a CPU backward on the thread that
    calls it."""

    def __init__(self, attachment, groups, timeout):
        self.attachment, self.groups, self.timeout = attachment, groups, timeout
        self.clock = Clock()
        self.owner = None
        self.delivered = 0  # groups, in the step that is being gathered

    def open(self, numbers):
        if self.attachment is None:
            return  # a graph that outlived detach()
        for number in numbers:
            group = self.groups[number]
            if group.lease is None:
                for member in group.members:
                    self.check_place(member)
                began = time.monotonic_ns()
                group.lease = self.attachment.fetch(number, self.timeout)
                self.clock.add("fetch", group.name, began)

    def close_unused(self, group):
        if group.uses == 0 and not group.in_backward and group.lease is not None:
            lease, group.lease = group.lease, None
            self.attachment.release(lease)

    @staticmethod
    def check_place(member):
        if member.tensor.data_ptr() != member.address:
            raise unsupported(
                f"parameter {member.name} was moved off its window (half(), to(), .data = ...)",
                "detach first; an attached parameter keeps its type, device and memory",
            )

    def take_gradient(self, member):
        """Copies p.grad into the group's slot; delivers the slot with the group's last gradient."""
        tensor, group = member.tensor, member.group
        gradient, tensor.grad = tensor.grad, None
        if member.arrived:
            tensor.grad = member.taken
            raise second_gradient(member.name)
        if gradient.requires_grad:
            raise unsupported(
                f"backward(create_graph=True) reached parameter {member.name}",
                "use torch.autograd.grad for gradients of gradients",
            )
        if group.slot is None:
            self.open_slot(group)
        if group.slot is not None:
            group.slot[member.begin : member.end].view(tensor.shape).copy_(gradient)
        tensor.grad = member.taken
        member.arrived = True
        group.arrived += 1
        if group.arrived == group.expected:
            self.deliver(group)
            group.in_backward = False
            self.close_unused(group)

    def open_slot(self, group):
        try:
            slot = self.attachment.grad_slot(group.number, self.timeout, False)
        except ForebayError as error:
            raise_unless_step_does(error)
            return
        group.slot = torch.from_dlpack(slot)
        group.slot[group.elems :].zero_()
        for member in group.members:
            if not member.trainable:
                group.slot[member.begin : member.end].zero_()

    def deliver(self, group):
        if group.slot is None:
            return  # this step has failed already
        group.slot = None
        try:
            self.attachment.grad_ready(group.number)
        except ForebayError as error:
            raise_unless_step_does(error)
            return
        self.delivered += 1

    def deliver_open(self):
        """Groups whose parameters did not all get a gradient: the missing ones count as zero."""
        for group in self.groups:
            if group.slot is not None:
                for member in group.members:
                    if not member.arrived:
                        group.slot[member.begin : member.end].zero_()
                self.deliver(group)

    def release_all(self):
        for group in self.groups:
            group.in_backward, group.uses = False, 0
            self.close_unused(group)

    def forget_gradients(self):
        self.delivered = 0
        for group in self.groups:
            group.forget()
            for member in group.members:
                member.tensor.grad = None


def raise_unless_step_does(error):
    """Torch's backward knows no error for a gradient that is NaN: step() raises it, on every rank,
    and the step can then be repeated."""
    if error.code != "E_NONFINITE":
        raise error


class BeforeForward(InertOnCopy):
    """Fetches the groups of one module."""

    def __init__(self, engine, numbers):
        self.engine, self.numbers = engine, numbers

    @torch.compiler.disable
    def __call__(self, _module, _args):
        began = time.monotonic_ns()
        engine = self.engine
        for number in self.numbers:  # all of them first: AfterForward runs also if a fetch fails
            engine.groups[number].uses += 1
        engine.clock.add_short(began)
        engine.open(self.numbers)


class AfterForward(InertOnCopy):
    """Releases them, also after an exception and after the early stop of a recomputation; asks for
    them again before the backward of what the module returned. A hook of the graph's node, unlike a
    full backward hook, puts no view around the output, and fires also where no input needs a
    gradient."""

    def __init__(self, engine, numbers):
        self.engine, self.numbers = engine, numbers

    @torch.compiler.disable
    def __call__(self, _module, _args, output):
        began = time.monotonic_ns()
        engine = self.engine
        if torch.is_grad_enabled():
            before_backward = BeforeBackward(engine, self.numbers)
            for node in _nodes(output, set()):
                node.register_prehook(before_backward)
        for number in self.numbers:
            group = engine.groups[number]
            group.uses = max(0, group.uses - 1)
            engine.close_unused(group)
        engine.clock.add_short(began)


class BeforeBackward:
    """Fetches the groups again; they stay until their last gradient has arrived, at most until
    step()."""

    def __init__(self, engine, numbers):
        self.engine, self.numbers = engine, numbers

    def __call__(self, _gradients):
        for number in self.numbers:
            group = self.engine.groups[number]
            if group.expected == 0 or group.arrived < group.expected:
                group.in_backward = True
        self.engine.open(self.numbers)


class BeforeAccumulate:
    """Refuses what the slot could not hold truthfully, before torch adds it up."""

    def __init__(self, member):
        self.member = member

    def __call__(self, gradient):
        member = self.member
        present = member.tensor.grad
        if present is not None and present is not member.taken:
            raise unsupported(
                f"the gradient of parameter {member.name} was set by hand before backward",
                "leave p.grad alone, or p.grad = None",
            )
        if gradient.layout is not torch.strided:
            raise unsupported(
                f"sparse gradient for parameter {member.name}", "nn.Embedding(..., sparse=False)"
            )


class AfterAccumulate:
    """Takes the gradient out of p.grad."""

    def __init__(self, engine, member):
        self.engine, self.member = engine, member

    def __call__(self, _parameter):
        began = time.monotonic_ns()
        with torch.no_grad():
            self.engine.take_gradient(self.member)
        self.engine.clock.add("grad", self.member.group.name, began)


def _nodes(value, seen):
    """The graph nodes of the tensors in a module's output."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            seen.add(value.grad_fn)
    elif isinstance(value, dict):
        for item in value.values():
            _nodes(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _nodes(item, seen)
    elif hasattr(value, "__dataclass_fields__"):
        for item in vars(value).values():
            _nodes(item, seen)
    return seen


def install(engine, hook_points):
    """Puts every hook; returns the handles that remove them."""
    handles = []
    for module, numbers in hook_points:
        handles.append(
            module.register_forward_pre_hook(BeforeForward(engine, numbers), prepend=True)
        )
        handles.append(
            module.register_forward_hook(AfterForward(engine, numbers), always_call=True)
        )
    for group in engine.groups:
        for member in group.members:
            if member.trainable:
                handles.append(member.tensor.register_hook(BeforeAccumulate(member)))
                handles.append(
                    member.tensor.register_post_accumulate_grad_hook(
                        AfterAccumulate(engine, member)
                    )
                )
    return handles

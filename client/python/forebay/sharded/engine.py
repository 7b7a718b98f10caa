# SPDX-License-Identifier: Apache-2.0
"""Sharded attachment: ZeRO-3 on torch's FSDP2. FSDP2 gathers, reduces and overlaps; Forebay holds the
shards. A rank's weights are copied from the daemon's memory when FSDP2 is about to gather them, on the
stream it gathers on; its reduced gradients are copied to that memory as soon as FSDP2 has them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._base import Backward, profiled, raise_unless_step_raises
from .._engine import Engine, Group, Member
from .._gradient import GradientProxy
from .._guards import Guards, InertOnCopy, late_gradient
from .._hooks import AfterAccumulate, graph_nodes
from .._plan import DTYPE_NAMES, Parameter
from ..errors import DETACH, ForebayError, unsupported, usage_error
from . import collectives, fsdp, unreduced
from .boxes import Box, Source
from .copy_ahead import CopyAhead
from .fsdp import Shard, Unit
from .shard_plan import ShardedPlan
from .shard_tensor import ShardTensor

if TYPE_CHECKING:
    from .._core import Attachment
    from .nodes import Nodes


T = TypeVar("T")

# --------------------------------------------------------------------------------------- the weights


class ShardGroup(Group):
    """A unit of FSDP2: the memory that its next gather takes its shards from. On the CPU that is the
    daemon's, where a shard is one piece of it; the other shards are copied into a buffer."""

    def __init__(self, number: int, unit: Unit) -> None:
        super().__init__(number, unit.name)
        self.unit = unit
        self.shard_members: list[ShardMember] = []
        self.copied: list[ShardMember] = []  # the members that are not read in place
        self.copies: Any = None  # a CopyList
        self.elems = 0  # elements of all padded shards of the members
        self.paddings: list[slice] = []
        self.buffer: torch.Tensor | None = None  # buffer of a gather in flight
        self.taken: set[int] = set()  # indices of the members that took their weights
        self.partitions: list[int] = []  # partitions of the members that are read in place
        self.places: list[int] = []  # theirs, in bytes within the window
        self.located = -1  # the version of the weights that they were found for

    def forget_copy(self) -> None:
        """It is of an older step."""
        self.buffer = None
        self.taken.clear()


class ShardMember(Member):
    """One parameter within its unit. Is the Reader of its ShardTensor, and what its GradientProxy
    speaks for."""

    group: ShardGroup

    def __init__(self, parameter: Parameter, index: int, group: ShardGroup, one: Shard) -> None:
        self.shard = one
        self.boxes = one.boxes()
        self.local_shape, self.padded_shape = torch.Size(one.local_shape), one.padded_shape
        super().__init__(parameter, index, group)
        self._storage = parameter.tensor.untyped_storage()  # empty: that of a DTensor
        self.first = 0  # first element in the unit's buffer, if copied
        self.source: Source | None = None  # where it is read in place
        self.in_place: torch.Tensor | None = None
        self.elems = one.local.numel()
        self.is_owned = False
        self.replica_groups: list[dist.ProcessGroup] = []  # together: all ranks with the same boxes
        self.backward = 0  # the last that has brought a gradient, by number
        self.replica_norm: float | None = None  # norm of a gradient that another rank delivers
        self.copies: Any = None  # a CopyList

    def _proxy(self) -> torch.Tensor:
        return self.shard.dtensor_of(GradientProxy(self, self.shard.local))

    def forget_gradient(self) -> None:
        super().forget_gradient()
        self.replica_norm = None

    def _sharded_engine(self) -> ShardedEngine:
        engine = self.live()
        assert isinstance(engine, ShardedEngine)
        return engine

    def check(self) -> None:
        is_ours = self.shard.parameter is self.tensor and isinstance(self.shard.local, ShardTensor)
        # p.data = ... gives the DTensor another one, and the shard behind it nothing.
        if not is_ours or self.tensor.untyped_storage()._cdata != self._storage._cdata:
            raise unsupported(
                f"parameter {self.name} no longer is the daemon's: it was replaced or moved, or "
                "p.data was set",
                f"{DETACH}; an attached parameter keeps its type, device and memory; "
                "p.copy_(values) sets its values",
            )

    def read(self) -> torch.Tensor:
        if type(self.shard.local) is torch.Tensor:  # detached: of a state_dict of before
            return self.shard.local.detach().clone()
        return self._sharded_engine().read(self)

    def check_values(self, values: torch.Tensor) -> None:
        self._sharded_engine().check_values(self, values)

    def write(self, values: torch.Tensor) -> None:
        self._sharded_engine().write(self, values)

    def padded(self) -> torch.Tensor:
        return self._sharded_engine().padded(self)

    def wait_for_replicas(self) -> None:
        """A barrier of the ranks that hold the same boxes: they are a block of their mesh, so one along
        each of its dimensions is one of all."""
        for group in self.replica_groups:
            dist.barrier(group)

    def make_private(self) -> None:
        self.tensor.grad = None
        values = self.read()
        padded = torch.zeros(self.padded_shape, dtype=values.dtype, device=values.device)
        self._part_of(padded).copy_(values)
        self.restore(padded)

    def restore(self, padded: torch.Tensor) -> None:
        """FSDP2 gathers this memory again."""
        self.shard.set_local(self._part_of(padded), padded.view(-1))

    def _part_of(self, padded: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(self.shard.local_shape):
            padded = padded.narrow(dim, 0, size)
        return padded


class ShardedEngine(Engine):
    """What the hooks of one model share. Threads: one trains."""

    mode = "sharded"

    def __init__(
        self,
        attachment: Attachment,
        plan: ShardedPlan,
        rank: int,
        timeout: float,
        prefetch_bytes: int = 0,
        passes: int = 1,
    ) -> None:
        from .. import _core

        self._copy_list = _core.copy_list
        self.plan, self._width, self.device = plan, plan.dtype.itemsize, plan.device
        self._reads_in_place = plan.device.is_host and not attachment.weights_on_swap
        self._ahead = CopyAhead(plan.device) if plan.copies_ahead else None
        of_name = {parameter.name: parameter for parameter in plan.parameters}
        self._process_groups = fsdp.process_groups_of(plan.units)
        self.shard_groups = []
        self.partition_of: dict[int, int] = {  # group -> partition of this rank
            group: number
            for number, (group, owner, _, _) in enumerate(plan.layout.partitions)
            if owner + plan.layout.first_rank == rank
        }
        for unit in plan.units:
            number = plan.layout.params[plan.layout.index[unit.shards[0].name]][2]
            group = ShardGroup(number, unit)
            for one in unit.shards:
                self._add(group, of_name[one.name], one, rank)
            group.copies = self._copies_of(group.copied, in_unit=True)
            self.shard_groups.append(group)
        super().__init__(attachment, list(self.shard_groups), timeout)
        self._window = torch.from_dlpack(attachment.window())  # type: ignore[attr-defined]
        for group in self.shard_groups:
            sources = (one.source for one in group.shard_members)
            group.partitions = sorted({one.partition for one in sources if one is not None})
        self._partitions = sorted({one for group in self.shard_groups for one in group.partitions})
        self._version = 0  # version of the weights read in place, counting steps and writes
        self._asked = -1  # the version whose places the daemon was asked for
        self._is_reset = True  # FSDP2 has nothing of a backward before the next one
        self._backwards = 0  # number of backwards begun
        self._pass = 0  # the backward that the attachment's pass is of
        # Says the scalars of the next step call, before the last of a step's backward passes.
        self.announce: Callable[[], None] = lambda: None
        self._passes, self._begun = passes, 0  # a step's, and of this attempt
        self._has_said = rank != 0
        self.rank = rank
        self.nodes: Nodes | None = None  # None: the job is on one node
        self._prefetch_bytes = prefetch_bytes
        # group -> unit, in the order in which forwards before the first step gather them
        self._order: dict[int, Unit] = {}

    def shards(self) -> Iterator[ShardMember]:
        """All members, group by group."""
        for group in self.shard_groups:
            yield from group.shard_members

    def _add(self, group: ShardGroup, parameter: Parameter, one: Shard, rank: int) -> None:
        layout = self.plan.layout
        member = ShardMember(parameter, layout.index[one.name], group, one)
        padded_elems = one.padded_shape.numel()
        is_one_piece = len(member.boxes) == 1 and member.elems == padded_elems
        if is_one_piece and self._reads_in_place:
            member.source = layout.places[member.name, member.boxes[0]]
        else:
            member.first = group.elems
            if member.elems < padded_elems:
                group.paddings.append(slice(member.first + member.elems, member.first + padded_elems))
            group.elems += padded_elems
            group.copied.append(member)
        if member.boxes:  # all boxes of a parameter have the same holders
            holders = layout.holders[one.name, member.boxes[0]]
            member.is_owned = holders[0] == rank
            member.replica_groups = [
                group for ranks, group in self._process_groups if ranks <= set(holders)
            ]
        member.copies = self._copies_of([member], in_unit=False)
        group.shard_members.append(member)
        group.members.append(member)
        group.expected += member.trainable

    def _copies_of(self, members: Iterable[ShardMember], in_unit: bool) -> Any:
        """(partition, first element, offset, bytes); what lies end to end on both sides is one."""
        copies: list[tuple[int, int, int, int]] = []
        for member in members:
            at = (member.first if in_unit else 0) * self._width
            for box in member.boxes:
                source = self.plan.layout.places[member.name, box]
                size = source.elems * self._width
                if copies:
                    partition, first, offset, bytes_ = copies[-1]
                    follows = first + bytes_ // self._width == source.first
                    if partition == source.partition and follows and offset + bytes_ == at:
                        copies[-1] = partition, first, offset, bytes_ + size
                        at += size
                        continue
                copies.append((source.partition, source.first, at, size))
                at += size
        return self._copy_list(copies)

    def copy(self, copies: Any, to: torch.Tensor, stream: int | None = None) -> None:
        """Copies weights into a new tensor of the device's, on the stream that torch works on now, or on another one."""
        assert self.attachment is not None
        size_bytes = to.numel() * to.element_size()
        stream = self.device.stream() if stream is None else stream
        self.attachment.copy_weights(copies, to.data_ptr(), size_bytes, self.timeout, stream)

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Room for weights, on the device."""
        return torch.empty(shape, dtype=self.plan.dtype, device=self.device.torch_device)

    def padded(self, member: ShardMember) -> torch.Tensor:
        """The member's part of what its unit's gather takes; the first that asks brings all."""
        group = member.group
        if self._prefetch_bytes and torch._C._current_graph_task_id() == -1:
            self._order.setdefault(group.number, group.unit)
        if member.source is not None:
            if group.located != self._version:
                self._locate(group)
            assert member.in_place is not None
            return member.in_place
        if group.buffer is None or member.index in group.taken:
            began = time.monotonic_ns()
            group.forget_copy()
            with profiled("forebay.fetch", group.name):
                group.buffer = self._copied(group)
            self.clock.add("fetch", group.name, began)
        group.taken.add(member.index)
        count = member.padded_shape.numel()
        part = group.buffer.narrow(0, member.first, count).view(member.padded_shape)
        if len(group.taken) == len(group.copied):
            group.forget_copy()
        return part

    def _copied(self, group: ShardGroup) -> torch.Tensor:
        """Its shards in a buffer, for the work that torch begins from now on."""

        def make() -> torch.Tensor:
            buffer = self._empty([group.elems])
            for padding in group.paddings:
                buffer[padding] = 0
            return buffer

        if self._ahead is not None:
            return self._ahead.copy(make, lambda buffer, stream: self.copy(group.copies, buffer, stream))
        buffer = make()
        self.copy(group.copies, buffer)
        return buffer

    def _locate(self, group: ShardGroup) -> None:
        """Finds the weights of the committed step; waits while the daemon updates this group. They stay as
        they are until this rank calls step or writes: no gather in between asks the daemon again."""
        assert self.attachment is not None
        began = time.monotonic_ns()
        with profiled("forebay.fetch", group.name):
            if self._asked != self._version:
                self.attachment.locate_ahead(self._partitions, self.timeout)
                self._asked = self._version
            places = self.attachment.locate(group.partitions, self.timeout)
        if places != group.places:
            of_partition = dict(zip(group.partitions, places))
            for member in group.shard_members:
                if member.source is not None:
                    begin = of_partition[member.source.partition] + member.source.first * self._width
                    part = self._window[begin : begin + member.elems * self._width]
                    member.in_place = part.view(self.plan.dtype).view(member.padded_shape)
            group.places = places
        group.located = self._version
        self.clock.add("fetch", group.name, began)

    def read(self, member: ShardMember) -> torch.Tensor:
        """This rank's part of a parameter, in the parameter's type: its masters, where these have more
        bits than the weights."""
        weights = self._empty(member.shard.local_shape)
        if self.plan.dtype == member.tensor.dtype or not member.trainable:
            self.copy(member.copies, weights)
            return weights.to(member.tensor.dtype)
        return self.read_state(member, "master")

    def read_state(self, member: ShardMember, state: str) -> torch.Tensor:
        """This rank's part of a state, in float32."""
        assert self.attachment is not None
        values = torch.empty(member.shard.local_shape, dtype=torch.float32, device="cpu")
        flat, at = values.view(-1), 0
        for first, run, stride, runs in member.boxes:
            for begin in range(first, first + runs * stride, stride):
                view, _ = self.attachment.read_state(member.name, state, begin, run, self.timeout)
                flat[at : at + run] = torch.from_dlpack(view)  # type: ignore[attr-defined]
                at += run
        return values.to(self.device.torch_device)

    def check_values(self, member: ShardMember, values: torch.Tensor) -> None:
        """Errors: E_NONFINITE where they cannot be written."""
        bad = int((~torch.isfinite(values.detach().to(self.plan.dtype))).sum())
        if bad:
            raise usage_error(
                "E_NONFINITE",
                f"{bad} of the values written into this rank's shard of parameter {member.name} are "
                f"NaN or infinite as {DTYPE_NAMES[self.plan.dtype]}",
                "check the values; the parameter is as it was",
            )

    def write(self, member: ShardMember, values: torch.Tensor) -> None:
        """Sets this rank's part of a parameter, masters and weights; of replicas, the owner does, and
        all of them have to call it."""
        masters, at = values.detach().to("cpu", torch.float32).contiguous().view(-1), 0
        assert self.attachment is not None
        member.wait_for_replicas()  # replicas have then read what the owner replaces
        try:
            for box in member.boxes if member.is_owned else ():
                source = self.plan.layout.places[member.name, box]
                part = masters[at : at + source.elems]
                self.attachment.write_state(
                    source.partition, source.first, "master", part, self.timeout
                )
                at += source.elems
        finally:
            member.wait_for_replicas()  # replicas then read what the owner has written
            self.forget_weights(member.group)

    def forget_weights(self, group: ShardGroup) -> None:
        """What is gathered or on its way is of before."""
        self._version += 1
        group.forget_copy()
        group.unit.reshard()

    def values_of(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, from all owners, on the CPU. Over several nodes a collective."""
        layout = self.plan.layout
        parts: list[tuple[Box, torch.Tensor]] = []
        for (name, box), source in layout.places.items():
            if name != parameter.name or not self._says(box, name):
                continue
            part = self._empty([source.elems])
            copies = [(source.partition, source.first, 0, source.elems * self._width)]
            self.copy(self._copy_list(copies), part)
            parts.append((box, part.cpu()))
        whole = torch.empty(parameter.tensor.shape, dtype=self.plan.dtype, device="cpu").view(-1)
        for (first, run, stride, runs), part in self._from_all_nodes(parts):
            whole.as_strided((runs, run), (stride, 1), first).copy_(part.view(runs, run))
        return whole.view(parameter.tensor.shape)

    @property
    def is_over_nodes(self) -> bool:  # type: ignore[override]
        return self.nodes is not None

    def _says(self, box: Box, name: str) -> bool:
        """Whether this rank tells those of other nodes what is in it."""
        return self.nodes is None or self.plan.layout.holders[name, box][0] == self.rank

    def _from_all_nodes(self, own: list[T]) -> list[T]:
        """What all ranks say, of several nodes; else what this one does."""
        if self.nodes is None:
            return own
        return [one for of_rank in collectives.gather(own, self.nodes.group) for one in of_rank]

    def read_elements(self, name: str, state: str, elements: range) -> tuple[torch.Tensor, int]:
        if self.nodes is None:
            return super().read_elements(name, state, elements)
        parts: list[tuple[int, torch.Tensor]] = []
        for of, box in self.plan.layout.places:
            if of != name or not self._says(box, name):
                continue
            first, run, stride, runs = box
            for begin in range(first, first + runs * stride, stride):
                held = range(max(begin, elements.start), min(begin + run, elements.stop))
                if held:
                    values, _ = super().read_elements(name, state, held)
                    parts.append((held.start - elements.start, values))
        whole = torch.empty(len(elements), dtype=torch.float32, device="cpu")
        for at, values in self._from_all_nodes(parts):
            whole[at : at + len(values)] = values
        return whole, self.updates_of(name)

    # The daemon leases within copy_weights: nothing is held between hooks.
    def fetch(self, numbers: Iterable[int]) -> None:
        pass

    def release_unused(self, group: Group) -> None:
        pass

    def release_all(self) -> None:
        super().release_all()
        self._version += 1  # step is called
        if self._prefetch_bytes and self._order:
            prefetch_along(list(self._order.values()), self._prefetch_bytes)
            self._prefetch_bytes = 0

    def end(self) -> None:
        for unit in self._order.values():
            unit.prefetch_in_forward(())

    def after_step(self) -> None:
        for group in self.shard_groups:
            self.forget_weights(group)
        if self._ahead is not None:
            self._ahead.release()

    # ------------------------------------------------------------------------------- the gradients

    def begin_attempt(self, attachment: Attachment) -> None:
        if torch._C._current_graph_task_id() == -1:  # else a forward has reset it
            if unreduced.find(self.plan.units):
                self._reset()
            self.reset_unless_idle()
        super().begin_attempt(attachment)

    def enter_backward(self) -> None:
        state = self.backward
        if state == Backward.UNFINISHED and not self._is_reset:
            raise usage_error(
                "E_GRAD_PARTIAL",
                "backward after one that did not come to its end, without a forward of the attached "
                "model between them: FSDP2 would add their gradients",
                "run forward and backward again, or opt.zero_grad() first",
            )
        super().enter_backward()
        if state != Backward.RUNNING:
            self._is_reset = False
            self._backwards += 1
            self._begun += 1
            if self._begun == self._passes and self.attachment is not None:
                try:
                    self.announce()
                except ForebayError as error:
                    raise_unless_step_raises(error)

    def say_what_waits(self) -> None:
        """Once, of the first pass whose gradients FSDP2 has not reduced."""
        if self._has_said or self.backward == Backward.UNFINISHED:
            return
        self._has_said = unreduced.report(self.plan.units)

    def finish_backward(self) -> None:
        super().finish_backward()
        for unit in self.plan.units:
            if unit.was_skipped:
                unit.reshard()  # FSDP2 left it gathered: clip_grad_norm_ takes DTensors alone

    def check_reduced(self, attachment: Attachment) -> None:
        left = unreduced.find(self.plan.units)
        if not left or self.backward in (Backward.RUNNING, Backward.UNFINISHED):
            return
        self._backward = Backward.UNFINISHED
        attachment.drop_gradients()  # raises also what has ended the session, if anything has
        raise unreduced.error(left, self.plan.units)

    def begin_forward(self, attachment: Attachment) -> None:
        """Drops the gradients that the next backward must not add to."""
        self.say_what_waits()
        if any(unit.was_skipped for unit in self.plan.units) and self.is_cleared(zeros=True):
            self.begin_attempt(attachment)
        self.reset_unless_idle()

    def reset_unless_idle(self) -> None:
        """After a forward or backward that did not come to its end: what FSDP2 has not reduced of it
        would be in the next gradient."""
        self._is_reset = True
        units = self.plan.units
        was_refused = self.backward == Backward.UNFINISHED and unreduced.find(units)
        if was_refused or not all(unit.is_idle for unit in units):
            self._reset()

    def _reset(self) -> None:
        fsdp.reset(self.plan.units)
        for member in self.shards():
            if member.arrived:
                member.tensor.grad = member.delivered

    def collect_gradient(self, member: Member) -> None:
        """Moves the reduced gradient of this rank's shard to the daemon's memory."""
        if self.attachment is None:
            return
        if member.is_proxied:
            return  # FSDP2 has added to it: GradientProxy has brought it here
        if member.arrived:
            after = "its gradient was cleared, and others were not: the daemon has it"
            raise late_gradient(member.name, after)
        gradient: Any = member.tensor.grad
        self.deliver(member, gradient._local_tensor)

    def deliver(self, member: Member, gradient: torch.Tensor) -> None:
        """Of this or a further backward of the step, of which it may be the first sign. Errors:
        E_UNSUPPORTED where the gradient was scaled before."""
        assert isinstance(member, ShardMember)
        self._send(member, gradient)
        if not member.arrived:
            member.tensor.grad = member.delivered
            member.arrived = True
            member.group.arrived += 1

    def _send(self, member: ShardMember, gradient: torch.Tensor) -> None:
        assert self.attachment is not None
        in_autograd = torch._C._current_graph_task_id() != -1
        if in_autograd:
            self.enter_backward()
        elif member.backward == self._backwards or self._backwards == 0:
            self._backwards += 1  # a pipeline schedule reduces, after the backwards of its chunks
        if member.arrived and member.is_edited:
            raise late_gradient(member.name, "its gradient was scaled or clamped")
        # FSDP2 reduces a layer once for each use if the layer has gradients of earlier backwards.
        again = member.arrived and member.backward == self._backwards
        if again or (self._pass not in (0, self._backwards) and self._arrived() > 0):
            self.attachment.begin_pass()
            # if the number of passes was not announced, the last one is unknown: nothing is updated early
            if self._passes == 1:
                self.announce = lambda: None
        self._pass = member.backward = self._backwards
        if not member.is_owned:
            norm = float(torch.linalg.vector_norm(gradient.float()))
            member.replica_norm = None if member.arrived else norm
            return
        local = gradient.to(self.plan.grad_dtype).contiguous()
        with profiled("forebay.deliver", member.name):
            try:
                self._add_gradient(member.index, local)
            except ForebayError as error:
                raise_unless_step_raises(error)

    def _add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """On a GPU it is read when what torch has begun on its stream has ended."""
        assert self.attachment is not None
        if self.device.is_host:
            self.attachment.add_gradient(index, gradient, self.timeout)
            return
        size_bytes = gradient.numel() * gradient.element_size()
        stream = self.device.stream()
        self.attachment.add_device_gradient(
            index, gradient.data_ptr(), size_bytes, stream, gradient, self.timeout
        )

    def norm_of(self, member: Member) -> float:
        """Of this rank's part, of all passes."""
        assert isinstance(member, ShardMember)
        if member.is_owned:
            return self.norm(member.index)
        if member.replica_norm is None and member.elems > 0:
            raise unsupported(
                f"the norm of the gradient of parameter {member.name}, which another rank owns, after "
                "several backward passes",
                "clip with forebay.AdamW(max_grad_norm=...)",
            )
        return member.replica_norm or 0.0

    def show_gradients(self) -> None:
        """FSDP2 has reduced a gradient on all ranks or on none."""

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self._pass = self._begun = 0

    def flush(self, attachment: Attachment, group: Group) -> None:
        partition = self.partition_of.get(group.number)
        if group.arrived == group.delivered or partition is None:
            return
        group.delivered = group.arrived
        try:
            attachment.flush_gradients(partition)
        except ForebayError as error:
            raise_unless_step_raises(error)


def prefetch_along(order: Sequence[Unit], limit_bytes: int) -> None:
    """FSDP2 gathers the next units of a forward ahead, as many as fit into the limit. All ranks have
    gathered in one order, or they could not have gathered at all."""
    for index, unit in enumerate(order):
        ahead, size_bytes = [], 0
        for other in order[index + 1 :]:
            size_bytes += other.gathered_bytes
            if size_bytes > limit_bytes or not unit.is_beside(other):
                break
            ahead.append(other)
        unit.prefetch_in_forward(ahead)


class BeforeForward(InertOnCopy):
    """Resets FSDP2 after a forward or backward that did not come to its end, before FSDP2 gathers."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = weakref.ref(engine)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _module: nn.Module, _args: Any) -> None:
        engine = self._engine()
        if engine is None or engine.attachment is None:
            return
        if torch._C._current_graph_task_id() != -1:  # a recomputation within a backward
            return
        for member in engine.shards():
            member.check()
        if engine.activations is not None:
            engine.activations.begin()
        engine.begin_forward(engine.attachment)


class AfterForward(InertOnCopy):
    """Notices the backward of what the model returned from its begin: one that fails before FSDP2
    has reduced anything leaves gradients too."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = weakref.ref(engine)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for node in graph_nodes(output, set()):
                node.register_prehook(self._enter_backward)

    def _enter_backward(self, _gradients: Any) -> None:
        engine = self._engine()
        if engine is not None:
            engine.enter_backward()


def install(engine: ShardedEngine, model: nn.Module) -> list[RemovableHandle]:
    """Puts every hook; returns the handles that remove them."""
    forward: list[RemovableHandle] = []
    for root in fsdp.roots_of(model):
        forward.append(root.register_forward_pre_hook(BeforeForward(engine), prepend=True))
        forward.append(root.register_forward_hook(AfterForward(engine)))
    # FSDP2 calls it for each sharded parameter whose gradient it has reduced.
    return forward + [
        member.tensor.register_post_accumulate_grad_hook(AfterAccumulate(engine, member))  # type: ignore[no-untyped-call]
        for member in engine.shards()
        if member.trainable
    ]


def bind(engine: ShardedEngine) -> list[tuple[ShardMember, torch.Tensor]]:
    """Every shard becomes a ShardTensor; returns what they were."""
    before = []
    for member in engine.shards():
        local = member.shard.local
        before.append((member, member.shard.padded.view(member.padded_shape)))
        wrapper = ShardTensor(member, local)
        member.shard.set_local(wrapper, torch.empty(0, dtype=local.dtype, device=local.device))
    return before


class AssignGuard(InertOnCopy):
    """Refuses load_state_dict() where it would replace the parameters."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _state: Any, _prefix: str, metadata: Any, *_args: Any) -> None:
        replaces = metadata.get("assign_to_params_buffers", False)
        if replaces or torch.__future__.get_swap_module_params_on_conversion():
            raise unsupported(
                f"load_state_dict on {self.name} with assign=True, or with parameters swapped: its "
                "parameters are attached",
                "leave assign out: the values are copied into the daemon's memory",
            )


class ShardedGuards(Guards):
    """As Guards; a module holds a shard or, while FSDP2 uses it, the whole parameter. What
    load_state_dict() copies into a shard goes to the daemon."""

    refuses_load = False
    are_windows = False
    script_hint = (
        "compile a plain model: plain.load_state_dict(get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True))), of torch.distributed.checkpoint.state_dict"
    )

    def __init__(self, model: nn.Module, plan: ShardedPlan, engine: ShardedEngine) -> None:
        self._engine = weakref.ref(engine)
        super().__init__(model, plan)

    def _guard(self, name: str, module: nn.Module, owner: nn.Module | None) -> None:
        super()._guard(name, module, owner)
        self._handles.append(module._register_load_state_dict_pre_hook(AssignGuard(name or "the model")))  # type: ignore[no-untyped-call]

    def check_parameters(self) -> None:
        for member in self._shards():
            if not member.shard.is_in_place:
                raise unsupported(
                    f"parameter {member.name} was replaced or removed after attach",
                    f"put it back, or {DETACH} and attach again as another job",
                )

    def give_private_copies(self) -> None:
        for member in self._shards():
            member.make_private()

    def _shards(self) -> Iterable[ShardMember]:
        engine = self._engine()
        return () if engine is None else engine.shards()

# SPDX-License-Identifier: Apache-2.0
"""Where the initial parameters of a sharded job come from: the values of the model or, of a model on the
meta device, a function that initializes its modules, or files. A unit of FSDP2 has memory from the
first module that may set it to the last, and is the daemon's then: no rank ever holds a model."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._buffers import holds_buffers
from .._memory import return_free_memory
from .._plan import check_finite
from ..errors import unsupported, usage_error
from . import collectives, fsdp
from .checkpoint import Checkpoint, refuse_difference
from .fsdp import Shard, Unit

if TYPE_CHECKING:
    from .._core import Attachment
    from .engine import ShardedEngine, ShardGroup, ShardMember

Initializer = Callable[[nn.Module], object]
_CURE = (
    "give it a reset_parameters() that sets them, or attach with initial=, a function of a module "
    "or safetensors files"
)
_ON_CPU = "make it on the CPU before attach (torch.arange(n, device='cpu'), or its module anew)"


class Unset(torch.Tensor):
    """A shard without memory: whatever uses it is refused by name."""

    @staticmethod
    def __new__(cls, name: str, like: torch.Tensor, device: torch.device) -> Unset:
        tensor: Unset = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        tensor.__dict__["name"] = name
        return tensor

    def __init__(self, name: str, like: torch.Tensor, device: torch.device) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].__dict__["name"], args[0], args[0].device)
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        name = next(one.__dict__["name"] for one in flat if isinstance(one, Unset))
        raise unsupported(
            f"{function.__name__} on parameter {name} while a module that does not hold it is "
            "initialized",
            "a module's initialization sets what is in it and in the modules inside it",
        )


@dataclass
class NewBuffer:
    """A buffer that was on the meta device, or that files may have."""

    name: str
    module: nn.Module
    key: str
    before: torch.Tensor
    made: torch.Tensor  # takes its place
    version: int  # version of `made` before any write

    @property
    def is_persistent(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set

    @property
    def is_set(self) -> bool:
        now = self.module._buffers.get(self.key)
        if now is self.made:
            return now._version > self.version or now.numel() == 0
        return now is not None and not now.is_meta


class Initial:
    """What attach() does with a model before its parameters are the daemon's: compare_generators(),
    make_buffers(), prepare() and, of a new job, write(). undo() takes it back.

    Errors  E_OPTION       `initial` is nothing of the kind, or the model has values.
            E_UNSUPPORTED  a part of the model is on the meta device.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], name_prefix: str, initial: Any
    ) -> None:
        self._model, self._prefix = model, name_prefix
        self._checkpoint: Checkpoint | None = None
        self._initialize: Initializer = reset_parameters
        if isinstance(initial, (str, os.PathLike)):
            self._checkpoint = Checkpoint(initial)
        elif callable(initial) and not isinstance(initial, (nn.Module, type)):
            self._initialize = initial
        elif initial is not None:
            raise usage_error(
                "E_OPTION",
                f"initial is a {type(initial).__name__}",
                "a function of a module, or the path of a safetensors file or of a folder of them",
            )
        self._shards = [one for unit in units for one in unit.shards]
        self._device = units[0].device
        self._is_meta = any(one.local.is_meta for one in self._shards)
        real = next((one for one in self._shards if not one.local.is_meta), None)
        if initial is not None and real is not None:
            raise usage_error(
                "E_OPTION",
                f"initial= for a model that has values: parameter {real.name} is on "
                f"{real.local.device}",
                'build it under torch.device("meta"), or leave initial out',
            )
        if self._is_meta and real is not None:
            other = next(one for one in self._shards if one.local.is_meta)
            raise unsupported(
                f"parameter {other.name} is on the meta device, and parameter {real.name} on "
                f"{real.local.device}",
                "build the whole model on one of them",
            )
        self._moved: list[tuple[Shard, nn.Parameter]] = []
        self._buffers: list[NewBuffer] = []
        self._needed: list[NewBuffer] = []  # those of them that a module has to set
        self._have_same_seed = False

    def undo(self) -> None:
        """The shards are what they were before bind()."""
        for one, before in self._moved:
            one.return_to_meta(before)
        for buffer in self._buffers:
            buffer.module._buffers[buffer.key] = buffer.before
        self._moved, self._buffers = [], []

    def compare_generators(self) -> None:
        """Whether all ranks would get the same random numbers: on a GPU torch gives each shard its own.
        Of a model on the meta device and a mesh of CPUs a collective over the default process group."""
        if self._is_meta and self._device.type == "cpu":
            states = collectives.gather([torch.get_rng_state().numpy().tobytes()])
            self._have_same_seed = all(state == states[0] for state in states)

    def make_buffers(self) -> None:
        """If the parameters are on the meta device, gives memory without values to each buffer on it, and replaces each
        other buffer by a clone if there is a checkpoint. Does nothing if the parameters have values: the initializer of
        a buffer would set them again."""
        if not self._is_meta:
            return
        # parameters that several modules share, each once
        made: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, module in self._model.named_modules():
            for key, before in module._buffers.items():
                if before is None or not (before.is_meta or self._checkpoint is not None):
                    continue
                if id(before) not in made:
                    name = self._prefix + fsdp.plain_name(f"{prefix}.{key}".lstrip("."))
                    is_meta = before.is_meta
                    nothing = _nothing(before.shape, before.dtype, self._device)
                    new = nothing if is_meta else before.clone()
                    made[id(before)] = name, new
                name, new = made[id(before)]
                self._buffers.append(NewBuffer(name, module, key, before, new, new._version))
        for buffer in self._buffers:
            buffer.module._buffers[buffer.key] = buffer.made

    def prepare(self, attachment: Attachment, all_names: Iterable[str]) -> None:
        """Behind it every parameter is on its device, and so are the buffers that the job does not have:
        with their values, where write() does not set them.

        all_names  Of the parameters of all ranks.

        Errors  E_UNSUPPORTED  nothing sets a parameter or a buffer.
                E_LAYOUT       the files are of another model.
        """
        frames = attachment.extra_state, attachment.rank0_extra_state
        committed = any(holds_buffers(frame) for frame in frames)
        needed = [one for one in self._buffers if not (committed and one.is_persistent)]
        is_new = attachment.writes_initial and self._is_meta
        in_files: list[tuple[NewBuffer, str]] = []
        checkpoint = self._checkpoint
        if checkpoint is not None and (is_new or any(one.is_persistent for one in needed)):
            aliases = self._aliases()
            if is_new:
                self._check_files(checkpoint, aliases, set(all_names))
            in_files = list(self._buffers_in(checkpoint, aliases, needed))
            found = {id(buffer) for buffer, _ in in_files}
            needed = [buffer for buffer in needed if id(buffer) not in found]
        self._needed = needed = [buffer for buffer in needed if buffer.before.is_meta]
        if not is_new or checkpoint is not None:  # parameters stay on meta: setting them does nothing
            for module in self._visits({id(buffer.made) for buffer in needed}):
                self._call(module)
            self._refuse_unset_buffers()
        for buffer, name in in_files:
            assert checkpoint is not None
            buffer.made.copy_(checkpoint.whole(name))
            buffer.module._buffers[buffer.key] = buffer.made
        if self._is_meta:
            for one in self._shards:
                unset = Unset(one.name, one.local, self._device)
                self._moved.append((one, one.leave_meta(unset)))

    def write(self, engine: ShardedEngine) -> None:
        """Writes the initial values of this rank's shards. Errors: those of prepare(), E_NONFINITE."""
        if self._checkpoint is not None:
            names_of = self._names_in(self._checkpoint, self._aliases())
            for group in engine.shard_groups:
                self._write_from(self._checkpoint, names_of, engine, group)
        elif self._is_meta:
            is_cut = any(one.local_shape != one.shape for one in self._shards)
            if self._have_same_seed and is_cut:
                warnings.warn(
                    "all ranks have the same seed, and on a CPU mesh torch takes the random numbers of a "
                    "shard from its rank's generator: all shards of a parameter get the same. "
                    "torch.manual_seed(seed + rank) before forebay.attach gives each its own",
                    stacklevel=4,
                )
            self._write_initialized(engine)
        else:
            for group in engine.shard_groups:
                _Memory(engine, group).write()
        assert engine.attachment is not None
        engine.attachment.initial_done(engine.timeout)

    # ------------------------------------------------------------------------------------- the files

    def _aliases(self) -> dict[str, list[str]]:
        """All names of each parameter and buffer, as the job and the files have them, by the first."""
        aliases: dict[str, list[str]] = {}
        first = {id(one.parameter): one.name for one in self._shards}
        for name, tensor in itertools.chain(
            self._model.named_parameters(remove_duplicate=False),
            self._model.named_buffers(remove_duplicate=False),
        ):
            full_name = self._prefix + fsdp.plain_name(name)
            aliases.setdefault(first.setdefault(id(tensor), full_name), []).append(full_name)
        return aliases

    def _names_in(
        self, checkpoint: Checkpoint, aliases: dict[str, list[str]]
    ) -> dict[str, list[str]]:
        """Of the aliases, those that the files have."""
        names = set(checkpoint.names())
        return {first: [one for one in known if one in names] for first, known in aliases.items()}

    def _check_files(
        self, checkpoint: Checkpoint, aliases: dict[str, list[str]], all_names: set[str]
    ) -> None:
        own = set(itertools.chain(*aliases.values()))
        temporary = {one.name for one in self._buffers if not one.is_persistent}
        wanted = {name: names for name, names in aliases.items() if name not in temporary}
        # If ranks hold different modules, this rank does not know the other ranks' aliases and buffers: then tensors may have
        # any name.
        refuse_difference(checkpoint, wanted, own if all_names <= own else None)
        names_of = self._names_in(checkpoint, aliases)
        for one in self._shards:
            for name in names_of[one.name]:
                checkpoint.check(name, f"parameter {one.name}", one.shape, one.parameter.dtype)

    def _buffers_in(
        self, checkpoint: Checkpoint, aliases: dict[str, list[str]], buffers: Iterable[NewBuffer]
    ) -> Iterator[tuple[NewBuffer, str]]:
        """Those that the files have, by what name."""
        names_of = self._names_in(checkpoint, aliases)
        for buffer in buffers:
            for name in names_of[buffer.name][:1]:
                checkpoint.check(
                    name, f"buffer {buffer.name}", buffer.made.shape, buffer.made.dtype
                )
                yield buffer, name

    def _write_from(
        self,
        checkpoint: Checkpoint,
        names_of: dict[str, list[str]],
        engine: ShardedEngine,
        group: ShardGroup,
    ) -> None:
        memory = _Memory(engine, group)
        memory.lend()
        for member in group.shard_members:
            found = names_of[member.name]
            for name in found if member.is_owned else ():
                part = checkpoint.part(name, member.shard.ranges())
                if name == found[0]:
                    member.shard.local.copy_(part)
                elif not torch.equal(member.shard.local, part.to(member.tensor.dtype)):
                    raise usage_error(
                        "E_LAYOUT",
                        f"tensors {found[0]} and {name} of {checkpoint.path} differ; in the model they "
                        "are one parameter",
                        "leave one of them out, or do not tie them",
                    )
        memory.write()
        memory.take_back()

    # ----------------------------------------------------------------------------- the initialization

    def _call(self, module: nn.Module) -> None:
        with torch.no_grad():
            self._initialize(module)

    def _visits(self, wanted: set[int]) -> list[nn.Module]:
        """The modules to call, in the order of model.apply(): those that hold tensors of these ids.
        Errors: E_UNSUPPORTED where one of these is in none of them."""
        order: list[nn.Module] = []
        self._model.apply(order.append)
        is_default = self._initialize is reset_parameters
        visits, covered = [], set()
        for module in order:
            if not is_default or _own_reset_parameters(module) is not None:
                held = wanted.intersection(map(id, _tensors_of(module)))
                covered |= held
                visits += [module] * bool(held)
        self._refuse_uncovered(wanted - covered)
        return visits

    def _refuse_uncovered(self, uncovered: set[int]) -> None:
        for name, module in self._model.named_modules():
            for key, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is None or id(tensor) not in uncovered:
                    continue
                what = "parameter" if key in module._parameters else "buffer"
                kind = type(module).__name__.removeprefix("FSDP")
                raise unsupported(
                    f"{what} {key} of {kind} {fsdp.plain_name(name)} is on the meta device, and neither "
                    "this module nor one around it has reset_parameters()",
                    _CURE if what == "parameter" else f"{_CURE} that has it; or {_ON_CPU}",
                )

    def _write_initialized(self, engine: ShardedEngine) -> None:
        group_of = {id(one.tensor): one.group for one in engine.shards()}
        wanted = {*group_of, *(id(buffer.made) for buffer in self._needed)}
        visits = self._visits(wanted)
        in_visit = [_groups_in(module, group_of) for module in visits]
        last = {group: index for index, groups in enumerate(in_visit) for group in groups}
        memories: dict[ShardGroup, _Memory] = {}
        for index, (module, groups) in enumerate(zip(visits, in_visit)):
            for group in groups:
                if group not in memories:
                    memories[group] = _Memory(engine, group)
                    memories[group].lend()
            self._call(module)
            for group in groups:
                if last[group] == index:
                    self._refuse_unset(group)
                    memories[group].write()
                    memories.pop(group).take_back()
        self._refuse_unset_buffers()

    def _refuse_unset(self, group: ShardGroup) -> None:
        for member in group.shard_members:
            values = member.shard.local
            if not member.shard.is_in_place:
                raise unsupported(
                    f"parameter {member.name} was replaced when its module was initialized",
                    "set the values of the parameter that is there, by torch.nn.init or copy_()",
                )
            if values.numel() > 0 and bool(values.isnan().all()):
                raise unsupported(
                    f"parameter {member.name} is on the meta device, and nothing sets it: not "
                    "reset_parameters() or initial= of the module that holds it",
                    _CURE,
                )

    def _refuse_unset_buffers(self) -> None:
        for buffer in self._needed:
            if not buffer.is_set:
                raise unsupported(
                    f"buffer {buffer.name} is on the meta device, and nothing sets it",
                    f"{_CURE} that has it; or {_ON_CPU}",
                )


# ------------------------------------------------------------------------------------------- modules


def reset_parameters(module: nn.Module) -> None:
    """What initializes a module where the caller does not say it."""
    own = _own_reset_parameters(module)
    if own is not None:
        own()


def _own_reset_parameters(module: nn.Module) -> Callable[[], object] | None:
    """Not that of a module inside it, which wrappers (torch.compile) pass on."""
    if "reset_parameters" in vars(module) or hasattr(type(module), "reset_parameters"):
        own: Callable[[], object] = module.reset_parameters  # type: ignore[assignment]
        return own
    return None


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _groups_in(module: nn.Module, group_of: dict[int, ShardGroup]) -> list[ShardGroup]:
    return list(dict.fromkeys(group_of[id(one)] for one in module.parameters()))


def _nothing(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN, where the type has it: what nobody has set is found."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


# -------------------------------------------------------------------------------- memory of one unit


class _Memory:
    """This rank's shards of one unit. Those that it owns are parts of one tensor, as the daemon's
    partition has them."""

    def __init__(self, engine: ShardedEngine, group: ShardGroup) -> None:
        self._engine, self._group = engine, group
        elems = sum(member.elems for member in group.shard_members if member.is_owned)
        self._device = engine.device.torch_device
        self._flat = _nothing([elems], engine.plan.master_dtype, self._device)

    def lend(self) -> None:
        """Lends memory to each shard: a part of the unit's tensor if this rank owns the shard and the types agree, else
        memory of its own."""
        for member in self._group.shard_members:
            if member.is_owned and self._flat.dtype == member.tensor.dtype:
                member.shard.lend(self._part_of(member))
            else:
                nothing = _nothing(member.local_shape, member.tensor.dtype, self._device)
                member.shard.lend(nothing)

    def write(self) -> None:
        """The values of the shards, wherever they are, become the job's."""
        for member in self._group.shard_members:
            if member.is_owned:
                values = member.shard.local.detach()
                check_finite(member.name, values, " in this rank's shard")
                part = self._part_of(member)
                if part.data_ptr() != values.data_ptr():
                    part.copy_(values)
        engine = self._engine
        number = engine.partition_of.get(self._group.number)
        if number is None:
            return
        assert engine.attachment is not None
        flat = self._flat.cpu()
        if flat.dtype == engine.plan.dtype:
            engine.attachment.write_initial(number, flat, engine.timeout)
        else:
            engine.attachment.write_state(number, 0, "master", flat, engine.timeout)

    def take_back(self) -> None:
        """The shards have no memory."""
        for member in self._group.shard_members:
            member.shard.lend(Unset(member.name, member.shard.local, self._device))
        self._flat = self._flat.new_empty(0)
        return_free_memory()

    def _part_of(self, member: ShardMember) -> torch.Tensor:
        first = self._engine.plan.layout.places[member.name, member.boxes[0]].first
        return self._flat.narrow(0, first, member.elems).view(member.local_shape)

# SPDX-License-Identifier: Apache-2.0
"""The optimizer's states in torch's format: state_dict() and load_state_dict() of an attached optimizer, and
the same to and from a file, of which no process holds more than a piece."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ..errors import ForebayError, ForebayTimeoutError, make_error, unsupported, usage_error
from ..optimizers import RULE_OPTIONS
from . import state_file
from .reader import read_states, state_names, step_tensor
from .state_file import BoxOf, FileTensor, Flat

if TYPE_CHECKING:
    from .._core import Attachment
    from .._engine import Engine, Member
    from .._plan import Parameter, Plan
    from ..optimizers import Optimizer
    from ..sharded.engine import ShardedEngine, ShardMember

T = TypeVar("T")
PIECE_ELEMS = 1 << 20  # elements read, checked or written at once; a multiple of int8's group
REPORT_BYTES_MAX = 4096  # limit of the wire for a report of one rank
# Update count of the first trainable parameter while states are written: kUpdatesMax of the wire, which no training reaches.
LOADING = 1 << 53
# Options that have one value in the daemon. Other options in torch's parameter groups are carried along.
FIXED_OPTIONS = {*RULE_OPTIONS, "maximize", "differentiable"}
# Options in the parameter groups of torch's optimizers, besides hyper-parameters and COMMON_OPTIONS.
GROUP_OPTIONS = {
    "Adam": ("amsgrad", "capturable", "decoupled_weight_decay"),
    "AdamW": ("amsgrad", "capturable", "decoupled_weight_decay"),
    "Adagrad": (),
    "SGD": ("nesterov",),
}
ZERO = torch.zeros((), dtype=torch.float32, device="cpu")
COMMON_OPTIONS = ("maximize", "foreach", "differentiable", "fused")


class DaemonState(Mapping[torch.Tensor, Any]):
    """The optimizer's `state`, which the daemon holds: what is asked for is read, into memory of the
    caller's. Its keys are the trainable parameters.

    Ownership  The optimizer's; refers to it weakly.
    """

    def __init__(self, optimizer: StateDicts) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _members(self) -> dict[torch.Tensor, Member]:
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer._trainable

    def __getitem__(self, tensor: torch.Tensor) -> dict[str, Any]:
        optimizer = self._optimizer()
        if optimizer is None:
            raise KeyError(tensor)
        return _torch_state(optimizer, optimizer._trainable[tensor])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._members())

    def __len__(self) -> int:
        return len(self._members())

    def __setitem__(self, tensor: torch.Tensor, values: Any) -> None:
        raise unsupported(
            "opt.state[p] = ... on an attached optimizer: its states are the daemon's",
            "opt.load_state_dict(...) writes them, of all parameters",
        )

    def __repr__(self) -> str:
        return f"DaemonState({len(self)} parameters)"


class StateDicts(torch.optim.Optimizer):
    """What an attached optimizer has of torch's state_dict().

    >>> opt = forebay.attach(model)
    >>> opt.load_state_dict(opt.state_dict())
    """

    _engine: Engine
    _plan: Plan
    _rule: Optimizer
    _members: list[Member]
    _may_be_half_loaded = True  # whether to look: after attach, and where a load has failed

    def _live(self) -> Attachment:
        attachment = self._engine.attachment
        if attachment is None:
            raise usage_error(
                "E_NOT_READY", "this optimizer is detached", "forebay.attach(model, ...) again"
            )
        return attachment

    @cached_property
    def _trainable(self) -> dict[torch.Tensor, Member]:
        """In the order of param_groups."""
        members = {member.tensor: member for member in self._members if member.trainable}
        tensors = chain.from_iterable(group["params"] for group in self.param_groups)
        return {tensor: members[tensor] for tensor in tensors if tensor in members}

    def state_dict(self) -> dict[str, Any]:
        """The states of all parameters in torch's format: torch's optimizer of the same name loads it and
        continues. Shared: all states, whole, in float32, in memory of this process (8 bytes a parameter of
        AdamW, 12 where parameters have 16 bits; save_state() takes no more than a piece). Sharded: this
        rank's shards, as DTensors.

        Parameters of 16 bits have a "master" beside what torch has, the float32 value that they are
        rounded from. SGD has a "step" beside it.

        Errors  E_TIMEOUT    a read waits for swap.
                E_NOT_READY  a load of states did not end.

        >>> opt = forebay.attach(model, forebay.AdamW(lr=0.5))
        >>> model(inputs).sum().backward()
        >>> opt.step()
        >>> {index: sorted(states) for index, states in opt.state_dict()["state"].items()}
        {0: ['exp_avg', 'exp_avg_sq', 'step'], 1: ['exp_avg', 'exp_avg_sq', 'step']}
        """
        self._live()
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            for key, value in _options_of(self._rule).items():
                group.setdefault(key, value)
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes states and parameter groups over from a state_dict() of this class or of torch's optimizer
        of the same kind: between two steps, on every rank, each with the same; it returns when all have
        them. Shared: rank 0 writes its own argument; the other ranks' steps and groups are compared, not
        their moments. Sharded: each rank its shards, out of DTensors with the placements of its parameters or
        of whole tensors; a collective of the process group, whose timeout bounds the wait for a rank that
        does not call, not that of attach(), and a rank that calls another collective meanwhile may abort.

        All is checked on all ranks before anything is written. Moments are stored as docs/reference/formats.md says
        (format "fp32" and "exact": bit for bit), "step" counts on from what is loaded. A parameter without a
        state has had no update. A "master" sets the parameter too; without one the parameter stays.
        Hyper-parameters are taken over as torch does; how torch computes ("foreach", "fused") and
        "initial_lr" are stored and not read. committed_step stays the job's.

        Ctrl-C that comes while states are written is raised when all are. If a process ends or fails
        meanwhile, a part is loaded: step(), state_dict() and save_state() raise E_NOT_READY, in later
        attachments too, until a load ends.

        state_dict  {"state": {index: {...}}, "param_groups": [...]}

        Errors  E_LAYOUT     other groups, parameters or shapes.
                E_OPTION     states of another optimizer, an option that the daemon does not have
                             (maximize=True), a value out of its range; the ranks load different dicts.
                E_NONFINITE  a moment is NaN, infinite, or a second moment below 0.
                E_STEP       a step() ended without an answer and has to be repeated first.
                E_TIMEOUT    shared: another rank has not called it.
                E_SWAP_NOSPC durable steps keep what is on swap, and there is no room for another version
                             of it: a part may be written.

        >>> plain = torch.nn.Linear(4, 2)
        >>> theirs = torch.optim.AdamW(plain.parameters(), lr=0.5)
        >>> plain(inputs).sum().backward()
        >>> theirs.step()
        >>> opt = forebay.attach(model, forebay.AdamW())
        >>> opt.load_state_dict(theirs.state_dict())
        >>> opt.param_groups[0]["lr"], int(opt.read_state("weight")["step"])
        (0.5, 1)
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        _load(self, lambda: _Loaded(self, state_dict))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def save_state(self, path: str | PathLike[str]) -> None:
        """Writes what state_dict() has, of all ranks, into one safetensors file, piece by piece: on every
        rank, between two steps. Rank 0 writes; all return when the file is whole. Sharded it is a collective
        of the process group, with the limits of load_state_dict(). It can be loaded with any number of
        ranks, shared and sharded.

        Until the file is whole it is .forebay-*.part in the same folder, and remains if the process is
        killed. Then it takes the place of the file of this name.

        Tensors  PARAMETER.STATE in float32, PARAMETER.step; the parameter groups are in the metadata.
        Errors   OSError on rank 0, E_RANK on the others: it cannot be written.
                 E_OPTION     path is a folder, a device or the like.
                 E_NOT_READY  a load of states did not end.

        >>> import tempfile
        >>> opt = forebay.attach(model)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     opt.save_state(f"{folder}/optimizer.safetensors")
        ...     opt.load_state(f"{folder}/optimizer.safetensors")
        """
        attachment = self._live()
        self._send_writes()

        def write() -> None:
            self._refuse_half_loaded("save_state()")
            # each rank brings its node's states
            if self._engine.rank == 0 or self._engine.is_over_nodes:
                _write_file(self, attachment, os.fsdecode(path))

        together(self, write, "save_state()")

    def load_state(self, path: str | PathLike[str]) -> None:
        """As load_state_dict(), of a regular file of save_state(), which is read piece by piece, once to check
        it and once to write it: on every rank, the same file.

        Errors  those of load_state_dict(); E_OPTION where the file cannot be read; E_LAYOUT where it has
                other parameters.

        >>> opt = forebay.attach(model)
        >>> opt.load_state("no/such/file")
        Traceback (most recent call last):
        forebay.UsageError: error[E_OPTION]: load_state('no/such/file'): [Errno 2] No such file or directory: 'no/such/file'
        hint: a file that opt.save_state(path) has written
        """
        with ExitStack() as stack:
            _load(self, lambda: _Loaded(self, _read_file(self, os.fsdecode(path), stack)))

    def _send_writes(self, *, alone: bool = False) -> None:
        """Makes what this process has written into the parameters the job's: on every rank, or where it is alone."""
        raise NotImplementedError

    def _refuse_half_loaded(self, call: str) -> None:
        """Errors: E_NOT_READY where a load of states did not end, in whichever process; what _live() raises."""
        self._live()
        if self._may_be_half_loaded and _is_half_loaded(self):
            raise usage_error(
                "E_NOT_READY",
                f"{call}: a load_state_dict() or load_state() of this job did not end, and a part of the "
                "states is loaded",
                "load the same states again, on every rank; or forebay jobs --delete NAME",
            )
        self._may_be_half_loaded = False


# --------------------------------------------------------------------------------------------- reading


def _parameter(opt: StateDicts, member: Member) -> Parameter:
    return opt._plan.by_name[member.name]


def _has_master(member: Member) -> bool:
    """Whether it has masters that the parameter itself does not give."""
    return member.tensor.dtype != torch.float32


def _names(opt: StateDicts, attachment: Attachment, parameter: Parameter, master: bool) -> list[str]:
    names = state_names(attachment, parameter)
    return [name for name in names if name != "master" or master]


def _updates(opt: StateDicts, member: Member) -> int:
    """How many updates the parameter has had."""
    opt._live()
    return opt._engine.updates_of(member.name)


def _first(opt: StateDicts) -> Member | None:
    """Whose number of updates says that states are being written: the same on every rank."""
    return min(opt._trainable.values(), key=lambda member: member.index, default=None)


def _is_half_loaded(opt: StateDicts) -> bool:
    first = _first(opt)
    return first is not None and _updates(opt, first) == LOADING


def _torch_state(opt: StateDicts, member: Member) -> dict[str, Any]:
    """As torch's optimizer has it. Before its first update the moments are 0: nothing is read."""
    opt._refuse_half_loaded("state_dict() and opt.state")
    opt._send_writes(alone=True)
    attachment, parameter, timeout = opt._live(), _parameter(opt, member), opt._engine.timeout
    updates = _updates(opt, member)
    moments = _names(opt, attachment, parameter, master=False)
    if updates == 0:
        state: dict[str, Any] = {name: _fresh(opt, member, name) for name in moments}
    elif opt._engine.mode == "shared":
        state = read_states(attachment, parameter, timeout)
    else:
        shard, engine = cast("ShardMember", member), cast("ShardedEngine", opt._engine)
        names = _names(opt, attachment, parameter, _has_master(member))
        state = {name: shard.shard.dtensor_of(engine.read_state(shard, name)) for name in names}
    return {**state, "step": step_tensor(updates)}


def _fresh(opt: StateDicts, member: Member, name: str) -> torch.Tensor | None:
    """A moment before the first update, as torch's optimizer begins with it."""
    group = opt.param_groups[_parameter(opt, member).param_group]
    if name == "momentum_buffer" and group["dampening"] != 0:
        return None  # torch's first step does not dampen
    value = float(group["initial_accumulator_value"]) if name == "sum" else 0.0
    if opt._engine.mode == "shared":
        return ZERO.new_full(member.tensor.shape, value)
    shard = cast("ShardMember", member)
    return shard.shard.dtensor_of(ZERO.new_full(shard.local_shape, value))


def _options_of(rule: Optimizer) -> dict[str, Any]:
    """What parameter groups of torch's optimizer of this name have beside hyper-parameters."""
    kind = type(rule).__name__
    if kind not in GROUP_OPTIONS:
        return {}
    return {key: getattr(rule, key) for key in (*GROUP_OPTIONS[kind], *COMMON_OPTIONS)}


# --------------------------------------------------------------------------------------------- loading


class _Loaded:
    """A state_dict that was checked against the optimizer: nothing of it is refused for what it is."""

    def __init__(self, opt: StateDicts, state_dict: Mapping[str, Any]) -> None:
        self._opt, self._attachment = opt, opt._live()
        opt._engine.refuse_while_under_way("load_state_dict()")
        if not {"state", "param_groups"} <= set(state_dict):
            raise usage_error(
                "E_LAYOUT",
                f"load_state_dict() of a dict with the keys {sorted(map(str, state_dict))}",
                'what state_dict() of an optimizer returns: {"state": ..., "param_groups": ...}',
            )
        self.groups = _groups_of(opt, state_dict["param_groups"])
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        tensors = chain.from_iterable(group["params"] for group in opt.param_groups)
        tensor_of: dict[Any, torch.Tensor] = dict(zip(saved, tensors))
        members = opt._trainable
        self.steps = {member.name: 0 for member in members.values()}
        # Parameter -> state -> whole tensors of the parameter's shape, or this rank's shard.
        self.values: dict[str, dict[str, torch.Tensor | FileTensor]] = {name: {} for name in self.steps}
        for key, entry in state_dict["state"].items():
            member = members.get(tensor_of[key]) if key in tensor_of else None
            if member is not None:
                self._take(member, entry)
            elif entry and not (key in tensor_of and tensor_of[key].numel() == 0):
                raise usage_error(
                    "E_LAYOUT",
                    f"load_state_dict(): a state of parameter {key!r}, which "
                    + ("is frozen" if key in tensor_of else "is in no parameter group"),
                    "load what an optimizer over the same parameters has saved",
                )
        # Found before any rank writes: sharded, each rank sets the count that the others read here.
        # moments may be loaded before their count
        half = opt._may_be_half_loaded and _is_half_loaded(opt)
        fresh = [member for member in members.values() if self.steps[member.name] == 0 and not half]
        self._stay = {member.name for member in fresh if _updates(opt, member) == 0}

    def _take(self, member: Member, entry: Mapping[str, Any]) -> None:
        parameter = _parameter(self._opt, member)
        moments = _names(self._opt, self._attachment, parameter, master=False)
        known = {*moments, "step"} | ({"master"} if _has_master(member) else set())
        given = {name: value for name, value in entry.items() if value is not None}
        unknown = sorted(set(map(str, given)) - known)
        missing = [name for name in moments if name not in given] if given.keys() - {"step"} else []
        if unknown or missing:
            raise usage_error(
                "E_OPTION",
                f"load_state_dict(): the state of parameter {member.name} has "
                f"{', '.join(map(str, given)) or 'nothing'}; {type(self._opt._rule).__name__} has "
                f"{', '.join(moments)}",
                "load it into the optimizer that it was saved from (amsgrad and momentum among it)",
            )
        self.steps[member.name] = step = _step_of(member, given)
        for name, value in given.items():
            if name == "step" or (step == 0 and name == "master"):
                continue
            tensor = _tensor_of(member, name, value)
            if step > 0:
                self._check(member, name, tensor)
                self.values[member.name][name] = tensor
            else:
                self._check_fresh(member, name, tensor)

    def _check(self, member: Member, name: str, tensor: torch.Tensor | FileTensor) -> None:
        is_square = name in ("exp_avg_sq", "max_exp_avg_sq", "sum")
        for piece in _pieces(_flat(tensor)):
            least, most = torch.aminmax(piece)
            is_finite = bool(torch.isfinite(least) & torch.isfinite(most))
            if not is_finite or (is_square and least < 0):
                raise usage_error(
                    "E_NONFINITE",
                    f"load_state_dict(): {name} of parameter {member.name} has NaN or infinite values"
                    + (" or some below 0" if is_square else ""),
                    "check the checkpoint; nothing was written",
                )

    def _check_fresh(self, member: Member, name: str, tensor: torch.Tensor | FileTensor) -> None:
        """Errors: E_OPTION if a state of a parameter at step 0 is not the value that the first update begins with."""
        number = _parameter(self._opt, member).param_group
        begin = self.groups[number].get("initial_accumulator_value", 0.0) if name == "sum" else 0.0
        if not all(bool((piece == float(begin)).all()) for piece in _pieces(_flat(tensor))):
            raise usage_error(
                "E_OPTION",
                f"load_state_dict(): {name} of parameter {member.name} is not {float(begin)}, and its "
                "step is 0",
                'give "step", how many updates made it',
            )

    def digest(self) -> str:
        """What every rank has to pass alike."""
        groups = [{k: v for k, v in g.items() if k in self._opt._rule.hyper_parameters} for g in self.groups]
        return json.dumps([self.steps if self._opt._engine.mode == "shared" else 0, groups], default=float)

    def write(self) -> None:
        """This rank's part, after the mark that states are being written."""
        engine, attachment = self._opt._engine, self._attachment
        shared, marked = engine.mode == "shared", _first(self._opt)
        if marked is None or (shared and attachment.rank != 0):
            return
        attachment.write_updates(marked.index, LOADING, engine.timeout)
        for member in self._opt._trainable.values():
            values, step = self.values[member.name], self.steps[member.name]
            if member.name in self._stay:
                continue
            parameter = _parameter(self._opt, member)
            for name in _names(self._opt, attachment, parameter, "master" in values):
                flat = _flat(values[name]) if name in values else None
                places = (
                    [(parameter.group, parameter.offset, _or_zeros(flat, parameter.elems))]
                    if shared
                    else _places_of_shard(self._opt, cast("ShardMember", member), flat)
                )
                for partition, first, part in places:
                    _write(attachment, (partition, first), name, part, engine.timeout)
            if member is not marked:
                attachment.write_updates(member.index, step, engine.timeout)
        if shared:
            self.end()

    def end(self) -> None:
        """The number of updates in place of the mark."""
        if (marked := _first(self._opt)) is not None:
            self._attachment.write_updates(marked.index, self.steps[marked.name], self._opt._engine.timeout)


def _groups_of(opt: StateDicts, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the parameter groups without their parameters. Errors: E_LAYOUT, E_OPTION."""
    own = [len(group["params"]) for group in opt.param_groups]
    given = [len(group["params"]) for group in saved]
    if own != given:
        raise usage_error(
            "E_LAYOUT",
            f"load_state_dict() of parameter groups of {given} parameters; the optimizer's have {own}",
            "attach with the param_groups of the optimizer that was saved",
        )
    rule = opt._rule
    fixed = {"maximize": False, "differentiable": False, **_options_of(rule)}
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(saved):
        for key in sorted(FIXED_OPTIONS & set(group)):
            wanted = fixed.get(key, False)
            if bool(group[key]) != bool(wanted):
                raise usage_error(
                    "E_OPTION",
                    f"load_state_dict(): parameter group {number} has {key}={group[key]!r}, and the "
                    f"attached {type(rule).__name__} {wanted!r}",
                    "attach the optimizer that was saved, or train on without this option",
                )
        missing = [name for name in rule.hyper_parameters if name not in group]
        if missing:
            raise usage_error(
                "E_OPTION",
                f"load_state_dict(): parameter group {number} has no {missing[0]}, which "
                f"{type(rule).__name__} has",
                "load what an optimizer of the same kind has saved",
            )
        groups.append({k: copy.deepcopy(v) for k, v in group.items() if k != "params"})
    rule._rows(groups)
    for group in groups:  # what attach() checks of its optimizer
        dataclasses.replace(rule, params=None, **{name: group[name] for name in rule.hyper_parameters})
    return groups


def _step_of(member: Member, given: Mapping[str, Any]) -> int:
    """torch's SGD stores no step count. A momentum buffer means at least one update; the exact count changes nothing, so 1
    stands for it."""
    step = given.get("step", 1 if "momentum_buffer" in given else 0)
    try:
        count = float(step)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        count = math.nan
    if not (0 <= count < LOADING and count.is_integer()):
        raise usage_error(
            "E_OPTION",
            f"load_state_dict(): step of parameter {member.name} is {step!r}",
            "a whole number from 0 on",
        )
    return int(count)


def _tensor_of(member: Member, name: str, value: Any) -> torch.Tensor | FileTensor:
    """Whole, or this rank's shard out of a DTensor with the parameter's placements."""
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        own: Any = member.tensor
        if getattr(own, "placements", None) != value.placements or own.shape != value.shape:
            raise usage_error(
                "E_LAYOUT",
                f"load_state_dict(): {name} of parameter {member.name} is a DTensor of "
                f"{list(value.shape)} placed {value.placements}; the parameter is "
                f"{list(own.shape)} placed {getattr(own, 'placements', 'nowhere')}",
                "value.full_tensor() of it, or redistribute() it",
            )
        return cast(torch.Tensor, value.to_local())
    is_tensor = isinstance(value, (torch.Tensor, FileTensor))
    if not is_tensor or value.shape != member.tensor.shape:
        what = list(value.shape) if is_tensor else f"a {type(value).__name__}"
        raise usage_error(
            "E_LAYOUT",
            f"load_state_dict(): {name} of parameter {member.name} is {what}, and the parameter "
            f"{list(member.tensor.shape)}",
            "build the model as the one whose optimizer was saved",
        )
    return cast("torch.Tensor | FileTensor", value)


def _flat(tensor: torch.Tensor | FileTensor) -> torch.Tensor | FileTensor:
    return tensor.detach().reshape(-1) if isinstance(tensor, torch.Tensor) else tensor


def _or_zeros(flat: Flat | None, elems: int) -> Flat:
    """None: zeros, which take no memory."""
    return ZERO.expand(elems) if flat is None else flat


def _pieces(flat: Flat) -> Iterator[torch.Tensor]:
    for begin in range(0, len(flat), PIECE_ELEMS):
        yield flat[begin : begin + PIECE_ELEMS]


def _places_of_shard(
    opt: StateDicts, member: ShardMember, flat: Flat | None
) -> Iterator[tuple[int, int, Flat]]:
    """(partition, first element, values) of what this rank owns of a parameter.

    flat  Of the whole parameter or of this rank's shard.
    """
    engine = cast("ShardedEngine", opt._engine)
    whole, at = flat is not None and len(flat) == member.tensor.numel(), 0
    for box in member.boxes if member.is_owned else ():
        source = engine.plan.layout.places[member.name, box]
        part = _or_zeros(flat, source.elems)
        if flat is not None:
            part = BoxOf(flat, box if whole else (at, source.elems, 0, 1))
        at += source.elems
        yield source.partition, source.first, part


def _write(
    attachment: Attachment, place: tuple[int, int], name: str, flat: Flat, timeout: float
) -> None:
    partition, first = place
    for piece in _pieces(flat):
        values = piece.to("cpu", torch.float32).contiguous()
        attachment.write_state(partition, first, name, values, timeout)
        first += len(values)


def _load(opt: StateDicts, make: Callable[[], _Loaded]) -> None:
    """Errors: of any rank, on all of them; before the first write, but for what the daemon meets."""
    opt._send_writes()
    loaded = together(opt, make, "load_state_dict()", lambda one: one.digest())
    engine = opt._engine
    if engine.mode == "shared":
        # releases leases of a forward without a backward yet: a write waits for leases
        engine.release_all()
    with without_interrupts():
        opt._may_be_half_loaded = True
        together(opt, loaded.write, "load_state_dict()")
        if engine.mode == "sharded":  # every rank has written its part
            loaded.end()
        opt._may_be_half_loaded = False
        for group, new in zip(opt.param_groups, loaded.groups):
            group.update(new)
        engine.after_step()  # a master has set its parameter
        if any("master" in values for values in loaded.values.values()):
            for member in opt._members:
                torch.autograd.graph.increment_version(member.tensor)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """SIGINT that comes meanwhile comes at its end. Other threads than the main one get none."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    kept: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: kept.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if kept:
            signal.raise_signal(signal.SIGINT)


# ------------------------------------------------------------------------------------------- the ranks


def together(
    opt: StateDicts,
    work: Callable[[], T],
    call: str,
    digest: Callable[[T], str] = lambda done: "",
    differ: tuple[str, str] = ("pass different steps or parameter groups", "load the same on every rank"),
) -> T:
    """Calls work() on every rank of the job; what one of them raises all do.

    digest  Of what it returned: the same on every rank.
    differ  What the ranks do where it is not, and a hint.

    Errors  E_TIMEOUT where a rank does not call it; E_OPTION where the digests differ.
    """
    met: BaseException | None = None
    report = ""
    try:
        done = work()
        report = digest(done)
    except Exception as error:
        met = error
    reports = _exchange(opt, ("1" if met else "0") + (str(met) if met else report), call)
    if met is not None:
        raise met
    for rank, text in enumerate(reports):
        if text[:1] == "1":
            raise usage_error(
                "E_RANK", f"{call} failed on rank {rank}: {text[1:]}", "see what that rank raises"
            )
        if text != reports[0]:
            raise usage_error(
                "E_OPTION",
                f"{call}: ranks 0 and {rank} {differ[0]}",
                differ[1],
            )
    return done


def _exchange(opt: StateDicts, text: str, call: str) -> list[str]:
    if opt._engine.mode == "sharded":
        from ..sharded import collectives

        return collectives.gather(text)
    own = text.encode()
    if len(own) > REPORT_BYTES_MAX:
        mark = hashlib.sha256(own).hexdigest() if text[0] == "0" else "..."
        own = own[: REPORT_BYTES_MAX - 80].decode(errors="ignore").encode() + mark.encode()
    try:
        answers = opt._live().exchange(own, opt._engine.timeout)
    except ForebayError as error:
        if error.code != "E_TIMEOUT":
            raise
        raise make_error(
            ForebayTimeoutError,
            "E_TIMEOUT",
            f"{call}: another rank has not called it within {opt._engine.timeout} s",
            "call it on every rank of the job",
        ) from None
    return [bytes(one).decode(errors="replace") for one in answers]


# -------------------------------------------------------------------------------------------- the file


def _params_of(opt: StateDicts) -> list[tuple[str, list[int], int]]:
    """Name, shape and parameter group of every trainable parameter of the job."""
    if opt._engine.mode == "sharded":
        params = cast("ShardedEngine", opt._engine).plan.layout.params
        return [(name, shape, number) for name, shape, _, number, trainable in params if trainable]
    named = opt._plan.named
    return [(p.name, list(p.tensor.shape), p.param_group) for p in named if p.trainable]


def _file_states(opt: StateDicts, attachment: Attachment) -> list[str]:
    member = next(iter(opt._trainable.values()), None)
    with_master = member is not None and _has_master(member)
    return [name for name in attachment.states if name != "master" or with_master]


def _write_file(opt: StateDicts, attachment: Attachment, path: str) -> None:
    params, states, engine = _params_of(opt), _file_states(opt, attachment), opt._engine
    groups: list[dict[str, Any]] = []
    options = _options_of(opt._rule)
    for number, group in enumerate(opt.param_groups):
        names = [name for name, _, of in params if of == number]
        plain = {key: value for key, value in {**options, **group}.items() if key != "params"}
        for key, value in plain.items():
            try:
                json.dumps({key: value}, default=float)
            except (RecursionError, RuntimeError, TypeError, ValueError) as error:
                raise usage_error(
                    "E_OPTION",
                    f"save_state(): parameter group {number} has {key!r}, which JSON cannot hold: {error}",
                    "numbers, strings, lists and dicts of them alone",
                ) from None
        groups.append({**plain, "params": names})
    tensors: dict[str, list[int]] = {}
    for name, shape, _ in params:
        tensors.update({f"{name}.{state}": shape for state in states})
        tensors[f"{name}.step"] = []

    def values() -> Iterator[torch.Tensor]:
        for name, shape, _ in params:
            elems, updates = torch.Size(shape).numel(), 0
            for state in states:
                for begin in range(0, elems, PIECE_ELEMS):
                    count = min(PIECE_ELEMS, elems - begin)
                    piece, updates = engine.read_elements(name, state, range(begin, begin + count))
                    yield piece
            yield step_tensor(updates)

    described = json.dumps({"optimizer": type(opt._rule).__name__, "param_groups": groups}, default=float)
    pieces = values()
    try:
        if engine.rank == 0:
            state_file.write(path, tensors, {"format": "pt", "forebay": described}, pieces)
    finally:
        for _ in pieces if engine.is_over_nodes else ():
            pass  # takes part in the collective of each piece


def _read_file(opt: StateDicts, path: str, stack: ExitStack) -> dict[str, Any]:
    """The file as a state_dict of FileTensors, valid until the stack is closed, for this rank's parameters."""
    tensors, metadata = state_file.read(path, stack)
    try:
        described = copy.deepcopy(json.loads(metadata["forebay"]))  # as deep as load_state_dict() copies
        kind, groups = described["optimizer"], described["param_groups"]
        number_of = {name: at for at, group in enumerate(groups) for name in group["params"]}
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise state_file.refusal(path, f"it does not say whose states it has: {error!r}") from None
    if kind != type(opt._rule).__name__:
        raise usage_error(
            "E_OPTION",
            f"load_state({path!r}): the file has the states of {kind}, and the attached optimizer is "
            f"{type(opt._rule).__name__}",
            "attach the optimizer that was saved",
        )
    params = _params_of(opt)
    missing = [name for name, _, _ in params if name not in number_of]
    extra = sorted(map(str, set(number_of) - {name for name, _, _ in params}))
    moved = [name for name, _, number in params if number_of.get(name, number) != number]
    if missing or extra or moved or len(groups) != len(opt.param_groups):
        raise usage_error(
            "E_LAYOUT",
            f"load_state({path!r}): the file has {len(number_of)} parameters in {len(groups)} groups, "
            f"the job {len(params)} in {len(opt.param_groups)}; missing: {missing[:3]}, not in the model: "
            f"{extra[:3]}, in another group: {moved[:3]}",
            "build the model and param_groups as those whose states were saved",
        )
    states = _file_states(opt, opt._live())
    entries: dict[int, dict[str, Any]] = {}
    indices: list[list[int]] = []
    members = {id(member.tensor): member for member in opt._members}
    for group in opt.param_groups:
        indices.append([])
        for tensor in group["params"]:
            index = sum(map(len, indices))
            indices[-1].append(index)
            member = members.get(id(tensor))  # None: the tensor has no elements
            if member is None or not member.trainable:
                continue
            names = [f"{member.name}.{state}" for state in (*states, "step")]
            absent = [name for name in names if name not in tensors]
            if absent:
                raise state_file.refusal(path, f"it has no {absent[0]}")
            entries[index] = dict(zip((*states, "step"), (tensors[name] for name in names)))
            entries[index]["step"] = _step_of(member, {"step": tensors[names[-1]][:2]})
            _begin_with_sum(opt, group, entries[index])
    return {
        "state": entries,
        "param_groups": [
            {**group, "params": params_of} for group, params_of in zip(groups, indices)
        ],
    }


def _begin_with_sum(opt: StateDicts, group: Mapping[str, Any], entry: dict[str, Any]) -> None:
    """Adagrad's sum before the first update is 0 in the daemon and in its files."""
    if "sum" in entry and entry["step"] == 0:
        value = float(group["initial_accumulator_value"])
        entry["sum"] = ZERO.new_full((), value).expand(entry["sum"].shape)

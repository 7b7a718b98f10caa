# SPDX-License-Identifier: Apache-2.0
"""attach(): from a model to windows, hooks and an optimizer."""

from __future__ import annotations

import faulthandler
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _report, options
from ._adopt import Groups
from ._buffers import EXTRA_STATE_BYTES_MAX, HEADER, Buffers
from ._engine import Engine, Group, WindowMember, windows_of
from ._guards import Guards, is_fully_sharded, refuse_unsupported_modules
from ._hooks import drop_empty_gradients, install
from ._memory import return_free_memory
from ._metrics import Node
from ._optimizer import ForebayOptimizer
from ._plan import DTYPE_NAMES, FORMATS, Parameter, Plan, check_finite, make_plan, part_of
from ._world import World
from .errors import ForebayError, ForebayTimeoutError, UnavailableError, unsupported, usage_error
from .optimizers import RULE_OPTIONS, TORCH_IMPLEMENTATIONS, TORCH_OPTIONS, Optimizer
from .states.reader import Reader

if TYPE_CHECKING:
    from ._core import Attachment
    from .options import Durability, Memory, Sharding
    from .sharded.engine import ShardMember
    from .sharded.fsdp import Unit
    from .sharded.initial import Initial
    from .sharded.nodes import Nodes

_trained_here: set[tuple[str, str]] = set()  # socket and job
PARAM_GROUPS_MAX = 4096  # limit of the wire
# Keys that a parameter group may have besides the optimizer's hyper-parameters. Schedulers set "initial_lr".
KNOWN_OPTIONS = {
    *("params", "name", "initial_lr"), *TORCH_IMPLEMENTATIONS, *TORCH_OPTIONS, *RULE_OPTIONS
}  # fmt: skip
ROOM_UNIT_BYTES = 64 << 10  # of extra_state

TorchGroups = list[dict[str, Any]]
Params = list[tuple[str, list[int], int, int, bool]]
Layout = dict[str, Any]  # options of _core.attach that describe the model


@dataclass(frozen=True)
class Request:
    """What forebay.attach was asked for, in either mode."""

    job: str
    world: World
    socket: str
    param_groups: Iterable[Any] | None
    timeout: float
    run: str
    resume: bool
    passes: int
    initial: Any
    durability: Durability
    memory: Memory
    sharding: Sharding

    @property
    def rank(self) -> int:
        return self.world.rank

    def send(
        self,
        layout: Layout,
        room_bytes: int,
        nodes: Nodes | None = None,
        has_replicas: bool = False,
        **others: Any,
    ) -> Attachment:
        """room_bytes  Of extra_state. others: what not every attachment asks for."""
        from . import _core

        own = range(self.world.world_size) if nodes is None else nodes.own
        if nodes is not None:
            others["nodes"] = nodes.world_ranks, own.start, has_replicas, nodes.all_gather
        named = {
            "socket": self.socket,
            "job": self.job,
            "rank": self.rank - own.start,
            "world_size": len(own),
            "timeout": self.timeout,
            "run": self.run,
            "resume": self.resume,
            "accumulate": self.passes > 1,
            "extra_state_bytes": room_bytes + HEADER.size,
        }
        return _core.attach(named | layout | self.memory._sent() | self.durability._sent() | others)


def attach(model: nn.Module, optimizer: Optimizer, request: Request) -> ForebayOptimizer:
    """See forebay.attach."""
    plan, torch_groups = _plan_of(model, optimizer, request.param_groups)
    prepared = _Prepared(model, optimizer, torch_groups, request.memory.extra_state_bytes)
    _print_stack_at_segv()
    layout = _layout(plan, optimizer, _params_of(plan))
    attachment = request.send(layout, prepared.room_bytes)
    undo = _Undo(attachment=attachment)
    try:
        groups = _groups(plan, attachment)
        if attachment.writes_initial:
            _write_initial(plan, attachment, groups, request.timeout)
        windows = windows_of(plan, attachment)
        attachment.allow_weight_writes()
        _bind(plan, groups, windows, undo)
        engine = Engine(attachment, groups, request.timeout)
        engine.world_size = request.world.world_size
        engine.node = Node(request.socket, request.job, request.rank)
        engine.world = request.world
        undo.guards = Guards(model, plan)
        undo.handles = install(engine, plan.hook_points) + drop_empty_gradients(plan.named)
        opt = prepared.optimizer(plan, engine, attachment, undo)
    except BaseException:
        undo.run()
        raise
    undo.private.clear()  # the last reference to the private values
    return_free_memory()
    return opt


def refuse_inference_mode() -> None:
    """Errors: E_UNSUPPORTED."""
    if torch.is_inference_mode_enabled():
        raise unsupported(
            "attach within torch.inference_mode(): what it makes of the parameters could not be trained",
            "attach outside of it",
        )


def say_what_goes_on(request: Request, opt: ForebayOptimizer) -> None:
    """Of a job that has steps. A second training of one process has another job as a rule."""
    if opt.committed_step > 0:
        if request.rank == 0:
            _report.say(f"job {request.job} goes on behind step {opt.committed_step}, with its weights and states")
        went_back_from = opt._live().went_back_from
        if went_back_from > 0 and request.rank == 0:
            warnings.warn(
                f"job {request.job} went back from step {went_back_from} to step {opt.committed_step}, the newest that "
                "all its nodes have: the daemon of one has lost what came later, in a power cut or because it was "
                'killed and its memory with it. With durability="step" the last step alone can be lost so',
                stacklevel=3,
            )
        if (request.socket, request.job) in _trained_here:
            warnings.warn(
                f"this process has trained job {request.job} before, and goes on with its weights, states and step "
                f"{opt.committed_step} in the place of the model's own: another training needs another name, as "
                f'forebay.attach(..., job="{request.job}-2")',
                stacklevel=3,
            )
    _trained_here.add((request.socket, request.job))


def mode_of(
    model: nn.Module, mode: str | None, sharding: Sharding, memory: Memory, initial: Any
) -> str:
    """"shared" or "sharded".

    Errors  E_OPTION  the arguments contradict each other.
    """
    if mode not in (None, "shared", "sharded"):
        raise usage_error(
            "E_OPTION", f"mode is {mode!r}", 'mode="shared", mode="sharded", or leave it out'
        )
    given = [name for name, value in sharding._of_fully_shard().items() if value is not None]
    if is_fully_sharded(model):
        if mode == "shared":
            raise usage_error(
                "E_OPTION",
                'mode="shared" for a model that fully_shard() was called on',
                "leave mode out, or attach the plain model",
            )
        if given:
            raise usage_error(
                "E_OPTION",
                f"{given[0]} for a model that fully_shard() was called on already",
                "pass it to fully_shard()",
            )
        return "sharded"
    others = {
        "name_prefix": bool(sharding.name_prefix),
        "prefetch_bytes": memory.prefetch_bytes != 0,
        "activation_bytes": memory.activation_bytes != 0,
        "initial": initial is not None,
    }
    given += [name for name, is_given in others.items() if is_given]
    if mode is None and _is_elsewhere(model):
        return "sharded"
    if given and mode != "sharded":
        raise usage_error(
            "E_OPTION",
            f'{given[0]} without mode="sharded"',
            f'mode="sharded", {options._written(given[0])}',
        )
    return mode or "shared"


def _is_elsewhere(model: nn.Module) -> bool:
    """On the meta device or a GPU."""
    is_module = isinstance(model, nn.Module)
    return is_module and any(one.device.type != "cpu" for one in model.parameters())


def shard(model: nn.Module, optimizer: Optimizer, request: Request) -> Request:
    """fully_shard() on a plain model. Groups of the parameters that it had name those that it has now."""
    if is_fully_sharded(model):
        return request
    from .sharded import shard_plan

    groups = optimizer.params if request.param_groups is None else request.param_groups
    if groups is not None and not isinstance(groups, Groups):
        groups = list(groups)  # copied before their parameters are replaced
    before = dict(model.named_parameters(remove_duplicate=False))
    shard_plan.shard(model, **request.sharding._of_fully_shard())
    if groups is None:
        return request
    after = dict(model.named_parameters(remove_duplicate=False))
    moved = {id(tensor): after[name] for name, tensor in before.items() if name in after}

    def follow(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return moved.get(id(item), item)
        if isinstance(item, dict) and "params" in item:
            params = item["params"]
            one = isinstance(params, torch.Tensor)
            moved_params = follow(params) if one else [follow(tensor) for tensor in params]
            if isinstance(groups, Groups):
                item["params"] = moved_params
                return item
            return {**item, "params": moved_params}
        return follow(item[1]) if isinstance(item, tuple) else item

    return replace(request, param_groups=type(groups)(follow(group) for group in groups))


def attach_sharded(model: nn.Module, optimizer: Optimizer, request: Request) -> ForebayOptimizer:
    """See forebay.attach, of a model that fully_shard() was called on."""
    from . import _activations, _core
    from .sharded import collectives, fsdp, shard_plan
    from .sharded.costs import costs, gathered, large_roots
    from .sharded.engine import ShardedEngine, ShardedGuards, bind, install as install_sharded
    from .sharded.initial import Initial
    from .sharded.nodes import find as find_nodes, run_of_all

    name_prefix = request.sharding.name_prefix
    prefetch_bytes = request.memory.prefetch_bytes

    def check() -> tuple[list[Unit], Initial, list[Parameter], TorchGroups]:
        _check_arguments(model, optimizer)
        refuse_unsupported_modules(model)
        units = fsdp.units_of(model, name_prefix)
        shard_plan.refuse_unusable(units, model)
        source = Initial(model, units, name_prefix, request.initial)
        parameters = shard_plan.parameters_of(units)
        # Order of model.parameters(), by which torch's optimizer numbers parameters. The units have another order.
        order = {id(tensor): at for at, tensor in enumerate(model.parameters())}
        listed = sorted(parameters, key=lambda parameter: order[id(parameter.tensor)])
        torch_groups = _torch_groups(optimizer, request.param_groups)
        return units, source, parameters, _number_groups(listed, torch_groups)

    units, source, parameters, torch_groups = collectives.together(check)
    collectives.refuse_different("prefetch_bytes", prefetch_bytes)
    request = replace(request, run=run_of_all(request.run))
    nodes = find_nodes(request.socket, request.durability.daemon_wait)
    plan = shard_plan.make_plan(units, parameters, nodes)
    fsdp.ensure_means(units)
    source.compare_generators()
    undo = _Undo(initial=source)
    try:
        source.make_buffers()

        def prepare() -> tuple[_Prepared, Layout]:
            prepared = _Prepared(model, optimizer, torch_groups, request.memory.extra_state_bytes)
            return prepared, _layout(plan, optimizer, plan.layout.params)

        prepared, layout = collectives.together(prepare)

        def send() -> Attachment:
            undo.attachment = request.send(
                layout,
                prepared.room_bytes,
                nodes,
                plan.layout.has_replicas,
                grad_dtype=DTYPE_NAMES[plan.grad_dtype],
                partitions=plan.layout.partitions,
                **request.sharding._sent(),
                **plan.device.options(),
            )
            return undo.attachment

        attachment = collectives.together(send)
        collectives.together(lambda: source.prepare(attachment, plan.layout.index))
        engine = ShardedEngine(
            attachment, plan, request.rank, request.timeout, prefetch_bytes, request.passes
        )
        engine.node = Node(request.socket, request.job, request.rank)
        engine.nodes = nodes
        if request.memory.activation_bytes > 0:
            engine.activations = _activations.Activations(attachment, plan.device)
        if attachment.writes_initial:
            source.write(engine)
        undo.shards = bind(engine)
        engine.after_step()  # what is gathered is not the job's
        undo.guards = ShardedGuards(model, plan, engine)
        undo.handles = install_sharded(engine, model)
        opt = prepared.optimizer(plan, engine, attachment, undo)
        if request.sharding.early_updates:
            engine.announce = opt._announcement()
    except BaseException:
        undo.run()
        raise
    undo.shards.clear()
    return_free_memory()
    if request.rank == 0:
        if not plan.device.is_host:
            _report.say(attachment.device_access)
        try:
            status = _core.status(request.socket)
            takes = _core.plan(request.socket, request.job)
            for line in costs(plan, request.job, status, takes, request.passes > 1):
                _report.say(line)
        except (UnavailableError, ForebayTimeoutError) as error:
            _report.say(f"forebay plan --job {request.job} will say what the job takes, now: {error}")
        staying = fsdp.staying_gathered(model, units)
        _report.say(gathered(units, staying, prefetch_bytes, plan.copies_ahead))
        for line in large_roots(model, units):
            _report.say(line)
    return opt


def attach_reader(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    job: str,
    socket: str,
    param_groups: Iterable[Any] | None,
    timeout: float,
) -> Reader:
    """See forebay.attach_reader."""
    from . import _core

    plan, _ = _plan_of(model, optimizer, param_groups)
    layout = _layout(plan, optimizer, _params_of(plan))
    named = {"socket": socket, "job": job, "timeout": timeout, "reader": True}
    attachment = _core.attach(named | layout)
    return Reader(plan, attachment, timeout)


def _plan_of(
    model: nn.Module, optimizer: Optimizer, param_groups: Iterable[Any] | None
) -> tuple[Plan, TorchGroups]:
    """The plan with each parameter's hyper-parameters numbered. Errors: what cannot be attached."""
    _check_arguments(model, optimizer)
    torch_groups = _torch_groups(optimizer, param_groups)
    others = _others(model, torch_groups)
    refuse_unsupported_modules(model, others)
    plan = make_plan(model, others)
    return plan, _number_groups(plan.named, torch_groups)


def _others(model: nn.Module, torch_groups: TorchGroups) -> dict[str, torch.Tensor]:
    """Parameters that the optimizer has and the model has not (those of a loss), named by their places."""
    seen = {id(tensor) for tensor in model.parameters()}
    found = {}
    for number, group in enumerate(torch_groups):
        for at, tensor in enumerate(group["params"]):
            is_leaf = isinstance(tensor, torch.Tensor) and tensor.is_leaf
            if is_leaf and id(tensor) not in seen and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
                seen.add(id(tensor))
                found[f"optimizer[{number}][{at}]"] = tensor
    return found


def _number_groups(parameters: Sequence[Parameter], torch_groups: TorchGroups) -> TorchGroups:
    """Each parameter gets the number of its group; without groups, one group has all parameters."""
    torch_groups = torch_groups or [{"params": [parameter.tensor for parameter in parameters]}]
    _assign_param_groups(parameters, torch_groups)
    return torch_groups


def _check_arguments(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise usage_error(
            "E_OPTION",
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            "forebay.attach(model, forebay.AdamW(lr=...)): the model itself, not its parameters",
        )
    if not isinstance(optimizer, Optimizer):
        raise usage_error(
            "E_OPTION",
            f"the optimizer is {optimizer!r}, none of Forebay's or torch's",
            "forebay.attach(model, torch.optim.AdamW(model.parameters(), lr=...)), or forebay.AdamW(lr=...), "
            "Adam, Adagrad, Lion, SGD, Lamb",
        )


def _params_of(plan: Plan) -> Params:
    return [
        (p.name, _shape_of(p, plan.dtype), p.group, p.param_group, p.trainable)
        for p in plan.parameters
    ]


def _shape_of(parameter: Parameter, dtype: torch.dtype) -> list[int]:
    """In the layout, which has one type."""
    same = parameter.tensor.dtype == dtype
    return list(parameter.tensor.shape) if same else [parameter.elems]


def _layout(plan: Plan, optimizer: Optimizer, params: Params) -> Layout:
    """Values that describe the model to the daemon."""
    return {
        "dtype": DTYPE_NAMES[plan.dtype],
        "optimizer": optimizer.name,
        "format": _format(optimizer, plan),
        "seed": optimizer.seed,
        "params": params,
        "group_names": plan.group_names,
    }


class _Undo:
    """What a failed attach takes back."""

    def __init__(
        self, attachment: Attachment | None = None, initial: Initial | None = None
    ) -> None:
        self.attachment, self._initial = attachment, initial
        self.private: list[tuple[Parameter, torch.Tensor]] = []
        self.shards: list[tuple[ShardMember, torch.Tensor]] = []
        self.guards: Guards | None = None
        self.handles: list[Any] = []

    def run(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.guards is not None:
            self.guards.remove()
        for parameter, values in self.private:
            parameter.tensor.data = values
        for member, padded in self.shards:
            member.restore(padded)
        if self._initial is not None:
            self._initial.undo()
        try:
            if self.attachment is not None:
                self.attachment.detach()
        except ForebayError:
            pass  # the error of the attach says more


class _Prepared:
    """The parts of an optimizer, checked before the job is created."""

    def __init__(
        self,
        model: nn.Module,
        rule: Optimizer,
        torch_groups: TorchGroups,
        extra_state_bytes: int | None,
    ) -> None:
        self._rule, self._torch_groups = rule, torch_groups
        self._buffers = Buffers(model)
        self.room_bytes = _room_bytes(self._buffers, extra_state_bytes)
        self._defaults = {key: getattr(rule, key) for key in rule.hyper_parameters}
        rule._rows([{**self._defaults, **group} for group in torch_groups])

    def optimizer(
        self, plan: Plan, engine: Engine, attachment: Attachment, undo: _Undo
    ) -> ForebayOptimizer:
        assert undo.guards is not None
        self._buffers.load(attachment.extra_state, attachment.rank0_extra_state)
        return ForebayOptimizer(
            self._torch_groups,
            self._defaults,
            plan=plan,
            engine=engine,
            handles=undo.handles,
            guards=undo.guards,
            rule=self._rule,
            buffers=self._buffers,
            extra_state_bytes=self.room_bytes,
        )


def _room_bytes(buffers: Buffers, wanted: int | None) -> int:
    """The room for extra_state, buffers included. Errors: E_EXTRA_STATE where they have none."""
    needed = buffers.size_bytes()
    room = wanted
    if room is None:  # whole units: slightly different buffers than the job's get E_LAYOUT by name
        units = -(-needed // ROOM_UNIT_BYTES) + 1
        room = min(units * ROOM_UNIT_BYTES, EXTRA_STATE_BYTES_MAX)
    if room > EXTRA_STATE_BYTES_MAX:
        raise usage_error(
            "E_EXTRA_STATE",
            f"extra_state_bytes is {room}, more than {EXTRA_STATE_BYTES_MAX}",
            "keep large data in a file, and its name in extra_state",
        )
    if needed > room:
        more = (
            f"leave extra_state_bytes out, or memory=forebay.Memory(extra_state_bytes=...) of {needed} plus what you "
            f"commit yourself (at most {EXTRA_STATE_BYTES_MAX}), or "
        )
        raise usage_error(
            "E_EXTRA_STATE",
            f"the model's buffers take {needed} bytes of extra_state, which has room for {room}",
            ("" if needed > EXTRA_STATE_BYTES_MAX else more)
            + "register_buffer(..., persistent=False) for what need not come back",
        )
    return room


def _print_stack_at_segv() -> None:
    """The extension explains a write into the read-only weights and then calls the handler that
    was installed before: faulthandler's prints the Python stack."""
    if faulthandler.is_enabled():
        return
    try:
        faulthandler.enable(all_threads=False)
    except (AttributeError, OSError, RuntimeError, ValueError):
        pass  # stderr has no descriptor: the explanation then lacks the stack


def _format(optimizer: Optimizer, plan: Plan) -> str:
    formats = FORMATS[plan.dtype]
    if optimizer.format is not None and optimizer.format not in formats:
        known = sorted({name for names in FORMATS.values() for name in names})
        dtype = DTYPE_NAMES[plan.dtype]
        raise usage_error(
            "E_OPTION",
            (
                f"format {optimizer.format!r} does not support {dtype} parameters"
                if optimizer.format in known
                else f"unknown format {optimizer.format!r}"
            ),
            f"{dtype} parameters take {', '.join(formats)}",
        )
    return optimizer.format or formats[0]


def _torch_groups(optimizer: Optimizer, param_groups: Iterable[Any] | None) -> TorchGroups:
    """The groups in torch's form; a plain list of parameters is one group. None: the script has passed none."""
    wanted = optimizer.params if param_groups is None else param_groups
    hyper_parameters = optimizer.hyper_parameters
    if wanted is None:
        return []
    listed = list(wanted)
    if not listed:
        raise usage_error(
            "E_OPTION", "param_groups is empty", "leave it out for one group of all parameters"
        )
    if not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    groups: TorchGroups = []
    for group in listed:
        if not isinstance(group, dict) or "params" not in group:
            raise usage_error(
                "E_OPTION",
                f'param_groups: group {len(groups)} is no dict with "params"',
                'param_groups=[{"params": [...], "lr": 1e-4}, ...], or a list of parameters',
            )
        params = group["params"]
        unknown = set(group) - KNOWN_OPTIONS - set(hyper_parameters)
        if unknown and not isinstance(wanted, Groups):
            raise usage_error(
                "E_OPTION",
                f"param_groups: unknown option {min(unknown)}",
                f"known: {', '.join(hyper_parameters)}",
            )
        params = [params] if isinstance(params, torch.Tensor) else [_unnamed(one) for one in params]
        if isinstance(wanted, Groups):
            group["params"] = params
        groups.append(group if isinstance(wanted, Groups) else {**group, "params": params})
    return groups


def _unnamed(param: Any) -> Any:
    """Of what model.named_parameters() gives the parameter."""
    return param[1] if isinstance(param, tuple) and len(param) == 2 else param


def _assign_param_groups(
    parameters: Sequence[Parameter], torch_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Numbers each trainable parameter's hyper-parameters."""
    numbers: dict[int, int] = {}
    names = {id(parameter.tensor): parameter.name for parameter in parameters}
    for number, group in enumerate(torch_groups):
        for tensor in group["params"]:
            if id(tensor) not in names:
                is_tensor = isinstance(tensor, torch.Tensor)
                what = f"a tensor of shape {list(tensor.shape)}" if is_tensor else repr(tensor)
                raise usage_error(
                    "E_OPTION",
                    f"param_groups: {what} is no parameter of the model",
                    "list model.parameters() themselves, not copies or views; sharded, a loss that has parameters "
                    "belongs into one module with the model, whose forward calls both",
                )
            if numbers.setdefault(id(tensor), number) != number:
                raise usage_error(
                    "E_OPTION",
                    f"parameter {names[id(tensor)]} is in param groups {numbers[id(tensor)]} "
                    f"and {number}",
                    "list it in one of them",
                )
    for parameter in parameters:
        if not parameter.trainable:
            continue
        if id(parameter.tensor) not in numbers:
            raise usage_error(
                "E_OPTION",
                f"parameter {parameter.name} is in no param group",
                "list it, or requires_grad_(False) before attach",
            )
        parameter.param_group = numbers[id(parameter.tensor)]
    if len(torch_groups) > PARAM_GROUPS_MAX:
        raise usage_error(
            "E_OPTION",
            f"{len(torch_groups)} param groups (at most {PARAM_GROUPS_MAX})",
            "join groups with the same hyper-parameters",
        )


def _groups(plan: Plan, attachment: Attachment) -> list[Group]:
    for parameter, offset in zip(plan.parameters, attachment.param_offsets):
        parameter.offset = offset
    return [Group(number, name) for number, name in enumerate(plan.group_names)]


def _write_initial(
    plan: Plan, attachment: Attachment, groups: Iterable[Group], timeout: float
) -> None:
    """The values of this process become the job's."""
    for group in groups:
        elems = attachment.groups[group.number][1]
        flat = torch.zeros(elems, dtype=plan.dtype, device="cpu")
        for parameter in plan.parameters:
            if parameter.group != group.number:
                continue
            values = parameter.tensor.detach()
            if values.is_floating_point():
                check_finite(parameter.name, values)
            part_of(flat, parameter).copy_(values)
        attachment.write_initial(group.number, flat, timeout)
    attachment.initial_done(timeout)


def _bind(
    plan: Plan, groups: Sequence[Group], windows: Iterable[torch.Tensor], undo: _Undo
) -> None:
    """Every parameter becomes a view of its window."""
    for index, (parameter, window) in enumerate(zip(plan.parameters, windows)):
        undo.private.append((parameter, parameter.tensor.data))
        parameter.tensor.data = window
        group = groups[parameter.group]
        group.members.append(WindowMember(parameter, index, group, window))
        group.expected += parameter.trainable

# SPDX-License-Identifier: Apache-2.0
"""Refusals of what would silently do nothing on an attached model, or move its parameters out of the
daemon's memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ._plan import Parameter, Plan
from .errors import DETACH, UsageError, unsupported

# methods in a guarded module's __dict__
OWN_METHODS = ("_apply", "__deepcopy__", "__prepare_scriptable__")
_owners: dict[int, str] = {}  # id of an attached parameter: its name
_windows: set[int] = set()  # addresses of those that are the daemon's memory themselves
_global_hooks: list[Removable] = []


class Removable(Protocol):
    """A handle that removes a hook."""

    def remove(self) -> None: ...


class InertOnCopy:
    """A hook whose copies do nothing: a pickled attached module is a module of its own. CopyGuard leaves
    the hook out of a deepcopy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return (_make_nothing, ())


def do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """The copy of a hook."""


def _make_nothing() -> Callable[..., None]:
    return do_nothing


def outside_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Keeps torch.compile out of a hook. If the graph may not be broken at the hook, torch's error has the hint."""
    options = {}
    if "reason" in inspect.signature(torch.compiler.disable).parameters:  # torch 2.7
        options["reason"] = (
            "the model is attached by forebay; hint: torch.export.export with strict=False, or of "
            "copy.deepcopy(model); torch.compile without fullgraph=True"
        )
    disabled: Callable[..., None] = torch.compiler.disable(function, **options)  # type: ignore[no-untyped-call]
    return disabled


def late_gradient(name: str, after: str) -> UsageError:
    """The error of a backward whose gradients cannot be added to those that the daemon has."""
    return unsupported(
        f"parameter {name} received a second gradient after {after}",
        "clip and take norms after the last backward of a step; opt.zero_grad() or model.zero_grad() leave "
        "out what was delivered",
    )


class LoadGuard(InertOnCopy):
    """Refuses load_state_dict on a module that holds attached parameters."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        raise unsupported(
            f"load_state_dict on {self.name}: its parameters are attached",
            "load before forebay.attach, or before prepare() of Accelerate (a new job begins with the "
            f"model's values), or {DETACH}",
        )


class ApplyGuard:
    """Replaces module._apply, through which half(), to(), cuda() and share_memory() replace
    parameters. Does not keep the module alive."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self.name = weakref.ref(module), name

    def _live(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a method of a module runs while it lives"
        return module

    def __call__(
        self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        module = self._live()
        for tensor in module.parameters(recurse=recurse):
            if id(tensor) in _owners and not _keeps(function, tensor):
                probe = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
                wanted = function(probe)
                raise unsupported(
                    f"half(), to() or the like on {self.name}: parameter {_owners[id(tensor)]} is "
                    "attached and cannot change its type, device or memory (it is "
                    f"{_kind(tensor)}, wanted is {_kind(wanted)})",
                    f"convert before forebay.attach, or {DETACH}",
                )

        # A function that returns every attached parameter unchanged may still copy it (.to("cpu:0")).
        def others_alone(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if id(tensor) in _owners else function(tensor)

        return type(module)._apply(module, others_alone, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> types.MethodType:
        copy = memo[id(self._live())]
        return types.MethodType(type(copy)._apply, copy)

    def __reduce__(self) -> tuple[Any, ...]:
        module = self._live()
        return (functools.partial, (type(module)._apply, module))


class CopyGuard:
    """Replaces module.__deepcopy__: the copy has no hooks and guards. Does not keep the module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        module = self._module()
        assert module is not None, "a method of a module runs while it lives"
        return _copy_without_hooks(module, memo)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[dict[int, Any]], nn.Module]:
        return functools.partial(_copy_without_hooks, memo[id(self._module())])

    def __reduce__(self) -> tuple[Any, ...]:
        return (functools.partial, (_copy_without_hooks, self._module()))


def _copy_without_hooks(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies as copy.deepcopy does, or as the class itself does."""
    own: Callable[..., nn.Module] | None = getattr(type(module), "__deepcopy__", None)
    if own is not None:
        twin = own(module, memo)
        if twin is not module:
            state = _without_hooks(vars(twin))
            vars(twin).clear()
            vars(twin).update(state)
        return twin
    reduced: Any = module.__reduce_ex__(4)
    make, args, state, *rest = reduced
    if isinstance(state, dict):
        state = _without_hooks(state)
    return copy._reconstruct(module, memo, make, args, state, *rest)  # type: ignore[attr-defined, no-any-return]


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """The __dict__ of a module without what Forebay put into it."""
    tables = {name: value for name, value in state.items() if "_hooks" in name and isinstance(value, dict)}
    ours = {number for table in tables.values() for number, hook in table.items() if _is_ours(hook)}
    for name, table in tables.items():
        tables[name] = type(table)((number, hook) for number, hook in table.items() if number not in ours)
    return {name: value for name, value in {**state, **tables}.items() if name not in OWN_METHODS}


def _is_ours(hook: Any) -> bool:
    """Whether Forebay registered it, or it is the copy of such a hook."""
    hook = getattr(hook, "hook", hook)  # torch wraps those of load_state_dict()
    return isinstance(hook, InertOnCopy) or hook is do_nothing


class ScriptGuard:
    """Replaces module.__prepare_scriptable__, which torch.jit.script calls: it cannot compile hooks."""

    def __init__(self, name: str, hint: str) -> None:
        self.name, self.hint = name, hint

    def __call__(self) -> nn.Module:
        raise unsupported(f"torch.jit.script of {self.name}: it has the hooks of an attached model", self.hint)


def _keeps(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> bool:
    """Whether the function gives each tensor back as it was: its type, kind of memory and values."""
    own = torch.Generator("cpu")  # the script's random numbers continue unchanged
    values = torch.rand(64, generator=own, device="cpu").to(tensor.device, tensor.dtype)
    probe = values.clone()
    wanted = function(probe)
    return (
        wanted.dtype == values.dtype
        and wanted.device == values.device
        and not _is_shared(probe)
        and not wanted.is_pinned()
        and torch.equal(probe, values)
        and torch.equal(wanted, values)
    )


def _is_shared(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}{', shared' * _is_shared(tensor)}"


class _Slot:
    """Where in the model a parameter was at attach."""

    def __init__(self, module: nn.Module, key: str, name: str, tensor: torch.Tensor) -> None:
        self._module, self._key = weakref.ref(module), key
        self.name, self._id = name, id(tensor)

    def tensor(self) -> torch.Tensor | None:
        """The attached parameter, if its module is alive and still has the parameter under its name."""
        module = self._module()
        tensor = None if module is None else module._parameters.get(self._key)
        return tensor if id(tensor) == self._id else None

    def was_changed(self) -> bool:
        """Whether a living module has another parameter under this name, or none."""
        return self._module() is not None and self.tensor() is None


class _ParametrizationSlot(_Slot):
    """The place that a parameter inside a parametrization (weight_norm) had at attach. remove_parametrizations() removes
    the parametrization and its parameters from `owner`, which counts as a change."""

    def __init__(self, owner: nn.Module, module: nn.Module, key: str, name: str, tensor: torch.Tensor) -> None:
        super().__init__(module, key, name, tensor)
        self._owner = weakref.ref(owner)

    def was_changed(self) -> bool:
        owner = self._owner()
        kept = () if owner is None else getattr(owner, "parametrizations", nn.ModuleDict()).values()
        is_there = any(module is self._module() for module in kept)
        return owner is not None and (not is_there or super().was_changed())


class Guards:
    """The guards of one attached model; remove() removes all of them. Keeps nothing of the model
    alive."""

    refuses_load = True
    are_windows = True
    script_hint = (
        "torch.jit.script(copy.deepcopy(model)) compiles a copy with the present values; torch.jit.trace and "
        "torch.export take the attached model"
    )

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.put(model, plan)

    def put(self, model: nn.Module, plan: Plan) -> None:
        """Guards the model, at first or after remove()."""
        self._parameter_ids = [id(parameter.tensor) for parameter in plan.parameters]
        self._handles: list[RemovableHandle] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._slots: list[_Slot] = []
        # Parameters of no module: a loss's, which its optimizer has.
        self._others: list[weakref.ref[torch.Tensor]] = []
        self._windows = [p.tensor.data_ptr() for p in plan.parameters if self.are_windows]
        _windows.update(self._windows)
        self._model = weakref.ref(model)
        if not hasattr(model, "no_sync"):  # DDP's: nothing is sent between ranks before step()
            model.__dict__["no_sync"] = contextlib.nullcontext
        try:
            for parameter in plan.parameters:
                _own(parameter)
            owners = {
                id(one): module
                for module in model.modules()
                if parametrize.is_parametrized(module)
                for one in module.parametrizations.values()  # type: ignore[operator]
            }
            for name, module in model.named_modules():
                if any(id(tensor) in _owners for tensor in module.parameters()):
                    self._guard(name, module, owners.get(id(module)))
            held = {id(tensor) for tensor in model.parameters()}
            self._others = [weakref.ref(p.tensor) for p in plan.parameters if id(p.tensor) not in held]
        except BaseException:
            self.remove()
            raise

    def _guard(self, name: str, module: nn.Module, owner: nn.Module | None) -> None:
        label = f"{type(module).__name__} {name}".rstrip()
        if self.refuses_load:
            self._handles.append(module._register_load_state_dict_pre_hook(LoadGuard(label)))  # type: ignore[no-untyped-call]
        methods = ApplyGuard(module, label), CopyGuard(module), ScriptGuard(label, self.script_hint)
        module.__dict__.update(zip(OWN_METHODS, methods))
        self._modules.append(weakref.ref(module))
        for key, tensor in module._parameters.items():
            if tensor is not None and id(tensor) in _owners:
                place = module, key, f"{name}.{key}".lstrip("."), tensor
                self._slots.append(_Slot(*place) if owner is None else _ParametrizationSlot(owner, *place))

    @property
    def model(self) -> nn.Module | None:
        """The model that is or was guarded, while it lives."""
        return self._model()

    def outside_ids(self) -> set[int]:
        """Ids of the attached parameters that no module of the model has."""
        return {id(tensor) for one in self._others if (tensor := one()) is not None}

    def check_parameters(self) -> None:
        """Errors: E_UNSUPPORTED where a module has another parameter than was attached, which would
        train without the daemon, or not at all."""
        for slot in self._slots:
            if slot.was_changed():
                raise unsupported(
                    f"parameter {slot.name} was replaced or removed after attach",
                    f"put it back, or {DETACH} and attach again as another job",
                )

    def give_private_copies(self) -> None:
        """Every attached parameter whose module still lives gets memory of its own."""
        done = set()
        for tensor in (*(slot.tensor() for slot in self._slots), *(one() for one in self._others)):
            if tensor is not None and id(tensor) not in done:
                done.add(id(tensor))
                tensor.grad = None
                tensor.data = tensor.detach().clone()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for reference in self._modules:
            module = reference()
            if module is not None:
                for method in OWN_METHODS:
                    module.__dict__.pop(method, None)
        model = self._model()
        if model is not None and model.__dict__.get("no_sync") is contextlib.nullcontext:
            del model.__dict__["no_sync"]
        _disown(self._parameter_ids)
        _windows.difference_update(self._windows)
        self._handles, self._modules, self._parameter_ids, self._slots = [], [], [], []


def refuse_unsupported_modules(
    model: nn.Module, others: Mapping[str, torch.Tensor] = types.MappingProxyType({})
) -> None:
    """Errors: E_UNSUPPORTED where a parameter is attached already, or where a module would write
    into its parameters, move them or wait for the hooks that deliver.

    others  Parameters that are in no module of the model.
    """
    for name, tensor in (*model.named_parameters(), *others.items()):
        if id(tensor) in _owners:
            raise unsupported(f"parameter {name} is attached already", DETACH)
    for name, module in model.named_modules():
        wrapper = _wrapper_name(module)
        if wrapper:
            raise unsupported(
                f"{wrapper} {name}".rstrip() + ": it reduces gradients and writes parameters itself",
                "attach the module inside it (the daemon adds up the gradients of all ranks)",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise unsupported(
                f"{type(module).__name__} {name} with max_norm={module.max_norm}: its forward "
                "writes into the parameter",
                "max_norm=None; scale the rows that the forward reads instead",
            )


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether fully_shard() was called on the model or a module in it. By name: importing FSDP takes
    a second."""
    return isinstance(model, nn.Module) and any(
        kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__
    )


def _wrapper_name(module: nn.Module) -> str | None:
    """The name of a torch class that takes the gradients of what it wraps, where this is one. By
    name: importing FSDP takes a second."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in (
            "DistributedDataParallel",
            "FullyShardedDataParallel",
        ):
            return kind.__name__
    return None


def _refuse_wrapper(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    wrapper = _wrapper_name(parent)
    if wrapper is None or child is None:
        return
    for module in child.modules():
        guard = module.__dict__.get("_apply")  # FSDP has replaced the parameters by now
        if isinstance(guard, ApplyGuard):
            raise unsupported(
                f"{wrapper} around {guard.name}, whose parameters are attached: the daemon adds up "
                "the gradients of all ranks",
                f"build the model again and leave {wrapper} out; each rank calls forebay.attach",
            )


class CopyForProcesses:
    """Tensors that go to another process (a DataLoader's worker that is spawned, torch.multiprocessing)
    move into shared memory as they are pickled: of a window the copy does. The memory that the daemon
    owns stays where it is."""

    def __init__(self) -> None:
        # torch's reduce_storage, or what took its place.
        self._before = ForkingPickler._extra_reducers[torch.UntypedStorage]  # type: ignore[attr-defined]
        ForkingPickler.register(torch.UntypedStorage, self._reduce)

    def _reduce(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or storage.data_ptr() not in _windows:
            return self._before(storage)
        copy = storage.clone()  # type: ignore[no-untyped-call]
        reduced = self._before(copy)
        process = get_spawning_popen()
        if process is not None:  # the new process gets the copy's descriptor when it starts
            vars(process).setdefault("forebay_copies", []).append(copy)
        return reduced

    def remove(self) -> None:
        ForkingPickler.register(torch.UntypedStorage, self._before)


def _own(parameter: Parameter) -> None:
    _owners[id(parameter.tensor)] = parameter.name
    if not _global_hooks:
        _global_hooks.append(CopyForProcesses())
        _global_hooks.append(register_optimizer_step_pre_hook(_refuse_other_optimizers))
        _global_hooks.append(register_module_module_registration_hook(_refuse_wrapper))


def _disown(parameter_ids: Iterable[int]) -> None:
    for number in parameter_ids:
        _owners.pop(number, None)
    if not _owners:
        while _global_hooks:
            _global_hooks.pop().remove()


def _refuse_other_optimizers(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if getattr(optimizer, "is_forebay", False):
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) in _owners:
                raise unsupported(
                    f"{type(optimizer).__name__}.step() on parameter {_owners[id(tensor)]}: it is "
                    "attached, the daemon updates it",
                    "step the optimizer that forebay.attach returned",
                )

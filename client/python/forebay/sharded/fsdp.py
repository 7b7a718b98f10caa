# SPDX-License-Identifier: Apache-2.0
"""Everything private of torch's FSDP2 that Forebay uses, in one place; checked at attach. For torch 2.8
to 2.15: docs/internals/torch.md says which versions ran the tests, and what older ones lack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import UsageError, unsupported, usage_error
from .boxes import Box, boxes_of


def _wrong_torch(message: str) -> UsageError:
    return unsupported(
        f"torch {torch.__version__}: {message}",
        'use torch 2.8 to 2.15, or a newer Forebay; mode="shared" attaches a plain model with any torch',
    )


try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
except ImportError:  # torch older than 2.6
    raise _wrong_torch("it has no torch.distributed.fsdp.fully_shard") from None

_PARAM_ATTRIBUTES = (
    "_init_extensions",
    "_module_info",
    "_orig_size",
    "_setattr_on_modules",
    "_sharded_param_data",
    "_sharding_spec",
    "fsdp_placement",
    "is_dtensor",
    "mesh_info",
    "mp_policy",
    "offload_to_cpu",
    "padded_sharded_param_size",
    "sharded_param",
    "sharded_size",
    "to_sharded_dtensor",
)
_GROUP_ATTRIBUTES = (
    "_all_gather_result",
    "_partial_reduce_output",
    "_post_forward_indices",
    "_to_sharded",
    "_training_state",
    "all_reduce_grads",
    "device",
    "fsdp_params",
    "is_unsharded",
    "mesh_info",
    "post_forward_mesh_info",
    "reduce_grads",
    "wait_for_unshard",
)
_STATE_ATTRIBUTES = ("_comm_ctx", "_is_root", "_state_ctx", "_training_state")
_CONTEXT_ATTRIBUTES = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")


def _check(thing: Any, attributes: Iterable[str]) -> None:
    """Errors: E_UNSUPPORTED where it has not all of them."""
    for name in attributes:
        if not hasattr(thing, name):
            raise _wrong_torch(f"{type(thing).__name__} of its FSDP2 has no {name}")


def check_runs_on(device: torch.device) -> None:
    """Errors: E_UNSUPPORTED where FSDP2 does not run on it: torch 2.6 on CPUs."""
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise _wrong_torch("its FSDP2 does not run on CPUs")


class Shard:
    """One parameter as FSDP2 has sharded it: this rank's part."""

    def __init__(self, param: Any, name: str) -> None:
        self._param, self.name = param, name
        _check(param, _PARAM_ATTRIBUTES)
        if param.is_dtensor:  # already, by tensor parallelism; the second name is of older versions
            self._spec = getattr(param, "_unsharded_dtensor_spec", None) or param._tp_spec

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded nn.Parameter, a DTensor."""
        parameter: nn.Parameter = self._param.sharded_param
        return parameter

    @property
    def trained(self) -> bool:
        return self.parameter.requires_grad

    @property
    def mesh(self) -> DeviceMesh:
        """Of the sharded parameter: data parallel, with the replicas, and tensor parallel."""
        mesh: DeviceMesh = self._param.sharded_param.device_mesh
        return mesh

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of it."""
        local: torch.Tensor = self._param.sharded_param._local_tensor
        return local

    @property
    def padded(self) -> torch.Tensor:
        """The same with its padding, flat."""
        padded: torch.Tensor = self._param._sharded_param_data
        return padded

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self._param.sharded_param.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self._param.sharded_size)

    @property
    def padded_shape(self) -> torch.Size:
        """Of what fsdp_pre_all_gather() returns: the same on every rank of the mesh."""
        size: torch.Size = self._param.padded_sharded_param_size
        return size

    @property
    def param_dtype(self) -> torch.dtype:
        """In which forward and backward read it."""
        policy = self._param.mp_policy
        dtype: torch.dtype = policy.param_dtype or self.parameter.dtype
        return dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        policy = self._param.mp_policy
        dtype: torch.dtype = policy.reduce_dtype or self.param_dtype
        return dtype

    @property
    def computed(self) -> tuple[torch.dtype, torch.dtype]:
        """In which it is read and reduced."""
        return self.param_dtype, self.reduce_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """In which its gradient travels. FSDP2 gives it in the parameter's type, whatever it reduced
        in; bits that the reduction has rounded off need not travel."""
        if self.param_dtype == torch.float32:
            return torch.float32
        has_more_bits = torch.float32 == self.parameter.dtype == self.reduce_dtype
        return torch.float32 if has_more_bits else self.param_dtype

    @property
    def is_offloaded(self) -> bool:
        return bool(self._param.offload_to_cpu)

    @property
    def is_in_place(self) -> bool:
        """Whether the module holds FSDP2's parameters, sharded or gathered, and no other."""
        info = self._param._module_info
        now = info.module._parameters.get(info.param_name)
        return now is self._param.sharded_param or now is getattr(
            self._param, "_unsharded_param", None
        )

    def is_gathered_as(self, tensor: torch.Tensor) -> bool:
        """Whether this is the whole parameter, which the module holds while it is used."""
        return tensor is getattr(self._param, "_unsharded_param", None)

    def ranges(self) -> list[tuple[int, int]]:
        """What this rank holds of the parameter, [begin, end) in each dimension. Errors: E_UNSUPPORTED
        names the placement."""
        ranges = [(0, size) for size in self.shape]
        if self._param.is_dtensor:
            spec = self._spec
            for dim, coordinate, placement in zip(
                spec.mesh.shape, spec.mesh.get_coordinate(), spec.placements
            ):
                if placement.is_shard():
                    _cut(ranges, placement.dim, dim, coordinate)
                elif not placement.is_replicate():
                    raise unsupported(
                        f"parameter {self.name} has the placement {placement}",
                        "Shard and Replicate can be attached",
                    )
        info = self._param.mesh_info
        if hasattr(info, "shard_mesh_size"):
            _cut(
                ranges, self._param.fsdp_placement.dim, info.shard_mesh_size, info.shard_mesh_rank
            )
        return ranges

    def boxes(self) -> tuple[Box, ...]:
        """The same in the order of memory. Errors: E_UNSUPPORTED, also where it is too many."""
        try:
            return boxes_of(self.shape, self.ranges())
        except ValueError as error:
            raise unsupported(
                f"parameter {self.name}: {error}", "shard it on another dimension"
            ) from None

    def dtensor_of(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor with the parameter's mesh and placements."""
        dtensor: torch.Tensor = self._param.to_sharded_dtensor(local)
        return dtensor

    def set_local(self, local: torch.Tensor, padded: torch.Tensor) -> None:
        """Replaces this rank's part; `padded` is what FSDP2 would gather without an extension."""
        self._param.sharded_param._local_tensor = local
        self._param._sharded_param_data = padded
        self._param._init_extensions()

    def lend(self, local: torch.Tensor) -> None:
        """This rank's part until set_local(): FSDP2 does not gather it."""
        self._param.sharded_param._local_tensor = local

    def leave_meta(self, local: torch.Tensor) -> nn.Parameter:
        """The parameter on the meta device becomes one on the device of `local`; it stays the same
        object. Returns what it was, for return_to_meta()."""
        other = nn.Parameter(self.dtensor_of(local), self.trained)
        other.__dict__.update(self.parameter.__dict__)
        try:
            torch.utils.swap_tensors(self.parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise unsupported(
                f"parameter {self.name} cannot leave the meta device: {error}",
                "drop what refers to it, or model.to_empty(device='cpu') and initialize it first",
            ) from None
        return other

    def return_to_meta(self, before: nn.Parameter) -> None:
        torch.utils.swap_tensors(self.parameter, before)  # type: ignore[no-untyped-call]
        self._param._setattr_on_modules(self.parameter)


def _cut(ranges: list[tuple[int, int]], dim: int, parts: int, index: int) -> None:
    """One of the parts that torch.chunk makes of a dimension; the last ones may be empty."""
    begin, end = ranges[dim]
    step = -(-(end - begin) // parts)
    ranges[dim] = min(begin + index * step, end), min(begin + (index + 1) * step, end)


class Unit:
    """Parameters that FSDP2 gathers together."""

    def __init__(self, module: FSDPModule, state: Any, group: Any, name: str) -> None:
        self._module, self._state, self._group, self.name = module, state, group, name
        self.shards: list[Shard] = []
        _check(group, _GROUP_ATTRIBUTES)
        _check(state, _STATE_ATTRIBUTES)
        _check(state._state_ctx, _CONTEXT_ATTRIBUTES)
        check_runs_on(self.device)

    @property
    def is_resharded_to_smaller_mesh(self) -> bool:
        """Whether reshard_after_forward is a number."""
        smaller = self._group.post_forward_mesh_info
        return smaller is not None and smaller is not self._group.mesh_info

    @property
    def device(self) -> torch.device:
        device: torch.device = self._group.device
        return device

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds its parameters whole: FSDP2 gathers nothing."""
        return int(getattr(self._group.mesh_info, "shard_mesh_size", 1)) == 1

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward is running, nor has failed."""
        return bool(self._group._training_state == TrainingState.IDLE)

    @property
    def has_gradients(self) -> bool:
        """Whether it has gradients that are not reduced."""
        return self._group._partial_reduce_output is not None or any(True for _ in self._whole_gradients())

    @property
    def unreduced_bytes(self) -> int:
        """Of whole gradients, which wait for a backward that reduces them."""
        return sum(one.numel() * one.element_size() for one in self._whole_gradients())

    @property
    def was_skipped(self) -> bool:
        """Whether a backward has ended that should have reduced its gradients, and has not."""
        return self.is_idle and bool(self._group.reduce_grads) and self.has_gradients

    def hint_to_reduce(self) -> str:
        """Says what to write so that FSDP2 reduces the gradients that it holds."""
        if not self._group.reduce_grads:
            return "model.set_requires_gradient_sync(True) before the last backward of each step"
        if not self._group.all_reduce_grads:
            return "model.set_requires_all_reduce(True) before the last backward of each step"
        if getattr(self._state._state_ctx, "manual_backward_finalization", False):  # torch 2.15
            return "model.finalize_backward() between backward and step()"
        return (
            "checkpoint(..., use_reentrant=False), of a Trainer gradient_checkpointing_kwargs="
            '{"use_reentrant": False}; FSDP2 loses the gradient of a module that a reentrant checkpoint '
            "computes twice in one backward"
        )

    def _whole_gradients(self) -> Iterator[torch.Tensor]:
        for param in self._group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            for gradient in (
                vars(param).get("unsharded_accumulated_grad"),  # in torch older than 2.15
                getattr(whole, "grad", None),
            ):
                if gradient is not None:
                    yield gradient

    @property
    def reduced_by(self) -> dist.ProcessGroup | None:
        """The process group that FSDP2 asks for the mean of gradients; None: it sums, or is alone."""
        info = self._group.mesh_info
        sums = getattr(self._group, "force_sum_reduction_for_comms", False)
        group: dist.ProcessGroup | None = getattr(info, "shard_process_group", None)
        return None if sums or group is None or group.size() == 1 else group

    def divide_sums(self) -> None:
        """FSDP2 asks for the sum, and divides. Errors: E_UNSUPPORTED where it cannot."""
        name = "force_sum_reduction_for_comms"
        if not hasattr(self._group, name):
            raise _wrong_torch("gloo sums the gradients that FSDP2 wants the mean of")  # torch 2.7
        setattr(self._group, name, True)

    @property
    def gathered_bytes(self) -> int:
        """Of its whole parameters."""
        return sum(math.prod(one.shape) * one.param_dtype.itemsize for one in self.shards)

    def stays_gathered(self, is_root: bool) -> bool:
        """Whether it stays so from forward to backward: without reshard_after_forward, or, unless it has
        that explicitly, as a root, which FSDP2 finds at its first forward."""
        is_usual: bool = getattr(self._state, "_auto_reshard_after_forward", True)
        return self._group.post_forward_mesh_info is None or (is_root and is_usual)

    def prefetch_in_forward(self, units: Sequence[Unit]) -> None:
        """What is gathered as soon as this unit is, before its forward."""
        self._module.set_modules_to_forward_prefetch([unit._module for unit in units])

    def is_beside(self, other: Unit) -> bool:
        """Whether one forward of their root uses both."""
        return self._state._state_ctx is other._state._state_ctx

    def reshard(self) -> None:
        """Frees what is gathered, or was prefetched and not used: its bytes are those of an older
        step."""
        if self._group._all_gather_result is not None:
            self._group.wait_for_unshard()
        if self._group.is_unsharded:
            self._group._to_sharded()

    def reset(self) -> None:
        """Forgets gradients that are not reduced."""
        self._state._comm_ctx.post_forward_order.clear()
        group = self._group
        group._training_state, group._all_gather_result = TrainingState.IDLE, None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
            if "unsharded_accumulated_grad" in vars(param):  # in torch older than 2.15
                param.unsharded_accumulated_grad = None
        self.reshard()


def ensure_means(units: Sequence[Unit]) -> None:
    """Gloo of torch before 2.9 sums in silence where it is asked for the mean (pytorch issue 162338):
    gradients would be as many times too large as there are ranks. A collective.

    Errors  E_UNSUPPORTED  FSDP2 cannot divide sums: torch 2.7.
    """
    is_mean: dict[dist.ProcessGroup, bool] = {}
    for unit in units:
        group = unit.reduced_by
        if group is None:
            continue
        if group not in is_mean:
            mean = torch.zeros(1, device=unit.device)
            ones = torch.ones(group.size(), device=unit.device)
            dist.reduce_scatter_tensor(mean, ones, op=dist.ReduceOp.AVG, group=group)
            is_mean[group] = mean.item() == 1
        if not is_mean[group]:
            unit.divide_sums()


def reset(units: Sequence[Unit]) -> None:
    """After a forward or backward that did not come to its end: FSDP2 forgets what it has gathered and
    the gradients that it has not reduced; the next forward begins from scratch."""
    contexts = {id(unit._state._state_ctx): unit._state._state_ctx for unit in units}
    for context in contexts.values():
        for state in context.all_states:
            if state._is_root and hasattr(state, "_reset_iter_state"):  # torch 2.15
                state._reset_iter_state()
            state._training_state = TrainingState.IDLE
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    for unit in units:
        unit.reset()


def roots_of(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that fully_shard() was called on: the model, or its parts (the stages of
    a pipeline that one rank has)."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from roots_of(child)


def root_units(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Groups of the roots. FSDP2 gathers them first and reduces their gradients last."""
    roots = {id(root) for root in roots_of(model)}
    return [unit for unit in units if id(unit._module) in roots]


def staying_gathered(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """What FSDP2 keeps gathered from forward to backward."""
    roots = root_units(model, units)
    return [unit for unit in units if unit.stays_gathered(unit in roots)]


def ungrouped_modules(
    module: nn.Module, name: str = "model", in_root: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """(expression, module) of the outermost modules within the roots that fully_shard() was not called on, neither on modules
    within them. Containers without a forward are not among them. `in_root`: `module` is within a root."""
    in_root = in_root or isinstance(module, FSDPModule)
    for child_name, child in module.named_children():
        expression = f"{name}[{child_name}]" if child_name.isdigit() else f"{name}.{child_name}"
        if isinstance(child, FSDPModule) and in_root:
            continue
        has_groups = any(isinstance(one, FSDPModule) for one in child.modules())
        if has_groups or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ungrouped_modules(child, expression, in_root)
        elif in_root:
            yield expression, child


def units_of(model: nn.Module, prefix: str) -> list[Unit]:
    """What fully_shard() has made of the model, in the order of its modules; the names of units and
    shards are those of the plain model, behind `prefix`.

    Errors  E_LAYOUT  two modules that share a parameter are sharded apart.
    """
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    units: list[Unit] = []
    seen: dict[str, str] = {}
    for module_name, module in model.named_modules():
        for state, group in _groups_of(module) if isinstance(module, FSDPModule) else ():
            if any(group is unit._group for unit in units):
                continue
            unit = Unit(module, state, group, prefix + (plain_name(module_name) or "root"))
            for param in group.fsdp_params:
                name = names.get(id(param.sharded_param))
                if name is None:  # gathered now: found by its place
                    name = _name_of(model, param)
                if name in seen:
                    raise usage_error(
                        "E_LAYOUT",
                        f"parameter {name} is in the groups {seen[name]} and {unit.name}",
                        "shard the modules that share it together: fully_shard([first, second])",
                    )
                seen[name] = unit.name
                unit.shards.append(Shard(param, prefix + name))
            units.append(unit)
    return units


def _groups_of(module: FSDPModule) -> Iterator[tuple[Any, Any]]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            yield state, group


def _name_of(model: nn.Module, param: Any) -> str:
    info = param._module_info
    for name, module in model.named_modules():
        if module is info.module:
            return plain_name(f"{name}.{info.param_name}".lstrip("."))
    raise usage_error(
        "E_LAYOUT",
        f"parameter {info.param_name} of {type(info.module).__name__} is not in the model",
        "attach the model that fully_shard() was called on",
    )


def plain_name(name: str) -> str:
    """Without what wrappers put in: torch.compile, checkpoint_wrapper."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removesuffix("._orig_mod").removesuffix("._checkpoint_wrapped_module")


def process_groups_of(units: Sequence[Unit]) -> list[tuple[set[int], dist.ProcessGroup]]:
    """Those of each dimension of the meshes that are larger than 1, with their ranks."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for mesh in dict.fromkeys(one.mesh for unit in units for one in unit.shards):
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                group = mesh.get_group(dim)
                found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return [(set(ranks), group) for ranks, group in found.items()]

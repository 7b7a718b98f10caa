# SPDX-License-Identifier: Apache-2.0
"""What a sharded model is, before it is attached: fully_shard() on a plain one, what cannot be attached,
and the layout of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._device import CudaDevice, HostDevice, refuse_mesh, refuse_other_kinds
from .._plan import FORMATS, Parameter, Plan, layers_of
from ..errors import UsageError, unsupported, usage_error
from . import collectives, fsdp
from .boxes import Held, ShardPlan, make_shard_plan
from .fsdp import Shard, Unit
from .nodes import Nodes


def shard(
    model: nn.Module,
    *,
    mesh: Any,
    mp_policy: Any,
    reshard_after_forward: bool | None,
    wrap: Sequence[nn.Module] | None,
) -> None:
    """Calls fully_shard() on each layer (the elements of the outermost ModuleList or Sequential, or
    what `wrap` lists) and on the model. Errors: E_OPTION, E_UNSUPPORTED."""
    from torch.distributed.fsdp import fully_shard

    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise _number_of_ranks()
    refuse_mesh(mesh)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            refuse_other_kinds(f"parameter {name}", parameter.device)
        fsdp.check_runs_on(parameter.device)
        _refuse_empty(name, parameter)
        if parameter.dim() == 0:
            raise unsupported(
                f"parameter {name} is a scalar, which FSDP2 cannot shard",
                "make it a tensor of one element: torch.nn.Parameter(torch.tensor([1.0]))",
            )
    options: dict[str, Any] = {}
    if mesh is not None:
        options["mesh"] = mesh
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if reshard_after_forward is not None:
        options["reshard_after_forward"] = reshard_after_forward
    layers = [module for _, module in layers_of(model)] if wrap is None else list(wrap)
    try:
        for layer in layers:
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, **options)
        fully_shard(model, **options)
    except (ValueError, NotImplementedError) as error:
        raise unsupported(f"fully_shard() refuses this model: {error}", "change what it names") from (
            error
        )


def refuse_unusable(units: Sequence[Unit], model: nn.Module) -> None:
    """Errors: E_UNSUPPORTED where the model is sharded in a way that cannot be attached."""
    managed = set()
    for unit in units:
        if unit.is_resharded_to_smaller_mesh:
            raise _number_of_ranks()
        for one in unit.shards:
            managed.add(id(one.parameter))
            _refuse_shard(one)
    for name, tensor in model.named_parameters():
        if id(tensor) not in managed and not _is_gathered(units, tensor):
            raise unsupported(
                f"parameter {name} is in no module that fully_shard() was called on",
                "fully_shard(model) as the last call, without ignored_params",
            )
    device_of(units)
    _refuse_mixed_types(units)


def device_of(units: Sequence[Unit]) -> HostDevice:
    """Errors: E_UNSUPPORTED where they are on several devices, or on one of another kind."""
    first = units[0]
    for unit in units:
        refuse_other_kinds(f"group {unit.name}", unit.device)
        if unit.device != first.device:
            raise unsupported(
                f"group {first.name} is on device {first.device}, group {unit.name} on {unit.device}",
                "one device for each rank: call fully_shard() with one mesh",
            )
    return (HostDevice if first.device.type == "cpu" else CudaDevice)(first.device)


def _refuse_mixed_types(units: Sequence[Unit]) -> None:
    first = _typical(units)
    for one in (one for unit in units for one in unit.shards):
        trained = one.trained
        if one.computed != first.computed or (
            trained and one.parameter.dtype != first.parameter.dtype
        ):
            raise unsupported(
                f"mixed types: parameter {first.name} is {_types_of(first)}, parameter "
                f"{one.name} is {_types_of(one)}",
                "give the whole model one type and one MixedPrecisionPolicy",
            )


def _refuse_shard(one: Shard) -> None:
    if one.is_offloaded:
        raise unsupported(
            f"parameter {one.name} is sharded with CPUOffloadPolicy: FSDP2 would keep and copy it",
            "delete offload_policy=CPUOffloadPolicy(...) from fully_shard()",
        )
    _refuse_empty(one.name, one.parameter)
    dtype = one.parameter.dtype
    if dtype not in FORMATS:
        raise unsupported(
            f"parameter {one.name} is {dtype}; float32, bfloat16 and float16 can be attached",
            "model.float() or model.to(torch.bfloat16) before fully_shard()",
        )
    if one.param_dtype not in FORMATS or (one.param_dtype != dtype and dtype != torch.float32):
        raise unsupported(
            f"parameter {one.name} is {dtype} and param_dtype is {one.param_dtype}",
            "float32 parameters take param_dtype=torch.bfloat16 or torch.float16; others their own",
        )
    if one.param_dtype != dtype and not one.trained:
        raise unsupported(
            f"parameter {one.name} is frozen, {dtype}, and param_dtype is {one.param_dtype}: it has "
            "no master, and the bits that its weights do not have would be lost",
            f"parameter.data = parameter.data.to({one.param_dtype}) before fully_shard()",
        )
    if one.reduce_dtype not in (dtype, one.param_dtype, torch.float32):
        raise unsupported(
            f"reduce_dtype is {one.reduce_dtype} for parameter {one.name} of {dtype}",
            "leave reduce_dtype out, or reduce_dtype=torch.float32",
        )
    if one.parameter.grad is not None:
        raise unsupported(
            f"parameter {one.name} has a gradient already",
            "model.zero_grad(set_to_none=True) before attach",
        )


def _refuse_empty(name: str, parameter: torch.Tensor) -> None:
    if parameter.numel() == 0:
        raise unsupported(
            f"parameter {name} has no elements: FSDP2 would have nothing of it on any rank",
            'register it as a buffer; attachment of a plain model with mode="shared" takes it',
        )


def _is_gathered(units: Sequence[Unit], tensor: torch.Tensor) -> bool:
    return any(one.is_gathered_as(tensor) for unit in units for one in unit.shards)


def _number_of_ranks() -> UsageError:
    return unsupported(
        "reshard_after_forward as a number of ranks: FSDP2's tensor extension does not have it",
        "reshard_after_forward=True or False",
    )


class ShardedPlan(Plan):
    """What this rank holds, and the layout of all ranks."""

    def __init__(self, units: Sequence[Unit], layout: ShardPlan, parameters: list[Parameter]) -> None:
        super().__init__(
            dtype=_typical(units).param_dtype,
            parameters=sorted(parameters, key=lambda one: layout.index[one.name]),
            named=parameters,
            by_name={one.name: one for one in parameters},
            group_names=layout.group_names,
        )
        self.units, self.layout = units, layout
        self.device = device_of(units)

    @property
    def grad_dtype(self) -> torch.dtype:
        """In which gradients travel."""
        return _typical(self.units).grad_dtype

    @property
    def copies_ahead(self) -> bool:
        """Whether this rank holds all groups whole on a GPU, where FSDP2 gathers none of them: see _copy_ahead."""
        return not self.device.is_host and all(unit.is_alone for unit in self.units)

    @property
    def master_dtype(self) -> torch.dtype:
        """Of the parameters that are trained."""
        return _typical(self.units).parameter.dtype


def parameters_of(units: Sequence[Unit]) -> list[Parameter]:
    """In the order of the units; a later call numbers their groups."""
    return [
        Parameter(one.name, one.parameter, one.trained, weights=one.param_dtype)
        for unit in units
        for one in unit.shards
    ]


def make_plan(
    units: Sequence[Unit], parameters: list[Parameter], nodes: Nodes | None = None
) -> ShardedPlan:
    """Gathers what every rank holds. A collective over the default process group.

    Errors  E_LAYOUT  ranks disagree about a parameter.
            E_UNSUPPORTED  replicas on several nodes.
    """
    by_name = {one.name: one for one in parameters}
    held = [
        Held(
            name=one.name,
            shape=one.shape,
            group=unit.name,
            param_group=by_name[one.name].param_group,
            trainable=by_name[one.name].trainable,
            boxes=one.boxes(),
        )
        for unit in units
        for one in unit.shards
    ]
    mesh = {rank for unit in units for one in unit.shards for rank in one.mesh.mesh.flatten().tolist()}
    everyone = collectives.gather((held, sorted(mesh)))
    try:
        layout = make_shard_plan(*zip(*everyone))
    except ValueError as error:
        raise usage_error(
            "E_LAYOUT",
            str(error),
            "build the same model on every rank; pipeline stages need other names (sharding=forebay.Sharding(name_prefix=...)), "
            "replicas a mesh of (replicate, shard)",
        ) from None
    for parameter in parameters:
        parameter.group = layout.params[layout.index[parameter.name]][2]
    if nodes is not None:
        try:
            layout = layout.of_node(nodes.own)
        except ValueError as error:
            raise unsupported(
                f"replicas on several nodes: {error}",
                "make the mesh so that whole nodes hold replicas: (nodes, ranks of a node)",
            ) from None
    return ShardedPlan(units, layout, parameters)


def _typical(units: Sequence[Unit]) -> Shard:
    """The first that is trained, whose types the others have; else the first."""
    shards = [one for unit in units for one in unit.shards]
    return next((one for one in shards if one.trained), shards[0])


def _types_of(one: Shard) -> str:
    return f"{one.parameter.dtype}, computed in {one.param_dtype}, reduced in {one.reduce_dtype}"


def world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and size of the default process group; None: the caller has not said them. Errors: E_RANK
    if there is no group, or its numbers differ from the caller's."""
    if not dist.is_available() or not dist.is_initialized():
        raise usage_error(
            "E_RANK",
            "sharded attachment needs a process group, and there is none",
            'torch.distributed.init_process_group("gloo") first; torchrun sets what it reads',
        )
    group = dist.get_rank(), dist.get_world_size()
    given = group[0] if rank is None else rank, group[1] if world_size is None else world_size
    if given != group:
        raise usage_error(
            "E_RANK",
            f"rank {given[0]} of {given[1]} for a process that is rank {group[0]} of {group[1]} in "
            "the process group",
            "leave rank and world_size out: sharded attachment takes those of the process group",
        )
    return group

# SPDX-License-Identifier: Apache-2.0
"""Which parameter lies in which group, and which modules fetch which groups. Knows no model."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import UsageError, unsupported, usage_error

# The parameters outside of any layer stay one group up to this size; above it, each child has its
# own.
ROOT_GROUP_BYTES = 16 << 20
CHECKED_ELEMS = 1 << 18  # elements checked at a time: torch makes three tensors of this size
# Formats of the optimizer's state for parameters of a type, the default first.
FORMATS = {
    torch.float32: ("fp32",),
    torch.bfloat16: ("exact", "bf16", "int8", "fp32"),
    torch.float16: ("fp32",),
}
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(eq=False)
class Parameter:
    """One parameter of the model; tied ones appear once, under their first name."""

    name: str
    tensor: torch.Tensor  # an nn.Parameter, or a leaf that an optimizer was given
    trainable: bool
    group: int = -1
    param_group: int = 0
    offset: int = 0  # elements from the start of its group
    elems: int = 0  # number of elements of the job's type that hold the parameter
    weights: torch.dtype | None = None  # the type of its weights, where it may be another

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements: it stays a parameter of this process, and the daemon does not know it."""
        return not is_lazy(self.tensor) and self.tensor.numel() == 0


def check_finite(name: str, values: torch.Tensor, where: str = "") -> None:
    """Errors: E_NONFINITE where a parameter cannot become the job's initial one."""
    parts = torch.split(values.reshape(-1), CHECKED_ELEMS)
    bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
    if bad:
        noun, verb = ("value", "is") if bad == 1 else ("values", "are")
        raise usage_error(
            "E_NONFINITE",
            f"parameter {name} has {bad} {noun}{where} that {verb} NaN or infinite at attach",
            "check the initialization or the loaded checkpoint",
        )


@dataclass(eq=False)
class Plan:
    """Groups in the order of the layout: what belongs to no layer first, then the layers as the
    model lists them."""

    dtype: torch.dtype
    # Parameters with elements, in the order of the layout.
    parameters: list[Parameter] = field(default_factory=list)
    # All parameters in the order of the model, with empty ones.
    named: list[Parameter] = field(default_factory=list)
    # Parameters keyed by every name that they have in the model.
    by_name: dict[str, Parameter] = field(default_factory=dict)
    group_names: list[str] = field(default_factory=list)
    # Modules, each with the groups that it fetches.
    hook_points: list[tuple[nn.Module, list[int]]] = field(default_factory=list)


def make_plan(model: nn.Module, others: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Plan:
    """Plans the model's parameters and others, which are in no module that is known.

    Errors  E_UNSUPPORTED  names the parameter that is on a device, trained in another type or shares its
                           memory.
    """
    listed = [
        Parameter(_logical(name), tensor, tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *others.items())
    ]
    for parameter in listed:
        parameter.trainable &= not parameter.is_empty
    named = [parameter for parameter in listed if not parameter.is_empty]
    if not named:
        raise usage_error(
            "E_LAYOUT",
            f"{type(model).__name__} has no parameters" + (" with elements" if listed else ""),
            "attach the module that holds the layers",
        )
    _check_tensors(named)
    dtype = _dtype_of(named)
    for parameter in named:
        size_bytes = parameter.tensor.numel() * parameter.tensor.element_size()
        parameter.elems = -(-size_bytes // dtype.itemsize)
    layers = list(layers_of(model))
    keys = _group_keys(named, [name for name, _ in layers])
    order = sorted(set(keys))
    numbers = {key: number for number, key in enumerate(order)}
    plan = Plan(dtype=dtype, named=listed, group_names=[name for _, _, name in order])
    of_tensor = {id(parameter.tensor): parameter for parameter in listed}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *others.items()):
        plan.by_name[_logical(name)] = of_tensor[id(tensor)]
    for parameter, key in zip(named, keys):
        parameter.group = numbers[key]
    # Frozen ones last in their group: gradients and their sums end before them.
    plan.parameters = sorted(
        named, key=lambda parameter: (parameter.group, not parameter.trainable)
    )
    plan.hook_points = _hook_points(model, [module for _, module in layers], plan)
    return plan


def _logical(name: str) -> str:
    return name.replace("_orig_mod.", "")  # a module that torch.compile wraps stays the same


def _dtype_of(named: Sequence[Parameter]) -> torch.dtype:
    """The type of all trainable parameters. Errors: E_UNSUPPORTED names two that differ."""
    trainable = [parameter for parameter in named if parameter.trainable]
    first = (trainable or named)[0]
    for parameter in trainable or [first]:
        dtype = parameter.tensor.dtype
        if dtype not in FORMATS:
            raise unsupported(
                f"parameter {parameter.name} is {dtype}; "
                "float32, bfloat16 and float16 can be attached",
                "model.float() or model.to(torch.bfloat16) before attach",
            )
        if dtype != first.tensor.dtype:
            raise unsupported(
                f"mixed types: parameter {first.name} is {first.tensor.dtype}, parameter "
                f"{parameter.name} is {dtype}, and both are trained",
                "model.to(torch.bfloat16) or model.float() first; frozen ones "
                "(p.requires_grad_(False)) may have any type",
            )
    return first.tensor.dtype


def part_of(weights: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """The parameter in the weights of its group: a view. The view of a frozen one of another type has its bits."""
    tensor = parameter.tensor
    part = weights[parameter.offset : parameter.offset + parameter.elems]
    if tensor.dtype != part.dtype:
        size_bytes = tensor.numel() * tensor.element_size()
        part = part.view(torch.uint8)[:size_bytes].view(tensor.dtype)
    return part.view(tensor.shape)


def _check_tensors(named: Sequence[Parameter]) -> None:
    at_address: dict[int, Parameter] = {}
    for parameter in named:
        tensor = parameter.tensor
        if is_lazy(tensor):
            raise unsupported(
                f"parameter {parameter.name} is not initialized yet", "run one forward pass first"
            )
        if hasattr(tensor, "device_mesh"):
            raise unsupported(
                f"parameter {parameter.name} is a DTensor (fully_shard or tensor parallelism)",
                "attach the plain module: each rank holds the whole model as views of one copy",
            )
        if tensor.device.type != "cpu":
            raise unsupported(
                f"parameter {parameter.name} is on device {tensor.device}; only CPU parameters "
                "can be attached",
                (
                    'attach() without mode="shared"; model.to_empty(device="cpu") for attach_reader()'
                    if tensor.is_meta
                    else "model.cpu() before attach"
                ),
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise unsupported(
                f"parameter {parameter.name} is {tensor.dtype} of layout {tensor.layout}",
                "to_dense(), dequantize(), or register it as a buffer",
            )
        if tensor.grad is not None:
            raise unsupported(
                f"parameter {parameter.name} has a gradient already",
                "model.zero_grad(set_to_none=True) before attach",
            )
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
            raise unsupported(
                f"parameter {parameter.name} has elements that are one in memory (expand)",
                "nn.Parameter(tensor.clone())",
            )
        other = at_address.setdefault(tensor.data_ptr(), parameter)
        if other is not parameter:
            raise _shared(other, parameter)
    _check_overlap(named)


def _check_overlap(named: Sequence[Parameter]) -> None:
    """Parameters that share a part of their memory. Only among contiguous ones: between the
    elements of another (a column of a matrix, say) there may be a third parameter."""
    spans = sorted(
        (
            (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), at)
            for at, tensor in enumerate(parameter.tensor for parameter in named)
            if tensor.is_contiguous()
        ),
    )
    for (_, end, at), (begin, _, next_at) in itertools.pairwise(spans):
        if begin < end:
            raise _shared(named[at], named[next_at])


def _shared(one: Parameter, other: Parameter) -> UsageError:
    return unsupported(
        f"parameters {one.name} and {other.name} share memory but are two parameters",
        f"tie them: {other.name} must be the very nn.Parameter of {one.name}, as in "
        "model.head.weight = model.embedding.weight",
    )


def layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the elements of the outermost nn.ModuleList and nn.Sequential."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for name, child in module.named_children():
            yield prefix + _logical(name), child
        return
    for name, child in module.named_children():
        child_prefix = _logical(f"{prefix}{name}.")
        yield from layers_of(child, child_prefix)


def _group_keys(
    named: Sequence[Parameter], layer_names: Sequence[str]
) -> list[tuple[int, int, str]]:
    """For each parameter (0, order, name) outside the layers or (1, order, name) within one."""
    order = {name: number for number, name in enumerate(layer_names)}
    layer_of = {}
    for parameter in named:
        parts = parameter.name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        layer_of[parameter.name] = next((prefix for prefix in prefixes if prefix in order), None)
    rest = [parameter for parameter in named if layer_of[parameter.name] is None]
    split = sum(p.tensor.numel() * p.tensor.element_size() for p in rest) > ROOT_GROUP_BYTES
    children: dict[str, int] = {}
    keys = []
    for parameter in named:
        layer = layer_of[parameter.name]
        if layer is not None:
            keys.append((1, order[layer], layer))
            continue
        child = parameter.name.split(".")[0] if split and "." in parameter.name else "root"
        keys.append((0, children.setdefault(child, len(children)), child))
    return keys


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _hook_points(
    model: nn.Module, layers: Sequence[nn.Module], plan: Plan
) -> list[tuple[nn.Module, list[int]]]:
    """The whole model for what belongs to no layer, and every layer; for a module without a
    forward of its own (a list of lists) its children. Each fetches every group that it has a
    parameter of, tied ones too."""
    group_of = {id(parameter.tensor): parameter.group for parameter in plan.parameters}
    in_layers = {id(tensor) for layer in layers for tensor in layer.parameters()}
    rest = {
        parameter.group for parameter in plan.parameters if id(parameter.tensor) not in in_layers
    }
    points: dict[int, tuple[nn.Module, set[int]]] = {}

    def add(module: nn.Module, groups: set[int]) -> None:
        if groups and _has_forward(module):
            points.setdefault(id(module), (module, set()))[1].update(groups)

    def groups_in(module: nn.Module) -> set[int]:
        return {group_of[id(tensor)] for tensor in module.parameters() if id(tensor) in group_of}

    def descend(module: nn.Module) -> None:
        groups = groups_in(module)
        if _has_forward(module):
            add(module, groups)
            return
        for child in module.children():
            descend(child)

    add(model, rest)
    for child in model.children():
        add(child, rest & groups_in(child))
    for layer in layers:
        descend(layer)
    return [(module, sorted(groups)) for module, groups in points.values()]

# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a parameter whose bytes are the daemon's: a tensor without storage. FSDP2 gathers it
through its tensor extension; whatever else reads it gets a copy of the present bytes, whatever writes
it sends the new ones to the daemon, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import unsupported

aten = torch.ops.aten


class Reader(Protocol):
    """Where the bytes come from."""

    name: str  # name of the parameter
    local_shape: torch.Size
    padded_shape: torch.Size

    def read(self) -> torch.Tensor:
        """This rank's part now, in a memory of its own."""

    def check_values(self, values: torch.Tensor) -> None:
        """Errors: E_NONFINITE where they cannot be written."""

    def write(self, values: torch.Tensor) -> None:
        """Replaces it by values that are checked. Errors: those of Attachment.write_state."""

    def padded(self) -> torch.Tensor:
        """The same for the next gather: in param_dtype, padded with zeros."""


View = tuple[Any, tuple[Any, ...], dict[str, Any]]


class ShardTensor(torch.Tensor):
    """Has a shape, a type and a device. A view of it is another one, which is read through the views
    that lead to it."""

    reader: Reader
    views: tuple[View, ...]

    @staticmethod
    def __new__(
        cls, reader: Reader, like: Any, views: tuple[View, ...] = ()
    ) -> ShardTensor:
        with torch.inference_mode(False):  # a view of a parameter is no inference tensor
            tensor: ShardTensor = torch.Tensor._make_wrapper_subclass(
                cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
            )
        tensor.__dict__["reader"], tensor.__dict__["views"] = reader, views
        return tensor

    def __init__(self, reader: Reader, like: Any, views: tuple[View, ...] = ()) -> None:
        pass

    def values(self) -> torch.Tensor:
        """The present bytes, in a memory of their own."""
        return self.seen_in(self.reader.read())

    def seen_in(self, values: torch.Tensor) -> torch.Tensor:
        """The part of the whole shard's values that this view is."""
        for function, args, kwargs in self.views:
            values = function(values, *args, **kwargs)
        return values

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"ShardTensor({self.values()!r})"

    def tolist(self) -> Any:
        return self.values().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        array = self.values().numpy(force=force)
        array.flags.writeable = False  # a write would reach the copy alone
        return array

    def __dlpack__(self, **_options: Any) -> Any:
        raise unsupported(
            f"DLPack of parameter {self.reader.name}: its bytes are the daemon's",
            "torch.from_dlpack(p.clone()), of a copy",
        )

    def share_memory_(self) -> ShardTensor:
        raise unsupported(
            f"share_memory_() of parameter {self.reader.name}: its bytes are the daemon's",
            "p.clone().share_memory_(), of a copy",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = values = self.values()
        return values

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------- FSDP2's extension

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What this rank brings to the gather."""
        return (self.reader.padded(),), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """FSDP2 cuts the parameter out of what was gathered, without a copy."""
        (whole,) = gathered
        return None if out is not None else (whole, (whole,))

    # ------------------------------------------------------------------------ everything else

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        padding = _padding(function, args)
        if padding is not None:
            return padding
        targets = _written(function, args, options)
        if targets:
            return _write(targets, function, args, options)
        if function.is_view and isinstance(args[0], ShardTensor):
            return _view(args[0], function, args[1:], options)
        args, options = pytree.tree_map_only(ShardTensor, ShardTensor.values, (args, options))
        return function(*args, **options)


def _write(
    targets: list[ShardTensor], function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """An operator in place, on copies that then go to the daemon."""
    wholes: dict[int, torch.Tensor] = {}  # id of the reader -> whole tensor
    parts: dict[int, torch.Tensor] = {}  # id of the target -> part
    for target in targets:
        whole = wholes.setdefault(id(target.reader), target.reader.read())
        parts[id(target)] = target.seen_in(whole)
    layouts = {key: _layout_of(part) for key, part in parts.items()}
    args, options = pytree.tree_map_only(
        ShardTensor, lambda one: parts[id(one)] if id(one) in parts else one.values(), (args, options)
    )
    result = function(*args, **options)
    for target in targets:
        if _layout_of(parts[id(target)]) != layouts[id(target)]:
            raise unsupported(
                f"{function.__name__} would give parameter {target.reader.name} another shape or "
                "memory: its bytes are the daemon's",
                "change its values, with copy_() for example",
            )
    readers = {id(target.reader): target.reader for target in targets}
    for key, reader in readers.items():
        reader.check_values(wholes[key])
    for key, reader in readers.items():
        reader.write(wholes[key])
    returned = {id(parts[id(target)]): target for target in targets}
    return pytree.tree_map_only(torch.Tensor, lambda one: returned.get(id(one), one), result)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.data_ptr(), tensor.storage_offset()


def _view(base: ShardTensor, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    like = function(_meta(base), *args, **options)
    if isinstance(like, torch.Tensor):
        return _view_like(base, like, (function, args, options))
    return [
        _view_like(base, one, (_element, (function, args, options, number), {}))
        for number, one in enumerate(like)
    ]


def _view_like(base: ShardTensor, like: torch.Tensor, view: View) -> ShardTensor:
    return ShardTensor(base.reader, _Like(like, like.dtype, base.device), (*base.views, view))


def _element(
    values: torch.Tensor, function: Any, args: tuple[Any, ...], options: dict[str, Any], number: int
) -> Any:
    """One of the views that split() and its like make."""
    return function(values, *args, **options)[number]


class _Like:
    """Shape and stride of one tensor, type and device of another."""

    def __init__(self, shape: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.stride = shape.size, shape.stride
        self.dtype, self.device = dtype, device


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
    )


def _written(
    function: Any, args: Iterable[Any], options: Mapping[str, Any]
) -> list[ShardTensor]:
    """Those of ours that the operator writes into."""
    arguments = function._schema.arguments
    given = [*zip(arguments, args)]
    given += [(one, options[one.name]) for one in arguments if one.name in options]
    written: dict[int, ShardTensor] = {}
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, ShardTensor):
                    written[id(one)] = one
    return list(written.values())


class _Padded(ShardTensor):
    """A shard with its padding, as FSDP2 builds it in reset_sharded_param(): new_zeros(), narrow(), then copy_() of the
    shard. Narrowing it to the shard's shape gives a ShardTensor of the same shard."""


def _padding(function: Any, args: tuple[Any, ...]) -> Any:
    """FSDP2's own calls on a shard; None: it is something else."""
    first = args[0] if args else None
    if not isinstance(first, ShardTensor) or first.views:
        return None
    reader = first.reader
    if function is aten.new_zeros.default and first.size() != reader.padded_shape:
        if tuple(args[1]) == tuple(reader.padded_shape):
            like = torch.empty(reader.padded_shape, device="meta")
            return _Padded(reader, _Like(like, first.dtype, first.device))
    if function is aten.copy_.default and isinstance(args[1], ShardTensor):
        source = args[1]
        if source.reader is reader and not source.views and source.size() == first.size():
            return first
    if isinstance(first, _Padded) and function in (aten.slice.Tensor, aten.view.default):
        like = function(_meta(first), *args[1:])
        kind = ShardTensor if like.size() == reader.local_shape else _Padded
        return kind(reader, _Like(like, first.dtype, first.device))
    return None

"""A rank's part of a parameter whose bytes are the daemon's: a tensor without storage. FSDP2 gathers it
through its tensor extension; whatever else reads it gets a copy of the present bytes, whatever writes
it sends the new ones to the daemon, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .errors import unsupported

aten = torch.ops.aten


class Reader(Protocol):
    """Where the bytes come from."""

    name: str  # of the parameter
    padded_shape: torch.Size

    def read(self) -> torch.Tensor:
        """This rank's part now, in a memory of its own."""

    def write(self, values: torch.Tensor) -> None:
        """Replaces it. Errors: those of Attachment.write_masters."""

    def padded(self) -> torch.Tensor:
        """The same for the next gather: in param_dtype, padded with zeros."""


View = tuple[Any, tuple[Any, ...], dict[str, Any]]


class ShardTensor(torch.Tensor):
    """Has a shape, a type and a device. A view of it is another one, which is read through the views
    that made it."""

    reader: Reader
    views: tuple[View, ...]

    @staticmethod
    def __new__(
        cls, reader: Reader, like: Any, views: tuple[View, ...] = ()
    ) -> ShardTensor:
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
        return self.values().numpy(force=force)

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
        written = _written(function, args, options)
        if written is not None:
            return _write(written, function, args, options)
        if function.is_view and isinstance(args[0], ShardTensor):
            return _view(args[0], function, args[1:], options)
        args, options = pytree.tree_map_only(ShardTensor, ShardTensor.values, (args, options))
        return function(*args, **options)


def _write(
    target: ShardTensor, function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> ShardTensor:
    """An operator in place, on a copy that then goes to the daemon."""
    name = target.reader.name
    if target is not args[0] or function.__name__.startswith(("set_", "resize_")):
        raise unsupported(
            f"{function.__name__} would write into parameter {name}, whose bytes are the daemon's",
            "change the values with copy_() or another operator of the parameter itself",
        )
    values = target.reader.read()
    part = target.seen_in(values)

    def local(tensor: ShardTensor) -> torch.Tensor:
        return part if tensor is target else tensor.values()

    args, options = pytree.tree_map_only(ShardTensor, local, (args, options))
    function(*args, **options)
    target.reader.write(values)
    return target


def _view(base: ShardTensor, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    like = function(_meta(base), *args, **options)
    if not isinstance(like, torch.Tensor):  # split and its like: copies
        return function(base.values(), *args, **options)
    like = _Like(like, base.dtype, base.device)
    return ShardTensor(base.reader, like, (*base.views, (function, args, options)))


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
) -> ShardTensor | None:
    """The first of ours that the operator writes into."""
    schema = function._schema
    for argument, value in zip(schema.arguments, args):
        found = _of_argument(argument, value)
        if found is not None:
            return found
    for argument in schema.arguments:
        if argument.name in options:
            found = _of_argument(argument, options[argument.name])
            if found is not None:
                return found
    return None


def _of_argument(argument: Any, value: Any) -> ShardTensor | None:
    if argument.alias_info is None or not argument.alias_info.is_write:
        return None
    values = value if isinstance(value, (list, tuple)) else [value]
    return next((one for one in values if isinstance(one, ShardTensor)), None)


class _Padded(ShardTensor):
    """The padded form that FSDP2 makes of a shard in reset_sharded_param(): new_zeros, narrow, copy_ of
    the shard into it. Its part is the shard itself."""


def _padding(function: Any, args: tuple[Any, ...]) -> Any:
    """FSDP2's own calls on a shard; None: it is something else."""
    first = args[0] if args else None
    if function is aten.new_zeros.default and isinstance(first, ShardTensor):
        if tuple(args[1]) == tuple(first.reader.padded_shape) and not first.views:
            shape = torch.empty(first.reader.padded_shape, device="meta")
            return _Padded(first.reader, _Like(shape, first.dtype, first.device))
    if not isinstance(first, _Padded):
        return None
    if function is aten.slice.Tensor or function is aten.view.default:
        shape = function(_meta(first), *args[1:])
        return _Padded(first.reader, _Like(shape, first.dtype, first.device))
    if function is aten.copy_.default and isinstance(args[1], ShardTensor):
        if args[1].reader is first.reader:
            return first
    return None

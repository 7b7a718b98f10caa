# SPDX-License-Identifier: Apache-2.0
"""Safetensors files by the names of their tensors. What is read of a tensor is a part: its other bytes
stay in the file."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError, unsupported, usage_error

NAMES_IN_A_MESSAGE = 3
_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


class Checkpoint:
    """One file, or all of a folder: those that its *.safetensors.index.json names, else *.safetensors.
    Opened when it is first asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Errors: E_UNSUPPORTED where the package safetensors is not installed."""
        self.path = Path(path)
        try:
            self._library: Any = importlib.import_module("safetensors")
        except ImportError as error:
            raise unsupported(
                f"initial={str(path)!r} needs the package safetensors: {error}",
                "pip install safetensors",
            ) from None
        self._opened: dict[str, Any] = {}  # file by tensor

    def names(self) -> Sequence[str]:
        """Of all tensors. Errors: E_OPTION where a file cannot be read, or two have the same tensor."""
        if not self._opened:
            for file in self._files():
                self._open(file)
        return list(self._opened)

    def check(self, name: str, what: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Errors: E_LAYOUT where a tensor has another shape, or values that `dtype` would round."""
        stored: Any = self._opened[name].get_slice(name)
        if list(stored.get_shape()) != list(shape):
            raise usage_error(
                "E_LAYOUT",
                f"{what} is {list(shape)}, and tensor {name} of {self.path} {stored.get_shape()}",
                "build the model as the one whose weights were saved",
            )
        known = _DTYPES.get(stored.get_dtype())
        if known is None or not _holds(dtype, known):
            raise usage_error(
                "E_LAYOUT",
                f"{what} is {dtype}, and tensor {name} of {self.path} {known or stored.get_dtype()}, "
                "which it cannot hold exactly",
                "convert the file; float32 parameters with param_dtype=torch.bfloat16 hold float32, "
                "bfloat16 and float16",
            )

    def part(self, name: str, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """[begin, end) in each dimension; a view of the file."""
        stored: Any = self._opened[name].get_slice(name)
        part: torch.Tensor = stored[tuple(slice(begin, end) for begin, end in ranges)]
        return part

    def whole(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened[name].get_tensor(name)
        return tensor

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if len(indices) == 1:
            try:
                names = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()
                return [self.path / name for name in dict.fromkeys(names)]
            except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
                raise self._refusal(f"{indices[0].name} has no weight_map: {error!r}") from None
        files = sorted(self.path.glob("*.safetensors"))
        if len(indices) > 1 or not files:
            found = f"{len(indices)} indices" if indices else "no *.safetensors"
            raise self._refusal(f"the folder has {found}")
        return files

    def _open(self, file: Path) -> None:
        try:
            opened = self._library.safe_open(str(file), framework="pt")
            names = list(opened.keys())
        except (OSError, self._library.SafetensorError) as error:
            raise self._refusal(f"{file.name}: {error}") from None
        for name in names:
            if name in self._opened:
                raise self._refusal(f"tensor {name} is in two of its files")
            self._opened[name] = opened

    def _refusal(self, cause: str) -> UsageError:
        return usage_error(
            "E_OPTION",
            f"initial={str(self.path)!r}: {cause}",
            "a .safetensors file, or a folder of them (with one index.json where it has others too)",
        )


def _holds(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether every value of `stored` is one of `dtype`."""
    return (
        torch.promote_types(dtype, stored) == dtype
        and dtype.is_floating_point == stored.is_floating_point
    )


def refuse_difference(
    checkpoint: Checkpoint, wanted: Mapping[str, Sequence[str]], known: set[str] | None
) -> None:
    """
    wanted  Names of the model; any of the aliases of each will do.
    known   All names that tensors may have; None: any.

    Errors  E_LAYOUT  tensors are missing, or the model has not got them.
    """
    names = set(checkpoint.names())
    missing = [name for name, aliases in wanted.items() if names.isdisjoint(aliases)]
    extra = [] if known is None else sorted(names - known)
    if missing or extra:
        differences = [f"missing: {_listed(missing)}"] * bool(missing)
        differences += [f"not in the model: {_listed(extra)}"] * bool(extra)
        raise usage_error(
            "E_LAYOUT",
            f"{checkpoint.path} has {len(names)} tensors, the model {len(wanted)} parameters and "
            f"buffers; {'; '.join(differences)}",
            "name the tensors as model.state_dict() does, and leave out what the model has not got",
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_IN_A_MESSAGE
    return ", ".join(names[:NAMES_IN_A_MESSAGE]) + (f" and {more} more" if more > 0 else "")

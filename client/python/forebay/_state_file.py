"""Safetensors files of float32 tensors, written piece by piece and read as views of the mapped file."""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike

import torch

from .errors import UsageError, usage_error

ALIGN_BYTES = 64
HEADER_BYTES_MAX = 100 << 20  # as the library safetensors


def write(
    path: str | PathLike[str],
    shapes: Mapping[str, Sequence[int]],
    metadata: Mapping[str, str],
    pieces: Iterable[torch.Tensor],
) -> None:
    """The file is there when all of it is on the disk; until then its name is what it was.

    pieces  The elements of all tensors, in the order of `shapes`: contiguous float32 on the CPU.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    part = f"{os.fspath(path)}.part"
    try:
        with open(part, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            written = 0
            for piece in pieces:
                assert piece.dtype == torch.float32, piece.dtype
                size = piece.numel() * 4
                file.write((ctypes.c_ubyte * size).from_address(piece.data_ptr()))
                written += size
            assert written == end, (written, end)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.remove(part)
        raise


def read(path: str | PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata. Errors: E_OPTION where the file is none of write()'s."""
    assert sys.byteorder == "little"
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(HEADER_BYTES_MAX, size - 8) or (8 + length) % 4 or size % 4:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        first, tensors = 8 + length, {}
        mapped = torch.from_file(os.fspath(path), size=size // 4, dtype=torch.float32)
        for name, one in header.items():
            begin, end = one["data_offsets"]
            shape = [int(dim) for dim in one["shape"]]
            inside = 0 <= begin <= end <= size - first and begin % 4 == 0
            if one["dtype"] != "F32" or end - begin != 4 * math.prod(shape) or not inside:
                raise ValueError(f"tensor {name} is {one}")
            tensors[name] = mapped[(first + begin) // 4 : (first + end) // 4].view(shape)
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(path, str(error)) from None
    return tensors, metadata


def refusal(path: str | PathLike[str], cause: str) -> UsageError:
    """E_OPTION."""
    return usage_error(
        "E_OPTION",
        f"load_state({os.fspath(path)!r}): {cause}",
        "a file that opt.save_state(path) has written",
    )

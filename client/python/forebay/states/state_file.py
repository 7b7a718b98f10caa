# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of float32 tensors, written and read piece by piece."""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from ..errors import UsageError, usage_error
from ..sharded.boxes import Box

ALIGN_BYTES = 64
HEADER_BYTES_MAX = 100 << 20  # as the library safetensors


def write(
    path: str,
    shapes: Mapping[str, Sequence[int]],
    metadata: Mapping[str, str],
    pieces: Iterable[torch.Tensor],
) -> None:
    """The file has its name when all of it is on the disk; an older file of the name persists until then. Until then the
    new file is .forebay-*.part in the same folder, and remains if the process is killed.

    pieces  The elements of all tensors, in the order of `shapes`: contiguous float32 on the CPU.

    Errors  E_OPTION  the path exists and is no regular file, nor a link to one.
    """
    path = os.path.realpath(path)
    try:
        before = os.stat(path)
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise usage_error(
            "E_OPTION",
            f"save_state({path!r}): it is there, and no regular file",
            "a file's name, not a folder's or a device's",
        )
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    folder = os.path.dirname(path)
    part = os.path.join(folder, f".forebay-{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            if before is not None:
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(len(text).to_bytes(8, "little") + text)
            written = 0
            for piece in pieces:
                assert piece.dtype == torch.float32, piece.dtype
                size = piece.numel() * 4
                file.write((ctypes.c_ubyte * size).from_address(piece.data_ptr()))
                written += size
            assert written == end, (written, end)
            file.flush()
            os.fsync(descriptor)
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.remove(part)
        raise
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileTensor:
    """A float32 tensor of an open file; flat[begin:end] reads these elements, and nothing else does.

    Errors  E_OPTION  the file has become shorter, or cannot be read.
    """

    def __init__(self, file: tuple[str, int], shape: Sequence[int], begin_bytes: int) -> None:
        self._path, self._descriptor = file
        self._begin_bytes = begin_bytes
        self.shape = tuple(shape)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, elems: slice) -> torch.Tensor:
        begin, end, _ = elems.indices(len(self))
        values = torch.empty(max(0, end - begin), dtype=torch.float32, device="cpu")
        size = 4 * len(values)
        buffer = (ctypes.c_ubyte * size).from_address(values.data_ptr())
        try:
            count = os.preadv(self._descriptor, [buffer], self._begin_bytes + 4 * begin)
        except OSError as error:
            raise refusal(self._path, str(error)) from None
        if count != size:
            raise refusal(self._path, f"{count} of {size} bytes are there: it has become shorter")
        return values


class BoxOf:
    """(first, run, stride, runs) of flat values; [begin:end] copies these of its elements."""

    def __init__(self, flat: Flat, box: Box) -> None:
        self._flat, (self._first, self._run, self._stride, runs) = flat, box
        self._elems = self._run * runs

    def __len__(self) -> int:
        return self._elems

    def __getitem__(self, elems: slice) -> torch.Tensor:
        begin, end, _ = elems.indices(len(self))
        parts = []
        while begin < end:
            row, at = divmod(begin, self._run)
            count = min(self._run - at, end - begin)
            first = self._first + row * self._stride + at
            parts.append(self._flat[first : first + count])
            begin += count
        return torch.cat(parts)


Flat = torch.Tensor | FileTensor | BoxOf  # values of one dimension: len() and [begin:end]


def read(path: str, stack: ExitStack) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """The tensors and the metadata, valid until the stack is closed. Errors: E_OPTION if the file is none
    of write()'s."""
    assert sys.byteorder == "little"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        size = status.st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 0 < length <= min(HEADER_BYTES_MAX, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(os.pread(descriptor, length, 8))
        metadata = header.pop("__metadata__", {})
        first, tensors = 8 + length, {}
        for name, one in header.items():
            shape, (begin, end) = one["shape"], one["data_offsets"]
            whole = all(type(number) is int for number in (*shape, begin, end))
            if not whole or not 0 <= begin <= end <= size - first:
                raise ValueError(f"tensor {name} is {one}")
            if one["dtype"] != "F32" or end - begin != 4 * math.prod(shape):
                raise ValueError(f"tensor {name} is {one}")
            tensors[name] = FileTensor((path, descriptor), shape, first + begin)
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise refusal(path, str(error)) from None
    return tensors, metadata


def refusal(path: str, cause: str) -> UsageError:
    """E_OPTION."""
    return usage_error(
        "E_OPTION",
        f"load_state({path!r}): {cause}",
        "a file that opt.save_state(path) has written",
    )

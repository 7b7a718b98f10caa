# SPDX-License-Identifier: Apache-2.0
"""Buffers (BatchNorm's running statistics, say): each rank commits its own with each step, in front
of the user's extra_state, and starts from them after an attach. A rank that has committed none
starts from rank 0's.

Frame  bytes 0..3 MAGIC; 4..7 bytes of the table; 8..15 bytes of the values; then the table (JSON:
       name, type and shape of each buffer), the values, and the user's extra_state. Little endian.
"""

from __future__ import annotations

import ctypes
import json
import struct
import weakref

import torch
from torch import nn

from .errors import unsupported, usage_error

MAGIC = b"FBB1"
HEADER = struct.Struct("<4sIQ")
EXTRA_STATE_BYTES_MAX = (480 << 20) - HEADER.size  # limit of the daemon, less the header

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Buffers:
    """The buffers of one model that its state_dict holds. Does not keep the model alive.

    Threads  The one that trains.
    Errors   E_UNSUPPORTED  from all that reads them: a buffer's elements are not in this memory.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = set(model.state_dict(keep_vars=True))
        self._slots: list[tuple[str, weakref.ref[nn.Module], str]] = []
        seen = set()
        for prefix, module in model.named_modules():
            for key, tensor in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is not None and name in saved and id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._slots.append((name, weakref.ref(module), key))
        self._packed: list[bytes] = []  # packed buffers of the newest step
        self.named()  # refuses at attach what a step could not read

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Name and present value of each, in the order of the model."""
        found = []
        for name, reference, key in self._slots:
            module = reference()
            tensor = None if module is None else module._buffers.get(key)
            if tensor is not None:
                _check_readable(name, tensor)
                found.append((name, tensor))
        return found

    def size_bytes(self) -> int:
        """What pack() returns, less its header. Reads no element."""
        return len(self._table()) + sum(_size_bytes(tensor) for _, tensor in self.named())

    def pack(self, users_bytes: int, room_bytes: int) -> list[bytes]:
        """The frame to commit, in parts, less the user's extra_state behind it. The part of a buffer that has not changed
        is the object of the call before.

        Errors  E_EXTRA_STATE  both together need more than the room.
        """
        table = self._table()
        values = [tensor.detach().cpu().contiguous() for _, tensor in self.named()]
        values_bytes = sum(map(_size_bytes, values))
        buffers_bytes = len(table) + values_bytes
        needed_bytes = buffers_bytes + users_bytes
        if needed_bytes > room_bytes:
            raise usage_error(
                "E_EXTRA_STATE",
                f"extra_state has {users_bytes} bytes and the model's buffers "
                f"{buffers_bytes}; there is room for {room_bytes}",
                f"attach with memory=forebay.Memory(extra_state_bytes={needed_bytes})",
            )
        packed = self._packed if len(self._packed) == len(values) else [b""] * len(values)
        self._packed = [
            part if _has_bytes(part, whole) else _bytes_of(whole)
            for part, whole in zip(packed, values)
        ]
        return [HEADER.pack(MAGIC, len(table), values_bytes), table, *self._packed]

    def load(self, own: bytes, rank0: bytes) -> None:
        """Sets every buffer to its value in this rank's committed frame, else in rank 0's; leaves
        all as they are where neither has any.

        Errors  E_LAYOUT  the job has other buffers than the model. None was changed.
        """
        table, values, _ = _split(own)
        if not table:
            table, values, _ = _split(rank0)
        if not table:
            return
        if table != self._table():
            raise usage_error(
                "E_LAYOUT",
                f"the job has other buffers than the model: {_difference(table, self._table())}",
                "build the model as it was, or use another job name",
            )
        begin = 0
        with torch.no_grad():
            for _, tensor in self.named():
                end = begin + _size_bytes(tensor)
                committed = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                ctypes.memmove(committed.data_ptr(), values[begin:end], end - begin)
                tensor.copy_(committed)
                begin = end

    def _table(self) -> bytes:
        if not self._slots:
            return b""
        rows = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in self.named()]
        return json.dumps(rows, separators=(",", ":")).encode()


def users_part(frame: bytes) -> bytes:
    """The user's extra_state; bytes without our header are all the user's."""
    return _split(frame)[2]


def holds_buffers(frame: bytes) -> bool:
    """Whether load() finds any in it."""
    return bool(_split(frame)[0])


def _check_readable(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise unsupported(
            f"buffer {name} is {tensor.layout} on device {tensor.device}; only dense buffers on CPUs "
            "and GPUs are committed",
            "model.cpu() before attach, or register_buffer(..., persistent=False)",
        )


def _bytes_of(whole: torch.Tensor) -> bytes:
    """The elements in the order of the indices."""
    return ctypes.string_at(whole.data_ptr(), _size_bytes(whole)) if whole.numel() else b""


def _has_bytes(packed: bytes, whole: torch.Tensor) -> bool:
    """Whether these are the tensor's, compared byte by byte: `.data` and foreign kernels write without torch's version
    counter."""
    if len(packed) != _size_bytes(whole):
        return False
    return not packed or _memcmp(packed, whole.data_ptr(), len(packed)) == 0


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _split(frame: bytes) -> tuple[bytes, bytes, bytes]:
    """Table, values and the user's bytes."""
    if not frame.startswith(MAGIC) or len(frame) < HEADER.size:
        return b"", b"", frame
    _, table_bytes, values_bytes = HEADER.unpack_from(frame)
    values_begin = HEADER.size + table_bytes
    end = values_begin + values_bytes
    return frame[HEADER.size : values_begin], frame[values_begin:end], frame[end:]


def _difference(committed: bytes, own: bytes) -> str:
    rows = [json.loads(table) if table else [] for table in (committed, own)]
    for theirs, ours in zip(rows[0], rows[1]):
        if theirs != ours:
            return f"{theirs[0]} {theirs[1]}{theirs[2]}, here {ours[0]} {ours[1]}{ours[2]}"
    return f"{len(rows[0])} of them, here {len(rows[1])}"

"""Buffers (BatchNorm's running statistics, say): rank 0's are committed with each step, in front of
the user's extra_state, and every rank starts from them after an attach.

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

from .errors import usage_error

MAGIC = b"FBB1"
HEADER = struct.Struct("<4sIQ")
EXTRA_STATE_BYTES_MAX = (16 << 20) - HEADER.size  # of the daemon, less the header


class Buffers:
    """The buffers of one model that its state_dict holds. Does not keep the model alive.

    Threads  The one that trains.
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

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Name and present value of each, in the order of the model."""
        found = []
        for name, reference, key in self._slots:
            module = reference()
            tensor = None if module is None else module._buffers.get(key)
            if tensor is not None:
                found.append((name, tensor))
        return found

    def size_bytes(self) -> int:
        """What pack() adds to the user's extra_state, less its header."""
        return len(self._table()) + sum(_size_bytes(tensor) for _, tensor in self.named())

    def pack(self, extra_state: bytes) -> bytes:
        """The frame that rank 0 commits."""
        if not self._slots:
            return pack_without(extra_state)
        table = self._table()
        values = b"".join(bytes_of(tensor) for _, tensor in self.named())
        return HEADER.pack(MAGIC, len(table), len(values)) + table + values + extra_state

    def load(self, frame: bytes) -> None:
        """Sets every buffer to its committed value, where `frame` has any.

        Errors  E_LAYOUT  the job has other buffers than the model. None was changed.
        """
        table, values, _ = _split(frame)
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
                committed = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                ctypes.memmove(committed.data_ptr(), values[begin:end], end - begin)
                tensor.copy_(committed)
                begin = end

    def _table(self) -> bytes:
        if not self._slots:
            return b""
        rows = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in self.named()]
        return json.dumps(rows, separators=(",", ":")).encode()


def pack_without(extra_state: bytes) -> bytes:
    """The frame of a rank that commits no buffers."""
    return HEADER.pack(MAGIC, 0, 0) + extra_state


def users_part(frame: bytes) -> bytes:
    """The user's extra_state; bytes without our header are all the user's."""
    return _split(frame)[2]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in the order of the indices."""
    whole = tensor.detach().contiguous()
    return ctypes.string_at(whole.data_ptr(), _size_bytes(whole)) if whole.numel() else b""


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

# SPDX-License-Identifier: Apache-2.0
"""What a forward keeps for its backward, in the daemon's memory instead of the device's."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import ForebayError, unsupported

if TYPE_CHECKING:
    from ._core import ActivationStore, Attachment
    from ._device import HostDevice

LEAST_BYTES = 64 << 10  # smaller tensors stay: their copies would cost more than they free
PENDING_BYTES = 256 << 20  # bytes waiting for their copies on the device before compute waits too


class Activations:
    """The room of one attachment. Tensors are restored with the bits, shape and strides that they had.

    Threads  Under the GIL: a forward on one, its backward on another."""

    def __init__(self, attachment: Attachment, device: HostDevice) -> None:
        from . import _core

        self.store: ActivationStore = _core.ActivationStore(attachment)
        self.device = device
        self.stayed_bytes = 0  # bytes for which the room was too small
        self._pending: deque[tuple[weakref.ref[Saved], int]] = deque()  # and bytes
        self._pending_bytes = 0
        # Saved tensors by generation, storage, version and place.
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[Saved]]] = {}
        self._generation = 0
        self._last: weakref.ref[Saved] | None = None
        with torch.inference_mode(False):
            self._plain_keys = _keys_of(torch.empty(0, device=device.torch_device))

    def offload(self) -> AbstractContextManager[Any]:
        return Offload(self)

    def begin(self) -> None:
        """A forward of the model, or what is within or behind an entry of offload_activations(): what was
        saved before is found no more. Memory that is written where torch does not see it (numpy's,
        x.data) keeps its version, and would be taken for what an earlier graph keeps that still lives."""
        self._generation += 1

    def forget(self, saved: Saved) -> None:
        found = self._known.get(saved.key)
        if found is not None and found[1]() in (None, saved):
            del self._known[saved.key]
        try:
            self.store.drop(saved.number)
        except ForebayError:
            pass  # the device has failed: later calls say so

    # ---------------------------------------------------------------------------- autograd's hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        stream = self.device.stream()
        self._let_go(stream)
        if not self._takes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        place = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        key = self._generation, storage._cdata, tensor._version, place
        found = self._known.get(key)
        if found is not None and not _is_freed(found[0]) and (known := found[1]()) is not None:
            return known
        size_bytes = tensor.numel() * tensor.element_size()
        number = self.store.save(tensor.data_ptr(), size_bytes, stream)
        if number is None:
            self.stayed_bytes += size_bytes
            return tensor
        saved = Saved(self, number, key, tensor, self._last)
        self._last = weakref.ref(saved)
        if not self.device.is_host:  # the copy is in flight
            saved.keep(tensor, stream)
            self._pending.append((self._last, size_bytes))
            self._pending_bytes += size_bytes
        self._known[key] = StorageWeakRef(storage), self._last  # type: ignore[no-untyped-call]
        return saved

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Saved):
            assert isinstance(packed, torch.Tensor)
            return packed
        self._let_go(self.device.stream())
        return packed.tensor()

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Parameters are the daemon's already; what lies elsewhere frees nothing of the device. A tensor
        with other keys is more than its bytes: conjugated or negated when it is read, quantized, sparse,
        nested, without memory, wrapped by a transform."""
        return (
            type(tensor) is torch.Tensor
            and _keys_of(tensor) == self._plain_keys
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.device == self.device.torch_device
            and tensor.numel() * tensor.element_size() >= LEAST_BYTES
            and _is_dense(tensor)
            and _has_memory(tensor)
        )

    def _let_go(self, stream: int) -> None:
        """Gives up the device's memory of what was copied; where too much waits, compute does."""
        while self._pending:
            first = self._pending[0][0]()
            if first is not None and not self.store.has_left(first.number):
                if self._pending_bytes <= PENDING_BYTES:
                    return
                self.store.leave_behind(first.number, stream)
            self._pending_bytes -= self._pending.popleft()[1]
            if first is not None:
                first.leave()


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """What offload_activations() returns. It can be entered again, also within itself or by another
    thread: autograd keeps the entries, by thread."""

    def __init__(self, room: Activations) -> None:
        super().__init__(room.pack, room.unpack)
        self._room = room

    def __enter__(self) -> None:
        self._room.begin()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._room.begin()


class Saved:
    """One tensor, until autograd gives it up."""

    def __init__(
        self,
        room: Activations,
        number: int,
        key: Any,
        tensor: torch.Tensor,
        before: weakref.ref[Saved] | None,
    ) -> None:
        self.number, self.key = number, key
        self.size_bytes = tensor.numel() * tensor.element_size()
        self._original: torch.Tensor | None = None  # None once copied
        self._stream = 0  # stream that the tensor was computed on
        self._room, self._before = room, before
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._version = tensor._version
        self._was_changed = False
        self._ahead: torch.Tensor | None = None  # being loaded before anybody has asked
        self._ahead_stream = 0
        self._loaded: weakref.ref[torch.Tensor] | None = None

    def __del__(self) -> None:
        try:  # what is freed with it is used again behind the copies from and to it
            if self._original is not None:
                self._room.store.leave_behind(self.number, self._stream)
            if self._ahead is not None:
                self._room.store.loaded_for(self.number, self._ahead_stream)
        except ForebayError:
            pass  # the device has failed: later calls say so
        self._room.forget(self)

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        """Retains the tensor until leave(), while the copy of what the stream's work computes is in progress."""
        self._original, self._stream = tensor.detach(), stream  # tensor and stream of one version

    def leave(self) -> None:
        """It was copied: nobody may have written it before that."""
        self._look_for_changes()
        self._original = None

    def _look_for_changes(self) -> None:
        if self._original is not None and self._original._version != self._version:
            self._was_changed = True

    def tensor(self) -> torch.Tensor:
        """On the device, for work that is begun from now on."""
        self._look_for_changes()
        if self._was_changed:
            raise unsupported(
                f"a tensor of shape {list(self._shape)} that backward needs was changed in place while "
                "it was copied to host memory",
                "change it behind the backward, or out of place",
            )
        if self._original is not None:
            return self._original
        tensor = self._loaded() if self._loaded is not None else None
        if tensor is None:
            tensor = self._load()
            self._loaded = weakref.ref(tensor)
        before = self._before() if self._before is not None else None
        if before is not None and not self._room.device.is_host:
            before._load_ahead()
        return tensor

    def _load(self) -> torch.Tensor:
        stream = self._room.device.stream()
        tensor, self._ahead = self._ahead, None
        if tensor is None:
            tensor = self._begin_load(stream)
        self._room.store.loaded_for(self.number, stream)
        return tensor

    def _load_ahead(self) -> None:
        is_there = self._loaded is not None and self._loaded() is not None
        if is_there or self._original is not None or self._ahead is not None:
            return
        self._ahead_stream = self._room.device.stream()
        self._ahead = self._begin_load(self._ahead_stream)

    def _begin_load(self, stream: int) -> torch.Tensor:
        device = self._room.device.torch_device
        tensor = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=device)
        self._room.store.load(self.number, tensor.data_ptr(), self.size_bytes, stream)
        return tensor


def _is_freed(storage: StorageWeakRef) -> bool:
    freed: bool = storage.expired()  # type: ignore[no-untyped-call]
    return freed


def _keys_of(tensor: torch.Tensor) -> int:
    """The dispatch keys, by which torch finds what an operation on it does, as bits."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage has all its elements: it can be freed, and filled again before backward."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are one range of memory, in whatever order of dimensions.

    >>> _is_dense(torch.ones(2, 3).t()), _is_dense(torch.ones(2, 3)[:, :2])
    (True, False)
    """
    elems = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != elems:
            return False
        elems *= size
    return True

# SPDX-License-Identifier: Apache-2.0
"""The device that a sharded model is on: the processor, or a GPU of CUDA's. torch says on which of its
streams it works; the core copies on that stream."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from .errors import unsupported

DRIVER = "libcuda.so.1"  # as dlopen(3) takes it
KINDS = ("cpu", "cuda")


class HostDevice:
    """The processor: copies end at once."""

    is_host = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def options(self) -> dict[str, Any]:
        """What attach needs to reach it."""
        return {}

    def stream(self) -> int:
        """The handle of the stream that torch works on now."""
        return 0

    # Streams, as torch.cuda.Stream. Only GPUs have them.

    def torch_stream(self) -> Any:
        """The stream that torch works on now."""
        raise AssertionError("the processor has no streams")

    def new_stream(self) -> Any:
        """One of our own."""
        raise AssertionError("the processor has no streams")

    def on(self, _stream: Any) -> AbstractContextManager[Any]:
        """What torch begins within it, and the memory that it makes, are of that stream."""
        raise AssertionError("the processor has no streams")


class CudaDevice(HostDevice):
    """One GPU."""

    is_host = False

    def options(self) -> dict[str, Any]:
        index = self.torch_device.index
        ordinal = torch.cuda.current_device() if index is None else index
        return {"cuda_device": ordinal, "cuda_driver": DRIVER}

    def stream(self) -> int:
        return int(self.torch_stream().cuda_stream)

    def torch_stream(self) -> Any:
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


def refuse_mesh(mesh: Any) -> None:
    """Errors: E_UNSUPPORTED where fully_shard() would not find the devices of the mesh."""
    kind = getattr(mesh, "device_type", None)
    if not isinstance(kind, str):
        return  # fully_shard() says what it takes
    refuse_other_kinds("the mesh", torch.device(kind))
    if kind == "cuda" and not torch.cuda.is_available():
        raise unsupported(
            f'the mesh is on "cuda", and torch sees no GPU: {_why_no_gpu()}',
            "install NVIDIA's driver (`nvidia-smi` shows it) and a torch that is built for CUDA, or "
            'init_device_mesh("cpu", (world_size,))',
        )


def _why_no_gpu() -> str:
    """torch's first sentence about it."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].partition(". ")[0]
    return "torch.cuda.is_available() is False"


def refuse_other_kinds(what: str, device: torch.device) -> None:
    """Errors: E_UNSUPPORTED if the device is neither a CPU nor a CUDA GPU."""
    if device.type not in KINDS:
        raise unsupported(
            f"{what} is on device {device}; models on CPUs (gloo) and on NVIDIA's GPUs (NCCL) can be "
            "attached",
            'init_device_mesh("cuda", (world_size,)), or "cpu"',
        )

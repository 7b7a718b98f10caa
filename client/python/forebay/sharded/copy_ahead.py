# SPDX-License-Identifier: Apache-2.0
"""The copies of a rank that is alone in its mesh on a GPU. FSDP2 gathers nothing then: it asks for the weights of a group
when it is to compute with them, on the stream that it computes on, where their copy would wait for the computation of the
group before them, and the GPU for their copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._device import HostDevice

HELD = 2  # buffers: of the group in use, and of the one whose copy is under way


class CopyAhead:
    """Copies on a stream beside torch's. The processor asks for a group long before the GPU computes with it: the group is
    copied while the GPU computes with the group before it.

    Threads  One.
    """

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._beside = device.new_stream()
        self._held: list[torch.Tensor] = []
        self._asked: Any = None  # the event of the last call: behind what computes with the group of the call before

    def copy(self, make: Callable[[], torch.Tensor], fill: Callable[[torch.Tensor, int], None]) -> torch.Tensor:
        """What `make` makes, for the work that torch begins on its stream from now until the second next call; `fill` begins
        copies into it on the stream of the given handle."""
        compute = self._device.torch_stream()
        if len(self._held) == HELD:
            self._beside.wait_event(self._asked)
            del self._held[0]
        self._asked = compute.record_event()
        with self._device.on(self._beside):
            buffer = make()
            fill(buffer, int(self._beside.cuda_stream))
        compute.wait_event(self._beside.record_event())
        self._held.append(buffer)
        return buffer

    def release(self) -> None:
        """Gives its buffers back to torch."""
        if self._held:
            self._beside.wait_event(self._device.torch_stream().record_event())
            self._held.clear()

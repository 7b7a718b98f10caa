# SPDX-License-Identifier: Apache-2.0
"""A GPU for ranks that have none: CUDA over the driver of tests/support/fake_cuda.h, whose memory is the
host's. Every copy between the daemon's memory and torch's takes the way that it takes on a GPU. torch
works on the default stream, which is not late; the streams of the core are as late as they may be."""

import contextlib
import ctypes
import os
import pathlib

from forebay._device import HostDevice
from forebay.sharded import shard_plan

LEFT_OUT = []  # not empty: torch's stream and the package's do not wait for each other
DEVICE_OF = shard_plan.device_of  # as it is on machines with GPUs
PROGRAMS = pathlib.Path(
    os.environ.get("FOREBAY_BIN_DIR", pathlib.Path(__file__).parents[3] / "build" / "bin")
)
LIBRARY = PROGRAMS.resolve().parent / "tests" / "libfake_cuda.so"


class LateStream:
    """A stream of that driver, with what CopyAhead calls of torch.cuda.Stream."""

    def __init__(self, handle):
        self.cuda_stream = handle

    @classmethod
    def made(cls):
        handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(handle), 1)
        return cls(handle.value)

    def record_event(self):
        event = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(event), 2)
        call("cuEventRecord", event, ctypes.c_void_p(self.cuda_stream))
        return event

    def wait_event(self, event):
        if not LEFT_OUT:
            call("cuStreamWaitEvent", ctypes.c_void_p(self.cuda_stream), event, 0)


def call(function, *args):
    """One of the driver's, with the context of its device."""
    context = ctypes.c_void_p()
    assert driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver().cuCtxPushCurrent_v2(context) == 0
    result = getattr(driver(), function)(*args)
    assert driver().cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert driver().cuDevicePrimaryCtxRelease_v2(0) == 0
    assert result == 0, (function, result)


class LateDevice(HostDevice):
    is_host = False

    def options(self):
        return {"cuda_device": 0, "cuda_driver": str(LIBRARY)}

    def torch_stream(self):
        return LateStream(0)

    def new_stream(self):
        return LateStream.made()

    def on(self, stream):
        return contextlib.nullcontext()


def driver():
    return ctypes.CDLL(str(LIBRARY))


def install(registers_read_only):
    """Models on CPUs are on such a device from now on."""
    driver().fake_cuda_start(int(registers_read_only))
    shard_plan.device_of = lambda units: LateDevice(units[0].device)


def mistakes():
    """How often somebody did what CUDA does not define."""
    return driver().fake_cuda_mistakes()

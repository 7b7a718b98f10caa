"""A GPU for ranks that have none: CUDA over the driver of tests/support/fake_cuda.h, whose memory is the
host's. Every copy between the daemon's memory and torch's takes the way that it takes on a GPU. torch
works on the default stream, which is not late; the streams of the core are as late as they may be."""

import ctypes
import os
import pathlib

from forebay import _device

OF_UNITS = _device.of_units  # as it is on machines with GPUs
PROGRAMS = pathlib.Path(
    os.environ.get("FOREBAY_BIN_DIR", pathlib.Path(__file__).parents[3] / "build" / "bin")
)
LIBRARY = PROGRAMS.resolve().parent / "tests" / "libfake_cuda.so"


class LateDevice(_device.HostDevice):
    is_host = False

    def options(self):
        return {"cuda_device": 0, "cuda_driver": str(LIBRARY)}


def driver():
    return ctypes.CDLL(str(LIBRARY))


def install(registers_read_only):
    """Models on CPUs are on such a device from now on."""
    driver().fake_cuda_start(int(registers_read_only))
    _device.of_units = lambda units: LateDevice(units[0].device)


def mistakes():
    """How often somebody did what CUDA does not define."""
    return driver().fake_cuda_mistakes()

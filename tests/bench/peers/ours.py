# SPDX-License-Identifier: Apache-2.0
"""Our side for a Python process: the shared object of ours.cc, and buffers on huge pages."""

import contextlib
import ctypes
import mmap
import os
import pathlib

HUGE_PAGE_BYTES = 2 << 20
LINE_BYTES = 64
STAGGER = 37  # lines from one stream to the next: no two of ten alike within 4 KiB
WORKS = {"fp32": 0, "exact": 1, "master": 2}  # the numbers of enum Work in ours.cc
BYTES_PER_ELEM = {"fp32": 28, "exact": 26, "master": 28}  # reads plus writes of one pass
LR, WEIGHT_DECAY = 1e-5, 0.01  # used by the peers and by the job


class Planes(ctypes.Structure):
    """struct PeersPlanes."""

    _fields_ = [
        ("n", ctypes.c_uint64),
        ("weights", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("m", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
    ]


class Buffer:
    """Zeroed private memory on 2 MiB pages, where the kernel has them.

    stagger  Cache lines from the start of the first page. Streams that start alike in every page
             compete for the same places of the caches, on all sides: give each another start.
    """

    def __init__(self, size_bytes, stagger=0):
        size_bytes += stagger * LINE_BYTES
        whole = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.memory = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.offset = -start % HUGE_PAGE_BYTES + stagger * LINE_BYTES
        self.address = start + self.offset


def huge_page_share(buffers):
    """Of the memory of these buffers."""
    kib = {"AnonHugePages:": 0, "Rss:": 0}
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            inside = any(begin <= buffer.address < end for buffer in buffers)
        elif inside and words[0] in kib:
            kib[words[0]] += int(words[1])
    return kib["AnonHugePages:"] / max(1, kib["Rss:"])


class Library:
    """libforebay_peers.so."""

    def __init__(self, path):
        self.calls = calls = ctypes.CDLL(str(path))
        calls.PeersMake.restype = ctypes.c_void_p
        calls.PeersMake.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_size_t]
        calls.PeersMakeBlocks.restype = ctypes.c_bool
        calls.PeersMakeBlocks.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64,
        ]
        calls.PeersDrop.argtypes = [ctypes.c_void_p]
        calls.PeersThreads.argtypes = [ctypes.c_void_p]
        calls.PeersStep.argtypes = calls.PeersAddGradients.argtypes = [ctypes.c_void_p]
        calls.PeersTouch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Planes)]
        calls.PeersHoldMake.restype = ctypes.c_void_p
        calls.PeersHoldMake.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_size_t]
        calls.PeersHoldBegin.argtypes = calls.PeersHoldEnd.argtypes = [ctypes.c_void_p]
        calls.PeersTarget.restype = ctypes.c_char_p

    def target(self):
        return self.calls.PeersTarget().decode()


@contextlib.contextmanager
def on_cpus(cpus):
    """Allows these CPUs, so that threads may be started on them: OpenMP has bound this one to its first place."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Hold:
    """Keeps CPUs from others, without touching memory, in each with block."""

    def __init__(self, library, cpus):
        self.calls, self.handle = library.calls, None
        if cpus:
            with on_cpus(cpus):
                self.handle = self.calls.PeersHoldMake((ctypes.c_int * len(cpus))(*cpus), len(cpus))

    def __enter__(self):
        if self.handle:
            self.calls.PeersHoldBegin(self.handle)

    def __exit__(self, *_):
        if self.handle:
            self.calls.PeersHoldEnd(self.handle)


class Ours:
    """A pool of one thread per processor of `cpus`, and the daemon's blocks for it to update."""

    def __init__(self, library, cpus):
        self.calls = library.calls
        with on_cpus(cpus):
            self.handle = self.calls.PeersMake((ctypes.c_int * len(cpus))(*cpus), len(cpus))
        if not self.handle:
            raise RuntimeError(f"no threads on CPUs {list(cpus)}")
        threads = self.calls.PeersThreads(self.handle)
        if threads != len(cpus):
            raise RuntimeError(f"{threads} threads on CPUs {list(cpus)}: no core for each")

    def make_blocks(self, work, n, parameters):
        """Blocks of `n` elements, in DRAM, for step()."""
        if not self.calls.PeersMakeBlocks(self.handle, WORKS[work], n, parameters):
            raise RuntimeError(f"no memory for {n} parameters")

    def step(self):
        """One step of AdamW, by the tasks of the daemon's workers."""
        self.calls.PeersStep(self.handle)

    def step_from_delivery(self):
        """The same, from the gradients as one rank delivers them: they are checked and summed first."""
        self.calls.PeersAddGradients(self.handle)
        self.calls.PeersStep(self.handle)

    def touch(self, work, planes):
        """One pass of the limit loop of `work`."""
        self.calls.PeersTouch(self.handle, WORKS[work], ctypes.byref(planes))

    def close(self):
        self.calls.PeersDrop(self.handle)
        self.handle = None

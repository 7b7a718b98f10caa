# SPDX-License-Identifier: Apache-2.0
"""The records of jobs in a service manager's store of descriptors (daemon/exec/recovery/kept_record.h), as a test reads
them.
"""

import os
import struct
import time

from ordered_steps import DEADLINE_S

# Words of a record's header.
VERSION, JOB_BYTES, HALF_BYTES, CHECKSUM, CURRENT = 1, 4, 5, 8, 9
FIXED_WORDS = range(2, CHECKSUM + 1)
JOB_OFFSET = 128
# Kinds of entries (RecordEntry of ledger.capnp) whose struct begins with the step.
ATTEMPT, DECISION, STEP = 4, 6, 8


def record(manager, job):
    """Returns the descriptor of the newest one of the job with this number."""
    return [fd for name, fd in manager.store if name.startswith(f"forebay.record.{job}.")][-1]


def words(fd):
    return struct.unpack("<10Q", os.pread(fd, 80, 0))


def current_half(fd):
    """Returns the offset of the half that counts, and the bytes of its entries."""
    header = words(fd)
    begin = JOB_OFFSET + (header[JOB_BYTES] + 63) // 64 * 64 + (header[CURRENT] >> 63) * header[HALF_BYTES]
    return begin, header[CURRENT] & ((1 << 63) - 1)


def steps(fd):
    """Returns {kind: step} of the newest entries of the kinds above."""
    entries, begin, size = b"", None, 0
    while (begin, size) != current_half(fd):  # the daemon may add entries meanwhile, or select the other half
        begin, size = current_half(fd)
        entries = os.pread(fd, size, begin)
    found, at = {}, 0
    while at < size:
        [message_bytes] = struct.unpack_from("<Q", entries, at)
        root = at + 24  # behind the head and the pointer to the RecordEntry, which has one word and one pointer
        kind, pointer = struct.unpack_from("<H6xQ", entries, root)
        if kind in (ATTEMPT, DECISION, STEP):
            [found[kind]] = struct.unpack_from("<Q", entries, root + 16 + 8 * (pointer >> 2 & 0x3FFFFFFF))
        at += 16 + message_bytes
    return found


def await_gradients(manager, step, job=1):
    """Returns when the daemon has taken gradients of this step: from now on a kill loses them."""
    _await(manager, lambda: steps(record(manager, job)).get(ATTEMPT) == step)


def await_decision(manager, step, job=1):
    """Returns when this step is decided: its update is under way or has ended."""
    _await(manager, lambda: steps(record(manager, job)).get(DECISION) == step)


def _await(manager, is_so):
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, manager.log.read_text()
        time.sleep(0.002)  # house: allow sleep: a poll with a deadline

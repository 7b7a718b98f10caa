# SPDX-License-Identifier: Apache-2.0
"""The records of jobs in a service manager's store of descriptors (daemon/exec/recovery/kept_record.cc), as a test reads
them.
"""

import os
import struct
import time

from ordered_steps import DEADLINE_S

# Words of a record's header.
VERSION = 1
PUBLISHED, DECIDED, ATTEMPT, FIXED_WORDS = 24, 25, 26, [*range(2, 23), 27, 29, 30, 31]
ATTEMPT_BITS = 16


def record(manager, job):
    """Returns the descriptor of the newest one of the job with this number."""
    return [fd for name, fd in manager.store if name.startswith(f"forebay.record.{job}.")][-1]


def words(fd):
    return struct.unpack("<32Q", os.pread(fd, 256, 0))


def await_gradients(manager, step, job=1):
    """Returns when the daemon has taken gradients of this step: from now on a kill loses them."""
    _await(manager, lambda: words(record(manager, job))[ATTEMPT] >> ATTEMPT_BITS == step)


def await_decision(manager, step, job=1):
    """Returns when this step is decided: its update is under way or has ended."""
    _await(manager, lambda: words(record(manager, job))[DECIDED] == step)


def _await(manager, is_so):
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, manager.log.read_text()
        time.sleep(0.002)  # house: allow sleep: a poll with a deadline

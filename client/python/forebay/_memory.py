# SPDX-License-Identifier: Apache-2.0
"""Private memory of the process that is free."""

import ctypes


def return_free_memory() -> None:
    """Returns freed memory to the system: large tensors, created and dropped in turns, leave holes in
    glibc's heap that the next one may not fit in."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc: the allocator retains the memory

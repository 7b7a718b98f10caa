# SPDX-License-Identifier: Apache-2.0
"""Lines on stderr, and sizes in them."""

from __future__ import annotations

import sys

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def say(line: str) -> None:
    print(f"forebay: {line}", file=sys.stderr, flush=True)


def size(count: int) -> str:
    """As the command line writes bytes.

    >>> size(1536), size(10)
    ('1.5 KiB', '10 B')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} B"

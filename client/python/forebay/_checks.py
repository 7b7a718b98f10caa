# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: each returns the value, or raises E_OPTION with its name."""

from typing import Any

from ._launcher import whole_number
from .errors import usage_error


def size_bytes(name: str, value: Any) -> int:
    """From 0 to 2**63 - 1."""
    number = whole_number(value)
    if number is None or not 0 <= number < 1 << 63:
        raise usage_error("E_OPTION", f"{name} is {value!r}, not a whole number of bytes", f"{name}=1 << 20")
    return number


def seconds(name: str, value: Any) -> float:
    """From 0 to infinity."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not number >= 0:  # NaN too
        raise usage_error(
            "E_OPTION",
            f"{name} is {value!r}, not a number of seconds",
            f'{name}=300.0, or float("inf") to wait without a limit',
        )
    return number

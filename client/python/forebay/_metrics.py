# SPDX-License-Identifier: Apache-2.0
"""The daemon of one attachment, asked for its numbers."""

from __future__ import annotations

import time
from typing import Any

from .errors import ForebayTimeoutError, UnavailableError

STATUS_TIMEOUT_S = 10.0
RATE_NAMES = {"read": "forebay/swap_read_bytes_per_s", "written": "forebay/swap_write_bytes_per_s"}


class Node:
    """The daemon of one attachment, asked for its numbers."""

    def __init__(self, socket: str, job: str, rank: int) -> None:
        self.socket, self.job, self.rank = socket, job, rank
        self._before: tuple[float, int, int] | None = None  # when, bytes read and written by then

    def metrics(self) -> dict[str, float]:
        """Empty where the daemon does not answer."""
        from . import _core

        try:
            status = _core.status(self.socket, STATUS_TIMEOUT_S)
        except (UnavailableError, ForebayTimeoutError):
            self._before = None  # the next daemon counts from 0
            return {}
        memory, swap = status["memory"], status["swap"]
        arenas = (arena for arena in memory["arenas"] if arena["job"] == self.job)
        values = {
            "forebay/dram_used_bytes": memory["used_bytes"],
            "forebay/dram_limit_bytes": memory["limit_bytes"],
            "forebay/job_dram_bytes": sum(arena["allocated_bytes"] for arena in arenas),
            "forebay/swap_used_bytes": sum(path["used_bytes"] for path in swap),
        }
        for job in status["jobs"]:
            if job["name"] == self.job:
                values["forebay/update_s"] = job["last_step_seconds"]
        return {name: float(value) for name, value in values.items()} | self._rates(swap)

    def _rates(self, swap: list[dict[str, Any]]) -> dict[str, float]:
        """Of all paths, since the call before."""
        read = sum(path["read_bytes"] for path in swap)
        written = sum(path["written_bytes"] for path in swap)
        before, self._before = self._before, (time.monotonic(), read, written)
        if before is None or read < before[1] or written < before[2]:  # another daemon's
            return {}
        seconds = max(self._before[0] - before[0], 1e-9)
        return {
            RATE_NAMES["read"]: (read - before[1]) / seconds,
            RATE_NAMES["written"]: (written - before[2]) / seconds,
        }

# SPDX-License-Identifier: Apache-2.0
"""Which run a process belongs to: a job is continued by its own run, and by another one only where
it asks for it (attach(resume=True))."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from ._launcher import run_of

# Prefixes of run tokens that may be made of a process's id: such a token differs between the nodes of one launch.
LAUNCHERS = ("launcher.", "mpirun.")
PROCESS = "process."  # begins the token of a process that is a run of its own


def run_token(environ: Mapping[str, str] = os.environ) -> str:
    """The same text in every process of one run, after a restart of its workers too.

    FOREBAY_RUN where it is set; torchrun's run id unless that is its default, "none", which every
    launch has; then pid and start time of torchrun itself. Of srun and mpirun the launch (run_of). Else one of this
    process alone.
    """
    named = environ.get("FOREBAY_RUN")
    if named:
        return named
    torchrun = environ.get("TORCHELASTIC_RUN_ID")
    if torchrun and torchrun != "none":
        return f"torchrun.{torchrun}"
    if torchrun:
        return f"{LAUNCHERS[0]}{_process(os.getppid())}"
    if launch := run_of(environ, _process(os.getppid())):
        return launch
    return f"{PROCESS}{_process(os.getpid())}"


def _process(pid: int) -> str:
    """Pid and start time (clock ticks since boot): unlike a pid alone, never used twice."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return str(pid)  # the process has ended
    return f"{pid}.{stat.rpartition(')')[2].split()[19]}"

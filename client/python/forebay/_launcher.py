# SPDX-License-Identifier: Apache-2.0
"""Which rank of what this process is, from the variables of whoever started it: torchrun's if they are
set, else those of srun and of mpirun (Open MPI, MPICH and Intel MPI, Cray PALS)."""

from __future__ import annotations

import operator
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any

from .errors import usage_error

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Variables of each mpirun, in the order of RANKS. environment_of() takes the first launcher whose variables are all set. It
# looks for srun's last: within a Slurm allocation mpirun starts its helpers by srun, and the ranks inherit srun's variables.
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
# Variables that srun sets in each rank of a step. A batch script has not all of them, and is no rank.
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
PORT_FIRST, PORTS = 15000, 15000  # below those that Linux gives to clients


def environment_of(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are for srun or mpirun, as
    far as they say it, whether or not they are set too; empty where neither of them started this process."""
    for names in (OPEN_MPI, MPICH, PALS):
        if all(name in environ for name in names):
            return _of_mpirun(environ, names)
    if all(name in environ for name in SLURM_STEP):
        return _of_srun(environ)
    return {}


def run_of(environ: Mapping[str, str], parent: str) -> str | None:
    """The same text in every rank of one launch on a node, where Open MPI or srun started it on all nodes and,
    where Slurm requeues it, in the next launch too. None for one rank alone: a shell that srun has started is one,
    and everything that is started in it is a run of its own.

    parent  Names the process that has started this one.
    """
    found = environment_of(environ)
    if found.get("WORLD_SIZE", "1") == "1":
        return None
    if OPEN_MPI[0] in environ and "PMIX_NAMESPACE" in environ:
        return f"mpirun.{re.sub('[^!-~]', '_', environ['PMIX_NAMESPACE'])[:100]}"
    if MPICH[2] in environ or PALS[2] in environ or OPEN_MPI[0] in environ:
        return f"mpirun.{parent}"
    return f"slurm.{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"


def set_launcher_environment(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Sets what torch.distributed.init_process_group() reads (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT) where srun or mpirun started this process, and returns what it has set. Does
    nothing below torchrun, which has set them, and alone. A variable that is set already stays.

    attach() finds rank and world size by itself: this is for scripts with a process group.

    Errors  E_OPTION  mpirun has started ranks on several nodes, and does not say on which the first one is.

    >>> forebay.set_launcher_environment()
    {}
    """
    found = {name: text for name, text in environment_of(environ).items() if name not in environ}
    if found and "MASTER_ADDR" not in found and "MASTER_ADDR" not in environ:
        raise usage_error(
            "E_OPTION",
            "MASTER_ADDR is not set, and mpirun does not say on which node rank 0 is",
            "mpirun -x MASTER_ADDR=HOST (MPICH: -genv MASTER_ADDR HOST), HOST being the first one",
        )
    environ.update(found)
    return found


def whole_number(value: Any) -> int | None:
    """None for what is no whole number, 1.5 and True among it; a string as of an environment variable."""
    if isinstance(value, bool):
        return None
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        return None


def _of_mpirun(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    found = {ours: environ[theirs] for ours, theirs in zip(RANKS, names)}
    if found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"]:
        found["MASTER_ADDR"] = "127.0.0.1"
    # Open MPI has one text for a launch: two of them on a node do not meet. Else torchrun's own default.
    launch = environ.get("PMIX_NAMESPACE")
    found["MASTER_PORT"] = str(_port(launch) if launch else 29500)
    return found


def _of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    _, _, rank, local_rank, world_size = SLURM_STEP
    found = {
        "RANK": environ[rank],
        "WORLD_SIZE": environ[world_size],
        "LOCAL_RANK": environ[local_rank],
    }
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    if node.isdigit() and int(node) < len(per_node):
        found["LOCAL_WORLD_SIZE"] = str(per_node[int(node)])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if nodes:
        found["MASTER_ADDR"] = first_host(nodes)
    found["MASTER_PORT"] = str(_port(f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"))
    return found


def tasks_per_node(text: str) -> list[int]:
    """Slurm's way to write it; empty where it is written otherwise.

    >>> tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Of a list as Slurm writes it.

    >>> first_host("rack[07-09,12]-n[1,3],login")
    'rack07-n1'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def _port(launch: str) -> int:
    return PORT_FIRST + zlib.crc32(launch.encode()) % PORTS

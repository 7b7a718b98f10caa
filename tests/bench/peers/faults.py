#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The same faults on DeepSpeed, with optimizer states on NVMe and in memory, and on Forebay: a
resume, a flipped bit and a truncated file in what is saved, a full disk, two jobs on one path, SIGKILL during
a save.

Real processes on real files, one rank. DeepSpeed saves with save_checkpoint() at steps 4 and 6 and resumes
with load_checkpoint(); a job of Forebay is at durability step, and resumes by attaching. Each training goes to
step 8; its result is SHA-256 of all weights, masters and moments at that step, beside that of the training that
nothing disturbs. If DeepSpeed's resume alone gives another one, results are compared with that of a resume
from the same step that nothing disturbs.

Needs the environment that infinity.py makes (with DeepSpeed and its aio), an interpreter with the forebay
package and, for the full disk, the right to mount. Writes OUT/faults.jsonl and prints a table;
docs/reports/reliability.md says what it means.
"""

import argparse
import contextlib
import datetime
import json
import pathlib
import subprocess
import tempfile
import time

import environment
import figures
from faults_deepspeed import DeepSpeed
from faults_forebay import Forebay
from faults_outcome import Rows, table
from faults_process import Folders, Server

KILLS = 20
SIDES = ("nvme", "cpu", "forebay")
FAULTS = ("flipped", "truncated", "full_disk", "two_jobs", "killed")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="build/peers", help="of the environment with DeepSpeed")
    parser.add_argument("--python", default=".venv/bin/python", help="with the forebay package")
    parser.add_argument("--build", default="build", help="a build tree of ours, built")
    parser.add_argument("--out", default="build/peers/out")
    parser.add_argument("--place", default="/var/tmp", help="folder on a disk, for what trainings write")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--by", nargs="*", default=SIDES, choices=SIDES)
    parser.add_argument("--only", nargs="*", default=FAULTS, choices=FAULTS, help="beside the resume")
    args = parser.parse_args()
    # Links are not resolved: an interpreter finds its virtual environment by the path of its link.
    for name in ("build", "out", "python"):
        setattr(args, name, pathlib.Path(getattr(args, name)).absolute())
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main():
    args = parse_args()
    began = time.monotonic()
    place = environment.Environment(args.folder)
    variables = place.variables(environment.cores(1))
    # OMP_PLACES would bind sides that run at once to the same CPU. FOREBAY_ variables of the caller may
    # name another daemon.
    other = ("OMP_P", "FOREBAY_")
    shared = {name: value for name, value in variables.items() if not name.startswith(other)}
    rows = Rows()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="fb-faults-", dir=args.place))
        folders = Folders(root)

        def server(by, python, variables):
            log = args.out / f"faults-{by}.log"
            return stack.enter_context(contextlib.closing(Server(by, python, variables, log)))

        sides = []
        if {"nvme", "cpu"} & set(args.by):
            deepspeed = server("deepspeed", place.python, shared)
            for by in ("nvme", "cpu"):
                if by in args.by:
                    sides.append(DeepSpeed(deepspeed, folders, rows, on_nvme=by == "nvme"))
        if "forebay" in args.by:
            sides.append(Forebay(server("forebay", args.python, shared), folders, rows, args.build))
            stack.callback(sides[-1].kill_daemons)
        try:
            for side in sides:
                side.begin()
                for fault in args.only:
                    work = getattr(side, fault)
                    work(args.kills) if fault == "killed" else work()
        finally:
            write(args, place, rows, time.monotonic() - began)
    print(table(rows), end="")


def write(args, place, rows, seconds):
    version = "import importlib.metadata as m; print(m.version('forebay'))"
    done = subprocess.run([args.python, "-c", version], capture_output=True, text=True, check=False)
    facts = {"case": "faults/facts", "date": datetime.date.today().isoformat()}
    facts |= environment.machine() | place.versions()
    facts |= {"forebay": done.stdout.strip() or None, "seconds": seconds}
    figures.write_lines(args.out / "faults.jsonl", facts, rows)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

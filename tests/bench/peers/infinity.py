#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step with optimizer states, then weights too, on the disk: Forebay beside DeepSpeed ZeRO-3
with NVMe, in alternation in one run.

Makes an environment of its own with torch and DeepSpeed from PyPI (whose asynchronous I/O compiles for a
quarter of an hour, once) and builds what it needs of ours. First the transfers alone: DeepSpeed's aio
handle on its own pinned memory beside `forebay bench disk`. Then, with one rank and with two, the step of
a GPT of 110 M parameters in bf16: each setting of DeepSpeed's beside Forebay with as much on swap, and
beside `compute`: FSDP2's forward and backward of the same model, all of it in memory and without an
optimizer. That is the limit: nothing that trains is faster beside DeepSpeed than `deepspeed-over-compute`.
For each side also the CPU seconds of a step: over the cores, they are what a step takes at least. They and the bytes
need neither a quiet machine nor DeepSpeed: `--sides forebay,compute --python .venv/bin/python` uses what is built.
Writes OUT/infinity.jsonl and prints a table. docs/reports/benchmarks.md says what the figures mean.
"""

import contextlib
import dataclasses
import datetime
import json
import pathlib
import re
import shutil
import subprocess
import sys

import environment
import figures
import phase
import quiet
import sharded

HERE = pathlib.Path(__file__).resolve().parent
SIDES = ("deepspeed", "forebay", "compute")
CLIP = 10.0  # largest norm of the gradient; the actual norm is 5.2
# Environment of all sides. By default glibc either frees a trainer's memory in each step or retains it, by chance of the
# process's address layout. This changes a step by 0.3 s. 32 MiB is the largest mmap threshold that glibc accepts.
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
STEPS = 4  # steps of a turn; the first is not timed, and the turn ends after the last
OPTIMIZER = {"device": "nvme", "pin_memory": True, "fast_init": False}
PLAIN = {"sub_group_size": 10**9, "offload_optimizer": OPTIMIZER | {"buffer_count": 4}}
# DeepSpeed's settings with pipelined reads and writes. With fewer buffers DeepSpeed stops with an error.
PIPELINED = {
    "sub_group_size": 2 * 10**7,
    "offload_optimizer": OPTIMIZER
    | {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
}
# DeepSpeed's settings with parameters on NVMe. Prefetch is off, because DeepSpeed's prefetch from NVMe stops with an error.
ALL = PLAIN | {
    "sub_group_size": 2 * 10**7,
    "stage3_prefetch_bucket_size": 0,
    "offload_param": {
        "device": "nvme",
        "pin_memory": True,
        "buffer_count": 64,
        "buffer_size": 15 * 10**6,
        "max_in_cpu": 0,
    },
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Of a comparison."""

    zero: dict  # DeepSpeed's zero_optimization
    dram: str  # Forebay's --dram for the 110M model
    format: str = "exact"  # Forebay's state format
    clip: float = CLIP


SETTINGS = {
    # Weights and the new weights of early updates fit in DRAM. All states are on swap.
    "optimizer, one group": Setting(PLAIN, "800MiB"),
    "optimizer, pipelined": Setting(PIPELINED, "800MiB"),
    "optimizer, one group; bf16": Setting(PLAIN, "800MiB", "bf16"),
    "optimizer, one group; int8": Setting(PLAIN, "800MiB", "int8"),
    # Neither weights nor states fit in DRAM.
    "optimizer and parameters": Setting(ALL, "320MiB"),
    # Half of Forebay's states fit in DRAM. DeepSpeed has no such setting.
    "optimizer, one group; half in DRAM": Setting(PLAIN, "1208MiB"),
    "optimizer, one group; half in DRAM, bf16": Setting(PLAIN, "996MiB", "bf16"),
    "optimizer, one group; half in DRAM, int8": Setting(PLAIN, "894MiB", "int8"),
    # Clipping delays each update until the norm is known.
    "optimizer, one group; each step clipped": Setting(PLAIN, "800MiB", clip=1.0),
}
SMOKE_DRAM = "128MiB"
SWAP = {"110M": "4GiB", "smoke": "64MiB"}
GOALS = {"all": 3.0, "step": 3.0}
AIO_GOAL = 1.4
TRANSFERS = ("read", "write", "mixed")


def with_folder(zero, folder):
    """`zero` with the path that each of its offloads needs."""
    return {
        name: value | {"nvme_path": str(folder)} if isinstance(value, dict) else value
        for name, value in zero.items()
    }


def counted(root):
    """Of a process and its descendants since they began, as the kernel counts: bytes of the disk, and CPU seconds (all,
    and those spent in the kernel) of the daemon and of the others, which train; and page faults of the latter."""
    names = ("read_bytes", "written_bytes", "trainers_s", "trainers_kernel_s", "daemon_s", "daemon_kernel_s")
    found = dict.fromkeys((*names, "trainers_faults"), 0)
    for pid in quiet.tree([root]):
        with contextlib.suppress(OSError):  # the process has ended
            text = pathlib.Path(f"/proc/{pid}/io").read_text(encoding="ascii")
            fields = dict(line.split(": ") for line in text.splitlines())
            found["read_bytes"] += int(fields["read_bytes"])
            found["written_bytes"] += int(fields["write_bytes"])
            text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            head, _, tail = text.rpartition(")")
            fields = tail.split()
            user, kernel = (int(field) / quiet.TICKS for field in fields[11:13])
            of = "daemon" if head.endswith("(forebayd") else "trainers"
            found[f"{of}_s"] += user + kernel
            found[f"{of}_kernel_s"] += kernel
            found["trainers_faults"] += int(fields[7]) if of == "trainers" else 0
    return found


def turn(side):
    before = counted(side.process.pid)
    taken = side.turn()
    return taken | {name: count - before[name] for name, count in counted(side.process.pid).items()}


def start(place, args, ranks, name):
    setting = SETTINGS[name]
    worker = [place.python, HERE / "sharded_worker.py", "--size", args.size, "--dtype", "bf16"]
    worker += ["--ranks", str(ranks), "--clip", str(setting.clip), "--steps", str(STEPS)]
    dram = SMOKE_DRAM if args.size == "smoke" else setting.dram
    run = [args.build / "bin" / "forebay", "run", "--dram", dram]
    run += ["--swap", args.out / "swap", "--swap-size", SWAP[args.size], "--"]
    theirs = json.dumps(with_folder(setting.zero, args.out / "nvme"))
    commands = {
        "deepspeed": [*worker, "--by", "deepspeed", "--zero", theirs],
        "forebay": [*run, *worker, "--by", "forebay-on-swap", "--format", setting.format],
        "compute": [*worker, "--by", "compute"],
    }
    variables = place.variables(environment.cores(args.threads // ranks)) | KEPT_MEMORY
    if ranks > 1:  # OMP_PLACES would bind all ranks to the same CPUs
        variables = {name: value for name, value in variables.items() if name != "OMP_PLACES"}
        variables["OMP_PROC_BIND"] = "false"
    for by in args.sides:
        log = args.out / f"infinity-{ranks}-{by}-{re.sub('[ ,;]+', '-', name)}.log"
        print(f"starting {by}, ranks: {ranks}, on the disk: {name}", flush=True)
        yield by, phase.Side(by, commands[by], variables, log)


def compare(place, args, ranks, name):
    """Rows of one comparison, with sides of its own: the memory of all would not fit together."""

    def work(sides):
        return sharded.measure(args, sides, turn), sharded.peaks_of(sides)

    try:
        (rounds, peaks), facts = sharded.with_sides(start(place, args, ranks, name), work)
    finally:
        shutil.rmtree(args.out / "nvme", ignore_errors=True)
    return rows_of(rounds, peaks, facts, f"infinity/ranks={ranks}/on_disk={name}")


def rows_of(rounds, peaks, facts, case):
    params = facts["forebay"]["params"]
    for part, names in figures.PARTS.items():
        seconds = {
            by: [sum(one[by][name] for name in names) for one in rounds.kept] for by in peaks
        }
        if "deepspeed" not in peaks:
            yield from sharded.compared_rows(f"{case}/part={part}", seconds, ("forebay", "compute"), "s")
            continue
        goal = GOALS.get(part)
        over = ("deepspeed", "forebay")
        yield from sharded.compared_rows(f"{case}/part={part}", seconds, over, "s", goal)
        if part == "all":
            yield sharded.ratio_row(f"{case}/part={part}/limit", seconds, ("deepspeed", "compute"))
    for by, peak in peaks.items():
        yield {"case": f"{case}/peak/by={by}", "unit": "MiB", "value": peak.bytes / 2**20}
    if "deepspeed" in peaks:
        share = peaks["forebay"].bytes / peaks["deepspeed"].bytes
        yield {"case": f"{case}/peak/forebay-over-deepspeed", "unit": "times", "value": share}
    for by in peaks:
        yield from cpu_rows(rounds.kept, case, by)
        faults = [one[by]["trainers_faults"] / STEPS for one in rounds.kept]
        yield {"case": f"{case}/faults/of=trainers/by={by}", "unit": "pages"} | figures.spread(faults)
        for name in ("read_bytes", "written_bytes"):
            counts = [one[by][name] / params / STEPS for one in rounds.kept]
            row = {"case": f"{case}/{name}/by={by}", "unit": "bytes a parameter"}
            yield row | figures.spread(counts)
    names = ("threads", "blocks", "blocks_in_dram")
    kept = {"params": params, "rejected": rounds.rejected}
    yield {"case": f"{case}/facts"} | kept | {name: facts["forebay"][name] for name in names}


def cpu_rows(kept, case, by):
    """CPU seconds of a step, and the median of those that were spent in the kernel."""
    for of in ("trainers", "daemon"):
        seconds, kernel = ([one[by][name] / STEPS for one in kept] for name in (f"{of}_s", f"{of}_kernel_s"))
        if of == "trainers" or by == "forebay":
            row = {"case": f"{case}/cpu/of={of}/by={by}", "unit": "s"} | figures.spread(seconds)
            yield row | {"kernel": figures.spread(kernel)["value"]}


def bench_disk(args):
    """GB/s of the daemon's transfers of blocks: {"read": ..., "write": ..., "mixed": ...}."""
    command = [args.build / "bin" / "forebay", "bench", "disk", "--json", "--swap", args.out / "swap"]
    command += ["--samples", "1", *(["--params", str(2**22)] if args.size == "smoke" else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = map(json.loads, done.stdout.splitlines())
    return {row["case"].partition("op=")[2].partition("/")[0]: row["value"] for row in rows}


def transfers(place, args):
    """Rows of the transfers alone."""
    log = args.out / "infinity-aio.log"
    command = [place.python, HERE / "aio_worker.py", "--folder", args.out / "swap"]
    command += ["--mib", "64" if args.size == "smoke" else "1024"]
    side = phase.Side("aio handle", command, place.variables(environment.cores(1)), log)
    samples = []
    try:
        for number in range(args.rounds):
            works = [("deepspeed", side.turn), ("forebay", lambda: bench_disk(args))]
            samples.append({by: work() for by, work in (works if number % 2 else reversed(works))})
        side.end()
    finally:
        side.kill()
    for op in TRANSFERS:
        values = {by: [one[by][op] for one in samples] for by in ("deepspeed", "forebay")}
        goal = None if op == "mixed" else AIO_GOAL
        over = ("forebay", "deepspeed")
        yield from sharded.compared_rows(f"transfers/op={op}", values, over, "GB/s", goal)


def add_options(parser):
    parser.add_argument("--folder", default="build/peers", help="of the environment")
    parser.add_argument("--only", choices=["transfers", "step"])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--settings", default="/".join(SETTINGS), help="by name, a / between two")
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--as-is", action="store_true", help="install and build nothing")
    parser.add_argument("--python", help="that has torch and forebay: with it nothing is installed or built")
    parser.add_argument("--sides", default=",".join(SIDES), help="of the steps: without deepspeed too")


def main():
    args = sharded.parse_args(__doc__, add_options)
    args.sides = args.sides.split(",")
    if not {"forebay", "compute"} <= set(args.sides) <= set(SIDES):
        sys.exit(f"--sides: forebay, compute, and deepspeed or not; not {args.sides}")
    place = environment.Environment(args.folder)
    if args.python:
        place.python = pathlib.Path(args.python).absolute()
    elif not args.as_is:
        place.make(args.build, with_aio=True)
    rows = []
    if args.only != "step" and "deepspeed" in args.sides:
        rows += transfers(place, args)
    if args.only != "transfers":
        for ranks in map(int, args.ranks.split(",")):
            for name in args.settings.split("/"):
                rows += compare(place, args, ranks, name)
    facts = {"case": "infinity/facts", "date": datetime.date.today().isoformat()}
    facts |= environment.machine() | place.versions()
    sharded.report(args.out / "infinity.jsonl", facts, rows)


if __name__ == "__main__":
    main()

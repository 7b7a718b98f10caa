#!/usr/bin/env python3
"""A training step with optimizer states, then weights too, on the disk: Forebay beside DeepSpeed ZeRO-3
with NVMe, in alternation in one run.

Makes an environment of its own with torch and DeepSpeed from PyPI (whose asynchronous I/O compiles for a
quarter of an hour, once) and builds what it needs of ours. First the transfers alone: DeepSpeed's aio
handle on its own pinned memory beside `forebay bench swap`. Then, with one rank and with two, the step of
a GPT of 110 M parameters in bf16: each setting of DeepSpeed's beside Forebay with as much on swap.
Writes OUT/infinity.jsonl and prints a table. docs/benchmarks.md says what the figures mean.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

import environment
import figures
import phase
import quiet
import sharded

HERE = pathlib.Path(__file__).resolve().parent
CLIP = 1.0
STEPS = 4  # a turn: the first is not timed, and the turn ends when all are done
OPTIMIZER = {"device": "nvme", "pin_memory": True, "fast_init": False}
PLAIN = {"sub_group_size": 10**9, "offload_optimizer": OPTIMIZER | {"buffer_count": 4}}
# With fewer buffers it stops with an error.
PIPELINED = {
    "sub_group_size": 2 * 10**7,
    "offload_optimizer": OPTIMIZER
    | {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
}
# Its prefetch from NVMe stops with an error, so it is off.
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
SETTINGS = {  # of DeepSpeed: what is on the disk, and `zero_optimization`
    "optimizer, one group": ("states", PLAIN),
    "optimizer, pipelined": ("states", PIPELINED),
    "optimizer and parameters": ("weights", ALL),
}
# Least DRAM that leaves the weights there and no states, and that leaves neither.
DRAM = {
    "110M": {"states": "608MiB", "weights": "320MiB"},
    "smoke": {"states": "128MiB", "weights": "128MiB"},
}
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


def disk_bytes(root):
    """Read and written by a process and its descendants since they began, by the kernel's count."""
    read = written = 0
    for pid in quiet.tree([root]):
        with contextlib.suppress(OSError):  # ended meanwhile
            text = pathlib.Path(f"/proc/{pid}/io").read_text(encoding="ascii")
            fields = dict(line.split(": ") for line in text.splitlines())
            read, written = read + int(fields["read_bytes"]), written + int(fields["write_bytes"])
    return read, written


def turn(side):
    before = disk_bytes(side.process.pid)
    taken = side.turn()
    read, written = (now - then for now, then in zip(disk_bytes(side.process.pid), before))
    return taken | {"read_bytes": read, "written_bytes": written}


def start(place, args, ranks, setting):
    on_disk, zero = SETTINGS[setting]
    worker = [place.python, HERE / "sharded_worker.py", "--size", args.size, "--dtype", "bf16"]
    worker += ["--ranks", str(ranks), "--clip", str(CLIP), "--steps", str(STEPS)]
    run = [args.build / "bin" / "forebay", "run", "--dram", DRAM[args.size][on_disk]]
    run += ["--swap", args.out / "swap", "--swap-size", SWAP[args.size], "--"]
    theirs = json.dumps(with_folder(zero, args.out / "nvme"))
    commands = {
        "deepspeed": [*worker, "--by", "deepspeed", "--zero", theirs],
        "forebay": [*run, *worker, "--by", "forebay-on-swap"],
    }
    variables = place.variables(environment.cores(args.threads // ranks))
    if ranks > 1:  # each rank would bind its threads to the same CPU
        variables = {name: value for name, value in variables.items() if name != "OMP_PLACES"}
        variables["OMP_PROC_BIND"] = "false"
    for by, command in commands.items():
        log = args.out / f"infinity-{ranks}-{by}-{setting.replace(' ', '-').replace(',', '')}.log"
        print(f"starting {by}, ranks: {ranks}, on the disk: {setting}", flush=True)
        yield by, phase.Side(by, command, variables, log)


def compare(place, args, ranks, setting):
    """Rows of one comparison, in rounds of its own: the sides' memory would not fit together."""
    sides = {}
    try:
        for by, side in start(place, args, ranks, setting):
            sides[by] = side
        for _ in range(phase.WARM_ROUNDS):
            for side in sides.values():
                side.turn()

        def take(number, watch):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            samples = {}
            for by in order:
                quiet.pause(phase.PARK_S)
                with watch.running([sides[by].process.pid]):
                    samples[by] = turn(sides[by])
            return samples

        rounds = quiet.Rounds(args.rounds, args.patience, args.noise, ahead=False)
        rounds.collect(take)
        peaks = {by: sharded.Peak(side.process.pid) for by, side in sides.items()}
        for by, peak in peaks.items():
            for _ in range(2):
                peak.during(sides[by].turn)
        facts = {by: side.facts for by, side in sides.items()}
        for side in sides.values():
            side.end()
    finally:
        for side in sides.values():
            side.kill()
        shutil.rmtree(args.out / "nvme", ignore_errors=True)
    if not rounds.kept:
        sys.exit(f"no quiet round within {args.patience} s ({rounds.rejected} were not)")
    return rows_of(rounds, peaks, facts, f"infinity/ranks={ranks}/on_disk={setting}")


def rows_of(rounds, peaks, facts, case):
    params = facts["forebay"]["params"]
    common = {"rejected": rounds.rejected}
    seconds = {
        (by, part): [sum(one[by][name] for name in names) for one in rounds.kept]
        for by in peaks
        for part, names in figures.PARTS.items()
    }
    for (by, part), values in seconds.items():
        yield {"case": f"{case}/part={part}/by={by}", "unit": "s"} | figures.spread(values) | common
    for part in figures.PARTS:
        pairs = zip(seconds["deepspeed", part], seconds["forebay", part])
        row = {"case": f"{case}/part={part}/deepspeed-over-forebay", "unit": "times"}
        row |= figures.spread([theirs / own for theirs, own in pairs]) | common
        yield row | ({"goal": GOALS[part]} if part in GOALS else {})
    for by, peak in peaks.items():
        yield {"case": f"{case}/peak/by={by}", "unit": "MiB", "value": peak.bytes / 2**20}
    share = peaks["forebay"].bytes / peaks["deepspeed"].bytes
    yield {"case": f"{case}/peak/forebay-over-deepspeed", "unit": "times", "value": share}
    for by in peaks:
        for name in ("read_bytes", "written_bytes"):
            counts = [one[by][name] / params / STEPS for one in rounds.kept]
            row = {"case": f"{case}/{name}/by={by}", "unit": "bytes a parameter"}
            yield row | figures.spread(counts)
    names = ("blocks", "blocks_in_dram")
    yield {"case": f"{case}/facts", "params": params} | {n: facts["forebay"][n] for n in names}


def bench_swap(args):
    """GB/s of the daemon's transfers of blocks: {"read": ..., "write": ..., "mixed": ...}."""
    command = [args.build / "bin" / "forebay", "bench", "swap", "--json", "--swap", args.out / "swap"]
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
            works = [("deepspeed", side.turn), ("forebay", lambda: bench_swap(args))]
            samples.append({by: work() for by, work in (works if number % 2 else reversed(works))})
        side.end()
    finally:
        side.kill()
    for op in TRANSFERS:
        values = {by: [one[by][op] for one in samples] for by in ("deepspeed", "forebay")}
        for by, rates in values.items():
            yield {"case": f"transfers/op={op}/by={by}", "unit": "GB/s"} | figures.spread(rates)
        ratios = [own / theirs for theirs, own in zip(values["deepspeed"], values["forebay"])]
        row = {"case": f"transfers/op={op}/forebay-over-deepspeed", "unit": "times"}
        yield row | ({} if op == "mixed" else {"goal": AIO_GOAL}) | figures.spread(ratios)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="build/peers", help="of the environment")
    parser.add_argument("--build", default="build", help="a configured build tree of ours")
    parser.add_argument("--out", default="build/peers/out", help="also where the disk is used")
    parser.add_argument("--only", choices=["transfers", "step"])
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=9, help="quiet rounds of each comparison")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for them")
    parser.add_argument(
        "--noise",
        type=float,
        default=quiet.NOISE_MAX,
        help="share of a CPU that others may use in a round (the kernel's own I/O threads count)",
    )
    parser.add_argument("--as-is", action="store_true", help="install and build nothing")
    parser.add_argument("--smoke", action="store_true", help="everything once, tiny: does it work?")
    args = parser.parse_args()
    args.build, args.out = pathlib.Path(args.build).absolute(), pathlib.Path(args.out).absolute()
    args.size = "smoke" if args.smoke else "110M"
    if args.smoke:
        args.rounds, args.noise = 1, float(os.cpu_count() + 1)
    return args


def main():
    args = parse_args()
    (args.out / "swap").mkdir(parents=True, exist_ok=True)
    place = environment.Environment(args.folder)
    if not args.as_is:
        place.make(args.build, with_aio=True)
    rows = []
    if args.only != "step":
        rows += transfers(place, args)
    if args.only != "transfers":
        for ranks in map(int, args.ranks.split(",")):
            for setting in SETTINGS:
                rows += compare(place, args, ranks, setting)
    facts = {"case": "infinity/facts", "date": datetime.date.today().isoformat()}
    facts |= environment.machine() | place.versions()
    with open(args.out / "infinity.jsonl", "w", encoding="utf-8") as lines:
        for row in [facts, *rows]:
            lines.write(json.dumps({"bench": "peers"} | row) + "\n")
    print(json.dumps(facts))
    print(sharded.table([row for row in rows if "value" in row]), end="")


if __name__ == "__main__":
    main()

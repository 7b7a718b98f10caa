#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A training step of two ranks that FSDP2 shards: Forebay beside CPUOffloadPolicy and torch's fused
AdamW, in alternation in one run.

Both keep float32 parameters; with bf16 both compute in it. Prints, for fp32 and bf16, the seconds of
the optimizer phase (opt.step(): from the last gradient to the next forward) and of the whole step, how
many times as fast Forebay is, the peak of the memory (PSS of the ranks and the daemon), for bf16 also
with all states on swap, and the bytes that Forebay copies for a step; writes OUT/sharded.jsonl. Needs an environment with torch and the forebay package: the interpreter it is
started with. docs/reports/benchmarks.md says what the figures mean.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import sys
import threading

import figures
import phase
import quiet

HERE = pathlib.Path(__file__).resolve().parent
DRAM = {"110M": "4GiB", "smoke": "256MiB"}
DRAM_WITH_SWAP = {"110M": "608MiB", "smoke": "128MiB"}  # fits all but most of the states
GOALS = {"bf16": 1.5, "fp32": 1.3}  # least speedup of the optimizer phase
BYTES_OF_FSDP2 = 16  # bytes of a parameter: float32 weights, gradient and two moments
# Memory goal of each side: a share of BYTES_OF_FSDP2 for each parameter, plus MiB. Memory that both sides need is not counted.
MEMORY_GOALS = {
    ("forebay", "bf16"): (0.90, 128),
    ("forebay", "fp32"): (1.02, 128),
    ("forebay-on-swap", "bf16"): (0.30, 256),
}
PARTS = {"step": ("step",), "all": ("forward", "backward", "step")}
SAMPLE_S = 0.02
# Environment of runs that sample memory. With glibc's defaults a process retains about 800 MiB of freed memory; the amount
# varies by chance. Memory is sampled in separate runs, because sampling disturbs the timing.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def pss_bytes(root):
    """Of a process and its descendants, where shared pages count in parts: all, and of memfds."""
    total = {"Pss:": 0, "Pss_Shmem:": 0}
    for pid in quiet.tree([root]):
        try:
            text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue  # the process has ended
        for row in text.splitlines()[1:]:
            name, size = row.split()[:2]
            if name in total:
                total[name] += 1024 * int(size)
    return total["Pss:"], total["Pss_Shmem:"]


class Peak:
    """Largest PSS of a side while it has its turn, and what of it is in memfds: the daemon's arenas."""

    def __init__(self, root):
        self.root, self.bytes, self.arenas = root, 0, 0

    def during(self, work):
        done = threading.Event()

        def sample():
            ends = False
            while not ends:  # a short turn is sampled once
                ends = done.wait(SAMPLE_S)
                self.bytes, self.arenas = max((self.bytes, self.arenas), pss_bytes(self.root))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            return work()
        finally:
            done.set()
            thread.join()


def start_sides(args, keys, variables):
    """(key, side) of each, one after the other."""
    worker = [sys.executable, HERE / "sharded_worker.py", "--size", args.size]
    run = [args.build / "bin" / "forebay", "run", "--dram"]
    swap = ["--swap", args.out / "swap", "--swap-size", "3GiB" if args.size == "110M" else "64MiB"]
    runs = {
        "fsdp2": [],
        "forebay": [*run, DRAM[args.size], "--"],
        "forebay-on-swap": [*run, DRAM_WITH_SWAP[args.size], *swap, "--"],
    }
    for by, dtype in keys:
        print(f"starting {by} {dtype}", flush=True)
        command = [*runs[by], *worker, "--by", by, "--dtype", dtype]
        log = args.out / f"sharded-{by}-{dtype}.log"
        yield (by, dtype), phase.Side(f"{by} {dtype}", command, os.environ | variables, log)


def warm_up(sides):
    for _ in range(phase.WARM_ROUNDS):
        for side in sides.values():
            side.turn()


def peaks_of(sides):
    """Of turns that are not timed: sampling disturbs."""
    peaks = {}
    for key, side in sides.items():
        peaks[key] = Peak(side.process.pid)
        for _ in range(2):
            peaks[key].during(side.turn)
    return peaks


def measure(args, sides, turn=phase.Side.turn):
    """Rounds of turn(side) of every side in alternation."""
    warm_up(sides)

    def take(number, watch):
        order = list(sides)
        shift = number % len(order)
        samples = {}
        for key in [*order[shift:], *order[:shift]]:
            quiet.pause(phase.PARK_S)
            with watch.running([sides[key].process.pid]):
                samples[key] = turn(sides[key])
        return samples

    rounds = quiet.Rounds(args.rounds, args.patience, args.noise, ahead=False)
    rounds.collect(take)
    if not rounds.kept:
        sys.exit(f"no quiet round within {args.patience} s ({rounds.rejected} were not)")
    return rounds


def ratio_row(case, values, over, goal=None):
    """What `over`, two sides of {side: values}, are to each other, of the same round."""
    row = {"case": f"{case}/{over[0]}-over-{over[1]}", "unit": "times"}
    ratios = [a / b for a, b in zip(values[over[0]], values[over[1]])]
    return row | ({} if goal is None else {"goal": goal}) | figures.spread(ratios)


def compared_rows(case, values, over, unit, goal=None):
    """A row for each side of {side: values}, and the ratio_row()."""
    for by, taken in values.items():
        yield {"case": f"{case}/by={by}", "unit": unit} | figures.spread(taken)
    yield ratio_row(case, values, over, goal)


def rows_of(rounds, peaks, params):
    """A row for each side and part, each comparison and each memory figure."""
    rows = []
    for dtype, goal in GOALS.items():
        for part, names in PARTS.items():
            ms = {
                by: [1e3 * sum(one[by, dtype][name] for name in names) for one in rounds.kept]
                for by in ("fsdp2", "forebay")
            }
            case = f"sharded/format={dtype}/part={part}"
            least = goal if part == "step" else 1.0
            rows += compared_rows(case, ms, ("fsdp2", "forebay"), "ms", least)
    for (by, dtype), peak in peaks.items():
        row = {"case": f"sharded/format={dtype}/peak/by={by}", "unit": "MiB"}
        rows.append(row | {"value": peak.bytes / 2**20})
    for (by, dtype), (share, extra) in MEMORY_GOALS.items():
        own = BYTES_OF_FSDP2 * params
        both_need = peaks["fsdp2", dtype].bytes - own  # interpreters, activations, gathered groups
        peak = peaks[by, dtype]
        for name, count in {"rest": peak.bytes - both_need, "arenas": peak.arenas}.items():
            rows.append(
                {
                    "case": f"sharded/format={dtype}/{name}/by={by}",
                    "unit": "MiB",
                    "value": count / 2**20,
                    "goal": share * own / 2**20 + extra,
                    "bytes_a_parameter": count / params,
                }
            )
    return rows + [row_of_bytes(key, side, params) for key, side in last_turns(rounds).items()]


def last_turns(rounds):
    turns = rounds.kept[-1].items()
    return {key: turn for key, turn in turns if "copied_bytes" in turn}


def row_of_bytes(key, turn, params):
    """What a step copies beside what FSDP2 does, of all ranks."""
    by, dtype = key
    row = {"case": f"sharded/format={dtype}/copied/by={by}", "unit": "bytes a parameter"}
    gathered, delivered = turn["copied_bytes"] / params, turn["grad_bytes"] / params
    return row | {"value": gathered + delivered, "gathered": gathered, "delivered": delivered}


def table(rows):
    lines = ["| case | median | quartiles | samples | goal |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        spread = f"{row['q1']:.2f} to {row['q3']:.2f}" if "q1" in row else ""
        goal = f"{row['goal']:.2f}" if "goal" in row else ""
        value = f"{row['value']:.2f} {row['unit']}"
        lines.append(f"| `{row['case']}` | {value} | {spread} | {row.get('samples', '')} | {goal} |")
    return "\n".join(lines) + "\n"


def parse_args(doc, add_options=None):
    """Of a bench of sides that take turns. `add_options(parser)` has those of one bench alone."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", default="build", help="a build tree of ours, built")
    parser.add_argument("--out", default="build/peers/out", help="where the disk is used too")
    parser.add_argument("--rounds", type=int, default=9, help="quiet rounds of a comparison")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for them")
    parser.add_argument(
        "--noise",
        type=float,
        default=quiet.NOISE_MAX,
        help="share of a CPU that others may use in a round",
    )
    parser.add_argument("--smoke", action="store_true", help="everything once, tiny")
    if add_options is not None:
        add_options(parser)
    args = parser.parse_args()
    args.build, args.out = pathlib.Path(args.build).absolute(), pathlib.Path(args.out).absolute()
    (args.out / "swap").mkdir(parents=True, exist_ok=True)
    args.size = "smoke" if args.smoke else "110M"
    if args.smoke:
        # The smoke run does not wait for a quiet machine.
        args.rounds, args.noise, args.patience = 1, float(os.cpu_count() + 1), 0.0
    return args


def with_sides(starting, work):
    """work(sides) with those of `starting`, pairs of key and side; and what they say of the model."""
    sides = {}
    try:
        for key, side in starting:
            sides[key] = side
        done = work(sides)
        facts = {key: side.facts for key, side in sides.items()}
        for side in sides.values():
            side.end()
    finally:
        for side in sides.values():
            side.kill()
    return done, facts


def report(path, facts, rows):
    figures.write_lines(path, facts, rows)
    print(json.dumps(facts))
    print(table([row for row in rows if "value" in row]), end="")


def main():
    args = parse_args(__doc__)
    timed = [(by, dtype) for dtype in GOALS for by in ("fsdp2", "forebay")]
    rounds, facts = with_sides(start_sides(args, timed, {}), lambda sides: measure(args, sides))
    sampled = [*timed, ("forebay-on-swap", "bf16")]

    def sample(sides):
        warm_up(sides)
        return peaks_of(sides)

    peaks, on_swap = with_sides(start_sides(args, sampled, FREED_AT_ONCE), sample)
    params = facts[timed[0]]["params"]
    rows = rows_of(rounds, peaks, params)
    facts = {
        "case": "sharded/facts",
        "date": datetime.date.today().isoformat(),
        "params": params,
        "blocks_in_dram": on_swap[sampled[-1]]["blocks_in_dram"],
        "blocks": on_swap[sampled[-1]]["blocks"],
        "rejected": rounds.rejected,
        "noise": statistics.median(rounds.noise),
    }
    report(args.out / "sharded.jsonl", facts, rows)


if __name__ == "__main__":
    main()

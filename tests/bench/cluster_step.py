# SPDX-License-Identifier: Apache-2.0
"""One node, predicted and measured: `forebay-bench cluster` beside `forebay-bench step`, whose disk is limited to a rate and
whose compute is timers.

usage: python3 tests/bench/cluster_step.py [--swap DIRECTORY] [--samples N]

Prints a row a case: the median of the measured steps, the prediction, and what it is off by. Nothing is a test: a busy
machine measures longer steps.
"""

import argparse
import json
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCH = ROOT / "build/bin/forebay-bench"
PARAMS, GROUPS = 1 << 25, 32
RATE_MIB = 500
COMPUTE_MS = (500, 1000, 2000)
FLAGS = {
    ("yes", "yes"): (),
    ("yes", "no"): ("--no-drain",),
    ("no", "yes"): ("--no-early-updates",),
    ("no", "no"): ("--no-early-updates", "--no-drain"),
}


def lines(*words):
    done = subprocess.run([BENCH, *map(str, words), "--json"], capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def predicted(nodes, disk_mib, compute_ms, *flags, resident_blocks=0):
    """Seconds of a step with so many blocks in DRAM at most, and no weights on swap: with the largest limit that does it."""
    rate = disk_mib * 2**20 / 1e9
    model = ("--nodes", nodes, "--gpus", 1, "--params", PARAMS, "--layers", GROUPS, "--dtype", "float32")
    disk = ("--read-rate", rate, "--write-rate", rate, "--staging", "64MiB")
    for dram_mib in range(600, 100, -4):
        call = ("cluster", *model, *disk, "--compute-ms", compute_ms, "--dram", f"{dram_mib}MiB", *flags)
        for found in lines(*call):
            if found["resident_blocks"] <= resident_blocks and found["weights_on_swap"] == 0:
                return found["value"]
    raise AssertionError("no limit leaves so few blocks in DRAM")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap", default=ROOT / "build")
    parser.add_argument("--samples", type=int, default=5)
    arguments = parser.parse_args()
    print("| compute | early | drain | measured | predicted | off by |\n| --- | --- | --- | --- | --- | --- |")
    for compute_ms in COMPUTE_MS:
        limits = ("--limit-rate", f"{RATE_MIB}MiB", "--compute-ms", compute_ms)
        job = ("--params", PARAMS, "--swap", arguments.swap, "--samples", arguments.samples)
        for found in lines("step", *limits, *job):
            early, drain = re.search(r"early=(\w+)/drain=(\w+)", found["case"]).groups()
            seconds = predicted(1, RATE_MIB, compute_ms, *FLAGS[early, drain])
            off = seconds / found["value"] - 1
            row = f"| {compute_ms / 1000} s | {early} | {drain} | {found['value']:.3f} s | {seconds:.3f} s | {off:+.1%} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()

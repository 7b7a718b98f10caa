#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The main job: trains the same GPT three times (torch alone; Forebay; Forebay with a rank killed, and later the daemon)
and a deep model that takes eight times the DRAM it is given (with plenty; with that); checks every claim made about them,
and writes quickstart-report/ and model.pt.

--all trains more: a bfloat16 model beside the scalar reference, a model that FSDP2 shards (torch alone; Forebay; Forebay
with all ranks killed), the deep model larger, and the deep model with all ranks killed.
--smoke trains less: the first three with 25 steps, and the bfloat16 model.

Exits with 0 where every claim holds; else names those that do not. tools/quickstart does the
setup and calls this.
"""

import argparse
import json
import os
import pathlib
import random
import secrets
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import claims as claims_of
import report
import service as service_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 2
DRAM_MIB = 700  # limit of the fp32 run, below its 12 bytes a parameter of parameters and moments
RESIDENT_SHARE = 0.12  # share of the states that is resident with DRAM_MIB
HALVED_MIB = 48  # MiB that 16-bit parameters save in gradient arenas and overflow
SWAP_SIZE = "2GiB"  # moments of 63 M parameters, each block in two slots
KEPT_SWAP_SIZE = "4GiB"  # durable steps: each block and the weights in three slots, one more
# Blocks have a quarter of the default size. The staging buffer then holds four times as many blocks, and the disk of a small
# machine always has reads to do while it writes.
BLOCK_ELEMS = 1 << 18
SETTINGS = [f"update.block_elems={BLOCK_ELEMS}", "swap.staging=64MiB"]
EXACT_STEPS = 5  # steps of the small bfloat16 run
SMALL = ["--width=256", "--layers=4", "--heads=4"]
SHARDED_STEPS = 20
SHARDED_DRAM_MIB = 128  # some blocks of the states are on swap
# The deep model, which is narrower without --all.
DEEP_STEPS = 10
DEEP = ["--layers=20", "--width=512", "--heads=8"]
DEEP_SMALL = ["--layers=20", "--width=256", "--heads=4"]
DEEP_SHARE = 8  # ratio of the deep model's weights, gradients and states to its DRAM limit
DEEP_BLOCK_ELEMS = 1 << 17
DEEP_SETTINGS = [f"update.block_elems={DEEP_BLOCK_ELEMS}", "swap.staging=10MiB"]
# torchrun otherwise lets started-again ranks read the addresses of those that died, and gloo waits
# for them (pytorch issue 135712).
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def parse_args():
    parser = argparse.ArgumentParser(
        prog="tools/quickstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--smoke", action="store_true", help="four trainings, 25 steps of half the text")
    extent.add_argument("--all", action="store_true", help="all ten trainings, with every claim")
    parser.add_argument("--steps", type=int, help="that many steps")
    parser.add_argument(
        "--optimizer", choices=list(claims_of.MOMENTS), default="adamw", help="of Forebay's runs"
    )
    parser.add_argument(
        "--format",
        choices=["fp32", *claims_of.NARROW],
        default="fp32",
        help="of their states; all but fp32 train bfloat16 parameters",
    )
    parser.add_argument("--seed", type=int, default=1611, help="of model and data")
    parser.add_argument(
        "--kill-seed", type=int, help="seed of the rank, step and group of the kill; default: random"
    )
    parser.add_argument("--work", default="build/quickstart", help="folder of logs and swap")
    parser.add_argument("--bin", default="build/bin", help="folder of forebay and forebayd")
    parser.add_argument("--report", default="quickstart-report")
    parser.add_argument("--model", default="model.pt")
    args = parser.parse_args()
    args.forebay = ROOT / args.bin / "forebay"
    args.block_elems = BLOCK_ELEMS
    args.steps = args.steps or (25 if args.smoke else 30)  # 30: the usual trainings take less than five minutes
    args.runs = claims_of.RUNS if args.all else claims_of.SMOKE_RUNS if args.smoke else claims_of.USUAL_RUNS
    args.kill_seed = secrets.randbelow(1 << 31) if args.kill_seed is None else args.kill_seed
    return args


# Title of each training and its approximate minutes on two cores. The minutes of plain, forebay and killed are for 100 steps.
TRAININGS = {
    "plain": ("torch alone", 2),
    "forebay": ("Forebay, most states on swap", 2),
    "killed": ("Forebay, a rank and later the daemon killed", 3),
    "exact": ("a bfloat16 model beside the scalar reference", 1),
    "fsdp2": ("a model that FSDP2 shards, torch alone", 1),
    "sharded": ("the same with Forebay", 1),
    "sharded_killed": ("the same with all ranks killed", 1),
    "roomy": ("a deep model with plenty of DRAM", 1),
    "infinity": (f"the deep model of {DEEP_SHARE} times the DRAM", 1),
    "infinity_killed": ("the same with all ranks killed", 2),
}


def announce(args, name):
    title, minutes = TRAININGS[name]
    if name in ("plain", "forebay", "killed"):
        minutes = max(1, round(minutes * args.steps / 100))
    return f"{name} ({title}): about {minutes} minute{'s' * (minutes > 1)} on two cores"


class Run:
    """One training: its folder, what it printed, how it ended."""

    def __init__(self, name, work, announcement):
        self.name = name
        self.announcement = announcement
        self.out = work / name
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        self.seconds = 0.0
        self.status = None
        self.lines = []

    def start(self, command, environment=None, on_line=None):
        """Runs to the end; every line is shown and stored, and `on_line` called with it. May be started again."""
        if self.status is None:
            print(f"== {self.announcement}", flush=True)
        print(f"== {self.name}: {' '.join(map(str, command))}", flush=True)
        began = time.monotonic()
        with open(self.out / "stdout.log", "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
            )
            for line in process.stdout:
                print(line, end="", flush=True)
                log.write(line)
                self.lines.append(line)
                if on_line is not None:
                    on_line(line)
            self.status = process.wait()
        seconds = time.monotonic() - began
        self.seconds += seconds
        print(f"== {self.name}: exit status {self.status} after {seconds:.0f} s", flush=True)


def torchrun(run, args, *flags, script="tools/train_gpt.py"):
    # If a machine cannot resolve its own name, ranks wait for minutes. The numeric address avoids this.
    module = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}"]
    ranks = ["--max-restarts=1", script, f"--steps={args.steps}"]
    ranks += ["--seq=64"] if args.smoke else []
    places = [f"--seed={args.seed}", f"--text={ROOT / 'build/kjv.txt'}", f"--out={run.out}"]
    return [sys.executable, *module, *ranks, *places, *flags]


def inside(run, args, work, command, dram=None, settings=SETTINGS):
    """The command beside a private daemon, and a watch of it that writes node.json."""
    swap = work / "swap"
    swap.mkdir(parents=True, exist_ok=True)
    flags = [f"--dram={dram or dram_mib(args)}MiB", f"--swap={swap}", f"--swap-size={SWAP_SIZE}"]
    flags += [f"--set={setting}" for setting in settings]
    watch = [sys.executable, "tests/quickstart/watch.py", args.forebay, run.out]
    return [args.forebay, "run", *flags, "--", *watch, *command]


def dram_mib(args):
    """What leaves the same share of the states on swap as fp32 has in DRAM_MIB."""
    saved = 4 - claims_of.weights_width(args.format)
    saved += RESIDENT_SHARE * (claims_of.MOMENT_BYTES - claims_of.state_width(args))
    halved = HALVED_MIB if args.format != "fp32" else 0
    return DRAM_MIB - halved - round(saved * claims_of.PARAMS_LEAST / 2**20)


def chosen(args):
    """Flags of the training script for optimizer and format."""
    dtype = "fp32" if args.format == "fp32" else "bf16"
    return [f"--optimizer={args.optimizer}", f"--dtype={dtype}", f"--format={args.format}"]


def draw_kill(args, run, steps, what, count):
    """Chooses at random where a rank of the run dies: in the midst of what it delivers in a step, `count` "groups" or
    "gradients". Returns the flag that says so."""
    generator = random.Random(args.kill_seed)
    rank, step = generator.randrange(RANKS), generator.randint(3, steps - 2)
    delivered = generator.randint(1, max(1, count - 1))
    run.kill = {"rank": rank, "step": step, what: delivered}
    print(
        f"== kill drawn from seed {args.kill_seed}: rank {rank} in step {step} after {delivered} {what}",
        flush=True,
    )
    return f"--kill={rank}:{step}:{delivered}"


def train_all(args, work):
    runs = {name: Run(name, work, announce(args, name)) for name in args.runs}
    plain, forebay, killed = runs["plain"], runs["forebay"], runs["killed"]

    plain.start(torchrun(plain, args, "--plain"))

    flags = [f"--timeline={args.steps}", f"--sha={forebay.out / 'sha.json'}"]
    flags += [f"--save={ROOT / args.model}", "--sample=200", *chosen(args)]
    forebay.start(inside(forebay, args, work, torchrun(forebay, args, *flags)))

    train_killed(args, work, killed, claims_of.group_count(forebay.out))

    if "exact" in runs:
        short = argparse.Namespace(steps=EXACT_STEPS, seed=args.seed, smoke=args.smoke)
        flags = ["--dtype=bf16", "--format=exact", "--reference-check", *SMALL]
        runs["exact"].start(inside(runs["exact"], args, work, torchrun(runs["exact"], short, *flags)))
    if "sharded" in runs:
        train_sharded(args, work, runs["fsdp2"], runs["sharded"], runs["sharded_killed"])
    if "infinity" in runs:
        train_deep(args, work, runs)
    return runs


def train_killed(args, work, run, groups):
    """A rank dies, and later the daemon, which keeps its swap; both times the ranks are started again."""
    flags = [f"--sha={run.out / 'sha.json'}", *chosen(args)]
    kill_rank = draw_kill(args, run, max(args.steps // 2 + 1, 5), "groups", groups)
    first = max(args.steps // 2, run.kill["step"])
    generator = random.Random(f"{args.kill_seed} daemon")
    run.daemon_kill = {"step": generator.randint(first, max(first, args.steps - 2)) + 1}
    part = generator.random()
    print(f"== and drawn: the daemon in step {run.daemon_kill['step']}", flush=True)
    settings = [f"dram.limit={dram_mib(args)}MiB", f"swap.capacity={KEPT_SWAP_SIZE}"]
    settings += ["jobs.durability=step", "swap.probe=never", *SETTINGS]
    service = service_of.Service(
        args.forebay.with_name("forebayd"), work / "kept_swap", settings
    )
    environment = {"FOREBAY_SOCKET": service.socket, "FOREBAY_RUN": "quickstart"}
    try:
        service.start()
        kill = service_of.KillWithinAStep(service, run.daemon_kill["step"] - 1, part)
        run.start(torchrun(run, args, *flags, kill_rank), environment, kill)
        run.daemon_kill["ranks_status"] = run.status
        if kill.has_killed():
            service.start()
            run.start(torchrun(run, args, *flags), environment)
    finally:
        service.stop()


def train_sharded(args, work, fsdp, sharded, killed):
    """The runs of the model that FSDP2 shards."""
    short = argparse.Namespace(steps=SHARDED_STEPS, seed=args.seed, smoke=True)

    def command(run, *flags):
        return torchrun(run, short, *flags, script="tools/train_sharded.py")

    def beside_daemon(run, *flags):
        ranks = command(run, f"--sha={run.out / 'sha.json'}", *flags)
        run.start(inside(run, args, work, ranks, SHARDED_DRAM_MIB), OWN_STORE)

    fsdp.start(command(fsdp, "--plain"), OWN_STORE)
    beside_daemon(sharded)
    gradients = claims_of.first_start(sharded.out)["gradients"]
    beside_daemon(killed, draw_kill(args, killed, SHARDED_STEPS, "gradients", gradients))


def train_deep(args, work, runs):
    """The runs of the model that is larger than DRAM."""
    short = argparse.Namespace(steps=DEEP_STEPS, seed=args.seed, smoke=True)
    shape = DEEP if args.all else DEEP_SMALL

    def beside_daemon(run, dram, *flags):
        flags = [*shape, f"--sha={run.out / 'sha.json'}", *flags]
        ranks = torchrun(run, short, *flags, script="tools/train_sharded.py")
        run.start(inside(run, args, work, ranks, dram, DEEP_SETTINGS), OWN_STORE)

    beside_daemon(runs["roomy"], 2048)
    start = claims_of.first_start(runs["roomy"].out)
    dram = start["params"] * claims_of.DEEP_BYTES // DEEP_SHARE // 2**20
    beside_daemon(runs["infinity"], dram)
    if "infinity_killed" in runs:
        flag = draw_kill(args, runs["infinity_killed"], DEEP_STEPS, "gradients", start["gradients"])
        beside_daemon(runs["infinity_killed"], dram, flag)


def main():
    args = parse_args()
    work = ROOT / args.work
    work.mkdir(parents=True, exist_ok=True)
    (ROOT / args.model).unlink(missing_ok=True)
    began = time.monotonic()
    runs = train_all(args, work)
    seconds = time.monotonic() - began
    claims = claims_of.Claims()
    evidence = claims_of.Evidence(args, runs, ROOT / args.model)
    summary = claims_of.check_all(claims, evidence)

    folder = ROOT / args.report
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    page = report.page(summary, claims, evidence)
    (folder / "index.html").write_text(page, encoding="utf-8")
    claims.check(
        "report",
        claims_of.is_self_contained(page),
        f"{folder.name}/index.html needs nothing beside itself",
    )
    (folder / "claims.json").write_text(claims.as_json(), encoding="utf-8")

    print(claims_of.table(summary))
    print(f"sample: {evidence.sample}\n")
    print(claims.text())
    print(claims_of.durations(runs, seconds))
    failed = [claim.name for claim in claims.all if not claim.holds]
    if failed:
        print(
            f"error[E_CLAIM]: not true: {', '.join(failed)}\nhint: logs are in {args.work}/",
            file=sys.stderr,
        )
    print(f"claims: {len(claims.all) - len(failed)} passed, {len(failed)} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What train_gpt.py needs around the training loop: text, batches, logs, meters, restart and the
planned kill.

Log lines (OUT/rank<R>.jsonl), all with "event" and "time" (seconds since the epoch):
  start, resume  step, params, world, args; of train_sharded.py also gradients (of a step)
  heldout        step, loss
  step           step, loss, tokens, began_ns, forward_done_ns, backward_done_ns, ended_ns
                 (CLOCK_MONOTONIC), step_s, rss_anon, rss_anon_peak (bytes); with Forebay also
                 exposed_wait_s (spent in Forebay's calls), rpc_calls, dram_used, swap_read_bytes,
                 swap_written_bytes (the daemon's totals, a few seconds old; rank 0 only)
  timeline       step, intervals: [kind, group, began_ns, ended_ns]
  kill           step, rank, groups; of train_sharded.py gradients instead of groups
  reference      elements, mismatches
  sample         text
  end            rss_anon_peak, rpc_calls
"""

import json
import os
import pathlib
import pickle
import signal
import subprocess
import threading
import time

import torch

SAMPLE_PERIOD_S = 0.02
STATUS_PERIOD_S = 2.0
JITTER = 16  # bytes by which a sequence's start may move, drawn from torch's generator

# Optimizers by the name of --optimizer: the class in forebay, its options, its default learning rate.
OPTIMIZERS = {
    "adamw": ("AdamW", {}, 3e-4),
    "adam": ("Adam", {}, 3e-4),
    "adamw_amsgrad": ("AdamW", {"amsgrad": True}, 3e-4),
    "adam_amsgrad": ("Adam", {"amsgrad": True}, 3e-4),
    "adagrad": ("Adagrad", {}, 3e-3),
    "lion": ("Lion", {}, 1e-4),
    "sgd": ("SGD", {"momentum": 0.9}, 0.1),
    "sgd_nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}, 0.1),
    "lamb": ("Lamb", {}, 5e-3),
}


def optimizer(args):
    """The optimizer that the flags --optimizer, --lr and --format ask for."""
    import forebay

    name, options, _ = OPTIMIZERS[args.optimizer]
    return getattr(forebay, name)(lr=args.lr, format=args.format, **options)


def add_run_arguments(parser, kill, kill_help):
    """What every training script of the quickstart takes; `kill` names the parts of --kill."""
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument(
        "--text", default="kjv.txt", help="the text; made by `bible` where the file is missing"
    )
    parser.add_argument("--out", default="train-out", help="folder of the logs")
    parser.add_argument(
        "--sha", metavar="FILE", help="rank 0 writes the SHA-256 of parameters and states, as JSON"
    )
    parser.add_argument("--kill", type=parse_kill, metavar=kill, help=kill_help)


def load_text(path):
    """The bytes of the text; the program `bible` creates the file if it is missing, at most
    once."""
    file = pathlib.Path(path)
    if not file.exists():
        made = subprocess.run(
            ["bible", "-f", "Gen1:1-Rev22:21"], check=True, capture_output=True
        ).stdout
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_bytes(made)
        part.replace(file)
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


class Batches:
    """Sequences that no step and no rank sees twice, in an order drawn from the seed; the last
    tenth is held out."""

    def __init__(self, text, *, batch, seq, rank, world, seed):
        self.text, self.batch, self.seq, self.rank, self.world = text, batch, seq, rank, world
        self.stride = seq + 1 + JITTER
        self.border = len(text) * 9 // 10
        order = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(self.border // self.stride, generator=order)
        self.position = 0  # sequences of all ranks that were drawn so far

    def next(self):
        first = self.position + self.rank * self.batch
        self.position += self.batch * self.world
        if self.position > len(self.order):
            raise SystemExit(
                f"the text has {len(self.order)} sequences of {self.seq} bytes: fewer steps, please"
            )
        starts = self.order[first : first + self.batch] * self.stride + torch.randint(
            JITTER, (self.batch,)
        )
        return self._rows(starts.tolist())

    def heldout(self, count):
        starts = [self.border + (self.rank * count + i) * self.stride for i in range(count)]
        return [self._rows([start]) for start in starts if start + self.stride <= len(self.text)]

    def _rows(self, starts):
        return torch.stack([self.text[start : start + self.seq + 1] for start in starts]).long()


def pack(step, batches):
    """What a restarted rank needs beside parameters and moments; committed with the step."""
    rng = bytes(torch.get_rng_state().tolist())
    return pickle.dumps({"step": step, "position": batches.position, "rng": rng}, protocol=5)


def restore(extra_state, batches):
    """Puts the state of the committed step back; returns that step, 0 for a fresh run."""
    if not extra_state:
        return 0
    state = pickle.loads(extra_state)
    batches.position = state["position"]
    torch.set_rng_state(torch.frombuffer(bytearray(state["rng"]), dtype=torch.uint8).clone())
    return state["step"]


def json_args(args):
    return {key: value for key, value in vars(args).items()}


class Log:
    """One JSON object a line; each line is in the file before the call returns."""

    def __init__(self, out, rank, resumed):
        out.mkdir(parents=True, exist_ok=True)
        self.file = open(
            out / f"rank{rank}.jsonl", "a" if resumed else "w", buffering=1, encoding="utf-8"
        )

    def write(self, event, **fields):
        self.file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")
        self.file.flush()


def rss_anon_bytes():
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


class Meter:
    """Private memory of this process from now on, and the optimizer's and the daemon's counters."""

    def __init__(self, opt, rank):
        self.opt, self.rank = opt, rank
        self.peak = rss_anon_bytes()
        self.node = {}
        self.rates = {}
        self.rpc_calls = 0
        self.last_ns = time.monotonic_ns()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._sample, daemon=True)]
        if rank == 0 and hasattr(opt, "stats"):
            self._threads.append(threading.Thread(target=self._watch_node, daemon=True))
        for thread in self._threads:
            thread.start()

    def start(self):
        self.take()

    def stop(self):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def take(self):
        """Figures since the last call."""
        now = time.monotonic_ns()
        row = {
            "step_s": (now - self.last_ns) / 1e9,
            "rss_anon": rss_anon_bytes(),
            "rss_anon_peak": self.peak,
        }
        self.last_ns = now
        if hasattr(self.opt, "stats"):
            stats = self.opt.stats()
            row["exposed_wait_s"] = stats["exposed_wait_s"]
            row["rpc_calls"] = stats["rpc_calls"] - self.rpc_calls
            row["timeline"] = stats["timeline"]
            self.rpc_calls = stats["rpc_calls"]
            row.update(self.node)
        return row

    def summary(self):
        return {"rss_anon_peak": self.peak, "rpc_calls": self.rpc_calls, **self.node}

    def _sample(self):
        while not self._over.wait(SAMPLE_PERIOD_S):
            self.peak = max(self.peak, rss_anon_bytes())

    def _watch_node(self):
        import forebay

        before, before_s = None, 0.0
        while not self._over.wait(STATUS_PERIOD_S if before else 0.1):
            try:
                node = node_figures(forebay.status())
            except forebay.ForebayError:
                continue
            now_s = time.monotonic()
            if before:
                for key in ("swap_read_bytes", "swap_written_bytes"):
                    self.rates[key] = (node[key] - before[key]) / (now_s - before_s)
            self.node, before, before_s = node, node, now_s


def node_figures(status):
    """The three figures of the progress line, out of what forebay.status() returns."""
    return {
        "dram_used": status["memory"]["used_bytes"],
        "swap_read_bytes": sum(path["read_bytes"] for path in status["swap"]),
        "swap_written_bytes": sum(path["written_bytes"] for path in status["swap"]),
    }


def progress_line(row, world, steps, meter):
    tokens_per_s = world * row["tokens"] / row["step_s"]
    line = f"step {row['step']:4d}/{steps}  loss {row['loss']:.4f}  {tokens_per_s:7.1f} tokens/s"
    line += f"  {row['step_s']:.2f} s"
    if "exposed_wait_s" in row:
        line += f"  exposed wait {row['exposed_wait_s'] * 1e3:.0f} ms"
    if "dram_used" in row:
        line += f"  DRAM {row['dram_used'] / 2**20:.0f} MiB"
    if meter.rates:
        line += (
            f"  swap read {meter.rates['swap_read_bytes'] / 1e6:.0f} MB/s"
            f"  write {meter.rates['swap_written_bytes'] / 1e6:.0f} MB/s"
        )
    return line


def parse_kill(text):
    rank, step, groups = (int(part) for part in text.split(":"))
    return {"rank": rank, "step": step, "groups": groups}


def arm_kill(kill, opt, model, rank, log):
    """SIGKILL of this process between two grad_ready of one step; only in the first start of a
    torchrun job."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if not kill or kill["rank"] != rank or restarts or not hasattr(opt, "delivered_groups"):
        return

    def die(_param):
        if opt.committed_step + 1 == kill["step"] and opt.delivered_groups >= kill["groups"]:
            log.write("kill", **kill)
            os.kill(os.getpid(), signal.SIGKILL)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(die)


def arm_kill_of_all(kill, opt, model, rank, log):
    """SIGKILL of every rank in the middle of a backward, once the chosen rank has delivered so many
    gradients of the step. A collective over the process group."""
    if not kill or not hasattr(opt, "committed_step"):
        return
    pids = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(pids, os.getpid())
    if kill["rank"] != rank:
        return
    delivered = 0

    def die(_param):
        nonlocal delivered
        delivered += opt.committed_step + 1 == kill["step"]
        if delivered == kill["groups"]:
            log.write("kill", step=kill["step"], rank=rank, gradients=delivered)
            for pid in sorted(pids, key=os.getpid().__eq__):  # this process is last
                os.kill(pid, signal.SIGKILL)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(die)


def reference(args, model, rank, world):
    """The recorder of --reference-check, or None; it must see the model before it is attached."""
    if not args.reference_check:
        return None
    import exact_reference

    return exact_reference.Recorder(
        model, pathlib.Path(args.out), rank=rank, world=world, lr=args.lr
    )

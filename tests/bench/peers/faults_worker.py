# SPDX-License-Identifier: Apache-2.0
"""Training processes of faults.py: one rank of one side, bf16, AdamW, states on the disk.

Started with the descriptor of a socket, it imports what its side needs, once, and forks a process for each
message: words for parse_args() and three descriptors, which become its stdin, its stdout and stderr, and that
of its events. It answers with the process id and, asked for that, with its exit status.

A training attaches (DeepSpeed: loads the checkpoint that --load names), trains to --to, and writes what happens
as events, a JSON list a line: ["ready", step, digests], ["stepping", step], ["step", step, loss in
hexadecimal], ["paused", step], ["saving", step], ["saved", step, seconds], ["unsaved", step, first line of the
error], ["end", step, digests], ["error", first line]. Digests are SHA-256 over all parameters, by what is
hashed; null without such a part. The data of a step depends on its number and --seed alone.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import socket
import sys
import time
import traceback

import torch
from torch import distributed

import deepspeed_side
import forebay_side
import gpt
import infinity

SIZE = gpt.Size(layers=4, width=128, heads=4, vocab=256, length=16)
CLIP = 1.0
AIO = {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True}
IN_MEMORY = {"sub_group_size": 10**9, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
MOMENTS = ("exp_avg", "exp_avg_sq")
MESSAGE_BYTES_MAX = 1 << 16


def first_line(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


class DeepSpeed(deepspeed_side.DeepSpeed):
    """ZeRO-3 with optimizer states on NVMe or in memory, and its own checkpoints."""

    def __init__(self, model, args):
        zero = infinity.with_folder(infinity.PLAIN, args.nvme) if args.nvme else IN_MEMORY
        super().__init__(model, zero, CLIP, {"aio": AIO})
        if args.step_first:
            self.backward(self.forward(tokens_of(1, args.seed)))
            self.step()
        if args.load:
            found, _ = self.engine.load_checkpoint(args.load)
            if found is None:
                raise RuntimeError("load_checkpoint has found nothing")

    @staticmethod
    def prepare():
        """Of what each process would do again, without threads."""
        import torch._inductor.compile_fx  # noqa: F401
        from deepspeed.ops import op_builder
        from deepspeed.ops.op_builder.cpu import comm

        for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
            getattr(op_builder, name)().load()
        comm.ShareMemCommBuilder().load()

    def step_number(self):
        return self.engine.global_steps

    def save(self, folder):
        self.engine.save_checkpoint(folder)

    def digests(self):
        from deepspeed import utils, zero

        def weights(param):
            with zero.GatheredParameters(param):
                return param.detach().clone()

        parts = {"weights": weights, "masters": utils.safe_get_full_fp32_param}
        inner = self.engine.optimizer
        (flat,) = inner.fp32_partitioned_groups_flat
        for moment in MOMENTS:
            # A request for a moment that does not exist fails and leaves DeepSpeed's buffers in use. The next step then fails.
            there = moment in inner.optimizer.state.get(flat, {})
            parts[moment] = there and functools.partial(
                utils.safe_get_full_optimizer_state, optim_state_key=moment
            )
        named = list(self.engine.module.named_parameters())
        return {part: read and digest(read, named) or None for part, read in parts.items()}

    def end(self):
        """Does nothing: DeepSpeed has nothing to end."""


def digest(read, named):
    """Of read(param) of each."""
    total = hashlib.sha256()
    for name, param in named:
        total.update(name.encode() + b"\0" + read(param).float().contiguous().numpy().tobytes())
    return total.hexdigest()


class Forebay(forebay_side.Forebay):
    """A job at durability step: what a step has answered is saved."""

    def __init__(self, model, args):
        from forebay import Durability

        durability = Durability(level="step", daemon_wait=0)
        super().__init__(model, CLIP, job=args.job, run=args.run, durability=durability)

    @staticmethod
    def prepare():
        import forebay  # noqa: F401

    def step_number(self):
        return self.opt.committed_step

    def save(self, folder):
        """Each step is."""

    def digests(self):
        return {"weights and states": self.opt.state_sha256()}

    def end(self):
        self.opt.detach()


SIDES = {"deepspeed": DeepSpeed, "forebay": Forebay}


def tokens_of(step, seed):
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.randint(0, SIZE.vocab, (1, SIZE.length), generator=generator)


def train(args, say):
    torch.manual_seed(args.seed)
    side = SIDES[args.by](gpt.Gpt(SIZE), args)
    say("ready", side.step_number(), side.digests())
    while side.step_number() < args.to:
        step = side.step_number() + 1
        if step in args.pause_before:
            say("paused", step)
            sys.stdin.readline()
        loss = side.forward(tokens_of(step, args.seed))
        side.backward(loss)
        say("stepping", step)
        side.step()
        say("step", step, loss.item().hex())
        if args.save and step in args.save_at:
            say("saving", step)
            try:
                began = time.monotonic()
                side.save(args.save)
                say("saved", step, time.monotonic() - began)
            except Exception as error:  # a training script may continue after a failed save
                traceback.print_exc()
                say("unsaved", step, first_line(error))
    say("end", side.step_number(), side.digests())
    side.end()


def parse_args(words):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=SIDES, required=True)
    parser.add_argument("--to", type=int, required=True, help="step")
    parser.add_argument("--seed", type=int, default=1, help="of the initial weights and the data")
    parser.add_argument("--job", default="faults", help="forebay: its name")
    parser.add_argument("--run", default="one", help="forebay: the run that the process is of")
    parser.add_argument("--socket", help="forebay: of the daemon")
    parser.add_argument("--nvme", help="deepspeed: folder of swap files; else states are in memory")
    parser.add_argument("--load", help="deepspeed: folder of checkpoints")
    parser.add_argument("--step-first", action="store_true", help="deepspeed: before it loads")
    parser.add_argument("--save", help="deepspeed: the same")
    parser.add_argument("--save-at", type=int, nargs="*", default=[], help="steps")
    parser.add_argument("--pause-before", type=int, nargs="*", default=[], help="until a line of stdin")
    return parser.parse_args(words)


def run(args, events):
    """The whole life of one training process."""

    def say(*values):
        os.write(events, (json.dumps(values) + "\n").encode())

    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if args.socket:
        os.environ["FOREBAY_SOCKET"] = args.socket
    try:
        if args.by == "deepspeed":
            store = distributed.HashStore()
            distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        train(args, say)
    except Exception as error:  # the error's first line is the result
        traceback.print_exc()
        say("error", first_line(error))
        return 1
    return 0


def start(words, descriptors):
    """The process id of a training of its own."""
    child = os.fork()
    if child == 0:
        stdin, log, events = descriptors
        os.dup2(stdin, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        with contextlib.suppress(SystemExit):
            status = run(parse_args(words), events)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips the exit handlers of libraries
    for descriptor in descriptors:
        os.close(descriptor)
    return child


def main():
    by, descriptor = sys.argv[1:]
    SIDES[by].prepare()
    with socket.socket(fileno=int(descriptor)) as driver:
        driver.send(b"{}")
        while True:
            message, descriptors, _, _ = socket.recv_fds(driver, MESSAGE_BYTES_MAX, 3)
            if not message:
                return
            order = json.loads(message)
            if "words" in order:
                answer = start(order["words"], descriptors)
            else:
                answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
            driver.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()

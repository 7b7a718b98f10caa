# SPDX-License-Identifier: Apache-2.0
"""One side of the benches of sharded training: ranks train the model, a step for each message, and
sleep in between.

Started by sharded.py and infinity.py; the Forebay sides under `forebay run`. This process is rank 0 and
starts the others. Each message is answered with the seconds of forward, backward and step, the slower
rank's of each, the bytes that Forebay has copied, and the loss. With --steps a message is so many steps
without a pause; the answer is that of a step behind the first one, and comes when all work of the steps has
ended: else the deferred work of a step would be done while others have their turn.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import threading
import time

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import deepspeed_side
import gpt
import ours
import quiet

POLL_S = 0.002
PARTS = ("forward", "backward", "step")


def sharded(model, mesh, args):
    """By FSDP2. Parameters are float32; with bf16, forward and backward compute in it, and gradients are
    reduced in it. Both sides wrap alike."""
    options = {"mesh": mesh}
    if args.dtype == "bf16":
        # reduce_dtype is explicit, because torch 2.15 otherwise reduces in the parameter's own type.
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if args.by == "fsdp2":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Sharded:
    """FSDP2 without an optimizer."""

    def __init__(self, model, args):
        self.model = sharded(model, init_device_mesh("cpu", (args.ranks,)), args)

    def forward(self, tokens):
        return self.model(tokens)

    def backward(self, loss):
        loss.backward()

    def finish(self):
        """Waits until all updates have ended."""

    def copied_bytes(self):
        """By Forebay's client, of all ranks, since attach."""
        return {}


class Compute(Sharded):
    """The time that no optimizer and no offload can shorten. Parameters are of the type that it computes in:
    no cast is needed."""

    def __init__(self, model, args):
        super().__init__(model.bfloat16() if args.dtype == "bf16" else model, args)

    def step(self):
        self.model.zero_grad()


class Torch(Sharded):
    """With torch's optimizer."""

    def __init__(self, model, args):
        super().__init__(model, args)
        self.opt = torch.optim.AdamW(
            self.model.parameters(), lr=ours.LR, weight_decay=ours.WEIGHT_DECAY, fused=True
        )

    def step(self):
        self.opt.step()
        self.opt.zero_grad()


class Forebay(Sharded):
    """With Forebay's."""

    def __init__(self, model, args):
        super().__init__(model, args)
        import forebay

        options = {"lr": ours.LR, "weight_decay": ours.WEIGHT_DECAY, "max_grad_norm": args.clip}
        rule = forebay.AdamW(**options, format=args.format)
        ranks = {"rank": distributed.get_rank(), "world_size": args.ranks}
        self.opt = forebay.attach(self.model, rule, **ranks)

    def step(self):
        self.opt.step()
        self.opt.zero_grad()

    def finish(self):
        import forebay

        while True:
            (job,) = forebay.status()["jobs"]
            if job["published_step"] == job["committed_step"]:
                return
            quiet.pause(POLL_S)

    def copied_bytes(self):
        names = ("copied_bytes", "grad_bytes")
        stats = self.opt.stats()
        total = torch.tensor([stats[name] for name in names])
        distributed.all_reduce(total)
        return dict(zip(names, total.tolist()))


class DeepSpeed(deepspeed_side.DeepSpeed):
    """With what --zero says of offloading."""

    def __init__(self, model, args):
        aio = {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True}
        super().__init__(model, json.loads(args.zero), args.clip, {"aio": aio})

    def finish(self):
        """Its step leaves nothing to do."""

    def copied_bytes(self):
        return {}


SIDES = {
    "compute": Compute,
    "fsdp2": Torch,
    "forebay": Forebay,
    "forebay-on-swap": Forebay,
    "deepspeed": DeepSpeed,
}


def blocks_of(args):
    """Of the daemon, in all and in DRAM."""
    if not args.by.startswith("forebay"):
        return {}
    import forebay

    (job,) = forebay.status()["jobs"]
    return {"blocks": job["blocks"], "blocks_in_dram": job["resident_blocks"]}


def one_step(side, tokens):
    """Each part begins when all ranks have ended the one before: opt.step() of Forebay waits for the
    other ranks' backward, and torch's does not."""
    seconds = []

    def timed(work):
        distributed.barrier()
        began = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - began)
        return result

    before = side.copied_bytes()
    loss = timed(lambda: side.forward(tokens))
    timed(lambda: side.backward(loss))
    timed(side.step)
    copied = {name: count - before[name] for name, count in side.copied_bytes().items()}
    slower = torch.tensor(seconds)
    distributed.all_reduce(slower, distributed.ReduceOp.MAX)
    return dict(zip(PARTS, slower.tolist())) | copied | {"loss": loss.item()}


def train(rank, store, args, messages):
    """A step for each "step" that `messages` gives rank 0, whose answers it takes."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks
    )
    # OMP_NUM_THREADS comes first: if OpenMP binds its threads, the affinity of this thread is a single CPU.
    threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)) // args.ranks
    torch.set_num_threads(max(1, int(threads)))
    size = gpt.SIZES[args.size]
    torch.manual_seed(0)
    model = gpt.Gpt(size)
    params = sum(param.numel() for param in model.parameters())
    side = SIDES[args.by](model, args)
    del model
    gc.collect()
    generator = torch.Generator().manual_seed(1 + rank)
    if rank == 0:
        facts = {"params": params, "dtype": args.dtype, "threads": torch.get_num_threads()}
        messages.send(facts | blocks_of(args))
    while True:
        word = [messages.recv() if rank == 0 else None]
        distributed.broadcast_object_list(word)
        if word[0] != "step":
            break
        answers = []
        for _ in range(args.steps):
            tokens = torch.randint(0, size.vocab, (1, size.length), generator=generator)
            answers.append(one_step(side, tokens))
        if args.steps > 1:
            side.finish()
        steady = answers[1:] or answers
        if rank == 0:
            means = {part: sum(one[part] for one in steady) / len(steady) for part in PARTS}
            messages.send(answers[-1] | means)
    distributed.destroy_process_group()


def end_with_rank_0():
    """Rank 0 holds the other end of the pipe."""
    # A buffered read would hold a lock that the interpreter needs at its exit.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=SIDES, required=True)
    parser.add_argument("--zero", default="{}", help="deepspeed: JSON, more of zero_optimization")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--format", help="forebay: of masters and moments")
    parser.add_argument("--size", choices=gpt.SIZES, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="a message")
    parser.add_argument("--clip", type=float, help="the gradient's largest norm")
    parser.add_argument("--connect", required=True, help="path of the conductor's socket")
    parser.add_argument("--store", help="ranks but 0: where they find rank 0")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    # DeepSpeed reads these variables even if the process group exists.
    os.environ |= {"RANK": str(args.rank), "LOCAL_RANK": str(args.rank), "WORLD_SIZE": str(args.ranks)}
    if args.store:
        threading.Thread(target=end_with_rank_0, daemon=True).start()
        train(args.rank, args.store, args, None)
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-peers-"))
        store = os.path.join(folder, "store")
        conductor = stack.enter_context(multiprocessing.connection.Client(args.connect, "AF_UNIX"))
        for rank in range(1, args.ranks):
            command = [sys.executable, *sys.argv, "--store", store, "--rank", str(rank)]
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
        train(0, store, args, conductor)


if __name__ == "__main__":
    main()

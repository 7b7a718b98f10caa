"""One side of the sharded bench: two ranks train the model as FSDP2 shards it, a step for each message,
and sleep in between.

Started by sharded.py; the Forebay sides under `forebay run`. This process is rank 0 and starts rank 1.
Each message is answered with the seconds of forward, backward and step, the slower rank's of each, the
bytes that Forebay has copied, and the loss.
"""

import argparse
import gc
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

import gpt
import ours

RANKS = 2
PARTS = ("forward", "backward", "step")


def sharded(model, mesh, args):
    """Parameters are float32; with bf16, forward and backward compute in it, and gradients are reduced
    in it. Both sides wrap alike."""
    options = {"mesh": mesh}
    if args.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if args.by == "fsdp2":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def optimizer_of(model, args):
    if args.by == "fsdp2":
        return torch.optim.AdamW(
            model.parameters(), lr=ours.LR, weight_decay=ours.WEIGHT_DECAY, fused=True
        )
    import forebay

    rule = forebay.AdamW(lr=ours.LR, weight_decay=ours.WEIGHT_DECAY)
    return forebay.attach(model, rule, rank=distributed.get_rank(), world_size=RANKS)


def blocks_of(args):
    """Of the daemon, in all and in DRAM."""
    if args.by == "fsdp2":
        return {}
    import forebay

    (job,) = forebay.status()["jobs"]
    return {"blocks": job["blocks"], "blocks_in_dram": job["resident_blocks"]}


def copied_bytes(opt):
    """By Forebay's client, of all ranks, since attach."""
    names = ("copied_bytes", "grad_bytes")
    if not hasattr(opt, "stats"):
        return {}
    stats = opt.stats()
    total = torch.tensor([stats[name] for name in names])
    distributed.all_reduce(total)
    return dict(zip(names, total.tolist()))


def one_step(model, opt, tokens):
    """Each part begins when both ranks have ended the one before: opt.step() of Forebay waits for the
    other rank's backward, and torch's does not."""
    seconds = []

    def timed(work):
        distributed.barrier()
        began = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - began)
        return result

    def step():
        opt.step()
        opt.zero_grad()

    before = copied_bytes(opt)
    loss = timed(lambda: model(tokens))
    timed(loss.backward)
    timed(step)
    copied = {name: count - before[name] for name, count in copied_bytes(opt).items()}
    slower = torch.tensor(seconds)
    distributed.all_reduce(slower, distributed.ReduceOp.MAX)
    return dict(zip(PARTS, slower.tolist())) | copied | {"loss": loss.item()}


def train(rank, store, args, messages):
    """A step for each "step" that `messages` gives rank 0, whose answers it takes."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    torch.set_num_threads(1)
    size = gpt.SIZES[args.size]
    torch.manual_seed(0)
    model = gpt.Gpt(size)
    params = sum(param.numel() for param in model.parameters())
    model = sharded(model, init_device_mesh("cpu", (RANKS,)), args)
    opt = optimizer_of(model, args)
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
        tokens = torch.randint(0, size.vocab, (1, size.length), generator=generator)
        seconds = one_step(model, opt, tokens)
        if rank == 0:
            messages.send(seconds)
    distributed.destroy_process_group()


def end_with_rank_0():
    """Rank 0 holds the other end of the pipe."""
    sys.stdin.buffer.read()
    os._exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=["fsdp2", "forebay", "forebay-on-swap"], required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--size", choices=gpt.SIZES, required=True)
    parser.add_argument("--connect", required=True, help="path of the socket of sharded.py")
    parser.add_argument("--store", help="rank 1's: where it finds rank 0")
    args = parser.parse_args()
    if args.store:
        threading.Thread(target=end_with_rank_0, daemon=True).start()
        train(1, args.store, args, None)
        return
    with tempfile.TemporaryDirectory(prefix="forebay-peers-") as folder:
        store = os.path.join(folder, "store")
        command = [sys.executable, *sys.argv, "--store", store]
        with (
            multiprocessing.connection.Client(args.connect, "AF_UNIX") as conductor,
            subprocess.Popen(command, stdin=subprocess.PIPE),
        ):
            train(0, store, args, conductor)


if __name__ == "__main__":
    main()

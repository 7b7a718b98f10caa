#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a decoder-only GPT on the King James Bible, with Forebay or, with --plain, with torch's
own DDP and AdamW.

The model is a plain nn.Module and the training loop is plain torch; the two `if args.plain:`
branches are all that differs. Start it with torchrun (one process per rank) or alone. Every rank
writes OUT/rank<R>.jsonl: one JSON object a line with "event": start, resume, heldout, step,
timeline, kill, end (see train_support.py).
"""

import argparse
import json
import math
import os
import pathlib
import time

import forebay
import torch
from torch import nn
from torch.nn import functional

import train_support as support

VOCAB = 256  # bytes


# Parameters may be bfloat16; what is computed with them is float32, since few CPUs multiply
# bfloat16 fast.


class Linear(nn.Linear):
    def forward(self, x):
        return functional.linear(x, self.weight.float())


class Norm(nn.LayerNorm):
    def forward(self, x):
        return functional.layer_norm(x, self.normalized_shape, self.weight.float(), None, self.eps)


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer: attention and a four times wider two-layer perceptron, each after a norm and
    around a shortcut."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = Norm(width, bias=False)
        self.attention = Attention(width, heads)
        self.norm2 = Norm(width, bias=False)
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out; the output matrix is the embedding (tied)."""

    def __init__(self, width, layers, heads, length):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = Norm(width, bias=False)
        self.head = Linear(width, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        for name, param in self.named_parameters():
            if param.dim() > 1:
                shrink = (
                    math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1
                )
                nn.init.normal_(param, std=0.02 / shrink)

    def forward(self, tokens):
        x = self.embedding(tokens).float() + self.positions[: tokens.shape[1]].float()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plain", action="store_true", help="torch DDP and torch.optim.AdamW instead of Forebay"
    )
    support.add_run_arguments(
        parser,
        kill="RANK:STEP:GROUPS",
        kill_help="SIGKILL that rank in that step once so many groups are delivered; first start only",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--optimizer", choices=list(support.OPTIMIZERS), default="adamw")
    parser.add_argument("--lr", type=float, help="learning rate; default: the optimizer's own")
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument(
        "--format",
        choices=["fp32", "exact", "bf16", "int8"],
        help="state format; default: by dtype (docs/reference/formats.md)",
    )
    parser.add_argument(
        "--heldout", type=int, default=4, help="held-out sequences per rank, before and after"
    )
    parser.add_argument("--save", metavar="FILE", help="rank 0 saves the plain state_dict here")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="rank 0 prints N characters"
    )
    parser.add_argument("--timeline", type=int, metavar="STEP", help="log every wait of this step")
    parser.add_argument(
        "--reference-check",
        action="store_true",
        help="compare all states with the scalar reference on the same gradients (bf16, exact)",
    )
    args = parser.parse_args(argv)
    args.lr = support.OPTIMIZERS[args.optimizer][2] if args.lr is None else args.lr
    return args


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def heldout_loss(model, batches):
    with torch.no_grad():
        return sum(loss_of(model, tokens).item() for tokens in batches) / max(1, len(batches))


def sample(model, count, prompt=b"And God said", context=16):
    """Samples `count` bytes one by one; a short context keeps it cheap without a cache of keys and
    values."""
    tokens = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(count):
            chances = torch.softmax(model(tokens[:, -context:])[0, -1].float() / 0.8, dim=0)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


def train(args):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    out = pathlib.Path(args.out)
    text = support.load_text(args.text)
    batches = support.Batches(
        text, batch=args.batch, seq=args.seq, rank=rank, world=world, seed=args.seed
    )

    torch.manual_seed(args.seed)
    model = Gpt(args.width, args.layers, args.heads, args.seq)
    model = model.to(torch.bfloat16) if args.dtype == "bf16" else model
    torch.manual_seed(args.seed + 1 + rank)
    reference = support.reference(args, model, rank, world)
    net = model
    if args.plain:
        torch.distributed.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(model)
        opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    else:
        opt = forebay.attach(model, support.optimizer(args))
    meter = support.Meter(opt, rank)

    start = support.restore(getattr(opt, "extra_state", None), batches)
    log = support.Log(out, rank, resumed=start > 0)
    params = sum(param.numel() for param in model.parameters())
    log.write(
        "resume" if start else "start",
        step=start,
        params=params,
        world=world,
        args=support.json_args(args),
    )
    if start == 0:
        log.write("heldout", step=0, loss=heldout_loss(model, batches.heldout(args.heldout)))
        support.arm_kill(args.kill, opt, model, rank, log)
    meter.start()

    for step in range(start + 1, args.steps + 1):
        for group in opt.param_groups:
            group["lr"] = args.lr * min(1.0, step / args.warmup)
        began = time.monotonic_ns()
        tokens = batches.next()
        loss = loss_of(net, tokens)
        forward_done = time.monotonic_ns()
        loss.backward()
        backward_done = time.monotonic_ns()
        opt.extra_state = support.pack(step, batches)
        opt.step()
        opt.zero_grad()
        row = {
            "step": step,
            "loss": loss.item(),
            "tokens": tokens.shape[0] * (tokens.shape[1] - 1),
            "began_ns": began,
            "forward_done_ns": forward_done,
            "backward_done_ns": backward_done,
            "ended_ns": time.monotonic_ns(),
            **meter.take(),
        }
        timeline = row.pop("timeline", None)
        log.write("step", **row)
        if step == args.timeline and timeline is not None:
            log.write("timeline", step=step, intervals=timeline)
        if reference:
            reference.after_step(step, opt)
        if rank == 0:
            print(support.progress_line(row, world, args.steps, meter), flush=True)

    log.write("heldout", step=args.steps, loss=heldout_loss(model, batches.heldout(args.heldout)))
    finish(args, model, opt, rank, log, reference)
    log.write("end", step=args.steps, **meter.summary())
    meter.stop()
    if args.plain:
        torch.distributed.destroy_process_group()


def finish(args, model, opt, rank, log, reference):
    """The work after the last committed step: the check, the hash, the file, the sample."""
    if reference:
        log.write("reference", **reference.compare(opt))
    if rank != 0:
        return
    if args.sha and hasattr(opt, "state_sha256"):
        pathlib.Path(args.sha).write_text(
            json.dumps({"sha256": opt.state_sha256(), "step": args.steps}) + "\n"
        )
    if args.save:
        torch.save(model.state_dict(), args.save)
    if args.sample:
        said = sample(model, args.sample)
        log.write("sample", step=args.steps, text=said)
        print(f"sample: {said}", flush=True)


if __name__ == "__main__":
    train(parse_args())

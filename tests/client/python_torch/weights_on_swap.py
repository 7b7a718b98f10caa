# SPDX-License-Identifier: Apache-2.0
"""Trains a sharded model on the daemon of FOREBAY_SOCKET, one process for each rank over gloo, and prints a JSON
line: the SHA-256 of weights and states, the losses, the job's statistics, the bytes that the node
uses, those of its swap path.

usage: weights_on_swap.py RANKS STEPS|ordered FORMAT DTYPE [late | wait | KILLED_STEP | MODEL]

ordered: the steps that a test orders (ordered_steps.py); each rank prints ["answered", rank, step] behind each.
late: on the GPU of late_device.py. wait: step() returns when all is updated. At KILLED_STEP the last rank is killed in
its forward; then all start again and attach to the job. MODEL: one of MODELS below instead of a plain one.
"""

import json
import os
import signal
import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import late_device  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ordered_steps import BEFORE_STEP, BEHIND_BACKWARD, Ordered, say  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

WIDTH = 256
# True: the awkward models have their full size, some two thousand experts and an embedding of 0.3 G elements.
FULL_SIZE = "FOREBAY_FULL_SIZE" in os.environ
LAYERS = 12 if FULL_SIZE else 8  # FOREBAY_LAYERS gives others
LAYERS_OF_EXPERTS = 34 if FULL_SIZE else 2
ROWS_OF_EMBEDDING = 1_171_877 if FULL_SIZE else 16_411


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(1001, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(int(os.environ.get("FOREBAY_LAYERS", LAYERS))))
        self.head = nn.Linear(WIDTH, 1001, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Adapters(Model):
    """All is frozen but adapters: weights without states, far more than those with."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for layer in self.layers:
            layer.up, layer.down = Adapted(WIDTH, 4 * WIDTH), Adapted(4 * WIDTH, WIDTH)


class Experts(nn.Module):
    """61 of them, each sharded by itself; a step uses three, others in each step and layer."""

    COUNT, WIDTH = 61, 64

    def __init__(self, number):
        super().__init__()
        self.number, self.step = number, 0
        self.into, self.out_of = nn.Linear(WIDTH, self.WIDTH), nn.Linear(self.WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.COUNT))

    def forward(self, x):
        generator = torch.Generator().manual_seed(1000 * self.step + self.number)
        h = self.into(x)
        for expert in torch.randperm(self.COUNT, generator=generator)[:3].tolist():
            h = h + torch.relu(self.experts[expert](h))
        return x + self.out_of(h)


class MixtureOfExperts(Model):
    """Hundreds of tiny partitions, most unused in a step; no step fetches what the one before has fetched."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts(number) for number in range(LAYERS_OF_EXPERTS))


class LargeEmbedding(Model):
    """One parameter with most of the elements, in many blocks."""

    def __init__(self):
        super().__init__()
        self.layers = self.layers[:2]
        self.embedding = nn.Embedding(ROWS_OF_EMBEDDING, WIDTH)


MODELS = {"adapters": Adapters, "experts": MixtureOfExperts, "embedding": LargeEmbedding}


def wrap(model):
    for layer in model.layers:
        for expert in getattr(layer, "experts", []):
            fully_shard(expert)
        fully_shard(layer)
    fully_shard(model)


def read(shard):
    shard.to_local().clone()


def steps_from(step, last, orders, rank):
    """Yields each: until the last, or as ordered."""
    if orders is None:
        yield from range(step, last)
        return
    while orders.await_step(step + 1):
        yield step
        step += 1
        say("answered", rank, step)


def train(rank, ranks, steps, format, dtype, killed_step, way, folder):
    os.environ["FOREBAY_RUN"] = "one"
    on_device, waits = way == "late", way == "wait"
    if on_device:
        late_device.install(registers_read_only=rank % 2 == 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=ranks)
    model = MODELS.get(way, Model)().to(dtype)
    wrap(model)
    adamw = forebay.AdamW(lr=1e-3, format=format)
    sharding = forebay.Sharding(drain=not waits, early_updates=not waits)
    opt = forebay.attach(model, adamw, job="large", mode="sharded", sharding=sharding)
    # Each rank fetches in another order, which is the same in every step.
    if rank > 0 and way not in MODELS:
        for number, layer in enumerate(model.layers):
            other = model.layers[(5 * number + rank) % len(model.layers)].down.weight
            layer.register_forward_pre_hook(lambda *_, shard=other: read(shard))
    orders = Ordered(rank) if steps is None else None
    if orders is not None:
        say("pid", rank, os.getpid())
        orders.hold_in_backward(model.layers[len(model.layers) // 2])
    losses = []
    for step in steps_from(opt.committed_step, steps, orders, rank):
        if step == killed_step and rank == ranks - 1:
            model.layers[5].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        for layer in model.layers:
            layer.step = step
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, 1001, (4, 33), generator=generator)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if orders is not None:
            orders.at(BEHIND_BACKWARD)
            orders.at(BEFORE_STEP)  # before clipping too, where ranks also wait for each other
        if step % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        # Writes a weight in place between two steps.
        if step == 0 and way not in ("experts", "embedding"):
            up = model.layers[3].up
            with torch.no_grad():
                getattr(up, "base", up).weight.mul_(0.5)
    digest = opt.state_sha256()
    if rank == 0:
        status = forebay.status()
        [job] = status["jobs"]
        used = status["memory"]["used_bytes"]
        print(json.dumps([digest, losses, job, used, status["swap"][0]]), flush=True)
    assert not on_device or late_device.mistakes() == 0
    dist.barrier()
    dist.destroy_process_group()


def launch(*arguments):
    forked_ranks.start(train, arguments[0], *arguments)


def main(arguments):
    ranks, format = int(arguments[0]), arguments[2]
    steps = None if arguments[1] == "ordered" else int(arguments[1])
    dtype = getattr(torch, arguments[3])
    way = arguments[4] if len(arguments) > 4 else ""
    if way.isdigit():
        try:
            launch(ranks, steps, format, dtype, int(way), way)
        except Exception as error:  # the killed rank's, or that of a rank that lost it
            print(error, file=sys.stderr)
        else:
            sys.exit("no rank was killed")
    launch(ranks, steps, format, dtype, None, way)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)

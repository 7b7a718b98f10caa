# SPDX-License-Identifier: Apache-2.0
"""Trains a small sharded model on the daemon of FOREBAY_SOCKET, one process for each rank over gloo, through a
schedule of what may come between the announcement of a step and its decision, and prints a JSON line: the SHA-256 of
losses and norms, that of weights and states, the job's statistics, and how many blocks it has updated early since a
step had a second pass that nobody had announced (null: none had).

usage: early_updates.py RANKS STEPS SEED [early] [drain] [accumulate] [unannounced] [groups]

groups: each parameter is in a parameter group of its own, with empty ones between: more than 64.
"""

import hashlib
import json
import os
import random
import sys

import torch

torch.set_num_threads(1)

import forebay  # noqa: E402
import forked_ranks  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

WIDTH = 160
LAYERS = 6
# Events of a step, and in how many of a thousand steps each happens.
EVENTS = {
    "clip": 150,  # torch scales the gradients between backward and step
    "lr before backward": 200,
    "lr after backward": 40,
    "nan": 60,  # a gradient is NaN: the step is refused, and repeated
    "zero_grad": 60,  # called after a backward, which is repeated
    "exception": 40,  # raised in the middle of a backward, which is repeated
    "second pass": 300,  # only with accumulate, or with unannounced in the second half
    "skipped layer": 100,  # the layer's parameters get no gradient
    "read": 60,  # a state is read between backward and step
    "write": 40,  # a parameter is written between backward and step
    "norms": 300,  # the norm of each gradient is read
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.raises = False

    def forward(self, x):
        if self.raises:
            x.register_hook(fail)
        return x + self.down(torch.relu(self.up(x)))


def fail(_gradient):
    raise RuntimeError("in the middle of backward")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.skipped = None

    def forward(self, x):
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = layer(x)
        return x


def groups_of(model):
    groups = []
    for number, parameter in enumerate(model.parameters()):
        groups += [{"params": []}, {"params": []}]
        groups += [{"params": [parameter], "lr": 1e-3 * 0.95**number, "weight_decay": 0.01 * (number % 3)}]
    assert len(groups) > 64
    return groups


def early_updates():
    [job] = forebay.status()["jobs"]
    return job["early_updates"]


def train(rank, ranks, steps, seed, options, folder):
    os.environ["FOREBAY_RUN"] = "one"
    dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=ranks)
    model, policy = Model(), MixedPrecisionPolicy()
    if "unannounced" in options:  # 16-bit sums on swap take no unannounced passes
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        model = model.to(torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = forebay.attach(
        model,
        forebay.AdamW(lr=1e-3, format="exact"),
        param_groups=groups_of(model) if "groups" in options else None,
        job="early",
        mode="sharded",
        sharding=forebay.Sharding(early_updates="early" in options, drain="drain" in options),
        accumulate=2 if "accumulate" in options else 1,
    )
    chance = random.Random(seed)  # gives the same numbers on every rank
    digest = hashlib.sha256()
    before_passes = None
    for step in range(steps):
        now = {event for event, often in EVENTS.items() if chance.randrange(1000) < often}
        is_unannounced = "unannounced" in options and step >= steps // 2
        if "accumulate" not in options and not is_unannounced:
            now.discard("second pass")
        number = chance.randrange(LAYERS)
        model.skipped = chance.randrange(LAYERS) if "skipped layer" in now else None
        if number == model.skipped:  # a skipped layer raises nothing: its backward would count
            number = (number + 1) % LAYERS
        layer = model.layers[number]
        data = torch.Generator().manual_seed(1000 * step + rank)

        def backward(scale=1.0, data=data):
            x = torch.randn(4, WIDTH, generator=data).to(torch.bfloat16)
            loss = model(x).float().square().mean() * scale
            loss.backward()
            return loss.item()

        if "lr before backward" in now:
            opt.param_groups[0]["lr"] = chance.choice([1e-3, 5e-4, 2e-3])
        if "exception" in now:
            layer.raises = True
            try:
                backward()
                sys.exit("a backward whose hook raises came to its end")
            except RuntimeError:
                opt.zero_grad()
            layer.raises = False
        if "nan" in now:
            backward(float("nan"))
            try:
                opt.step()
                sys.exit("a gradient that is NaN was applied")
            except forebay.ForebayError as error:
                assert error.code == "E_NONFINITE", error
        if "zero_grad" in now:
            backward()
            opt.zero_grad()
        loss = backward()
        if "second pass" in now:
            loss += backward()
        if "lr after backward" in now:
            opt.param_groups[0]["lr"] *= 0.5
        if "read" in now:
            state = opt.read_state("first.weight")
            digest.update(state["exp_avg"].numpy().tobytes())
        if "write" in now:
            with torch.no_grad():
                layer.down.bias.mul_(0.5)
        if "norms" in now:
            for parameter in model.parameters():
                # The daemon's value: torch's float32 hides last bits.
                if parameter.grad is not None:
                    digest.update(repr(parameter.grad.to_local().delivered.norm()).encode())
        if "clip" in now:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            digest.update(repr(float(norm)).encode())
        opt.step()
        if "second pass" in now and before_passes is None:
            before_passes = early_updates()
        digest.update(repr(loss).encode())
    states = opt.state_sha256()
    if rank == 0:
        [job] = forebay.status()["jobs"]
        since = None if before_passes is None else job["early_updates"] - before_passes
        print(json.dumps([digest.hexdigest(), states, job, since]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments):
    numbers = [int(argument) for argument in arguments[:3]]
    forked_ranks.start(train, numbers[0], *numbers, arguments[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)

# SPDX-License-Identifier: Apache-2.0
"""The grammar of training scripts for script_fuzz.py: models, optimizers with parameter groups, steps.

A script is data: what each step does before its backwards, its backwards, what it does to the gradient, its step call and
its zero_grad. `script_of(seed)` chooses one.
"""

import random
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, VOCAB, ROWS = 4, 7, 3


def spec_checkpoints(spec, x):
    return spec.checkpoints and torch.is_grad_enabled() and x.requires_grad


class Stack(nn.Module):
    """Layers one after the other; the spec decides how they are used."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(VOCAB, WIDTH, sparse=spec.sparse) if spec.embeds else None
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=spec.bias) for _ in range(spec.layers))
        self.norm = {"layer": nn.LayerNorm(WIDTH), "batch": nn.BatchNorm1d(WIDTH)}.get(spec.norm)
        self.other = nn.Linear(WIDTH, WIDTH) if spec.branches else None
        self.head = nn.Linear(WIDTH, VOCAB if spec.ties == "embedding" else 3, bias=False)
        if spec.ties == "embedding":
            self.head.weight = self.embedding.weight
        if spec.ties == "layers":
            self.layers[-1].weight = self.layers[0].weight
        for index in spec.frozen:
            self.layers[index].weight.requires_grad_(False)

    def forward(self, x, branch=False):
        x = x if self.embedding is None else self.embedding(x)
        for index, layer in enumerate(self.layers):
            used = self.other if branch and self.other is not None and index == 0 else layer
            for _ in range(2 if index == self.spec.twice else 1):
                if spec_checkpoints(self.spec, x):
                    x = torch.tanh(checkpoint(used, x, use_reentrant=False))
                else:
                    x = torch.tanh(used(x))
        x = x if self.norm is None else self.norm(x)
        return self.head(functional.dropout(x, self.spec.dropout, self.training))


@dataclass(frozen=True)
class ModelSpec:
    layers: int
    bias: bool
    embeds: bool
    norm: str | None
    ties: str | None
    frozen: tuple
    twice: int | None
    branches: bool
    dropout: float
    sparse: bool
    checkpoints: bool
    seed: int


@dataclass(frozen=True)
class Step:
    before: tuple  # (name, argument)
    backwards: tuple  # (name, loss factor, batch)
    branch: bool
    gradient: tuple
    call: str
    zero: str


@dataclass(frozen=True)
class Script:
    model: ModelSpec
    rule: str
    options: dict
    groups: tuple  # hyper-parameters of each further group; parameters go round
    scaler: bool
    schedule: str | None
    steps: tuple


def weighted(rng, choices):
    return rng.choices(list(choices), weights=list(choices.values()))[0]


def random_model(rng):
    layers = rng.randint(1, 3)
    embeds = rng.random() < 0.3
    ties = None
    if embeds and rng.random() < 0.4:
        ties = "embedding"
    elif layers > 1 and rng.random() < 0.2:
        ties = "layers"
    frozen = tuple(i for i in range(layers) if rng.random() < 0.15)
    return ModelSpec(
        layers=layers,
        bias=rng.random() < 0.7,
        embeds=embeds,
        norm=weighted(rng, {None: 5, "layer": 3, "batch": 2}),
        ties=ties,
        frozen=() if ties == "layers" else frozen,
        twice=rng.randrange(layers) if rng.random() < 0.25 else None,
        branches=rng.random() < 0.3,
        dropout=0.5 if rng.random() < 0.2 else 0.0,
        sparse=rng.random() < 0.05,
        checkpoints=rng.random() < 0.15,
        seed=rng.randrange(1 << 16),
    )


def random_rule(rng):
    """(name, options) of torch.optim and of forebay alike."""
    rule = weighted(rng, {"AdamW": 5, "Adam": 3, "SGD": 3, "Adagrad": 2})
    options = {"lr": rng.choice((1e-3, 1e-2, 0.1)), "weight_decay": rng.choice((0.0, 0.01, 0.1))}
    if rule.startswith("Adam"):
        options |= {"betas": rng.choice(((0.9, 0.999), (0.8, 0.95))), "amsgrad": rng.random() < 0.2}
    elif rule == "SGD":
        options["momentum"] = rng.choice((0.0, 0.5, 0.9))
        if options["momentum"] > 0:
            options |= rng.choice(({}, {"nesterov": True}, {"dampening": 0.25}))
    else:
        options |= rng.choice(({}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.5}))
    return rule, options


BEFORE = {"nothing": 12, "evaluate": 2, "deepcopy": 1, "lr": 2, "hook": 1, "read_state": 1, "train_mode": 1}
BEFORE |= {"state_dict": 1, "weight_decay": 1, "autograd_grad": 1, "zero_grad": 1, "model_state_dict": 1}
BEFORE |= {"module_hook": 1, "backward_hook": 1, "post_hook": 0.3, "unused_forward": 1, "load_state_dict": 0.2}
BEFORE |= {"add_group": 0.2, "freeze": 0.2}
BACKWARDS = {"once": 20, "sum": 2, "accumulate": 2, "retain": 1, "dropped": 2, "dropped_by_model": 1, "none": 1}
BACKWARDS |= {"broken": 1, "infinite": 1, "penalty": 1}
GRADIENT = {"nothing": 8, "clip_norm": 3, "clip_value": 2, "norm_of_one": 1, "one_to_none": 0.3, "read": 0.3}
GRADIENT |= {"autograd_grad": 0.3}
NOT_SHARDED = {
    "deepcopy",  # FSDP2 refuses it
    "penalty",  # torch.autograd.grad() frees what the backward after it has to read
}
CALLS = {"step": 40, "closure": 1, "twice": 0.5}
ZERO = {"opt": 8, "opt_false": 2, "model": 4, "model_false": 2, "nothing": 1}


def random_step(rng):
    before = [(weighted(rng, BEFORE), rng.random()) for _ in range(rng.randint(1, 2))]
    kind = weighted(rng, BACKWARDS)
    count = {"accumulate": 2, "none": 0}.get(kind, 1)
    backwards = tuple((kind, rng.choice((1.0, 0.5, 3.0)), rng.randrange(1 << 16)) for _ in range(count))
    if kind.startswith("dropped") or kind == "broken":  # a backward that counts may follow
        backwards += (("once", 1.0, rng.randrange(1 << 16)),) * rng.randint(0, 1)
    gradient = [(weighted(rng, GRADIENT), rng.choice((0.01, 0.5)))]
    if rng.random() < 0.1:
        gradient.append((weighted(rng, GRADIENT), 0.05))
    return Step(
        tuple(before),
        backwards,
        rng.random() < 0.5,
        tuple(gradient),
        weighted(rng, CALLS),
        weighted(rng, ZERO),
    )


def script_of(seed):
    rng = random.Random(seed)
    model = random_model(rng)
    rule, options = random_rule(rng)
    names = [name for name in ("lr", "weight_decay") if rng.random() < 0.7]
    groups = tuple(
        {name: options[name] * rng.choice((0.1, 2.0)) for name in names} for _ in range(rng.randint(0, 2))
    )
    return Script(
        model=model,
        rule=rule,
        options=options,
        groups=groups,
        scaler=rng.random() < 0.2,
        schedule=weighted(rng, {None: 4, "step": 1, "cosine": 1}),
        steps=tuple(random_step(rng) for _ in range(rng.randint(2, 4))),
    )


def sharded_form(seed):
    """The script without what torch's FSDP2 cannot do: NOT_SHARDED, sparse gradients, and training after a first forward in
    inference mode, whose memory the next gather cannot write into."""
    script = script_of(seed)

    def kept(pairs):
        return tuple(one for one in pairs if one[0] not in NOT_SHARDED)

    steps = [replace(one, before=kept(one.before), backwards=kept(one.backwards)) for one in script.steps]
    without_gradients = ((name, value / 2 if name == "evaluate" else value) for name, value in steps[0].before)
    steps[0] = replace(steps[0], before=tuple(without_gradients))
    return replace(script, model=replace(script.model, sparse=False), steps=tuple(steps))

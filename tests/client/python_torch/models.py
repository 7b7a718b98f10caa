"""Small models and a loop that trains them, with torch's optimizer or an attached one."""

import copy

import torch
from torch import nn
from torch.nn import functional

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, a few layers, a tied head."""

    def __init__(self, layers=3, width=WIDTH, vocab=11):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def net(seed=1, **options):
    torch.manual_seed(seed)
    return Net(**options)


def batch(seed, vocab=11):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (2, 6), generator=generator)


def loss_of(model, tokens):
    return functional.cross_entropy(
        model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
    )


def train(model, opt, steps, loss=loss_of, first=0):
    """Losses of `steps` steps."""
    losses = []
    for step in range(first, first + steps):
        value = loss(model, batch(step))
        value.backward()
        opt.step()
        opt.zero_grad()
        losses.append(value.item())
    return losses


def pair(model):
    """The model, a private copy and torch's AdamW over the copy."""
    plain = copy.deepcopy(model)
    return model, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)


def assert_close(model, plain, steps, lr=1e-2):
    """Element by element. Both compute the same formula in float32 with another order of roundings:
    an update lr * m' / d differs by at most some 8 roundings of relative 2^-24 while gradients are
    equal, so w by steps * (8 * 2^-24 * lr * |m'/d| + 2^-23 |w|) with |m'/d| <= 10 in the first
    steps of AdamW (bias correction bounds it by about 1/sqrt(1-beta2) = 32). Gradients differ too,
    as w does: the factor 64 covers it for the few steps here.
    """
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        bound = 64 * steps * (2**-24 * 8 * lr * 10 + 2**-23 * theirs.abs().max().item())
        difference = (ours - theirs).abs().max().item()
        assert difference <= bound, f"{name}: {difference} > {bound}"

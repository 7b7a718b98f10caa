# SPDX-License-Identifier: Apache-2.0
"""Small models and a loop that trains them, with torch's optimizer or an attached one."""

import copy
import warnings

import forebay
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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


class TwiceNet(Net):
    """Its layers are used twice."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(layer(x))
        return self.head(self.norm(x))


class CheckpointedNet(Net):
    """Backward computes its layers again."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def net(seed=1, **options):
    torch.manual_seed(seed)
    return Net(**options)


def batch(seed, vocab=11):
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(vocab, (2, 6), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


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


def scaled_step(model, opt, scaler, loss, max_norm=1.0):
    """As torch's documentation has it; returns the scale of the next step."""
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(opt)
    scaler.update()
    return scaler.get_scale()


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


def assert_trains_one_more_step(model, opt, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, decay=1e-2):
    """One step of an attached float32 model, compared with AdamW's formula on its own state: nothing
    of that state was lost. A private twin computes the gradients.

    Bounds: each new value is the result of a few float32 operations, each with a relative error of 2^-24;
    1e-5 is above a hundred of them. The step that corrects a group's bias is the number of steps in
    which it had a gradient, which only the daemon counts: one of those that can be must fit.
    """
    seed, before = 1000 + opt.committed_step, opt.committed_step
    twin = copy.deepcopy(model)
    states = {name: opt.read_state(name) for name, _ in model.named_parameters()}
    loss_of(twin, batch(seed)).backward()
    (loss,) = train(model, opt, 1, first=seed)
    assert opt.committed_step == before + 1
    assert loss == loss_of(twin, batch(seed)).item() and loss < 100
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters()):
        if not ours.requires_grad:
            assert torch.equal(ours, theirs), name
            continue
        gradient, w = theirs.grad, theirs.detach()
        m = betas[0] * states[name]["exp_avg"] + (1 - betas[0]) * gradient
        v = betas[1] * states[name]["exp_avg_sq"] + (1 - betas[1]) * gradient**2
        state = opt.read_state(name)
        torch.testing.assert_close(state["exp_avg"], m, rtol=1e-5, atol=1e-8, msg=name)
        torch.testing.assert_close(state["exp_avg_sq"], v, rtol=1e-5, atol=1e-12, msg=name)
        fits = []
        for t in range(1, before + 2):
            update = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
            want = w * (1 - lr * decay) - lr * update
            fits.append(torch.allclose(ours, want, rtol=1e-5, atol=lr * 1e-3))
        assert any(fits), name


class HealthyJob:
    """A job that does everything right, on the daemon that the tests mistreat."""

    def __init__(self, socket):
        self.socket, self.steps, self.sha256 = socket, 0, None

    def train_one_more_step(self):
        model = net(seed=42)
        options = {"job": "healthy", "rank": 0, "world_size": 1, "socket": self.socket, "timeout": 30}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns if this process has trained the job before
            opt = forebay.attach(model, forebay.AdamW(lr=1e-2), **options)
        assert opt.committed_step == self.steps
        assert self.sha256 in (None, opt.state_sha256()), "lost or changed since its last step"
        assert_trains_one_more_step(model, opt)
        self.steps, self.sha256 = self.steps + 1, opt.state_sha256()
        opt.detach()


class Scored(torch.utils.data.Dataset):
    """Batches, and the model's outputs for them in the process that loads them."""

    def __init__(self, model, batches):
        self.model, self.batches = model, batches

    def __len__(self):
        return self.batches

    def __getitem__(self, number):
        with torch.no_grad():
            return batch(number), loss_of(self.model, batch(number))

# SPDX-License-Identifier: Apache-2.0
"""The scalar reference of --reference-check: AdamW with format `exact`, as cpu_adam/update_kernel.h
defines it, in torch.

Every rank records the bfloat16 gradients that its model hands to the optimizer; after the last step
each rank replays its share of the parameters and compares master and moments bit by bit with what
the daemon holds.
"""

import math

import torch

BETA1, BETA2, EPS, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 1e-2  # forebay.AdamW's defaults


def fma(a, b, c):
    """a * b + c in float32, rounded once. The product of two float32 is exact in float64; the sum
    is rounded to odd in float64 (TwoSum gives what was lost), which makes the second rounding to float32
    the only one that counts."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    toward = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where((lost != 0) & (bits & 1 == 0) & total.isfinite(), bits + toward, bits)
    return odd.view(torch.float64).float()


def single(value):
    return torch.tensor(value, dtype=torch.float32)


class Scalars:
    """Constants of step t, computed in double and rounded once."""

    def __init__(self, lr, t, world, weight_decay=WEIGHT_DECAY):
        self.beta1, self.beta2, self.eps = single(BETA1), single(BETA2), single(EPS)
        self.one_minus_beta1, self.one_minus_beta2 = single(1 - BETA1), single(1 - BETA2)
        self.inv_sqrt_bias2 = single(1 / math.sqrt(-math.expm1(t * math.log(BETA2))))
        self.grad_scale = single(1 / world)
        lr = single(lr)
        self.decay = fma(-lr, single(weight_decay), single(1.0))
        self.step_size = lr * single(1 / -math.expm1(t * math.log(BETA1)))


def update(scalars, gradient, master, m, v):
    """New master and moments, in the order of operations of the kernel."""
    g = gradient * scalars.grad_scale
    m = fma(scalars.beta1, m, scalars.one_minus_beta1 * g)
    v = fma(scalars.beta2, v, (scalars.one_minus_beta2 * g) * g)
    root = torch.sqrt(v.double()).float()  # torch's float32 root is not always rounded to nearest
    d = fma(root, scalars.inv_sqrt_bias2, scalars.eps)
    return fma(-scalars.step_size, m / d, scalars.decay * master), m, v


def split(master):
    """param = (bits + 0x8000) >> 16, remainder = int16(bits - (param << 16))."""
    bits = master.view(torch.int32)
    param = (bits + 0x8000) >> 16
    return param.to(torch.int16).view(torch.bfloat16), (bits - (param << 16)).to(torch.int16)


class Recorder:
    """Writes this rank's gradients to files, one per step, and compares at the end."""

    def __init__(self, model, out, *, rank, world, lr):
        self.folder = out / "gradients"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.world, self.lr = rank, world, lr
        self.rates = []
        self.gradients = {}
        self.parameters = dict(model.named_parameters())
        self.initial = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.gradients.__setitem__(name, p.grad.detach().clone())
            )

    def after_step(self, step, opt):
        self.rates.append(opt.param_groups[0]["lr"])
        part = self.folder / f"part.{self.rank}"
        torch.save(self.gradients, part)
        part.replace(self._file(step, self.rank))
        self.gradients.clear()

    def _file(self, step, rank):
        return self.folder / f"rank{rank}.step{step}.pt"

    def compare(self, opt):
        """Every rank reached the last step's barrier, but the other rank's last file may not exist
        yet."""
        names = sorted(self.parameters)[self.rank :: self.world]
        state = {
            name: (self.initial[name].float(), *torch.zeros(2, *self.initial[name].shape))
            for name in names
        }
        for step, lr in enumerate(self.rates, start=1):
            parts = [self._load(step, rank) for rank in range(self.world)]
            scalars = Scalars(lr, step, self.world)
            for name in names:
                total = parts[0][name].float()
                for part in parts[1:]:
                    total = total + part[name].float()
                state[name] = update(scalars, total, *state[name])
        elements = mismatches = 0
        for name in names:
            param, _ = split(state[name][0])
            have = opt.read_state(name)
            for mine, theirs in (
                (param, self.parameters[name].detach()),
                (state[name][0], have["master"]),
                (state[name][1], have["exp_avg"]),
                (state[name][2], have["exp_avg_sq"]),
            ):
                width = {2: torch.int16, 4: torch.int32}[mine.element_size()]
                elements += mine.numel()
                mismatches += int((mine.view(width) != theirs.view(width)).sum())
        return {"elements": elements, "mismatches": mismatches}

    def _load(self, step, rank):
        import time

        end = time.monotonic() + 60
        while not self._file(step, rank).exists():
            if time.monotonic() > end:
                raise SystemExit(f"rank {rank} left no gradients of step {step}")
            time.sleep(0.01)
        return torch.load(self._file(step, rank))

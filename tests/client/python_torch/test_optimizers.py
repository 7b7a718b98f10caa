# SPDX-License-Identifier: Apache-2.0
# Goal    Each optimizer of the package does what the class of torch of the same name does, element
#         by element, for every option; Lion and LAMB do what their papers say; `exact` serves the
#         rounding of what `fp32` holds.
# Method  Losses that are linear in the parameters, so that every step has the same gradients on both
#         sides; on the real daemon. Compare parameters and states with the bound derived below, the
#         two formats bit by bit.

import dataclasses
import os

import forebay
import pytest
import torch
from daemon_process import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

STEPS = 5
LR = 0.01
NOT_TORCHS = ("max_grad_norm", "format", "params", "seed", "foreach", "fused")
NOT_TORCHS += ("maximize", "capturable", "differentiable")
OPTIMIZERS = [
    forebay.AdamW(lr=LR),
    forebay.AdamW(lr=LR, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, amsgrad=True),
    forebay.Adam(lr=LR),
    forebay.Adam(lr=LR, weight_decay=0.1),
    forebay.Adam(lr=LR, weight_decay=0.1, amsgrad=True),
    forebay.Adagrad(lr=LR),
    forebay.Adagrad(lr=LR, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    forebay.SGD(lr=LR),
    forebay.SGD(lr=LR, dampening=0.5),
    forebay.SGD(lr=LR, momentum=0.9, weight_decay=0.1),
    forebay.SGD(lr=LR, momentum=0.9, dampening=0.5),
    forebay.SGD(lr=LR, momentum=0.9, weight_decay=0.1, nesterov=True),
    forebay.Lion(lr=LR),
    forebay.Lion(lr=LR, betas=(0.8, 0.9), weight_decay=0.1),
    forebay.Lamb(lr=LR),
    forebay.Lamb(lr=LR, betas=(0.8, 0.9), weight_decay=0.1),
]


def label(optimizer):
    shown = dataclasses.asdict(optimizer)
    return optimizer.name + "".join(
        f"-{key}" for key in ("weight_decay", "dampening", "lr_decay") if shown.get(key)
    )


class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675, algorithm 2, in double."""

    def __init__(self, params, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p, dtype=torch.float64))
                g = p.grad.double()
                update = torch.sign(beta1 * m + (1 - beta1) * g) + group["weight_decay"] * p
                p.copy_(p - group["lr"] * update)
                self.state[p]["exp_avg"] = beta2 * m + (1 - beta2) * g


class Lamb(torch.optim.Optimizer):
    """arXiv:1904.00962, algorithm 2, with bias correction and phi the identity, in double."""

    def __init__(self, params, **options):
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                zero = torch.zeros_like(p, dtype=torch.float64)
                t = state["t"] = state.get("t", 0) + 1
                g, w = p.grad.double(), p.double()
                m = state["exp_avg"] = beta1 * state.get("exp_avg", zero) + (1 - beta1) * g
                v = beta2 * state.get("exp_avg_sq", zero) + (1 - beta2) * g * g
                state["exp_avg_sq"] = v
                u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
                u = u + group["weight_decay"] * w
                p.copy_(w - group["lr"] * w.norm() / u.norm() * u)


def torchs(optimizer, parameters):
    options = {
        key: value for key, value in dataclasses.asdict(optimizer).items() if key not in NOT_TORCHS
    }
    if isinstance(optimizer, (forebay.Lion, forebay.Lamb)):
        return (Lion if isinstance(optimizer, forebay.Lion) else Lamb)(parameters, **options)
    return getattr(torch.optim, type(optimizer).__name__)(parameters, **options)


class Plane(torch.nn.Module):
    """Two parameters and a loss that is linear in them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        # Sizes that are not a multiple of any vector width. Values that bfloat16 represents exactly.
        self.a = torch.nn.Parameter((torch.rand(37, 11) * 2 - 1).bfloat16().to(dtype))
        self.b = torch.nn.Parameter((torch.rand(1009) * 2 - 1).bfloat16().to(dtype))

    def forward(self, step):
        return sum((p * gradient(p, step)).sum() for p in (self.a, self.b))


def gradient(parameter, step):
    """Sizes of 0.5 to 1 with random signs."""
    generator = torch.Generator().manual_seed(1000 * step + parameter.dim())
    size = (0.5 + 0.5 * torch.rand(parameter.shape, generator=generator)).bfloat16()
    sign = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
    return (size * sign).to(parameter.dtype)


def train(model, opt, steps=STEPS):
    for step in range(steps):
        model(step).backward()
        opt.step()
        opt.zero_grad()


# With u = 2^-24: a moment of T steps is a sum whose every term was rounded at most 3T times, an
# update rounds 8 times more, so both sides are within (3T + 8) u of the sum of absolute terms, and of
# each other within twice that. Gradients of 0.5 to 1, with up to 0.1 of a weight below 1.5 added:
# updates are below 25 learning rates (SGD: 1.15 / (1 - 0.9) times 1.9), moments below 12. The weight
# itself is rounded twice a step.
BOUND = 2 * (3 * STEPS + 8) * 2.0**-24
PARAMETER_BOUND = BOUND * STEPS * LR * 25 + 2 * 2 * STEPS * 2.0**-24 * 1.5
STATE_BOUND = BOUND * 12


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=label)
def test_it_is_torchs_element_by_element(node, optimizer):
    model, plain = Plane(), Plane()
    opt = forebay.attach(model, optimizer)
    plain_opt = torchs(optimizer, plain.parameters())
    train(model, opt)
    train(plain, plain_opt)
    for (name, have), want in zip(model.named_parameters(), plain.parameters()):
        worst = (have.double() - want.double()).abs().max().item()
        assert worst <= PARAMETER_BOUND, f"{name} differs by {worst}"
        states = opt.read_state(name)
        compared = 0
        for key, state in states.items():
            reference = plain_opt.state[want].get(key)
            if reference is None:
                compared += key == "step"  # torch's SGD and our references keep none
                continue  # nor does torch's SGD without momentum keep a buffer
            worst = (state.double() - reference.double()).abs().max().item()
            assert worst <= STATE_BOUND, f"{key} of {name} differs by {worst}"
            compared += 1
        assert compared == len(states) or getattr(optimizer, "momentum", 1) == 0
    opt.detach()


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=label)
def test_exact_serves_the_rounding_of_fp32(node, optimizer):
    weights = {}
    job = os.environ["FOREBAY_JOB"]
    for dtype in (torch.float32, torch.bfloat16):
        model = Plane(dtype)
        opt = forebay.attach(model, optimizer, job=f"{job[:50]}.{dtype}")
        train(model, opt)
        weights[dtype] = [p.detach().clone() for p in model.parameters()]
        opt.detach()
    for wide, narrow in zip(*weights.values()):
        rounded = ((wide.view(torch.int32) + 0x8000) >> 16).to(torch.int16)
        assert torch.equal(rounded, narrow.view(torch.int16))


def test_nesterov_needs_momentum_and_no_dampening():
    for options in ({"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(forebay.UsageError, match="nesterov"):
            forebay.SGD(nesterov=True, **options)


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (forebay.SGD(momentum=-0.1), "momentum -0.1 is not 0 or above"),
        (forebay.Adagrad(lr_decay=-1.0), "lr_decay -1 is not 0 or above"),
        (forebay.Adagrad(eps=0.0), "eps 0 is not above 0"),
        (forebay.Lion(betas=(1.0, 0.9)), r"beta1 1 is not in \[0, 1\)"),
    ],
    ids=["momentum", "lr_decay", "eps", "beta1"],
)
def test_a_value_outside_its_range_is_refused_by_the_name_that_torch_gives_it(
    node, optimizer, words
):
    model = Plane()
    words = f"parameter group 0: {words}"
    with pytest.raises(forebay.UsageError, match=words):
        forebay.attach(model, optimizer)
    opt = forebay.attach(model, type(optimizer)())  # the name is still free
    before = model.a.detach().clone()
    model(0).backward()
    opt.param_groups[0].update(
        {name: getattr(optimizer, name) for name in optimizer.hyper_parameters}
    )
    with pytest.raises(forebay.UsageError, match=words):
        opt.step()
    assert torch.equal(model.a, before) and opt.committed_step == 0
    opt.detach()


def test_defaults_are_those_of_torch():
    for cls in (forebay.AdamW, forebay.Adam, forebay.Adagrad, forebay.SGD):
        for amsgrad in (False, True):
            options = {"amsgrad": True} if amsgrad and "amsgrad" in cls.__annotations__ else {}
            ours = cls(**options)
            theirs = getattr(torch.optim, cls.__name__)([torch.zeros(1)], **options).defaults
            for name in ours.hyper_parameters:
                want = 1e-3 if (cls, name) == (forebay.SGD, "lr") else theirs[name]
                assert getattr(ours, name) == want, f"{cls.__name__}.{name}"


def test_a_seed_or_a_clip_that_is_none_is_refused_where_it_is_written():
    for options in ({"seed": -1}, {"seed": 1 << 64}, {"seed": 1.5}, {"seed": None}):
        with pytest.raises(forebay.UsageError, match="seed is") as caught:
            forebay.AdamW(**options)
        assert caught.value.code == "E_OPTION" and caught.value.hint
    for clip in (-1.0, float("nan"), "x"):
        with pytest.raises(forebay.UsageError, match="max_grad_norm is") as caught:
            forebay.SGD(max_grad_norm=clip)
        assert caught.value.code == "E_OPTION" and caught.value.hint


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
def test_what_is_no_number_is_refused_before_there_is_a_job(node):
    for wrong in (
        forebay.AdamW(betas=(0.9,)),
        forebay.AdamW(betas=0.9),
        forebay.AdamW(eps="small"),
        forebay.Adagrad(eps=None),
        forebay.SGD(momentum=torch.ones(2)),
    ):
        with pytest.raises(forebay.UsageError, match="group 0: .* not the numbers") as info:
            forebay.attach(Plane(), wrong)
        assert info.value.code == "E_OPTION" and info.value.hint
    # The name is still free, for any layout; a bad value that comes later is an error too.
    model = Plane()
    opt = forebay.attach(model, forebay.Lion(lr=LR))
    model(0).backward()
    opt.param_groups[0]["betas"] = (0.9, "x")
    with pytest.raises(forebay.UsageError, match="parameter group 0: .* not the numbers"):
        opt.step()
    opt.param_groups[0]["betas"] = (0.9, 0.99)
    opt.step()
    assert opt.committed_step == 1
    opt.detach()


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
def test_param_groups_that_are_none_are_refused_before_there_is_a_job(node):
    model = Plane()
    for groups, words in (
        ([{"lr": 1.0}], 'no dict with "params"'),
        ([{"params": [model.a]}, model.b], 'no dict with "params"'),
        ([{"params": "ab"}], "'a' is no parameter"),
        (list(model.named_buffers()) + [("a", 1)], "1 is no parameter"),
        ([{"params": [model.a, model.b]}, {"params": [model.a]}], "a is in param groups 0 and 1"),
        ([{"params": [model.a, model.b]}] + [{"params": []}] * 4096, "4097 param groups"),
    ):
        with pytest.raises(forebay.UsageError, match=words) as caught:
            forebay.attach(model, forebay.AdamW(), param_groups=groups)
        assert caught.value.code == "E_OPTION" and caught.value.hint
    opt = forebay.attach(model, forebay.Lion(lr=LR))
    train(model, opt, 1)
    opt.detach()

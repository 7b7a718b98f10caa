# SPDX-License-Identifier: Apache-2.0
# Goal    Each format of the optimizer's state has its documented precision, for every optimizer: `fp32` with 16-bit parameters
#         has the same bits as `exact`; `bf16` and `int8` moments are close to those of `exact`. The bits of a state are the
#         same in DRAM and on swap.
# Method  The model and losses of test_optimizers.py on the real daemon, in DRAM and on swap; bits are
#         compared as bits, narrow moments within the bound derived below.

import dataclasses
import os
import sys
import tempfile

import forebay
import pytest
import torch
from daemon_process import Daemon, missing
from test_optimizers import LR, Plane, label, train

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

OPTIMIZERS = [
    forebay.AdamW(lr=LR, weight_decay=0.1),
    forebay.AdamW(lr=LR, amsgrad=True),
    forebay.Adam(lr=LR, weight_decay=0.1),
    forebay.Adam(lr=LR, amsgrad=True),
    forebay.Adagrad(lr=LR),
    forebay.SGD(lr=LR, momentum=0.9),
    forebay.SGD(lr=LR, momentum=0.9, nesterov=True),
    forebay.Lion(lr=LR, weight_decay=0.1),
    forebay.Lamb(lr=LR),
]
STEPS = 4


def trained(optimizer, name, dtype=torch.bfloat16, **options):
    """(parameters, states by parameter and plane, SHA-256) after STEPS steps as a job of its own."""
    model = Plane(dtype)
    job = f"{os.environ['FOREBAY_JOB'][-40:]}.{name}"
    opt = forebay.attach(model, optimizer, job=job, **options)
    try:
        train(model, opt, STEPS)
        parameters = [p.detach().clone() for p in model.parameters()]
        states = {name: opt.read_state(name) for name, _ in model.named_parameters()}
        return parameters, states, opt.state_sha256()
    finally:
        opt.detach()


def bits(tensor):
    return tensor.view(torch.int16)


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=label)
def test_fp32_beside_bfloat16_parameters_serves_the_bits_of_exact(node, optimizer):
    exact, exact_states, _ = trained(optimizer, "exact")
    wide, states, _ = trained(dataclasses.replace(optimizer, format="fp32"), "fp32")
    for a, b, (name, planes) in zip(exact, wide, states.items()):
        assert torch.equal(bits(a), bits(b)), name
        assert planes.keys() == exact_states[name].keys()
        for key, values in planes.items():
            assert torch.equal(values, exact_states[name][key]), f"{key} of {name}"


# Bounds of a moment's error after four steps, relative to the largest moment. In a step a bf16 moment is off by at most 2^-7 of
# itself. An int8 moment is off by at most one code: 1/127 of the largest moment of its group. A root is off by 1/255 of the
# largest root, which is 2/255 of the square and the square of 1/255. The errors of four steps add, and a beta never enlarges an
# error. Adagrad's sum and SGD's buffer grow up to fourfold. The part that a weight decay feeds back is smaller.
BOUNDS = {"bf16": 4 * 2.0**-7, "int8": 4 * 2.2 / 127}


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=label)
def test_narrow_moments_are_close_to_those_of_exact(node, optimizer, format):
    _, exact, _ = trained(optimizer, "exact")
    parameters, states, digest = trained(dataclasses.replace(optimizer, format=format), format)
    for name, planes in states.items():
        assert planes.keys() == exact[name].keys()
        for key, values in planes.items():
            assert values.dtype == torch.float32
            if key in ("master", "step"):
                continue
            wide = exact[name][key]
            largest = wide.abs().max()
            worst = (values.float() - wide).abs().max()
            assert 0 < worst <= BOUNDS[format] * largest, f"{key} of {name} differs by {worst}"
    # Training again with the same seed gives the same bits. Another seed gives other bits.
    same = trained(dataclasses.replace(optimizer, format=format), f"{format}2")
    other = trained(dataclasses.replace(optimizer, format=format, seed=7), f"{format}3")
    assert same[2] == digest != other[2]


class Large(torch.nn.Module):
    """Two parameters of which blocks of 2^16 elements hold parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a = torch.nn.Parameter(torch.randn(1 << 19).bfloat16())
        self.b = torch.nn.Parameter(torch.randn(1000, 301).bfloat16())

    def forward(self, step):
        return sum((p * torch.cos(p.detach() + step)).sum() for p in (self.a, self.b))


def digest_on(folder, optimizer, dram_bytes, monkeypatch):
    """(SHA-256, what the job's states take, what the daemon used) on a daemon with such a limit."""
    own = Daemon(
        folder,
        f"dram.limit={dram_bytes}",
        f"swap.paths={folder}",
        "swap.capacity=64MiB",
        "swap.staging=4MiB",
        "update.block_elems=65536",
    )
    monkeypatch.setenv("FOREBAY_SOCKET", own.socket)
    try:
        model = Large()
        opt = forebay.attach(model, optimizer, job="one")
        train(model, opt, STEPS)
        digest = opt.state_sha256()
        status = forebay.status()
        opt.detach()
        return digest, status["jobs"][0], status["memory"]["used_bytes"]
    finally:
        own.stop()


@pytest.mark.parametrize("format", ["exact", "bf16", "int8", "fp32"])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS[0], OPTIMIZERS[-1]], ids=label)
def test_on_swap_it_has_the_bits_that_it_has_in_dram(optimizer, format, monkeypatch):
    monkeypatch.setattr(forebay, "_core", sys.modules["forebay._core"], raising=False)
    optimizer = dataclasses.replace(optimizer, format=format)
    place = os.environ.get("TMPDIR", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="fb", dir=place) as folder:
        dram, all_resident, used = digest_on(folder, optimizer, 1 << 30, monkeypatch)
    assert all_resident["resident_blocks"] == all_resident["blocks"]
    with tempfile.TemporaryDirectory(prefix="fb", dir=place) as folder:
        swapped, job, _ = digest_on(folder, optimizer, used + (1 << 20), monkeypatch)
    assert job["resident_blocks"] < job["blocks"]
    assert dram == swapped


@pytest.mark.parametrize("node", ["daemon"], indirect=True)
def test_float16_parameters_are_the_rounding_of_fp32(node):
    """Gradients of both are the same numbers: they are bfloat16's, between 0.5 and 1."""
    wide, wide_states, _ = trained(OPTIMIZERS[0], "fp32", torch.float32)
    half, states, _ = trained(OPTIMIZERS[0], "half", torch.float16)
    for a, b, name in zip(wide, half, states):
        assert torch.equal(a.half(), b), name
        assert torch.equal(states[name]["master"], a), name
        assert torch.equal(states[name]["exp_avg_sq"], wide_states[name]["exp_avg_sq"]), name


@pytest.mark.parametrize(
    ("dtype", "format", "words"),
    [
        (torch.float32, "int8", "format 'int8' does not support float32 parameters"),
        (torch.float32, "exact", "format 'exact' does not support float32 parameters"),
        (torch.float16, "bf16", "format 'bf16' does not support float16 parameters"),
        (torch.bfloat16, "int4", "unknown format 'int4'"),
    ],
)
@pytest.mark.parametrize("node", ["daemon"], indirect=True)
def test_a_format_that_does_not_fit_is_refused_with_those_that_do(node, dtype, format, words):
    with pytest.raises(forebay.UsageError, match=words) as caught:
        forebay.attach(Plane(dtype), forebay.AdamW(format=format))
    assert caught.value.code == "E_OPTION" and "take" in caught.value.hint

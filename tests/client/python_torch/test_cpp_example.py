# SPDX-License-Identifier: Apache-2.0
# Goal    docs/examples/cpp/ builds against the installed client and trains as torch does: each loss and each weight of
#         each step, in every ZeRO stage.
# Method  The project is built from an empty prefix with the client alone. Two processes are the ranks; rank 0 writes its
#         weights before each step and after the last. The same model in torch takes each step from the weights that the
#         example had, so no difference grows from step to step and none can hide. The runs on a GPU have the drivers of
#         the tests, under the names that the loader looks for.
#
# Bound   Without their signs ReLU(x) is x or 0, so each output, loss and gradient is a sum of products, one a path through
#         the network. A product is rounded at most ROUNDINGS times, in whatever order sums are taken: each side is off by
#         at most ROUNDINGS * UNIT of the sum of the products' sizes. That sum is the same loss, or gradient, of the same
#         network with each number by its size. It holds while both sides agree which units are 0, which is asserted.
#         update_bound.py derives what becomes of it in AdamW.
#
# Stages  The three have the same bits. The host's collectives add in the order of ranks, in an all-reduce as in a
#         reduce-scatter, and AdamW's result for an element does not depend on who holds it.

import dataclasses
import os
import pathlib
import re
import subprocess

import pytest
import torch
from daemon_process import ROOT
from torch import nn
from update_bound import UNIT, bounds

DEADLINE_S = 120
WIDTHS, ROWS, RANKS, STEPS = (8, 16, 16, 1), 32, 2, 10
# Roundings of the forward: products with their sums, and the bias.
FORWARD = sum(inputs + 1 for inputs in WIDTHS[:-1])
BACKWARD = sum(outputs + 1 for outputs in WIDTHS[1:])
# Roundings of the sum over rows, and of the loss: its difference and factor, and the mean over rows and ranks.
LAST = ROWS + 1 + 5
# The error of the outputs and of a layer's inputs meet in the gradient of its weight.
ROUNDINGS = 1.01 * (2 * FORWARD + BACKWARD + LAST)  # 1.01: for the products of roundings
STAGES = (1, 2, 3)


@dataclasses.dataclass
class Run:
    """What the ranks of one run have said."""

    losses: list  # the loss before each step, and after the last step
    weights: torch.Tensor  # [moment as in losses, parameters end to end]
    bytes_max: int  # most bytes on the device


class Program:
    """The example, built; each job's ranks are processes."""

    def __init__(self, path, daemon, folder):
        self.path, self.daemon, self.folder = path, daemon, folder

    def start(self, *arguments, rank=0, ranks=1, **variables):
        launch = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "FOREBAY_SOCKET": self.daemon.socket}
        return subprocess.Popen(
            [self.path, *map(str, arguments)],
            env={**os.environ, **launch, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def train(self, job, stage, ranks=RANKS, steps=STEPS, device="host", **variables):
        file = self.folder / f"{job}.{steps}"
        arguments = ["--job", job, "--stage", stage, "--steps", steps, "--device", device, "--weights", file]
        started = [self.start(*arguments, rank=rank, ranks=ranks, **variables) for rank in range(ranks)]
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
        assert [process.returncode for process in started] == [0] * ranks, outputs
        losses = [float(loss) for loss in re.findall(r"loss (\S+)$", outputs[0], re.M)]
        bytes_max = int(re.search(rf"^stage {stage}: at most (\d+) bytes", outputs[0], re.M)[1])
        weights = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)
        return Run(losses, weights.view(len(losses), -1), bytes_max)


@pytest.fixture(scope="module")
def program(daemon, tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    build, prefix = folder / "build", folder / "prefix"
    for command in (
        ["cmake", "--install", ROOT / "build", "--component", "client", "--prefix", prefix],
        ["cmake", "-S", ROOT / "docs/examples/cpp", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"]
        + ["-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wconversion -Wshadow -Werror"],
        ["cmake", "--build", build],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return Program(build / "train", daemon, folder)


@pytest.fixture(scope="module")
def runs(program):
    """By stage: the run on two ranks."""
    return {stage: program.train(f"stage{stage}", stage) for stage in STAGES}


def data():
    """Inputs and targets, as the example computes them; exact in float32."""
    row, column = torch.arange(ROWS)[:, None], torch.arange(WIDTHS[0])[None]
    x = ((row * row * 7 + row * (column * 13 + 1) + column * 29) % 61 - 30).float() / 32
    return x, x[:, 0:1] * x[:, 1:2] - x[:, 2:3]


def initial():
    layers = []
    for layer, (inputs, outputs) in enumerate(zip(WIDTHS, WIDTHS[1:])):
        numbers = torch.arange(inputs * outputs + outputs)
        layers.append(((numbers * 7919 + layer * 104729) % 1000 - 500).float() / 1000)
    return torch.cat(layers)


def network():
    first, second, last = (nn.Linear(inputs, outputs) for inputs, outputs in zip(WIDTHS, WIDTHS[1:]))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def sizes_of(model, x, target):
    """(loss, gradients) of the network with each number by its size, in float64."""
    sizes = [parameter.detach().double().abs().requires_grad_() for parameter in model.parameters()]
    value, size, roundings = x, x.double().abs(), 0
    for number, (weight, bias) in enumerate(zip(sizes[::2], sizes[1::2])):
        value = model[2 * number](value)
        size = size @ weight.T + bias
        roundings += 1.01 * (weight.shape[1] + 1)
        if weight is not sizes[-2]:
            # By the formulas of inputs and weights, each unit is at least 18 times this bound from 0.
            is_clear = value.abs() > 2 * roundings * UNIT * size
            assert is_clear.all(), "a unit is so near 0 that either side is right"
            size, value = size * (value > 0), value.relu()
    loss = ((size + target.abs()) ** 2).mean()
    return loss.item(), torch.autograd.grad(loss, sizes)


def near_enough(what, ours, plain, bound):
    wrong = ~((ours.double() - plain.double()).abs() <= bound)
    assert not wrong.any(), f"{what}: {ours[wrong][0]:.9g}, {plain[wrong][0]:.9g} in torch, bound {bound[wrong][0]:.3g}"


@pytest.mark.parametrize("stage", STAGES)
def test_every_step_is_that_of_torch(runs, stage):
    run = runs[stage]
    assert len(run.losses) == STEPS + 1 and run.losses[-1] < run.losses[0] / 3, "it learns"
    assert torch.equal(run.weights[0], initial())
    x, target = data()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)
    group, moments = optimizer.param_groups[0], {}
    for step, (printed, after) in enumerate(zip(run.losses, run.weights[1:]), 1):
        nn.utils.vector_to_parameters(run.weights[step - 1].clone(), model.parameters())
        loss_size, gradient_sizes = sizes_of(model, x, target)
        loss = nn.functional.mse_loss(model(x), target)
        assert abs(printed - loss.item()) <= 2 * ROUNDINGS * UNIT * loss_size, step
        optimizer.zero_grad()
        loss.backward()
        allowed = []
        for parameter, size in zip(model.parameters(), gradient_sizes):
            states = {key: value.double() for key, value in optimizer.state.get(parameter, {}).items()}
            before = parameter.detach().double(), states
            error = 2 * ROUNDINGS * UNIT * size
            bound = bounds("AdamW", group, before, parameter.grad.double(), error, moments.get(parameter))
            moments[parameter] = bound
            allowed.append(bound[""].flatten())
        optimizer.step()
        plain = nn.utils.parameters_to_vector(model.parameters()).detach()
        near_enough(f"step {step}", after, plain, torch.cat(allowed))


def test_the_stages_differ_in_memory_and_not_in_a_bit(runs):
    for stage in STAGES[1:]:
        assert runs[stage].losses == runs[1].losses
        assert torch.equal(runs[stage].weights, runs[1].weights)
        assert runs[stage].bytes_max < runs[stage - 1].bytes_max


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_over_cuda_and_nccl_has_the_bits_of_the_host(program, stage, tmp_path):
    for library, soname in (("cuda", "libcuda.so.1"), ("nccl", "libnccl.so.2")):
        fake = ROOT / "build" / "tests" / f"libfake_{library}.so"
        if not fake.exists():
            pytest.skip(f"{fake} is not built")
        (tmp_path / soname).symlink_to(fake)
    on_gpu = program.train(f"gpu{stage}", stage, 1, device="cuda", LD_LIBRARY_PATH=str(tmp_path))
    on_host = program.train(f"host{stage}", stage, 1)
    assert on_gpu.losses == on_host.losses and torch.equal(on_gpu.weights, on_host.weights)


def test_a_second_run_resumes_the_job(program, runs):
    first, second = program.train("twice", 3, steps=4), program.train("twice", 3, steps=STEPS)
    assert first.losses + second.losses[1:] == runs[3].losses
    assert torch.equal(torch.cat([first.weights, second.weights[1:]]), runs[3].weights)


@pytest.mark.parametrize(
    "arguments,ranks",
    [(["--stage", 4], 1), (["--stage"], 1), (["--steps", "1x"], 1), (["--no"], 1), ([], 3), ([], 0)],
)
def test_a_bad_option_prints_the_usage(program, arguments, ranks):
    process = program.start("--job", "refused", *arguments, ranks=ranks)
    assert process.communicate(timeout=DEADLINE_S)[0].startswith("usage: ")
    assert process.returncode == 2


def test_a_file_that_cannot_be_written_is_an_error(program, tmp_path):
    file = pathlib.Path(tmp_path, "none", "weights")
    process = program.start("--job", "unwritable", "--weights", file)
    assert process.communicate(timeout=DEADLINE_S)[0].startswith("error[E_OPTION]: --weights: cannot write")
    assert process.returncode == 1

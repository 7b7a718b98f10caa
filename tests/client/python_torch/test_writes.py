# SPDX-License-Identifier: Apache-2.0
# Goal    Any in-place write into the parameters of a shared attachment writes into the job. This process computes with the
#         values at once, and the next step updates them. Values that are exchanged and exchanged back leave no trace. A write
#         that cannot be taken is an error that a script can catch, with unchanged parameters.
# Method  The same writes go to a private twin with torch's optimizer. Two ranks are two threads, as in test_two_ranks.py.

import copy
import errno
import os
import threading

import forebay
import pytest
import torch
from models import Net, assert_close, batch, loss_of, net, pair, train
from test_two_ranks import attach, both
from torch import nn
from torch.nn.utils import parametrizations, parameters_to_vector, prune, vector_to_parameters

LR = 1e-2


def up(model):
    return model.layers[0].up.weight


def data_of(model):
    for parameter in model.parameters():
        parameter.data += 0.1  # merges like peft: an in-place operator, then .data is set to itself


def in_numpy(model):
    up(model).detach().numpy()[1:3, ::2] = 0.25


def masked(model):
    up(model)[up(model) > 0.1] = 0.2


def through_state_dict(model):
    for values in model.state_dict().values():
        values.mul_(0.9)


WRITES = {
    "add_": lambda m: up(m).add_(0.1),
    "copy_": lambda m: up(m).copy_(torch.full_like(up(m), 0.7)),
    "data.add_": data_of,
    "data.copy_": lambda m: up(m).data.copy_(torch.full_like(up(m), 0.3)),
    "lerp_": lambda m: up(m).lerp_(up(m) * 2, 0.1),
    "normal_": lambda m: up(m).normal_(),
    "kaiming": lambda m: nn.init.kaiming_uniform_(up(m)),
    "trunc_normal": lambda m: nn.init.trunc_normal_(m.layers[1].down.weight, std=0.2),
    "ones": lambda m: nn.init.ones_(m.norm.weight),
    "out=": lambda m: torch.add(up(m), 0.1, out=up(m)),
    "rows": lambda m: up(m)[1:3].fill_(0.3),
    "columns": lambda m: up(m).t()[2].copy_(torch.arange(len(up(m))) / 16),
    "elements": lambda m: up(m).__setitem__((1, slice(2, 5)), 0.1),
    "mask": masked,
    "view": lambda m: up(m).view(-1)[3:].uniform_(),
    "other type": lambda m: up(m).view(torch.int32)[0].fill_(0x3F000001),
    "split": lambda m: [one.mul_(1.1) for one in up(m).split(3)],
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 0.9),
    "foreach of lists": lambda m: torch._foreach_add_(list(m.parameters()), [p * 0.3 for p in m.parameters()]),
    "numpy": in_numpy,
    "state_dict": through_state_dict,
}


def assert_equal(model, plain):
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters()):
        assert torch.equal(ours, theirs), name


def equalize(model, plain):
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            ours.copy_(theirs)


def test_every_way_to_write(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    kinds = [(type(one), one.data_ptr()) for one in model.parameters()]
    for number, (name, write) in enumerate(WRITES.items()):
        train(model, opt, 1, first=number)
        train(plain, plain_opt, 1, first=number)
        equalize(model, plain)
        before = copy.deepcopy(plain)
        for one in (model, plain):
            torch.manual_seed(number)
            with torch.no_grad():
                write(one)
        assert_equal(model, plain)
        assert any(not torch.equal(*pair_) for pair_ in zip(plain.parameters(), before.parameters())), name
        with torch.no_grad():
            assert torch.equal(loss_of(model, batch(7)), loss_of(plain, batch(7))), name
        train(model, opt, 1, first=number)
        train(plain, plain_opt, 1, first=number)
        assert_close(model, plain, 1)
        equalize(model, plain)
    assert kinds == [(type(one), one.data_ptr()) for one in model.parameters()]
    # The step has no gradient. The written values become the job's, and no rank has private pages.
    opt.step()
    assert not opt._engine.attachment.has_written_weights
    assert_equal(model, plain)
    reader = forebay.attach_reader(seen := net(seed=9))
    reader.load_weights()
    assert_equal(seen, plain)
    opt.detach()
    assert_equal(model, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exchange_for_an_evaluation_and_back_leaves_the_bits(node, dtype):
    """Exchanges weights as Lightning's WeightAveraging, diffusers' EMAModel and torch_ema do."""
    model = net().to(dtype)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    twin = net().to(dtype)
    twin_opt = forebay.attach(twin, forebay.AdamW(lr=LR), job=f"{os.environ['FOREBAY_JOB']}.twin")
    mean = [one.detach().clone() for one in model.parameters()]

    def exchange():
        with torch.no_grad():
            for one, other in zip(model.parameters(), mean):
                kept = one.detach().clone()
                one.copy_(other)
                other.copy_(kept)

    for step in range(6):
        train(model, opt, 1, first=step)
        train(twin, twin_opt, 1, first=step)
        sent = opt._engine.attachment.counters()["commands"]
        exchange()
        with torch.no_grad():
            averaged = loss_of(model, batch(50)).item()
            plain = net().to(dtype)
            for one, other in zip(plain.parameters(), model.parameters()):
                one.copy_(other)
            assert averaged == loss_of(plain, batch(50)).item() and averaged != loss_of(twin, batch(50)).item()
        exchange()
        assert opt._engine.attachment.counters()["commands"] == sent, "the daemon has nothing to do with it"
        for one, other in zip(model.parameters(), mean):
            other.lerp_(one.detach(), 0.2)
    assert opt.state_sha256() == twin_opt.state_sha256()


def test_masters_follow_where_something_was_written(node):
    model = net().bfloat16()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-4))
    train(model, opt, 3)
    name = "layers.0.up.weight"
    before = opt.read_state(name)["master"]
    assert not torch.equal(before, up(model).float()), "masters have more bits"
    with torch.no_grad():
        up(model)[2] = 0.7
    after = opt.read_state(name)["master"]
    assert torch.equal(after[2], up(model)[2].float()) and torch.equal(after[2], torch.full((8,), 0.7).bfloat16().float())
    rest = [row for row in range(len(after)) if row != 2]
    assert torch.equal(after[rest], before[rest])
    train(model, opt, 1)


def test_a_write_between_backward_and_step(node):
    """The step applies the gradient to what was written."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    for one, optimizer in ((model, opt), (plain, plain_opt)):
        train(one, optimizer, 1)
        loss_of(one, batch(3)).backward()
        with torch.no_grad():
            one.norm.weight.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        train(one, optimizer, 1)
    assert_close(model, plain, 3)


def test_a_write_between_forward_and_backward_is_torchs_own_error(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    loss = loss_of(model, batch(0))
    with torch.no_grad():
        up(model).mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    opt.zero_grad()
    train(model, opt, 1)


class Large(nn.Module):
    """Parameters that share chunks of memory with others, and take several."""

    def __init__(self):
        super().__init__()
        sizes = (3, (1 << 20) + 5, 70_000, 1 << 21, 1)
        self.parts = nn.ParameterList(torch.linspace(-1, 1, size) for size in sizes)

    def forward(self, x):
        return sum((part * x).square().mean() for part in self.parts)


def test_several_threads_write_at_once(node):
    model, plain = Large(), Large()
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=LR)

    def ramp(part):
        part.detach().add_(torch.linspace(0, 1, len(part)))

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(3):
            for one, optimizer in ((model, opt), (plain, plain_opt)):
                threads = [threading.Thread(target=ramp, args=(part,)) for part in one.parameters()]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                one(torch.ones(())).backward()
            assert_equal(model, plain)
            for optimizer in (opt, plain_opt):
                optimizer.step()
                optimizer.zero_grad()
            assert_close(model, plain, 1)
            equalize(plain, model)
    finally:
        torch.set_num_threads(before)


def test_what_is_written_is_the_jobs_with_the_step(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    train(model, opt, 1)
    committed = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        up(model).fill_(0.5)
    opt.detach()
    assert up(model).eq(0.5).all(), "the model keeps it"
    opt = forebay.attach(again := net(), forebay.AdamW(lr=LR))
    assert all(torch.equal(value, committed[name]) for name, value in again.state_dict().items())
    with torch.no_grad():
        up(again).fill_(0.5)
    opt.step()
    opt.detach()
    forebay.attach(last := net(), forebay.AdamW(lr=LR))
    assert up(last).eq(0.5).all()


@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16, torch.float16])
def test_a_frozen_parameter(node, frozen):
    """The base of adapters, into which they are merged."""
    model = net()
    up(model).requires_grad_(False)
    up(model).data = up(model).data.to(frozen)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    with torch.no_grad():
        up(model).add_(0.25)
        up(model)[0, :3] = -0.0
    wanted = up(model).detach().clone()
    opt.step()
    assert not opt._engine.attachment.has_written_weights
    assert torch.equal(up(model).view(torch.uint8), wanted.view(torch.uint8))


def test_codes_cannot_be_written(node):
    model = net()
    model.codes = nn.Parameter(torch.arange(64, dtype=torch.uint8), requires_grad=False)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    model.codes.add_(1)
    with pytest.raises(forebay.UsageError, match="parameter codes: it was frozen at attach.*torch.uint8") as error:
        opt.step()
    assert error.value.code == "E_UNSUPPORTED" and "detach()" in error.value.hint
    assert torch.equal(model.codes, torch.arange(64, dtype=torch.uint8))
    train(model, opt, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_that_are_not_finite(node, dtype):
    model = net().to(dtype)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    train(model, opt, 1)
    before, digest = copy.deepcopy(model), opt.state_sha256()
    for write in (
        lambda: up(model).fill_(float("nan")),
        lambda: up(model)[-1:].fill_(float("inf")),
        lambda: torch._foreach_mul_([model.norm.weight, up(model)], [2.0, float("nan")]),
    ):
        with torch.no_grad():
            write()
        with pytest.raises(forebay.ForebayError, match="values written into parameter layers.0.up.weight") as error:
            opt.step()
        assert error.value.code == "E_NONFINITE" and error.value.hint
        assert_equal(model, before)
        assert opt.state_sha256() == digest
    train(model, opt, 1)


@pytest.mark.parametrize(
    "replace",
    [
        lambda m: vector_to_parameters(parameters_to_vector(m.parameters()) * 0.5, m.parameters()),
        lambda m: prune.l1_unstructured(m.layers[0].up, "weight", 0.5),
        lambda m: m.half(),
        lambda m: torch.nn.utils.parametrize.remove_parametrizations(m.layers[1].up, "weight"),
        lambda m: up(m).__setattr__("data", up(m).data.clone()),
    ],
)
def test_calls_that_replace_a_parameter_name_detach(node, replace):
    model = net()
    parametrizations.weight_norm(model.layers[1].up)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    with pytest.raises(forebay.ForebayError) as error:
        replace(model)
        train(model, opt, 1)
    assert error.value.code == "E_UNSUPPORTED" and "opt.detach()" in error.value.hint
    opt.detach()
    loss_of(model.float(), batch(0)).backward()


def test_a_system_call_cannot_write(node):
    """No write of the program's own has come before it."""
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    with open("/dev/zero", "rb") as zeros, pytest.raises(OSError) as error:
        os.readv(zeros.fileno(), [memoryview(up(model).detach().numpy()).cast("B")])
    assert error.value.errno == errno.EFAULT
    train(model, opt, 1)


# ----------------------------------------------------------------------------------------- two ranks


def two(timeout=30):
    models = [net(), net()]
    opts = both(lambda rank: attach(rank, models[rank]) if timeout == 30 else attach_briefly(rank, models[rank]))
    return models, opts


def attach_briefly(rank, model):
    return forebay.attach(model, forebay.AdamW(lr=LR), rank=rank, world_size=2, timeout=1.5)


def step_both(models, opts, first=0):
    def run(rank):
        loss_of(models[rank], batch(10 * first + rank)).backward()
        opts[rank].step()

    both(run)


def test_ranks_that_write_the_same(node):
    models, opts = two()
    plain = net()
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(3):
        with torch.no_grad():
            for one in (*models, plain):
                torch._foreach_mul_(list(one.parameters()), 0.9)
        step_both(models, opts, step)
        sum(loss_of(plain, batch(10 * step + rank)) / 2 for rank in (0, 1)).backward()
        plain_opt.step()
        plain_opt.zero_grad()
    for model in models:
        assert_close(model, plain, 3)
    assert opts[0].state_sha256() == opts[1].state_sha256()


def test_the_values_are_those_of_rank_0(node):
    models, opts = two()
    with torch.no_grad():
        for rank, model in enumerate(models):
            up(model).fill_(1 + rank)
    both(lambda rank: opts[rank].step())
    assert all(up(model).eq(1).all() for model in models)


def test_one_rank_may_exchange_and_exchange_back(node):
    models, opts = two()
    kept = up(models[0]).detach().clone()
    with torch.no_grad():
        up(models[0]).zero_()
        up(models[0]).copy_(kept)
    step_both(models, opts)
    assert opts[0].state_sha256() == opts[1].state_sha256()


def test_ranks_that_write_different_parameters(node):
    models, opts = two()
    before = copy.deepcopy(models[0])
    with torch.no_grad():
        up(models[0]).zero_()
        models[1].norm.weight.zero_()
    codes = []

    def run(rank):
        with pytest.raises(forebay.ForebayError, match="rank") as error:
            opts[rank].step()
        codes.append(error.value.code)

    both(run)
    assert set(codes) <= {"E_OPTION", "E_RANK"} and "E_OPTION" in codes
    for model in models:
        assert_equal(model, before)
    step_both(models, opts)


def test_a_write_of_one_rank_alone(node):
    models, opts = two(timeout=1.5)
    with torch.no_grad():
        kept = up(models[0]).detach().clone()
        up(models[0]).zero_()

    def run(rank):
        with pytest.raises(forebay.ForebayTimeoutError) as error:
            opts[rank].step()
        return str(error.value)

    texts = both(run)
    assert "a write into parameter layers.0.up.weight: another rank has not called it" in texts[0]
    with torch.no_grad():
        up(models[0]).copy_(kept)
    both(lambda rank: opts[rank].step())


@pytest.mark.parametrize("ends", [True, False])
def test_a_write_while_step_runs(node, ends):
    """A Python exception, and the step's values."""
    models, opts = two(30 if ends else 1.5)
    caught = []

    def step():
        try:
            opts[0].step()
        except forebay.ForebayError as error:
            caught.append(error)

    loss_of(models[0], batch(0)).backward()
    waiting = threading.Thread(target=step)
    waiting.start()
    while opts[0]._engine.under_way is None:  # until rank 0's step is sent and waits for rank 1
        pass
    if not ends:
        waiting.join()
        assert caught.pop().code == "E_TIMEOUT"
    with torch.no_grad():
        up(models[0]).zero_()
    if not ends:
        step()
    loss_of(models[1], batch(1)).backward()
    if ends:
        opts[1].step()
        waiting.join()
    else:
        both(lambda rank: opts[rank].step())
    (error,) = caught
    assert error.code == "E_STEP" and "a write into parameter layers.0." in str(error), error
    assert_equal(*models)
    step_both(models, opts)

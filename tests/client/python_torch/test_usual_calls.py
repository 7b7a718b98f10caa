# SPDX-License-Identifier: Apache-2.0
# Goal    The calls of a script that was written for torch's optimizer work on an attached one: its
#         constructor, its groups and schedulers, a closure, model.zero_grad(), sparse gradients, frozen
#         parameters of another type.
# Method  Train the same model with torch's optimizer and attached; compare within the bound of
#         assert_close, or bit by bit what may not change.

import copy
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import forebay
import pytest
import torch
from models import Scored, assert_close, batch, loss_of, net, pair, train
from test_processes import environment
from torch import nn
from torch.nn import functional

LR = 1e-2


def close(model, plain, opt, plain_opt, steps=4, **options):
    assert train(model, opt, steps, **options) == pytest.approx(
        train(plain, plain_opt, steps, **options), rel=1e-5
    )
    assert_close(model, plain, steps)


# ------------------------------------------------------------------------- torch's own optimizers

MADE = {
    "AdamW": lambda of: torch.optim.AdamW(of, lr=LR, betas=(0.8, 0.95), weight_decay=0.1),
    "AdamW, amsgrad": lambda of: torch.optim.AdamW(of, lr=LR, amsgrad=True),
    "AdamW, fused": lambda of: torch.optim.AdamW(of, lr=LR, fused=True),
    "Adam": lambda of: torch.optim.Adam(of, lr=LR, weight_decay=0.1),
    "Adam, decoupled": lambda of: torch.optim.Adam(of, lr=LR, weight_decay=0.1, decoupled_weight_decay=True),
    "Adagrad": lambda of: torch.optim.Adagrad(of, lr=LR, initial_accumulator_value=0.1),
    "SGD": lambda of: torch.optim.SGD(of, lr=LR),
    "SGD, Nesterov": lambda of: torch.optim.SGD(of, lr=LR, momentum=0.9, nesterov=True),
    "a tensor's lr": lambda of: torch.optim.AdamW(of, lr=torch.tensor(LR)),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_an_instance_of_torchs_optimizers(node, make):
    model = net()
    plain = copy.deepcopy(model)
    opt = forebay.attach(model, make(model.parameters()))
    close(model, plain, opt, make(plain.parameters()))
    opt.detach()


def test_hooks_of_an_instance_of_torchs_optimizers(node):
    """They are called, and a handle that the script has removes its own."""
    model, calls = net(), []
    plain = torch.optim.AdamW(model.parameters(), lr=LR)
    handle = plain.register_step_pre_hook(lambda *_: calls.append("removed"))
    plain.register_step_pre_hook(lambda *_: calls.append("before the step"))
    plain.register_step_post_hook(lambda *_: calls.append("after the step"))
    plain.register_state_dict_post_hook(lambda *_: calls.append("state_dict"))
    plain.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    opt = forebay.attach(model, plain)
    handle.remove()
    train(model, opt, 1)
    opt.load_state_dict(opt.state_dict())
    assert calls == ["before the step", "after the step", "state_dict", "load"]
    opt.detach()


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("of", ["parameters", "named_parameters"])
def test_the_signature_is_torchs(node, kind, of):
    model = net()
    plain = copy.deepcopy(model)
    opt = forebay.attach(model, getattr(forebay, kind)(getattr(model, of)(), LR, foreach=True, maximize=False))
    close(model, plain, opt, getattr(torch.optim, kind)(plain.parameters(), LR))
    opt.detach()


def groups_of(model):
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2 * LR}]


@pytest.mark.parametrize("made", ["before attach", "after attach"])
def test_groups_and_a_scheduler_that_was_made_for_it(node, made):
    model = net()
    plain = copy.deepcopy(model)
    plain_opt = torch.optim.AdamW(groups_of(plain), lr=LR)
    plain_schedule = torch.optim.lr_scheduler.StepLR(plain_opt, 1, gamma=0.5)
    torchs = torch.optim.AdamW(groups_of(model), lr=LR)
    if made == "before attach":
        schedule = torch.optim.lr_scheduler.StepLR(torchs, 1, gamma=0.5)
    opt = forebay.attach(model, torchs)
    if made == "after attach":
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    for step in range(4):
        train(model, opt, 1, first=step)
        train(plain, plain_opt, 1, first=step)
        schedule.step()
        plain_schedule.step()
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([LR / 16, LR / 8])
    assert_close(model, plain, 4)
    opt.detach()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_has_stepped_goes_on(node, kind):
    model = net()
    plain = copy.deepcopy(model)
    torchs, plain_opt = kind(model.parameters(), lr=LR), kind(plain.parameters(), lr=LR)
    train(model, torchs, 2)
    opt = forebay.attach(model, torchs)
    assert opt.read_state("norm.bias")["step"] == 2 and opt.committed_step == 0
    train(model, opt, 2, first=2)
    train(plain, plain_opt, 4)
    assert_close(model, plain, 4)
    opt.detach()
    again = net()
    torchs = kind(again.parameters(), lr=LR)
    train(again, torchs, 1)
    opt = forebay.attach(again, torchs)  # the job's newer states replace those of torchs
    assert opt.read_state("norm.bias")["step"] == 4 and opt.committed_step == 2
    opt.detach()


def test_a_reader_takes_the_same_optimizer(node):
    model, other = net(), net(seed=2)
    opt = forebay.attach(model, torch.optim.AdamW(model.parameters(), lr=LR))
    train(model, opt, 2)
    reader = forebay.attach_reader(other, torch.optim.AdamW(other.parameters(), lr=LR))
    assert reader.load_weights() == 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), other.parameters()))
    reader.detach()
    opt.detach()


class Own(torch.optim.AdamW):
    pass


REFUSED = {
    "a rule that we lack": (
        lambda model: torch.optim.RMSprop(model.parameters()),
        "E_UNSUPPORTED",
        "torch.optim.rmsprop.RMSprop: the daemon computes the step",
    ),
    "a class of one's own": (lambda model: Own(model.parameters()), "E_UNSUPPORTED", "Own: the daemon"),
    "maximize": (
        lambda model: torch.optim.AdamW(model.parameters(), maximize=True),
        "E_UNSUPPORTED",
        r"AdamW\(maximize=True\)",
    ),
    "maximize, ours": (
        lambda model: forebay.AdamW(model.parameters(), maximize=True),
        "E_UNSUPPORTED",
        r"AdamW\(maximize=True\)",
    ),
    "amsgrad of a group": (
        lambda model: torch.optim.AdamW([{"params": model.parameters(), "amsgrad": True}]),
        "E_UNSUPPORTED",
        "parameter group 0: amsgrad=True, and amsgrad=False in the optimizer",
    ),
    "one parameter left out": (
        lambda model: torch.optim.AdamW(model.layers.parameters()),
        "E_OPTION",
        "embedding.weight is in no param group",
    ),
}


@pytest.mark.parametrize(("make", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_optimizers_that_are_refused(node, make, code, words):
    model = net()
    with pytest.raises(forebay.UsageError, match=words) as caught:
        forebay.attach(model, make(model))
    assert caught.value.code == code and caught.value.hint


def test_groups_beside_torchs_optimizer(node):
    model = net()
    with pytest.raises(forebay.UsageError, match="param_groups beside torch's AdamW") as caught:
        forebay.attach(model, torch.optim.AdamW(model.parameters()), param_groups=groups_of(model))
    assert caught.value.code == "E_OPTION"


@pytest.mark.parametrize("call", ["step", "zero_grad", "param_groups", "state_dict"])
def test_what_was_not_attached_says_so(call):
    rule = forebay.AdamW(net().parameters(), lr=LR)
    with pytest.raises(forebay.UsageError, match=f"AdamW.{call} before forebay.attach") as caught:
        getattr(rule, call)
    assert caught.value.code == "E_NOT_READY" and "opt = forebay.attach(model" in caught.value.hint
    assert not hasattr(rule, "defaults")
    assert copy.deepcopy(rule).lr == pickle.loads(pickle.dumps(forebay.SGD(lr=LR))).lr == LR


def test_an_option_that_is_switched_on_later(node):
    model = net()
    opt = forebay.attach(model, torch.optim.AdamW(model.parameters(), lr=LR))
    train(model, opt, 1)
    loss_of(model, batch(1)).backward()
    opt.param_groups[0]["maximize"] = True
    with pytest.raises(forebay.UsageError, match=r"parameter group 0: AdamW\(maximize=True\)"):
        opt.step()
    opt.param_groups[0]["maximize"] = False
    opt.step()
    assert opt.committed_step == 2
    opt.detach()


# ------------------------------------------------------------------------------------- the loop


def test_a_closure(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    calls = []

    def step(which, optimizer, number):
        def closure():
            calls.append(number)
            optimizer.zero_grad()
            loss = loss_of(which, batch(number))
            loss.backward()
            return loss

        with torch.no_grad():  # torch's optimizers enable gradients for a closure
            return optimizer.step(closure).item()

    for number in range(3):
        assert step(model, opt, number) == pytest.approx(step(plain, plain_opt, number), rel=1e-5)
    assert calls == [0, 0, 1, 1, 2, 2] and opt.committed_step == 3
    assert_close(model, plain, 3)
    with pytest.raises(RuntimeError, match="of the closure"):
        opt.step(fail)
    # Without a gradient the step changes nothing.
    assert opt.step() is None and opt.committed_step == 4
    assert_close(model, plain, 3)
    opt.detach()


def fail():
    raise RuntimeError("of the closure")


CLEARS = {
    "model.zero_grad()": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "p.grad = None": lambda model: [setattr(one, "grad", None) for one in model.parameters()],
    "p.grad.zero_()": lambda model: [one.grad.zero_() for one in model.parameters()],
}


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
def test_a_batch_that_is_dropped_by_clearing_the_model(node, clear):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    for which, optimizer in ((model, opt), (plain, plain_opt)):
        train(which, optimizer, 1)
        loss_of(which, batch(1)).backward()
        clear(which)
        loss_of(which, batch(2)).backward()
        optimizer.step()
        which.zero_grad()
    assert opt.committed_step == 2
    assert_close(model, plain, 2)
    opt.detach()


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
def test_a_step_after_clearing_the_model(node, clear):
    """The same as torch: without a gradient nothing changes; with one of zeros moments and decay still apply."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    for which, optimizer in ((model, opt), (plain, plain_opt)):
        train(which, optimizer, 1)
        loss_of(which, batch(1)).backward()
        clear(which)
        optimizer.step()
    assert opt.committed_step == 2
    assert_close(model, plain, 2)
    before = {name: opt.read_state(name)["step"] for name, _ in model.named_parameters()}
    assert before == {name: plain_opt.state[one]["step"] for name, one in plain.named_parameters()}
    opt.detach()


def test_zeros_of_the_optimizer_are_warned_of(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    with pytest.warns(UserWarning, match="gradients are forgotten, not kept as zeros"):
        opt.zero_grad(set_to_none=False)
    opt.detach()


def test_gradients_that_are_set_by_hand(node):
    """Of a loop that computes them in its own way: torch.autograd.grad, and a sum of its own."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    for which, optimizer in ((model, opt), (plain, plain_opt)):
        for step in range(3):
            parameters = list(which.parameters())
            first, second = (torch.autograd.grad(loss_of(which, batch(2 * step + one)), parameters) for one in (0, 1))
            for parameter, one, other in zip(parameters, first, second):
                if step == 0 or parameter is not which.norm.bias:
                    parameter.grad = (one + 2 * other).sign()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, plain, 3)
    assert opt.read_state("norm.bias")["step"] == 1
    opt.detach()


def test_parameters_that_are_frozen_for_a_while(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    for which, optimizer in ((model, opt), (plain, plain_opt)):
        train(which, optimizer, 2)
        which.layers[1].requires_grad_(False)
        train(which, optimizer, 2, first=2)
        which.layers[1].requires_grad_(True)
        train(which, optimizer, 2, first=4)
    assert_close(model, plain, 6)
    for name, one in plain.named_parameters():
        assert opt.read_state(name)["step"] == plain_opt.state[one]["step"], name
    opt.detach()


def test_a_moving_average_of_the_weights(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    means = []
    for which, optimizer in ((model, opt), (plain, plain_opt)):
        mean = torch.optim.swa_utils.AveragedModel(which, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for step in range(3):
            train(which, optimizer, 1, first=step)
            mean.update_parameters(which)
        means.append(mean)
    assert_close(*means, 3)
    opt.detach()


def test_no_sync_is_there_while_the_model_is_attached(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    with model.no_sync():
        loss_of(model, batch(0)).backward()
    opt.step()
    assert copy.deepcopy(model).no_sync and pickle.loads(pickle.dumps(model)).no_sync
    opt.detach()
    assert not hasattr(model, "no_sync")


def test_a_sparse_gradient_is_made_dense_and_said(node):
    model = net()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model, plain, plain_opt = pair(model)
    model.embedding.sparse = True
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    with pytest.warns(UserWarning, match="gradient of parameter embedding.weight is sparse"):
        train(model, opt, 3)
    train(plain, plain_opt, 3)
    assert_close(model, plain, 3)
    opt.detach()


# ------------------------------------------------------------- frozen parameters of another type


class Adapted(nn.Module):
    """A frozen base of one type, adapters of another: LoRA as peft makes it."""

    def __init__(self, base, adapter, width=5):
        super().__init__()
        self.base = nn.Linear(width, width).to(base).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False).to(adapter)
        self.up = nn.Linear(2, width, bias=False).to(adapter)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.wide = nn.Parameter(torch.full((3,), 1e300, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        low = self.base(x.to(self.base.weight.dtype)).to(self.up.weight.dtype)
        return low + self.up(self.down(x.to(self.down.weight.dtype)))


@pytest.mark.parametrize(
    ("base", "adapter"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["bf16 base", "fp16 base", "fp32 base, bf16 adapters"],
)
def test_a_frozen_base_of_another_type(node, base, adapter):
    torch.manual_seed(3)
    model = Adapted(base, adapter)
    with torch.no_grad():  # a value whose low half is a NaN of 16 bits
        if base == torch.float32:
            model.base.weight.view(torch.int32)[0, 0] = 0x3F80FFFF
    plain = copy.deepcopy(model)
    opt = forebay.attach(model, torch.optim.AdamW([model.down.weight, model.up.weight], lr=LR))
    plain_opt = torch.optim.AdamW([plain.down.weight, plain.up.weight], lr=LR)
    x = torch.randn(4, 5)
    losses = []
    for which, optimizer in ((model, opt), (plain, plain_opt)):
        for _ in range(3):
            loss = functional.mse_loss(which(x).float(), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if adapter == torch.float32 else 2**-7)
    for name, one in plain.named_parameters():
        ours = dict(model.named_parameters())[name]
        assert ours.dtype == one.dtype and ours.shape == one.shape
        if not one.requires_grad:
            assert torch.equal(ours, one), name
            assert opt.read_state(name) == {}
    again = Adapted(base, adapter)
    reader = forebay.attach_reader(again)
    reader.load_weights()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), again.parameters()))
    reader.detach()
    digest = opt.state_sha256()
    opt.detach()
    opt = forebay.attach(again)
    assert opt.committed_step == 3 and opt.state_sha256() == digest
    opt.detach()


# --------------------------------------------------------------------------------- a notebook

CELLS = [
    "model = net(); opt = forebay.attach(model, forebay.AdamW(lr=1e-2), job=job + '.first')",
    "train(model, opt, 2)",
    "interrupted(lambda: loss_of(model, batch(7)).backward())",
    "train(model, opt, 1, first=2)",
    "refused('E_UNSUPPORTED', lambda: forebay.attach(model, job=job + '.second'))",
    "other = net(width=16)",
    "first, opt = opt, forebay.attach(other, forebay.SGD(lr=0.1), job=job + '.second')",
    "train(other, opt, 2)",
    "first.detach(); refused('E_NOT_READY', first.step)",
    "refused('E_LAYOUT', lambda: forebay.attach(model, job=job + '.second'))",
    "again = net(); opt = forebay.attach(again, forebay.AdamW(lr=1e-2), job=job + '.first')",
    "assert opt.committed_step == 3",
    "train(again, opt, 2, first=3)",
    "result = again; opt.detach()",
]


def test_cells_of_a_notebook(node):
    """Attach, interrupt, continue, attach another, return to the first."""

    def interrupted(call):
        handle = cells["model"].layers[1].up.weight.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            call()
        handle.remove()

    def interrupt(_gradient):
        raise KeyboardInterrupt

    def refused(code, call):
        with pytest.raises(forebay.ForebayError) as caught:
            call()
        assert caught.value.code == code and caught.value.hint

    cells = {**globals(), "job": os.environ["FOREBAY_JOB"], "interrupted": interrupted, "refused": refused}
    for cell in CELLS:
        exec(cell, cells)
    _, plain, plain_opt = pair(net())
    train(plain, plain_opt, 5)
    assert_close(cells["result"], plain, 5)


# ------------------------------------------------------------------------ processes of the loader


def test_a_forked_worker_of_a_data_loader_holds_the_model(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    for tokens, _ in torch.utils.data.DataLoader(Scored(model, 3), num_workers=1, batch_size=None):
        for which, optimizer in ((model, opt), (plain, plain_opt)):
            train(which, optimizer, 1, loss=lambda model, _, tokens=tokens: loss_of(model, tokens))
    assert opt.committed_step == 3  # the worker has ended, and the session continues
    assert_close(model, plain, 3)
    opt.detach()


SPAWNED = """
import forebay, torch
from models import Scored, net, batch, loss_of, train

if __name__ == "__main__":
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for start in ("spawn", "forkserver"):
        before = [loss_of(model, batch(number)).item() for number in range(2)]
        loader = torch.utils.data.DataLoader(
            Scored(model, 2), num_workers=1, batch_size=None, multiprocessing_context=start
        )
        for number, (tokens, score) in enumerate(loader):
            assert abs(score.item() - before[number]) < 1e-5  # of the copy that was pickled
            train(model, opt, 1, loss=lambda model, _: loss_of(model, tokens))
    assert opt.committed_step == 4 and not model.embedding.weight.is_shared()
"""


def test_workers_that_are_spawned_get_a_copy(node, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    command = [sys.executable, "-W", "error::UserWarning:torch.multiprocessing", str(script)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_what_goes_to_another_process_leaves_the_memory_of_the_daemon(node, strategy):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        for value in (model.embedding.weight, model.norm.weight.detach(), model.head.weight.detach()[2:4]):
            address = value.data_ptr()
            again = pickle.loads(ForkingPickler.dumps(value))
            assert torch.equal(again, value) and value.data_ptr() == address
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    for which, optimizer in ((model, opt), (plain, plain_opt)):
        train(which, optimizer, 2)
    assert_close(model, plain, 2)
    opt.detach()
    assert pickle.loads(ForkingPickler.dumps(model.norm.weight)).is_shared()  # as before attach
    assert model.norm.weight.is_shared()


# ------------------------------------------------------------------- between forward and backward


def test_a_parameter_that_is_frozen_between_forward_and_backward(node):
    """It has no gradient then, as with torch."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    for one, optimizer in ((model, opt), (plain, plain_opt)):
        for step in range(3):
            loss = loss_of(one, batch(step))
            one.norm.weight.requires_grad_(step != 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            one.norm.weight.requires_grad_(True)
    assert_close(model, plain, 3)
    assert int(opt.read_state("norm.weight")["step"]) == 2
    opt.detach()


# ------------------------------------------------------------------------ several trainings


def test_a_second_training_of_one_process_is_warned_of(node, capfd, recwarn):
    """It continues the job of the first one, whatever its model has."""
    first = net()
    opt = forebay.attach(first, forebay.AdamW(lr=LR))
    train(first, opt, 2)
    opt.detach()
    second = net(seed=5)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="this process has trained job .* before, and goes on .* step 2"):
        opt = forebay.attach(second, forebay.AdamW(lr=LR))
    assert torch.equal(second.head.weight, first.head.weight)
    assert "goes on behind step 2" in capfd.readouterr().err
    opt.detach()

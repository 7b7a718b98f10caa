# SPDX-License-Identifier: Apache-2.0
# Goal    Parameters that are unlike those of a layer train as with torch's optimizer: without elements, and those of a
#         loss, which the optimizer has and the model has not.
# Method  Train the same modules with torch's AdamW and attached, clipped to one norm; compare weights, norms and states.

import copy
import gc

import forebay
import pytest
import torch
from models import assert_close
from test_two_ranks import both
from torch import nn
from torch.nn import functional

LR = 1e-2
MAX_NORM = 0.1


class Net(nn.Module):
    """A layer, and parameters without elements."""

    def __init__(self):
        super().__init__()
        self.device_of = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 0)  # a head without classes
        self.codes = nn.Parameter(torch.empty(3, 0, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        y = self.body(x)
        return y.square().mean() + self.head(y).sum()


def empty_net():
    torch.manual_seed(1)
    return Net()


def rows(step, count=4):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(step))


def train_empty(model, opt, steps, first=0):
    norms = []
    for step in range(first, first + steps):
        model(rows(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        opt.step()
        opt.zero_grad()
    return norms


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR)


def assert_trained_alike(model, plain, steps, norms, plain_norms):
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    assert_close(nn.ParameterList(filled(model)), nn.ParameterList(filled(plain)), steps, lr=LR)


def filled(module):
    return [one for one in module.parameters() if one.numel() > 0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("make", [adamw, lambda parameters: forebay.AdamW(parameters, lr=LR)], ids=["torch", "forebay"])
def test_parameters_without_elements_stay_as_they_are(node, make):
    model, plain = empty_net(), empty_net()
    plain_norms = train_empty(plain, adamw(plain.parameters()), 4)
    opt = forebay.attach(model, make(model.parameters()))
    assert_trained_alike(model, plain, 4, train_empty(model, opt, 4), plain_norms)
    assert opt.read_state("head.weight") == {} and len(opt.state_sha256()) == 64
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    assert copy.deepcopy(model).device_of.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_states_of_a_model_with_empty_parameters_go_both_ways(node, folder):
    model, plain = empty_net(), empty_net()
    theirs = adamw(plain.parameters())
    norms = train_empty(plain, theirs, 2)
    model.load_state_dict(plain.state_dict())
    opt = forebay.attach(model, adamw(model.parameters()))
    opt.load_state_dict(theirs.state_dict())
    opt.save_state(f"{folder}/states")
    norms = train_empty(model, opt, 2, first=2)
    assert_trained_alike(model, plain, 4, norms, train_empty(plain, theirs, 2, first=2))
    theirs = adamw(plain.parameters())
    theirs.load_state_dict(opt.state_dict())
    norms = train_empty(model, opt, 2, first=4)
    assert_trained_alike(model, plain, 6, norms, train_empty(plain, theirs, 2, first=4))
    opt.load_state(f"{folder}/states")
    assert opt.read_state("body.weight")["step"] == 2


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_two_ranks_and_a_reader_of_a_model_with_empty_parameters(node):
    models = [empty_net(), empty_net()]
    opts = both(lambda r: forebay.attach(models[r], forebay.AdamW(lr=LR), rank=r, world_size=2, timeout=30))
    both(lambda r: train_empty(models[r], opts[r], 3))
    assert torch.equal(models[0].body.weight, models[1].body.weight)
    if node == "daemon":
        other = empty_net()
        assert forebay.attach_reader(other).load_weights() == 3
        assert torch.equal(other.body.weight, models[0].body.weight)


def test_a_model_of_empty_parameters_alone_is_refused(node):
    with pytest.raises(forebay.UsageError, match="Linear has no parameters with elements") as info:
        forebay.attach(nn.Linear(0, 0))
    assert info.value.code == "E_LAYOUT"


# ----------------------------------------------------------------------------------- of a loss


def model_and_loss():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), nn.Bilinear(4, 4, 3)


def both_parameters(model, loss):
    return [*model.parameters(), *loss.parameters()]


def train_both(model, loss, opt, steps, first=0):
    norms = []
    for step in range(first, first + steps):
        classes = torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(step))
        scores = loss(model(rows(step, 6)), model(rows(step + 100, 6)))
        functional.cross_entropy(scores, classes).backward()
        norms.append(nn.utils.clip_grad_norm_(both_parameters(model, loss), MAX_NORM).item())
        opt.step()
        opt.zero_grad()
    return norms


def group_of_its_own(model, loss):
    return torch.optim.AdamW(
        [{"params": loss.parameters(), "lr": 2 * LR}, {"params": model.parameters()}], lr=LR
    )


MADE = {
    "one group": (lambda model, loss: adamw(both_parameters(model, loss)), "optimizer[0][4]"),
    "a group of its own": (group_of_its_own, "optimizer[0][0]"),
    "ours": (lambda model, loss: forebay.AdamW(both_parameters(model, loss), lr=LR), "optimizer[0][4]"),
}


@pytest.mark.parametrize(("make", "name"), MADE.values(), ids=MADE)
def test_parameters_of_a_loss_train_with_the_model(node, make, name):
    (model, loss), plain = model_and_loss(), model_and_loss()
    made = make if make is not MADE["ours"][0] else MADE["one group"][0]
    plain_norms = train_both(*plain, made(*plain), 4)
    opt = forebay.attach(model, make(model, loss))
    norms = train_both(model, loss, opt, 4)
    assert_trained_alike(nn.ModuleList([model, loss]), nn.ModuleList(plain), 4, norms, plain_norms)
    assert opt.read_state(name)["exp_avg"].shape == loss.weight.shape
    sha256 = opt.state_sha256()
    opt.detach()
    model, loss = model_and_loss()  # as in another process of the run
    opt = forebay.attach(model, make(model, loss))
    assert opt.committed_step == 4 and opt.state_sha256() == sha256
    assert_close(loss, plain[1], 4, lr=LR)


def test_states_of_a_loss_go_both_ways(node):
    plain = model_and_loss()
    theirs = adamw(both_parameters(*plain))
    train_both(*plain, theirs, 2)
    model, loss = copy.deepcopy(plain)
    other = adamw(both_parameters(model, loss))
    other.load_state_dict(theirs.state_dict())
    opt = forebay.attach(model, other)  # `other` has the states of earlier steps
    norms = train_both(model, loss, opt, 2, first=2)
    plain_norms = train_both(*plain, theirs, 2, first=2)
    assert_trained_alike(nn.ModuleList([model, loss]), nn.ModuleList(plain), 4, norms, plain_norms)
    theirs.load_state_dict(opt.state_dict())
    norms = train_both(model, loss, opt, 1, first=4)
    assert norms == pytest.approx(train_both(*plain, theirs, 1, first=4), rel=1e-5)


def test_two_ranks_train_one_loss(node):
    pairs = [model_and_loss(), model_and_loss()]
    plain = model_and_loss()

    def attach(rank):
        model, loss = pairs[rank]
        return forebay.attach(model, adamw(both_parameters(model, loss)), rank=rank, world_size=2, timeout=30)

    opts = both(attach)
    # Both ranks train on the same batches, so the mean of their gradients is that of one rank.
    norms = both(lambda rank: train_both(*pairs[rank], opts[rank], 3))
    plain_norms = train_both(*plain, adamw(both_parameters(*plain)), 3)
    for pair, of_rank in zip(pairs, norms):
        assert_trained_alike(nn.ModuleList(pair), nn.ModuleList(plain), 3, of_rank, plain_norms)


def test_an_optimizer_that_is_dropped_gives_the_loss_memory_of_its_own(node):
    model, loss = model_and_loss()
    opt = forebay.attach(model, adamw(both_parameters(model, loss)))
    before = loss.weight.detach().clone()
    del opt
    gc.collect()
    with torch.no_grad():
        loss.weight.add_(1.0)
        model[0].weight.add_(1.0)
    assert torch.equal(loss.weight, before + 1.0)


def test_what_is_refused_of_other_parameters(node):
    model, loss = model_and_loss()
    for wrong in (model[0].weight.view(-1), model[0].weight.detach(), torch.ones(3)):
        with pytest.raises(forebay.UsageError, match="is no parameter of the model") as info:
            forebay.attach(model, forebay.AdamW([*model.parameters(), wrong]))
        assert info.value.code == "E_OPTION" and "not copies or views" in info.value.hint
    opt = forebay.attach(model, adamw(both_parameters(model, loss)))
    second = nn.Linear(2, 2)
    with pytest.raises(forebay.UsageError, match=r"parameter optimizer\[0\]\[2\] is attached already"):
        forebay.attach(second, adamw([*second.parameters(), loss.weight]), job="second")
    with pytest.raises(forebay.UsageError, match=r"AdamW.step\(\) on parameter optimizer\[0\]\[4\]"):
        adamw(loss.parameters()).step()
    train_both(model, loss, opt, 1)

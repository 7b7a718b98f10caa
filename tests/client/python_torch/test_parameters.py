# Goal    A model with parameters without elements trains as with torch's optimizer.
# Method  Train the same model with torch's AdamW and attached, clipped to one norm; compare weights, norms and states.

import copy

import forebay
import pytest
import torch
from models import assert_close
from test_two_ranks import both
from torch import nn

LR = 1e-2
MAX_NORM = 0.1


class Net(nn.Module):
    """A layer, and parameters without elements."""

    def __init__(self):
        super().__init__()
        self.device_of = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 0)  # of no classes
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

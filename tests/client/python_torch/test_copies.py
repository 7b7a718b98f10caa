# SPDX-License-Identifier: Apache-2.0
# Goal    A copy of an attached model is a plain model without hooks. torch.jit and torch.export take the attached model, or
#         raise an error that says what to write instead.
# Method  Copies are compared with copies from before attach, table by table, and both are trained with torch's
#         optimizer. What is compiled returns what the model returns. The attached model continues training like a model that
#         was never copied.

import copy
import io
import pickle
import pickletools

import forebay
import pytest
import torch
from forebay._guards import OWN_METHODS
from models import WIDTH, assert_close, batch, net, pair, train
from test_refusals import refused
from torch import nn

LR = 1e-2


class Root(nn.Module):
    """Its parts refer to it and to each other."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.net.head.register_forward_hook(double)
        self.net.layers[0].above = [self]
        self.net.norm.register_load_state_dict_pre_hook(nothing)

    def forward(self, tokens):
        return self.net(tokens)


def double(_module, _args, output):
    return 2 * output


def nothing(*_args):
    pass


class OwnCopy(nn.Module):
    """Its class has its own deepcopy."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, tokens):
        return self.net(tokens)

    def __deepcopy__(self, memo):
        twin = OwnCopy()
        twin.load_state_dict(self.state_dict())
        return twin


def tables_of(model):
    """Lists what a module has besides its weights: by name its attributes, and how many hooks are in each table."""
    return {
        name: {
            key: len(value) if "_hooks" in key and value is not None else type(value)
            for key, value in vars(module).items()
            if key != "no_sync"  # of DDP; a copy has it too
        }
        for name, module in model.named_modules()
    }


@pytest.fixture(name="attached", params=[Root, OwnCopy])
def attached_fixture(node, request):
    """(an attached model that has trained a step, its optimizer, a copy of before attach, a plain one that trains
    beside it, its optimizer)"""
    torch.manual_seed(1)
    model, plain, plain_opt = pair(request.param())
    before = copy.deepcopy(model)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    train(model, opt, 1)
    train(plain, plain_opt, 1)
    yield model, opt, before, plain, plain_opt
    train(model, opt, 3, first=1)
    train(plain, plain_opt, 3, first=1)
    assert_close(model, plain, 4)
    opt.detach()
    for name, table in tables_of(model).items():
        assert table.items() >= tables_of(before)[name].items()  # dynamo leaves something in a module
        assert not set(table) & set(OWN_METHODS)


def test_a_deepcopy_has_no_hooks(attached):
    model, _, before, _, _ = attached
    twin = copy.deepcopy(model)
    for one in (twin, copy.deepcopy(twin)):
        assert tables_of(one) == tables_of(before)
        assert {name: values.tolist() for name, values in one.state_dict().items()} == {
            name: values.tolist() for name, values in model.state_dict().items()
        }
    assert tables_of(copy.deepcopy(model.net.layers[1])) == tables_of(before.net.layers[1])
    if isinstance(model, Root):
        assert twin.net.layers[0].above[0] is twin
        first, second = copy.deepcopy([model, model.net])
        assert first.net is second
    plain = copy.deepcopy(before)
    plain.load_state_dict(model.state_dict())
    for one in (plain, twin):
        train(one, torch.optim.AdamW(one.parameters(), lr=LR), 2)
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    twin.half().share_memory()


def parametrized():
    model = net()
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    return model


@pytest.mark.parametrize("make", [parametrized, lambda: torch.fx.symbolic_trace(net())], ids=["parametrized", "fx"])
def test_a_deepcopy_of_classes_of_torchs_that_copy_themselves(node, make):
    model, plain, plain_opt = pair(make())
    before = copy.deepcopy(model)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    train(model, opt, 1)
    train(plain, plain_opt, 1)
    twin = copy.deepcopy(model)
    assert tables_of(twin) == tables_of(before)
    assert_returns_the_same(twin, model, batch(3))
    if isinstance(model, torch.fx.GraphModule):
        assert_returns_the_same(torch.jit.script(twin), model, batch(3))
    train(twin, torch.optim.AdamW(twin.parameters(), lr=LR), 1)
    train(model, opt, 2, first=1)
    train(plain, plain_opt, 2, first=1)
    assert_close(model, plain, 3)
    opt.detach()


def test_a_shallow_copy_is_attached_too(attached):
    model, opt, _, plain, plain_opt = attached
    twin = copy.copy(model)
    train(twin, opt, 2, first=7)
    train(plain, plain_opt, 2, first=7)
    assert_close(model, plain, 3)


def test_a_script_is_made_of_a_copy(attached):
    model, _, before, _, _ = attached
    loaded = pickle.loads(pickle.dumps(model))  # the loaded copy's hooks do nothing
    for module in (model, model.net, model.net.head, loaded):
        with refused(match="torch.jit.script of .* hooks of an attached model") as info:
            torch.jit.script(module)
        assert "torch.jit.script(copy.deepcopy(model))" in info.value.hint
    for whole in (model, loaded):
        twin = copy.deepcopy(whole.net)
        assert tables_of(twin) == tables_of(before.net)
        assert_returns_the_same(torch.jit.script(twin.layers[0]), model.net.layers[0], torch.randn(3, WIDTH))


def test_a_saved_model_names_nothing_but_guards_of_the_package(attached):
    """Files that users have saved name it: its path stays."""
    model, _, _, _, _ = attached
    words = [argument for _, argument, _ in pickletools.genops(pickle.dumps(model))]
    assert {word for word in words if str(word).startswith("forebay.")} == {"forebay._guards"}


def test_a_detached_model_can_be_scripted(node):
    model = net()
    forebay.attach(model, forebay.AdamW(lr=LR)).detach()
    assert_returns_the_same(torch.jit.script(model), model, batch(3))


def test_traces_and_exports_take_the_attached_model(attached):
    model, opt, _, _, _ = attached
    tokens = batch(3)
    for which in (model, copy.deepcopy(model)):
        traced = torch.jit.trace(which, (tokens,))
        assert_returns_the_same(traced, model, tokens)
        exported = torch.export.export(which, (tokens,), strict=False)
        assert_returns_the_same(exported.module(), model, tokens)
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        assert_returns_the_same(torch.export.load(file).module(), model, tokens)
    assert opt.committed_step == 1


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch.compiler.disable takes no reason before torch 2.7")
def test_an_export_that_may_not_break_the_graph_says_what_to_write(attached):
    model, _, _, _, _ = attached
    tokens = batch(3)
    with pytest.raises(Exception, match=r"strict=False, or of copy.deepcopy\(model\)"):
        torch.export.export(model, (tokens,), strict=True)
    with pytest.raises(Exception, match="attached by forebay.*without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens)
    twin = torch.export.export(copy.deepcopy(model), (tokens,), strict=True)
    assert_returns_the_same(twin.module(), model, tokens)


def assert_returns_the_same(compiled, model, *args):
    """The same kernels on the same values."""
    assert torch.equal(compiled(*args), model(*args))

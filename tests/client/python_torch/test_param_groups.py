# SPDX-License-Identifier: Apache-2.0
# Goal    A model trains with as many parameter groups as layer-wise learning rates need, up to 4096, and with long parameter
#         names. More is refused with the number of the model and the limit.
# Method  Training is compared with torch's optimizer over the same groups: under a stand-in for the service manager, which
#         kills the daemon and restarts it between steps; and durable, with a daemon that is stopped and started.

import copy

import forebay
import pytest
import torch
from daemon_process import missing
from models import assert_close, net, train
from test_daemon_restart import Service
from torch import nn

STEPS = 6
GROUPS_MAX = 4096
LR = 1e-2


def layers(count):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)])


def layer_wise(model):
    """Two groups a layer, each with a learning rate of its own."""
    groups = []
    for at, layer in enumerate(model):
        rate = LR * 0.9 ** (len(model) - at)
        groups.append({"params": [layer[0].weight], "lr": rate, "weight_decay": 0.05})
        groups.append({"params": [layer[0].bias], "lr": rate, "weight_decay": 0.0})
    return groups


class Scales(nn.Module):
    """So many parameters of three elements."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.ParameterList(torch.randn(3) for _ in range(count))

    def forward(self, x):
        return (torch.stack(list(self.scales)) * x).sum(0)


def one_each(model):
    return [
        {"params": [parameter], "lr": LR * (1 + number % 7), "weight_decay": 0.01 * (number % 3)}
        for number, parameter in enumerate(model.parameters())
    ]


def steps_of(model, optimizer, shape, steps=STEPS, first=0):
    for step in range(first, first + steps):
        rows = torch.randn(*shape, generator=torch.Generator().manual_seed(step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_twin(model, groups_of, shape, steps=STEPS):
    plain = copy.deepcopy(model)
    steps_of(plain, torch.optim.AdamW(groups_of(plain), lr=LR), shape, steps)
    return plain


def test_layer_wise_learning_rates_of_80_groups_train_as_torch(node):
    model = layers(40)
    plain = plain_twin(model, layer_wise, (4, 16))
    opt = forebay.attach(model, torch.optim.AdamW(layer_wise(model), lr=LR))
    assert len(opt.param_groups) == 80
    steps_of(model, opt, (4, 16))
    assert_close(model, plain, STEPS, lr=LR)


def test_a_group_for_each_of_4096_parameters_trains_as_torch(node):
    model = Scales(GROUPS_MAX)
    plain = plain_twin(model, one_each, (3,))
    opt = forebay.attach(model, forebay.AdamW(lr=LR), param_groups=one_each(model))
    steps_of(model, opt, (3,))
    assert_close(model, plain, STEPS, lr=7 * LR)


def test_more_groups_are_refused_with_both_numbers(node):
    model = Scales(GROUPS_MAX + 1)
    with pytest.raises(forebay.UsageError) as error:
        forebay.attach(model, torch.optim.AdamW(one_each(model), lr=LR))
    assert error.value.code == "E_OPTION"
    assert "4097" in str(error.value) and "4096" in str(error.value)
    assert "join groups with the same hyper-parameters" in str(error.value)


def test_groups_without_parameters_behind_the_others_take_no_room(node):
    model = net()
    plain = copy.deepcopy(model)

    def groups_of(module):
        return [{"params": list(module.parameters())}, *({"params": [], "lr": 1.0} for _ in range(99))]

    opt = forebay.attach(model, torch.optim.AdamW(groups_of(model), lr=LR))
    plain_opt = torch.optim.AdamW(groups_of(plain), lr=LR)
    train(model, opt, STEPS)
    train(plain, plain_opt, STEPS)
    assert_close(model, plain, STEPS, lr=LR)


@pytest.mark.skipif(bool(missing()), reason=missing() or "")
@pytest.mark.parametrize("level", ["memory", "step"])
def test_groups_stay_when_the_daemon_is_killed_restarted_or_started_again(folder, level):
    model = layers(40)
    plain = plain_twin(model, layer_wise, (4, 16), 8)
    service = Service(folder, "dram.limit=1GiB")
    with service.manager as manager:
        manager.start()

        def attach(one):
            return forebay.attach(
                one,
                torch.optim.AdamW(layer_wise(one), lr=LR),
                job="groups",
                run="one",
                durability=level,
                socket=f"{folder}/s",
            )

        opt = attach(model)
        steps_of(model, opt, (4, 16), 2)
        manager.kill()
        steps_of(model, opt, (4, 16), 2, first=2)
        manager.restart()
        steps_of(model, opt, (4, 16), 2, first=4)
        if level == "step":
            opt.detach()
            manager.stop()
            manager.start()
            model = layers(40)
            opt = attach(model)
            assert opt.committed_step == 6
        steps_of(model, opt, (4, 16), 2, first=6)
        assert_close(model, plain, 8, lr=LR)
        opt.detach()


def with_name_of(name_bytes):
    """A model in which the name of the longest parameter has so many bytes."""
    model = net()
    inner = nn.Module()
    inner.add_module("n" * (name_bytes - len("layers.0.") - len(".up.weight")), model.layers[0])

    class Outer(nn.Module):
        def forward(self, x):
            return next(iter(self.children()))(x)

    outer = Outer()
    outer.add_module(*next(iter(inner.named_children())))
    model.layers[0] = outer
    assert max(len(name) for name, _ in model.named_parameters()) == name_bytes + len("norm.weight") - len("up.weight")
    return model


@pytest.mark.parametrize("name_bytes", [1100, 65000])
def test_parameters_with_long_names_train_as_torch(node, name_bytes):
    model = with_name_of(name_bytes)
    plain = copy.deepcopy(model)
    opt = forebay.attach(model, forebay.AdamW(lr=LR))
    train(model, opt, STEPS)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=LR), STEPS)
    assert_close(model, plain, STEPS, lr=LR)
    longest = max((name for name, _ in model.named_parameters()), key=len)
    assert opt.read_state(longest)["exp_avg"].abs().max() > 0
    assert forebay.status()["jobs"]


def test_a_name_that_is_too_long_is_refused_with_the_number_and_what_to_do(node):
    with pytest.raises(forebay.UsageError) as error:
        forebay.attach(with_name_of(65600), forebay.AdamW(lr=LR))
    assert error.value.code == "E_LAYOUT"
    assert "65536" in str(error.value) and "shorten the names of the modules" in str(error.value)

# SPDX-License-Identifier: Apache-2.0
# Goal    An optimizer that is dropped without detach() ends its session, unmaps the weights and leaves the model with private
#         parameters. No reference of the package keeps a dropped model or optimizer alive.
# Method  Drop one, the other or both, in each state of a step. Check weak references, the node's sessions and the mappings of
#         the process.

import gc
import pathlib
import weakref

import forebay
import pytest
import torch
from models import batch, loss_of, net, train


def sessions():
    """Of the newest job."""
    return forebay.status()["jobs"][-1]["sessions"]


def mapped_windows():
    return pathlib.Path("/proc/self/maps").read_text(encoding="ascii").count("/memfd:forebay")


def attached():
    model = net()
    return model, forebay.attach(model, forebay.AdamW(lr=1e-2))


@pytest.mark.parametrize("state", ["new", "trained", "forward", "backward"])
def test_dropping_model_and_optimizer_ends_the_session(node, state):
    gc.collect()
    before = mapped_windows()
    model, opt = attached()
    assert sessions() == 1
    if state != "new":
        train(model, opt, 1)
    if state in ("forward", "backward"):
        loss = loss_of(model, batch(1))
    if state == "backward":
        loss.backward()
    loss = None
    references = [weakref.ref(model), weakref.ref(opt), weakref.ref(model.norm.weight)]
    del model, opt
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert sessions() == 0
    assert mapped_windows() == before


def test_dropping_the_optimizer_gives_the_model_private_parameters(node):
    model, opt = attached()
    train(model, opt, 1)
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    graph = loss_of(model, batch(1))
    del opt
    gc.collect()
    assert sessions() == 0
    assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())
    graph.backward()  # the hooks find no optimizer: the gradients are torch's again
    train(model, torch.optim.AdamW(model.parameters()), 1)
    model.half()


def test_an_optimizer_lives_without_the_name_of_its_model(node):
    model, opt = attached()
    train(model, opt, 1)
    loss_of(model, batch(1)).backward()
    del model
    gc.collect()
    opt.step()
    assert opt.committed_step == 2
    opt.detach()


def test_a_scheduler_that_is_dropped_too_keeps_nothing(node):
    model, opt = attached()
    schedule = torch.optim.lr_scheduler.LinearLR(opt)
    train(model, opt, 1)
    schedule.step()
    reference = weakref.ref(opt)
    del model, opt, schedule
    gc.collect()
    assert reference() is None and sessions() == 0

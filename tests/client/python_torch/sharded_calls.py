# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: the calls of a script that was written for torch's optimizer."""

import copy
import pickle

import forebay
import torch
from models import batch, loss_of
from sharded_ranks import LR, Twins, assert_same, case, full, refused, small_net
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def torchs(model):
    """Two groups, as scripts make them."""
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=LR)


@case(1, 2)
def an_instance_of_torchs_optimizers(ranks):
    twins = Twins(ranks)
    ours, theirs = torchs(twins.ours), torchs(twins.theirs)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (ours, theirs)]
    twins.attach(ours).torch_opt = theirs
    for _ in range(3):
        twins.train(1)
        for schedule in schedules:
            schedule.step()
    twins.assert_close()
    assert [group["weight_decay"] for group in twins.opt.param_groups] == [0.01, 0.0]
    twins.opt.detach()


@case(2)
def an_instance_of_torchs_optimizers_over_a_plain_model(ranks):
    """That has stepped before, on every rank in the same way."""
    model, plain = small_net(), small_net()
    fully_shard(plain, mesh=ranks.mesh)
    ours, plain_opt = torchs(model), torchs(plain)
    for which, optimizer in ((model, ours), (plain, plain_opt)):
        loss_of(which, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    opt = ranks.attach(model, ours, mode="sharded", sharding=forebay.Sharding(mesh=ranks.mesh))
    for step in range(3):
        for which, optimizer in ((model, opt), (plain, plain_opt)):
            loss_of(which, ranks.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=1e-5, atol=1e-6)
    opt.detach()


@case(1, 2)
def a_default_device_that_is_not_the_processor(ranks):
    """What the client makes for itself stays on the processor."""
    twins = Twins(ranks).attach().train(2)
    plain = twins.opt.state_sha256(), twins.opt.read_state("embedding.weight")["exp_avg"], twins.opt.state_dict()
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        sha256 = twins.opt.state_sha256()
        moment = twins.opt.read_state("embedding.weight")["exp_avg"]
        state = twins.opt.state_dict()
    finally:
        torch.set_default_device(before)
    assert sha256 == plain[0] and torch.equal(moment, plain[1])
    assert str(state["param_groups"]) == str(plain[2]["param_groups"])
    twins.opt.load_state_dict(state)
    twins.train(1).assert_close()
    twins.opt.detach()


@case(1, 2, 3)
def a_first_forward_in_inference_mode(ranks):
    """After it FSDP2 can evaluate, not train."""
    twins = Twins(ranks).attach()
    for step in range(2):
        with torch.inference_mode():
            ours, theirs = (loss_of(model, ranks.batch(step)) for model in (twins.ours, twins.theirs))
            assert torch.equal(ours, theirs)
            assert_same(full(twins.ours), full(twins.theirs))
    twins.opt.detach()


@case(1, 2)
def a_closure(ranks):
    twins = Twins(ranks).attach()

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, ranks.batch(twins.first))
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    for _ in range(3):
        assert abs(step(twins.ours, twins.opt) - step(twins.theirs, twins.torch_opt)) < 1e-5
        twins.first += 1
    twins.assert_close()
    twins.opt.detach()


@case(1, 2)
def a_batch_that_is_dropped_by_clearing_the_model(ranks):
    twins = Twins(ranks).attach().train(1)
    for set_to_none in (True, False):
        twins.backward(50)
        for model in (twins.ours, twins.theirs):
            model.zero_grad(set_to_none=set_to_none)
        twins.train(1)
    twins.assert_close()
    twins.opt.detach()


@case(2)
def parameters_that_are_frozen_for_a_while(ranks):
    twins = Twins(ranks).attach().train(1)
    for trained in (False, True):
        for model in (twins.ours, twins.theirs):
            model.layers[1].requires_grad_(trained)
        twins.train(1)
    twins.assert_close()
    twins.opt.detach()


@case(1, 2)
def gradients_that_are_set_by_hand(ranks):
    twins = Twins(ranks).attach().train(1)
    for _ in range(2):
        for model in (twins.ours, twins.theirs):
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
        twins.step()
    twins.train(1).assert_close()
    twins.opt.detach()


@case(1, 2)
def copies_and_scripts(ranks):
    """FSDP2 refuses copies of its modules. A plain model that loads the state dict can be copied and compiled."""
    twins = Twins(ranks).attach().train(1)
    for model in (twins.ours, twins.theirs):
        for make in (copy.deepcopy, pickle.dumps):
            try:
                make(model)
            except (AssertionError, pickle.PicklingError, AttributeError):
                continue
            raise AssertionError(f"{make.__name__} of an FSDP2 model: docs/reference/calls.md says that torch refuses it")
    for module in (twins.ours, twins.ours.layers[0].up):
        with refused("E_UNSUPPORTED", "torch.jit.script of", "get_model_state_dict"):
            torch.jit.script(module)
    plain = small_net()
    plain.load_state_dict(get_model_state_dict(twins.ours, options=StateDictOptions(full_state_dict=True)))
    assert_same(dict(plain.named_parameters()), full(twins.ours))
    tokens = ranks.batch(1)
    torch.testing.assert_close(torch.jit.script(plain)(tokens), plain(tokens))
    twins.train(1).assert_close()
    twins.opt.detach()

# SPDX-License-Identifier: Apache-2.0
# Goal    A step applies only the gradients of complete backwards. A parameter without a gradient is skipped as in torch. After
#         Ctrl-C or an exception in the middle of a backward, the next backward, or zero_grad(), begins the step from scratch on
#         every rank.
# Method  Torch's AdamW over a private twin, with `grad is None` where the attached model has no gradient; backwards that a hook
#         breaks off; two ranks, of which one or both drop their gradients.

import forebay
import pytest
import torch
from models import CheckpointedNet, assert_close, batch, loss_of, net, pair, train
from test_two_ranks import attach_both, both
from torch import nn

EXPERTS = 6


class Moe(nn.Module):
    """A router that sends each token to one of its experts; most have no gradient in a step."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS)) for _ in range(2)
        )
        self.head = nn.Linear(8, 11)

    def forward(self, tokens, used=(0, 3)):
        x = self.embedding(tokens)
        for layer in self.layers:
            for number in used:
                x = x + layer[number](x)
        return self.head(x)


def moe_loss(model, step, rank=0):
    tokens = batch(10 * step + rank)
    logits = model(tokens[:, :-1], used=(step % EXPERTS, (step + rank + 3) % EXPERTS))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def moe(seed=3):
    torch.manual_seed(seed)
    return Moe()


def assert_same_states(opt, plain, plain_opt):
    """Moments as torch's, and none where torch has none. Bounds: as in test_training."""
    for name, tensor in plain.named_parameters():
        state = opt.read_state(name)
        for plane in ("exp_avg", "exp_avg_sq"):
            want = plain_opt.state[tensor].get(plane, torch.zeros_like(tensor))
            bound = 64 * 2**-23 * want.abs().max()
            assert (state[plane] - want).abs().max() <= bound, (name, plane)


def test_unused_experts_stand_still(node):
    model, plain, plain_opt = pair(moe())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(5):
        for module, optimizer in ((model, opt), (plain, plain_opt)):
            moe_loss(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, plain, 5)
    assert_same_states(opt, plain, plain_opt)


def test_a_gradient_of_one_rank_alone_is_the_mean_with_zero(node):
    models = [moe(), moe()]
    opts = attach_both(models)
    plain = moe()
    plain.load_state_dict(models[0].state_dict())
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):

        def run(rank):
            moe_loss(models[rank], step, rank).backward()
            opts[rank].step()

        both(run)
        (sum(moe_loss(plain, step, rank) for rank in (0, 1)) / 2).backward()
        plain_opt.step()
        plain_opt.zero_grad()
    for model, opt in zip(models, opts):
        assert_close(model, plain, 4)
        assert_same_states(opt, plain, plain_opt)


def test_the_gradient_is_delivered_when_backward_ends(node):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleDict({"used": nn.Linear(256, 256), "idle": nn.Linear(256, 256)})
                for _ in range(4)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer["used"](x)
            return x

    model = Wide()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    model(torch.ones(1, 256)).sum().backward()
    assert all(group.lease is None for group in opt._engine.groups)
    assert opt.delivered_groups == 4
    before = opt.stats()["grad_bytes"]
    opt.step()
    after = opt.stats()
    # A gradient in the same unit of 4096 elements as a parameter without a gradient may be delivered only by step.
    assert after["grad_bytes"] - before <= 4 * 4096 * 4
    assert before >= 4 * 256 * 256 * 4 - 4 * 4096 * 4
    assert after["private_slots"] == 0


class Break:
    """Raises once, when the gradient of a parameter arrives."""

    def __init__(self, parameter, error=KeyboardInterrupt):
        self.error, self.armed = error, True
        self.handle = parameter.register_hook(self)

    def __call__(self, _gradient):
        if self.armed:
            self.armed = False
            raise self.error("broken off")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("then", ["zero_grad", "backward", "both"])
def test_a_backward_that_was_broken_off_leaves_nothing(node, error, then):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train(model, opt, 1)
    train(plain, plain_opt, 1)
    Break(model.layers[1].up.weight, error)
    with pytest.raises(error):
        loss_of(model, batch(5)).backward()
    with pytest.raises(forebay.UsageError, match="did not come to its end") as info:
        opt.step()
    assert info.value.code == "E_GRAD_PARTIAL" and opt.committed_step == 1
    if then != "backward":
        opt.zero_grad()
    if then == "zero_grad":
        opt.step()  # without any gradient: changes nothing
        assert_close(model, plain, 1)
        return
    train(model, opt, 2, first=1)
    train(plain, plain_opt, 2, first=1)
    assert_close(model, plain, 3)
    assert_same_states(opt, plain, plain_opt)


def test_zero_grad_after_a_backward_drops_the_batch(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(3):
        loss_of(model, batch(50 + step)).backward()
        opt.zero_grad()
        assert opt.delivered_groups == 0 and model.norm.weight.grad is None
        opt.zero_grad()
        train(model, opt, 1, first=step)
        train(plain, plain_opt, 1, first=step)
    assert_close(model, plain, 3)


def test_a_second_backward_adds_what_the_first_did_not_bring(node):
    model, plain, plain_opt = pair(moe())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for module, optimizer in ((model, opt), (plain, plain_opt)):
        module.layers[0][1].weight.square().sum().backward()
        module.layers[0][2].weight.square().sum().backward()
        optimizer.step()
    assert_close(model, plain, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_backward_that_was_broken_off(node, reentrant):
    torch.manual_seed(3)
    model, plain, plain_opt = pair(CheckpointedNet(reentrant))
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    Break(model.layers[0].up.weight)  # breaks off when the later layers' backwards have ended
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, batch(5)).backward()
    with pytest.raises(forebay.UsageError, match="did not come to its end"):
        opt.step()
    train(model, opt, 2)
    train(plain, plain_opt, 2)
    assert_close(model, plain, 2)


def test_loops_in_which_every_rank_drops_see_no_error(node):
    models = [net(), net()]
    opts = attach_both(models)
    plain = net()
    plain.load_state_dict(models[0].state_dict())
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def run(rank):
        for step in range(3):
            loss_of(models[rank], batch(70 + step)).backward()
            opts[rank].zero_grad()  # a bad batch
            loss_of(models[rank], batch(10 * step + rank)).backward()
            opts[rank].step()

    both(run)
    for step in range(3):
        (sum(loss_of(plain, batch(10 * step + rank)) for rank in (0, 1)) / 2).backward()
        plain_opt.step()
        plain_opt.zero_grad()
    for model in models:
        assert_close(model, plain, 3)


def test_a_rank_whose_partner_began_anew_brings_its_gradients_again(node):
    models = [net(), net()]
    opts = attach_both(models)

    def run(rank):
        for attempt in range(2):
            loss_of(models[rank], batch(rank)).backward()
            if rank == 0 and attempt == 0:
                opts[0].zero_grad()
                continue
            try:
                opts[rank].step()
                return attempt
            except forebay.ForebayError as error:
                assert error.code == "E_GRAD_DROPPED" and error.retryable, error
        return None

    done = both(run)
    assert done[0] == 1 and done[1] in (0, 1), done
    assert [opt.committed_step for opt in opts] == [1, 1]
    assert opts[0].state_sha256() == opts[1].state_sha256()


def test_an_interrupt_as_the_lease_of_weights_comes(node):
    """Python raises it between the call's return and the place that keeps its result."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    attachment = opt._engine.attachment

    class Interrupted:
        def __getattr__(self, name):
            return getattr(attachment, name)

        def fetch(self, *args):
            attachment.fetch(*args)
            raise KeyboardInterrupt

    opt._engine.attachment = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, batch(0))
    opt._engine.attachment = attachment
    train(model, opt, 2)
    train(plain, plain_opt, 2)
    assert_close(model, plain, 2)
    opt.detach()

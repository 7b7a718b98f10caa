# SPDX-License-Identifier: Apache-2.0
# Goal    The calls that training loops make between backward and step work on an attached model: torch's clip_grad_norm_, a
#         GradScaler, the norm of a gradient. They work on one rank and on two ranks, whose norms are those of the mean.
# Method  Beside torch's own AdamW on the same batches. Two ranks are two threads, as in
#         test_two_ranks.py.

import forebay
import pytest
import torch
from models import assert_close, batch, loss_of, net, pair, scaled_step
from test_two_ranks import attach_both, both
from torch import nn

# Bound of the difference of two norms, relative to the norm. The gradients are the same up to rounding, and their squares are
# summed in another order.
NORM_BOUND = 1e-3


def assert_same_norm(ours, theirs):
    assert abs(ours.item() - theirs.item()) <= NORM_BOUND * theirs.item()


def test_clip_grad_norm_clips_as_torch(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(6):
        norms = []
        for one, optimizer in ((model, opt), (plain, plain_opt)):
            loss_of(one, batch(step)).backward()
            # Odd steps scale the gradients. Even steps do not change them.
            norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.1 if step % 2 else 1e6))
            optimizer.step()
            optimizer.zero_grad()
        assert_same_norm(*norms)
    assert_close(model, plain, 6)
    assert opt.committed_step == 6


def test_the_norm_of_a_gradient_can_be_read(node):
    model, plain, _ = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for one in (model, plain):
        loss_of(one, batch(1)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert_same_norm(ours.grad.norm(), theirs.grad.norm())
        assert_same_norm(ours.grad.data.norm(2), theirs.grad.norm())
        assert_same_norm(ours.grad.detach().norm(), theirs.grad.norm())
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert_same_norm(total, nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    opt.step()


def test_two_ranks_clip_by_the_norm_of_the_mean(node):
    models = [net(seed=1), net(seed=1)]
    plain = net(seed=1)
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    opts = attach_both(models)

    def clipped_step(rank, step):
        loss_of(models[rank], batch(10 * step + rank)).backward()
        norm = nn.utils.clip_grad_norm_(models[rank].parameters(), 0.1)
        opts[rank].step()
        return norm

    for step in range(4):
        norms = both(lambda rank: clipped_step(rank, step))
        sum(loss_of(plain, batch(10 * step + rank)) / 2 for rank in (0, 1)).backward()
        assert torch.equal(*norms)
        assert_same_norm(norms[0], nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        plain_opt.step()
        plain_opt.zero_grad()
    assert_close(models[0], plain, 4)


def test_one_rank_may_look_at_norms_alone(node):
    models = [net(seed=1), net(seed=1)]
    opts = attach_both(models)

    def step_of(rank):
        loss_of(models[rank], batch(rank)).backward()
        norm = models[0].head.weight.grad.norm() if rank == 0 else None
        opts[rank].step()
        return norm

    norm, _ = both(step_of)
    assert norm > 0
    assert [opt.committed_step for opt in opts] == [1, 1]


def test_a_parameter_of_which_another_rank_has_a_gradient(node):
    """Both ranks see its norm and scale it, and it moves on both."""
    models = [net(seed=1), net(seed=1)]
    opts = attach_both(models)
    before = models[0].layers[1].up.weight.detach().clone()

    def step_of(rank):
        part = models[rank].layers[1].up.weight if rank == 1 else models[rank].layers[0].up.weight
        part.sum().backward()
        norm = models[rank].layers[1].up.weight.grad.norm()
        unused = models[rank].norm.weight.grad.norm()
        nn.utils.clip_grad_norm_(models[rank].parameters(), 1e-3)
        opts[rank].step()
        return norm, unused

    for norm, unused in both(step_of):
        assert norm == before.numel() ** 0.5 / 2 and unused == 0
    assert not torch.equal(models[0].layers[1].up.weight, before)


def test_a_norm_within_backward(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    hidden = []
    handle = model.layers[0].register_forward_hook(lambda _m, _i, out: hidden.append(out))
    loss = loss_of(model, batch(0))
    handle.remove()
    hidden[0].register_hook(lambda _g: model.layers[1].up.weight.grad.norm() and None)
    with pytest.raises(forebay.UsageError, match="within backward") as info:
        loss.backward()
    assert info.value.code == "E_UNSUPPORTED" and "between backward and opt.step" in info.value.hint
    opt.zero_grad()
    loss_of(model, batch(0)).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    opt.step()


def test_a_backward_after_a_norm(node):
    """Whoever has asked for a norm has delivered its gradient."""
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    model.layers[0].up.weight.sum().backward()
    assert model.layers[0].up.weight.grad.norm() > 0
    with pytest.raises(forebay.UsageError, match="after a norm was asked for") as info:
        model.layers[1].up.weight.sum().backward()
    assert info.value.code == "E_UNSUPPORTED"
    opt.zero_grad()
    loss_of(model, batch(0)).backward()
    opt.step()
    assert opt.committed_step == 1


def test_gradients_that_were_scaled_apart(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    loss_of(model, batch(0)).backward()
    nn.utils.clip_grad_norm_([model.norm.weight], 1e-9)
    with pytest.raises(forebay.UsageError, match="were scaled by") as info:
        opt.step()
    assert "all of them at once" in info.value.hint
    opt.zero_grad()
    loss_of(model, batch(0)).backward()
    opt.step()


def test_the_norm_of_a_gradient_that_is_not_finite(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    (loss_of(model, batch(0)) * float("inf")).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).isnan()
    with pytest.raises(forebay.ForebayError) as info:
        opt.step()
    assert info.value.code == "E_NONFINITE" and opt.committed_step == 0
    loss_of(model, batch(0)).backward()
    opt.step()
    assert opt.committed_step == 1


@pytest.mark.parametrize("factor", [0.0, -0.5])
def test_any_finite_factor_is_taken(node, factor):
    """0 too: torch's clip_grad_norm_ multiplies by it where the norm overflows."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(3):
        for one in (model, plain):
            loss_of(one, batch(step)).backward()
            for parameter in one.parameters() if step == 1 else ():
                parameter.grad.mul_(factor)
        opt.step()
        plain_opt.step()
        plain_opt.zero_grad()
    assert_close(model, plain, 3)


def test_after_a_factor_that_is_refused_the_batch_can_be_left_out(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    loss_of(model, batch(0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), float("nan"))
    with pytest.raises(forebay.UsageError, match="E_OPTION.*not finite in float32") as info:
        opt.step()
    assert "zero_grad leaves the batch out" in info.value.hint
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    opt.step()
    assert opt.committed_step == 1


def test_after_factors_that_differ_the_batch_can_be_left_out(node):
    models = [net(seed=1), net(seed=1)]
    opts = attach_both(models)

    def different(rank):
        loss_of(models[rank], batch(rank)).backward()
        for parameter in models[rank].parameters():
            parameter.grad.mul_(2.0 + rank)
        with pytest.raises(forebay.UsageError, match="E_STEP.*grad_scale"):
            opts[rank].step()

    def left_out(rank):
        opts[rank].zero_grad()
        loss_of(models[rank], batch(rank)).backward()
        opts[rank].step()

    both(different)
    both(left_out)
    assert [opt.committed_step for opt in opts] == [1, 1]


# --------------------------------------------------------------------------------- clip_grad_value_


def test_clip_grad_value_is_torchs(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(4):
        for one in (model, plain):
            loss_of(one, batch(step)).backward()
            nn.utils.clip_grad_value_(one.parameters(), 1e-3)
        opt.step()
        plain_opt.step()
        plain_opt.zero_grad()
    assert_close(model, plain, 4)


def test_two_ranks_clamp_the_mean_over_them(node):
    models, plain = [net(seed=1), net(seed=1)], net(seed=1)
    opts = attach_both(models)

    def step_of(rank):
        (loss_of(models[rank], batch(rank)) * 8).backward()
        nn.utils.clip_grad_value_(models[rank].parameters(), 1e-3)
        opts[rank].step()

    both(step_of)
    sum(loss_of(plain, batch(rank)) * 4 for rank in (0, 1)).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    for (name, _), theirs in zip(models[0].named_parameters(), plain.parameters()):
        moment = opts[0].read_state(name)["exp_avg"]
        torch.testing.assert_close(moment, 0.1 * theirs.grad, rtol=1e-5, atol=1e-9)


def test_bounds_of_one_side_and_of_both(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    loss_of(model, batch(0)).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    torch._foreach_clamp_min_(grads, -1e-4)
    torch._foreach_clamp_max_(grads, 2e-4)
    opt.step()
    names = [name for name, _ in model.named_parameters()]
    moments = torch.cat([opt.read_state(name)["exp_avg"].flatten() for name in names])
    assert moments.min().item() == pytest.approx(-1e-5) and moments.max().item() == pytest.approx(2e-5)


def test_what_bounds_do_not_go_with(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    loss_of(model, batch(0)).backward()
    weight = model.head.weight
    with pytest.raises(forebay.UsageError, match=r"clamp of the gradient .* to \[0.0, inf\]"):
        weight.grad.clamp_(min=0.0)
    nn.utils.clip_grad_value_([weight], 1e-3)
    for use in (weight.grad.norm, lambda: weight.grad.mul_(0.5)):
        with pytest.raises(forebay.UsageError, match="after it was clamped to") as info:
            use()
        assert "before clip_grad_value_" in info.value.hint
    with pytest.raises(forebay.UsageError, match="were clamped to") as info:
        opt.step()
    assert "all of them at once" in info.value.hint
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    opt.step()
    assert opt.committed_step == 1
    opt.detach()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2, max_grad_norm=1.0), job="norm")
    loss_of(model, batch(0)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    with pytest.raises(forebay.UsageError, match="clip_grad_value_ beside max_grad_norm=1.0"):
        opt.step()


# -------------------------------------------------------------------------------------- GradScaler


def scaler_of():
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


def test_a_grad_scaler_skips_the_steps_that_torch_skips(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    scalers = [scaler_of(), scaler_of()]
    for step in range(6):
        factor = float("inf") if step == 3 else 1.0
        scales = [
            scaled_step(one, optimizer, scaler, loss_of(one, batch(step)) * factor)
            for one, optimizer, scaler in ((model, opt, scalers[0]), (plain, plain_opt, scalers[1]))
        ]
        assert scales[0] == scales[1], step
    assert opt.committed_step == 5
    assert_close(model, plain, 5)


def test_all_ranks_skip_a_step_that_overflows_on_one(node):
    models = [net(seed=1), net(seed=1)]
    opts, scalers = attach_both(models), [scaler_of(), scaler_of()]

    def step_of(rank, step):
        opts[rank].zero_grad()
        factor = float("inf") if (rank, step) == (1, 1) else 1.0
        scalers[rank].scale(loss_of(models[rank], batch(rank)) * factor).backward()
        scalers[rank].step(opts[rank])
        scalers[rank].update()
        return scalers[rank].get_scale()

    scales = [both(lambda rank: step_of(rank, step)) for step in range(3)]
    assert scales == [[256.0] * 2, [128.0] * 2, [128.0] * 2]
    assert [opt.committed_step for opt in opts] == [2, 2]

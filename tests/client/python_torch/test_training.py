# SPDX-License-Identifier: Apache-2.0
# Goal    An attached model trains as under torch.optim.AdamW, whatever torch feature its forward
#         uses.
# Method  The same model twice, from the same values, on the same batches; losses and parameters are
#         compared element by element with a derived bound (models.assert_close).

import copy

import forebay
import pytest
import torch
from models import Block, CheckpointedNet, Net, TwiceNet, assert_close, batch, loss_of, net, pair, train
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 5


def compare(node, model, loss=loss_of, steps=STEPS):
    model, plain, plain_opt = pair(model)
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    ours, theirs = train(model, opt, steps, loss), train(plain, plain_opt, steps, loss)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert_close(model, plain, steps)
    assert opt.committed_step == steps
    return opt


def test_tied_model_equals_torch_adamw(node):
    opt = compare(node, net())
    assert opt._plan.group_names == ["root", "layers.0", "layers.1", "layers.2"]


def test_sequential_model(node):
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 11)
    )
    assert compare(node, model)._plan.group_names == ["0", "1", "3"]


def test_states_equal_torch_adamw(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train(model, opt, 3)
    train(plain, plain_opt, 3)
    for (name, _), theirs in zip(model.named_parameters(), plain.parameters()):
        state = opt.read_state(name)
        assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
        for plane, values in state.items():
            want = plain_opt.state[theirs][plane]
            # A moment is a sum of a few gradients, each equal within 64 roundings of its largest
            # term.
            assert (values - want).abs().max() <= 64 * 2**-23 * want.abs().max(), (name, plane)


def test_a_step_forgets_its_gradients(node):
    """Without zero_grad() a loop trains as one that has it; a second step() has nothing to apply."""
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
    train(plain, plain_opt, 3)
    assert_close(model, plain, 3)
    before = model.head.weight.clone()
    opt.step()
    assert torch.equal(model.head.weight, before) and opt.committed_step == 4
    opt.detach()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(node, reentrant):
    def loss(model, tokens):
        x = model.embedding(tokens[:, :-1])
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        logits = model.head(model.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    opt = compare(node, net(), loss)
    assert all(group.forwards == 0 and group.lease is None for group in opt._engine.groups)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_within_forward_leaves_no_lease(node, reentrant):
    torch.manual_seed(3)
    opt = compare(node, CheckpointedNet(reentrant))
    assert all(group.lease is None for group in opt._engine.groups)


def test_autocast(node):
    def loss(model, tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, tokens)

    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    assert train(model, opt, STEPS, loss) == pytest.approx(
        train(plain, plain_opt, STEPS, loss), rel=1e-3
    )


def test_module_used_twice(node):
    torch.manual_seed(4)
    compare(node, TwiceNet())


def test_compiled_block(node):
    model, plain, plain_opt = pair(net())
    for number in range(len(model.layers)):
        model.layers[number] = torch.compile(model.layers[number], backend="aot_eager")
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    assert opt._plan.group_names == ["root", "layers.0", "layers.1", "layers.2"]
    assert train(model, opt, STEPS) == pytest.approx(train(plain, plain_opt, STEPS), rel=1e-4)
    assert_close(model, plain, STEPS)


def test_block_compiled_in_place_after_attach(node):
    model, plain, plain_opt = pair(net(layers=2))
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    assert train(model, opt, 2) == pytest.approx(train(plain, plain_opt, 2), rel=1e-4)


def test_no_grad_and_eval_between_steps(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    for step in range(3):
        train(model, opt, 1, first=step)
        train(plain, plain_opt, 1, first=step)
        with torch.no_grad():
            assert loss_of(model, batch(99)).item() == pytest.approx(
                loss_of(plain, batch(99)).item(), rel=1e-5
            )
        assert all(group.lease is None for group in opt._engine.groups)


def test_lr_scheduler_of_torch(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=8, cycle_momentum=True)
        for o in (opt, plain_opt)
    ]
    for step in range(STEPS):
        train(model, opt, 1, first=step)
        train(plain, plain_opt, 1, first=step)
        for schedule in schedules:
            schedule.step()
    assert opt.param_groups[0]["lr"] == plain_opt.param_groups[0]["lr"]
    assert_close(model, plain, STEPS, lr=2e-2)


def test_param_groups_have_their_own_options(node):
    model = net()
    plain = copy.deepcopy(model)

    def groups_of(module):
        small = [p for p in module.parameters() if p.dim() < 2]
        large = [p for p in module.parameters() if p.dim() >= 2]
        return [
            {"params": small, "lr": 3e-2, "weight_decay": 0.0},
            {"params": large, "betas": (0.8, 0.9)},
        ]

    opt = forebay.attach(model, forebay.AdamW(lr=1e-2), param_groups=groups_of(model))
    plain_opt = torch.optim.AdamW(groups_of(plain), lr=1e-2)
    train(model, opt, STEPS)
    train(plain, plain_opt, STEPS)
    assert_close(model, plain, STEPS, lr=3e-2)


def test_max_grad_norm_clips_as_torch(node):
    model, plain, plain_opt = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2, max_grad_norm=0.1))
    for step in range(3):
        train(model, opt, 1, first=step)
        loss_of(plain, batch(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_opt.step()
        plain_opt.zero_grad()
        # Both norms are of the same gradients up to rounding, with the squares summed in another order.
        assert abs(opt.grad_norm - norm.item()) <= 1e-3 * norm.item()
    assert_close(model, plain, 3)


def test_frozen_parameters_keep_their_bytes(node):
    model = net()
    model.layers[0].up.weight.requires_grad_(False)  # one parameter of its group
    for tensor in model.layers[1].parameters():  # the whole group
        tensor.requires_grad_(False)
    before = {
        name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
    }
    opt = compare(node, model)
    for name, p in model.named_parameters():
        if name in before:
            assert torch.equal(p, before[name]), name
    assert all(group.lease is None for group in opt._engine.groups)


def test_unused_parameters_are_skipped(node):
    class Lazy(Net):
        def forward(self, tokens):
            x = self.embedding(tokens)
            x = x + nn.functional.linear(
                x, self.layers[0].up.weight[: x.shape[-1]]
            )  # the rest of layer 0 is unused
            return self.head(self.norm(self.layers[1](x)))  # layer 2: unused

    torch.manual_seed(5)
    model = Lazy()
    idle = {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if name.startswith("layers.2")
    }
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2, weight_decay=0.0))
    lazy = model.layers[0].down.weight.detach().clone()
    train(model, opt, 2)
    assert torch.equal(model.layers[0].down.weight, lazy)
    assert not opt.read_state("layers.0.down.weight")["exp_avg"].any()
    for name, p in model.named_parameters():
        if name in idle:
            assert torch.equal(p, idle[name]), name
            assert not opt.read_state(name)["exp_avg"].any()


def test_exception_in_forward_leaves_no_lease_and_training_goes_on(node):
    class Failing(Block):
        fail = False

        def forward(self, x):
            if self.fail:
                raise ValueError("on purpose")
            return super().forward(x)

    torch.manual_seed(6)
    model = Net()
    model.layers[1] = Failing()
    model, plain, plain_opt = pair(model)
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    model.layers[1].fail = True
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, batch(0))
    assert all(group.lease is None for group in opt._engine.groups)
    model.layers[1].fail = False
    train(model, opt, 3)
    train(plain, plain_opt, 3)
    assert_close(model, plain, 3)


def test_a_list_of_lists_and_a_tied_layer(node):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.stages = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
            self.stages[1][0].up.weight = self.stages[0][0].up.weight

        def forward(self, tokens):
            x = self.embedding(tokens)
            for stage in self.stages:
                for layer in stage:
                    x = layer(x)
            return x @ self.embedding.weight.T

    torch.manual_seed(7)
    opt = compare(node, Nested())
    assert opt._plan.group_names == ["root", "stages.0", "stages.1"]
    points = {id(module): numbers for module, numbers in opt._plan.hook_points}
    shared = [numbers for numbers in points.values() if numbers == [1, 2]]
    assert len(shared) == 1, "the layer that uses a weight of another group fetches that group too"


def test_weight_aliases_saved_by_autograd_read_the_right_bytes(node):
    model, plain, _ = pair(net())
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    window = {id(p): p.data_ptr() for p in model.parameters()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        loss = loss_of(model, batch(0))
    aliases = [t for t in saved if any(t.data_ptr() == place for place in window.values())]
    assert len(aliases) >= 6, "autograd keeps views of the weights"
    inputs = {id(p): p for p in model.parameters()}
    for alias in aliases:
        owner = next(p for p in inputs.values() if p.data_ptr() == alias.data_ptr())
        assert torch.equal(
            alias.reshape(-1).sort().values, owner.detach().reshape(-1).sort().values
        )
    seen = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.__setitem__(name, g.clone()))
    loss.backward()
    loss_of(plain, batch(0)).backward()
    for name, p in plain.named_parameters():
        assert torch.equal(seen[name], p.grad), name
    opt.step()


def test_bfloat16_parameters_take_format_exact(node):
    model = net().to(torch.bfloat16)
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    losses = train(model, opt, 10)
    assert losses[-1] < losses[0]
    state = opt.read_state(
        "head.weight" if "head.weight" in dict(model.named_parameters()) else "embedding.weight"
    )
    assert list(state) == ["master", "exp_avg", "exp_avg_sq", "step"]
    assert state["master"].dtype == torch.float32 and state["step"] == 10

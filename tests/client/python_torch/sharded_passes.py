# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: several backward passes a step, and what torch's clip_grad_norm_ does with the
gradients that the daemon has."""

import contextlib
import io
import types

import forebay
import torch
import torch.distributed as dist
from forebay import _core
from forebay._report import size
from forebay.sharded import fsdp
from models import batch, loss_of, scaled_step
from sharded_ranks import Twins, assert_same, case, computes_on, full, refused, small_net
from torch import nn
from torch.distributed.fsdp import fully_shard

PASSES = 3


def backward_of_passes(twins, synchronize):
    """Of both; the gradient of the step is the mean over the passes."""
    for number in range(PASSES):
        tokens = twins.ranks.batch(100 * twins.first + number)
        for model in (twins.ours, twins.theirs):
            model.set_requires_gradient_sync(synchronize or number == PASSES - 1)
            (loss_of(model, tokens) / PASSES).backward()


def norm_of(result):
    return (result.full_tensor() if hasattr(result, "full_tensor") else result).item()


def clip(twins, max_norm):
    """Norms are of equal gradients, added in another order: 1e-5 of them covers that."""
    ours, theirs = (
        norm_of(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        for model in (twins.ours, twins.theirs)
    )
    assert abs(ours - theirs) <= 1e-5 * theirs, (ours, theirs)


def steps_of_passes(ranks, synchronize):
    twins = Twins(ranks).attach()
    for _ in range(4):
        backward_of_passes(twins, synchronize)
        twins.step()
        twins.first += 1
    twins.assert_close()


@case(1, 2, 3)
def passes_are_added(ranks):
    steps_of_passes(ranks, synchronize=True)


@case(2)
def passes_without_synchronization(ranks):
    steps_of_passes(ranks, synchronize=False)


@case(1, 2, 3)
def clip_grad_value(ranks):
    twins = Twins(ranks).attach()
    for _ in range(4):
        twins.backward(twins.first)
        for model in (twins.ours, twins.theirs):
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        twins.step()
        twins.first += 1
    twins.assert_close()
    twins.opt.detach()


@case(1, 2)
def a_factor_of_zero_or_below(ranks):
    twins = Twins(ranks).attach()
    for step, factor in enumerate((1.0, 0.0, -0.5, 1.0)):
        twins.backward(step)
        for parameter in (*twins.ours.parameters(), *twins.theirs.parameters()):
            parameter.grad.mul_(factor)
        twins.step()
    twins.assert_close()
    twins.opt.detach()


class Repeating(nn.Module):
    """Its layers are used three times in a forward."""

    def __init__(self):
        super().__init__()
        self.net = small_net()
        self.layers = self.net.layers

    def forward(self, tokens):
        x = self.net.embedding(tokens)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return self.net.head(self.net.norm(x))


@case(1, 2)
def layers_used_several_times_after_passes_without_synchronization(ranks):
    """FSDP2 reduces such a layer more than once in one backward."""
    twins = Twins(ranks, Repeating).attach()
    for _ in range(3):
        backward_of_passes(twins, synchronize=False)
        twins.step()
    twins.assert_close()
    twins.opt.detach()


@case(2)
def rank_0_prints_what_the_job_takes(ranks):
    """And once what passes without synchronization leave: whole gradients, 4 bytes an element."""
    with contextlib.redirect_stderr(io.StringIO()) as out:
        twins = Twins(ranks).attach(accumulate=PASSES)
        for _ in range(2):
            backward_of_passes(twins, synchronize=False)
            twins.step()
    count = sum(parameter.numel() for parameter in twins.theirs.parameters())
    lines = [line for line in out.getvalue().splitlines() if line.startswith("forebay: ")]
    if ranks.rank == 0:
        assert len(lines) == 4, lines
        assert f"{ranks.job} is sharded over 2 ranks: {count:,} parameters, adamw, fp32" in lines[0]
        types = "weights 4 (float32), gradients 4 to the daemon (float32) and 4 in their sums"
        assert lines[0].endswith(types), lines[0]
        assert "on swap" not in lines[1], lines[1]
        weights = sum(
            arena["size_bytes"]
            for arena in forebay.status()["memory"]["arenas"]
            if (arena["job"], arena["kind"]) == (ranks.job, "weights")
        )
        assert f"this node's DRAM: weights {weights / 1024:.1f} KiB" in lines[1], (lines[1], weights)
        takes = _core.plan("", ranks.job)
        for term, words in (("states", "states"), ("tables", "tables"), ("node", "the daemon itself")):
            assert f"{words} {size(takes[term])}" in lines[1], (lines[1], takes)
        assert lines[1].endswith(f"; of {size(takes['limit'])}"), lines[1]
        # FSDP2 holds a layer in use, the next layer, and the root, which stays gathered.
        layers = [sum(one.numel() for one in layer.parameters()) for layer in twins.theirs.layers]
        held = f"holds FSDP2's gathered groups itself, of rank 0 at most {size(count * 4)} in float32"
        assert held in lines[2], lines[2]
        assert f"{size(layers[0] * 4)} in use, {size(layers[1] * 4)} gathered ahead" in lines[2], lines[2]
        stays = size((count - sum(layers)) * 4)
        assert lines[2].endswith(f", and {stays} that stay from forward to backward"), lines[2]
        assert f"left {count * 4 / 1024:.1f} KiB of gradients" in lines[3], (lines[3], count * 4)
    else:
        assert not lines, lines
    twins.opt.detach()


def untied_net():
    model = small_net()
    model.head.weight = nn.Parameter(torch.ones_like(model.embedding.weight))
    return model


@case(1, 2)
def a_root_group_with_much_of_the_model_is_a_line_of_rank_0(ranks):
    """The line names the modules that are to be groups of their own. It is not printed if they are, or if they share
    their parameter."""

    def said(name, make, *names, train=True, attached=lambda model: model):
        model = make()
        for parameter in [] if train else [model.embedding.weight, model.head.weight]:
            parameter.requires_grad_(False)
        modules = [model.get_submodule(one) for one in names]
        ranks.shard(model, layers=[*modules, *model.layers])
        with contextlib.redirect_stderr(io.StringIO()) as out:
            opt = ranks.attach(attached(model), job=f"{ranks.job}.{name}")
        loss_of(model, ranks.batch(1)).backward()
        opt.step()
        opt.detach()
        return [line for line in out.getvalue().splitlines() if "reduced last" in line]

    lines = said("root", untied_net)
    if ranks.rank == 0:
        sizes = {name: one.numel() for name, one in untied_net().named_parameters()}
        root = sum(size for name, size in sizes.items() if not name.startswith("layers."))
        total = sum(sizes.values())
        numbers = f"group root holds {root:,} of {total:,} trained parameters ({root / total:.0%})"
        calls = "fully_shard(model.embedding) and fully_shard(model.head) before the call for the root"
        wrap = "sharding=forebay.Sharding(wrap=[..., model.embedding, model.head])"
        (line,) = lines
        assert numbers in line and calls in line and line.endswith(wrap), line
    else:
        assert lines == []
    # The root may be a part of the model.
    line = "".join(said("part", untied_net, attached=lambda model: nn.ModuleDict({"part": model})))
    assert ("fully_shard(model.part.embedding)" in line) == (ranks.rank == 0), line
    assert said("apart", untied_net, "embedding", "head") == []
    assert said("tied", small_net) == []
    assert said("frozen", untied_net, train=False) == []
    # One module suffices if the rest is small.
    line = "".join(said("half", untied_net, "embedding"))
    assert ("Write fully_shard(model.head) before" in line) == (ranks.rank == 0), line


@case(1, 2)
def zero_grad_drops_what_is_not_reduced(ranks):
    """torch's zero_grad() leaves it: FSDP2 has it, beside the parameters."""
    twins = Twins(ranks).attach().train(1)
    twins.ours.set_requires_gradient_sync(False)
    loss_of(twins.ours, ranks.batch(77)).backward()
    twins.ours.set_requires_gradient_sync(True)
    twins.opt.zero_grad()
    twins.train(2).assert_close()
    twins.opt.detach()


@case(1, 2, 3)
def clip_grad_norm_of_torch(ranks):
    twins = Twins(ranks).attach()
    for step in range(4):
        if step % 2:
            backward_of_passes(twins, synchronize=True)
        else:
            twins.backward(twins.first)
        # The first two steps scale gradients, later ones do not.
        clip(twins, 0.05 if step < 2 else 1e6)
        twins.step()
        twins.first += 1
    twins.assert_close()


@case(1, 2)
def a_grad_scaler(ranks):
    """Every rank skips the step that overflows on one, as with torch's AdamW."""
    twins = Twins(ranks).attach()
    scalers = [torch.amp.GradScaler(computes_on(), init_scale=256.0) for _ in range(2)]
    for step in range(4):
        overflows = step == 1 and ranks.rank == ranks.size - 1
        factor = float("inf") if overflows else 1.0
        scales = [
            scaled_step(model, opt, scaler, loss_of(model, ranks.batch(step)) * factor, max_norm=0.05)
            for model, opt, scaler in (
                (twins.ours, twins.opt, scalers[0]),
                (twins.theirs, twins.torch_opt, scalers[1]),
            )
        ]
        assert scales == [128.0 if step else 256.0] * 2, step
    assert twins.opt.committed_step == 3
    twins.assert_close()


@case(2)
def sums_of_16_bit_gradients(ranks):
    """They are float32 from attach on, or from the first step on that has a second pass: the same bits."""
    values = []
    for accumulate in (PASSES, 1):
        model = ranks.shard(small_net().to(torch.bfloat16))
        opt = ranks.attach(model, job=f"{ranks.job}.{accumulate}", accumulate=accumulate)
        for step, passes in enumerate((1, PASSES, 1, 2)):
            for number in range(passes):
                (loss_of(model, ranks.batch(10 * step + number)) / passes).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        assert opt.committed_step == 4
        values.append(full(model))
        opt.detach()
    assert_same(*values)


class Opaque(nn.Module):
    """Returns its loss in an object that nobody looks into."""

    def __init__(self):
        super().__init__()
        self.net = small_net()
        self.layers = self.net.layers

    def forward(self, tokens):
        return types.SimpleNamespace(loss=loss_of(self.net, tokens))


def loss_within(model, tokens):
    return model(tokens).loss


@case(1, 2)
def passes_of_a_model_whose_output_hides_its_tensors(ranks):
    """Nothing but the gradients themselves says that another backward has begun."""
    twins = Twins(ranks, Opaque, loss_within).attach()
    for step in range(3):
        for number in range(PASSES):
            twins.backward(10 * step + number)
        twins.step()
        twins.backward(10 * step + PASSES)
        with fails_in(twins.ours.layers[0]), contextlib.suppress(ZeroDivisionError):
            loss_within(twins.ours, ranks.batch(step)).backward()
        twins.theirs.zero_grad()
    twins.backward(99)
    twins.step()
    twins.assert_close()
    twins.opt.detach()


@contextlib.contextmanager
def fails_in(layer):
    """A backward, when it comes to the layer."""
    handle = layer.register_full_backward_pre_hook(lambda *_: 1 / 0)
    try:
        yield
    finally:
        handle.remove()


@case(2)
def what_a_gradient_does_not_take(ranks):
    twins = Twins(ranks).attach()
    twins.backward(1)
    first = next(twins.ours.parameters())
    for read in (
        lambda: first.grad.sum(),
        lambda: first.grad.full_tensor(),
        lambda: first.grad + 1,
        lambda: first.grad.clamp(-1, 1),
    ):
        with refused("E_UNSUPPORTED", "gradient of parameter", "2-norm"):
            read()
    nn.utils.clip_grad_norm_([first], 1e-9)
    with refused("E_UNSUPPORTED", "were scaled by", "all of them at once"):
        twins.opt.step()
    twins.opt.zero_grad()
    twins.theirs.zero_grad()
    twins.train(2).assert_close()


@case(2)
def a_backward_after_clipping(ranks):
    """The sum would be of gradients on two scales."""
    twins = Twins(ranks).attach()
    twins.backward(1)
    nn.utils.clip_grad_norm_(twins.ours.parameters(), 1e-3)
    message, hint = "second gradient after its gradient was scaled", r"opt.zero_grad\(\)"
    with refused("E_UNSUPPORTED", message, hint):
        loss_of(twins.ours, ranks.batch(78)).backward()
    twins.opt.zero_grad()
    twins.theirs.zero_grad()
    twins.train(2).assert_close()


@contextlib.contextmanager
def gloo_that_sums_where_the_mean_is_asked():
    """As that of torch 2.8 does, in silence (pytorch issue 162338)."""
    names = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}

    def summing(function):
        def reduce_scatter(*tensors, op, **options):
            return function(*tensors, op=dist.ReduceOp.SUM, **options)

        return reduce_scatter

    for name, function in before.items():
        setattr(dist, name, summing(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@case(1, 2, 3)
def gradients_are_means_over_the_ranks(ranks):
    """Of the gradients of one process, in another order of additions: 1e-5 of their norm covers that."""
    plain = small_net()
    for rank in range(ranks.size):
        (loss_of(plain, batch(100 + rank)) / ranks.size).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1e6).item()
    for number, gloo in enumerate((contextlib.nullcontext, gloo_that_sums_where_the_mean_is_asked)):
        with gloo():
            model = fully_shard(small_net(), mesh=ranks.mesh)
            opt = ranks.attach(model, job=f"{ranks.job}.{number}")
            loss_of(model, ranks.batch(1)).backward()
            norm = norm_of(nn.utils.clip_grad_norm_(model.parameters(), 1e6))
            assert abs(norm - wanted) <= 1e-5 * wanted, (number, norm, wanted)
            opt.step()
            opt.detach()


@case(2)
def an_fsdp2_without_what_is_used_of_it(ranks):
    """As that of torch 2.7, which cannot divide what gloo sums, and as others would be."""
    for name, gloo, message in (
        ("force_sum_reduction_for_comms", gloo_that_sums_where_the_mean_is_asked, "gloo sums the grad"),
        ("_post_forward_indices", contextlib.nullcontext, "FSDPParamGroup of its FSDP2 has no _post_"),
    ):
        model = fully_shard(small_net(), mesh=ranks.mesh)
        (unit,) = fsdp.units_of(model, "")
        value = vars(unit._group).pop(name)
        with gloo(), refused("E_UNSUPPORTED", message, "use torch 2.8 to"):
            ranks.attach(model)
        setattr(unit._group, name, value)
        ranks.attach(model, job=f"{ranks.job}.{name}").detach()

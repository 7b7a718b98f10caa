# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: a sharded attachment trains as torch's FSDP2 with torch's AdamW does."""

import contextlib
import copy
import io

import forebay
import torch
from forebay.sharded.shard_tensor import ShardTensor
from models import CheckpointedNet, Net, loss_of
from sharded_ranks import (
    LR,
    STEPS,
    Twins,
    assert_same,
    case,
    computes_on,
    full,
    refused,
    reshard,
    small_net,
    with_means,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


# -------------------------------------------------------------------------------------- the models


class Uneven(nn.Module):
    """Rows that no number of ranks from 2 on divides, and fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 2)])
        self.table = nn.Parameter(torch.randn(3, 64))
        self.scale = nn.Parameter(torch.ones(1))
        self.pair = nn.Parameter(torch.randn(2, 3, 5))

    def forward(self, x):
        first, second, third = self.layers
        hidden = torch.tanh(first(x))
        mixed = torch.einsum("brc,bc->br", self.pair[:, :, :], hidden.new_ones(2, 5)).sum(0)
        out = third(torch.tanh(second(hidden + mixed)))
        return out.sum(-1) * self.scale + (hidden @ self.table).square().mean(-1)


def loss_of_uneven(model, tokens):
    generator = torch.Generator("cpu").manual_seed(int(tokens.sum()))
    x = torch.randn(8, 5, generator=generator, device="cpu").to(torch.get_default_device())
    return (model(x) - x[:, 0]).square().mean()


class Unused(Net):
    """A layer, and a parameter of a layer, that no forward uses."""

    def __init__(self):
        super().__init__()
        self.layers[1].extra = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 3)


def made(kind, *args):
    def make():
        torch.manual_seed(1)
        return kind(*args)

    return make


# -------------------------------------------------------------------------- the same as torch's FSDP2


@case(1, 2, 3)
def tied_embedding(ranks):
    twins = Twins(ranks).attach().train()
    assert twins.ours.head.weight is twins.ours.embedding.weight
    twins.assert_close()
    assert len(set(ranks.everyone(twins.opt.state_sha256()))) == 1
    twins.opt.detach()


@case(1, 2, 3)
def uneven_and_empty_shards(ranks):
    twins = Twins(ranks, Uneven, loss_of_uneven).attach()
    empty = [name for name, p in twins.ours.named_parameters() if p.to_local().numel() == 0]
    if ranks.size == 3:
        assert ("scale" in empty) == (ranks.rank > 0) and ("pair" in empty) == (ranks.rank > 1)
    twins.train().assert_close()
    twins.opt.detach()


@case(2)
def one_group_for_the_whole_model(ranks):
    twins = Twins(ranks, layers=[]).attach()
    twins.train().assert_close()
    twins.opt.detach()


@case(2)
def a_model_of_which_modules_share_a_group(ranks):
    twins = Twins(ranks, layers=[])
    for model in (twins.ours, twins.theirs):
        assert not any(isinstance(p, ShardTensor) for p in model.parameters())
    grouped = [small_net(), small_net()]
    for model in grouped:
        fully_shard([model.layers[0], model.layers[1]], mesh=ranks.mesh)
        with_means(fully_shard(model, mesh=ranks.mesh))
    twins.ours, twins.theirs = grouped
    twins.attach().train().assert_close()
    twins.opt.detach()


@case(2, 3)
def unused_parameters_stay_as_they_were(ranks):
    twins = Twins(ranks, made(Unused)).attach()
    before = full(twins.ours)
    twins.train().assert_close()
    after = full(twins.ours)
    for name in ("spare.weight", "spare.bias", "layers.1.extra.weight"):
        assert torch.equal(after[name], before[name]), name
        state = twins.opt.read_state(name)
        assert state["step"] == 0 and not state["exp_avg"].any(), name
    assert twins.opt.read_state("norm.weight")["step"] == STEPS
    twins.opt.detach()


@case(1, 2)
def frozen_parameters_stay_as_they_were(ranks):
    def make():
        model = small_net()
        for parameter in (model.embedding.weight, model.layers[0].up.bias, *model.norm.parameters()):
            parameter.requires_grad_(False)
        return model

    twins = Twins(ranks, make).attach()
    before = full(twins.ours)
    twins.train().assert_close()
    assert torch.equal(full(twins.ours)["embedding.weight"], before["embedding.weight"])
    assert twins.opt.read_state("embedding.weight") == {}
    twins.opt.detach()


class Skipping(Net):
    """Skips its second layer in every other forward."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number != 1 or self.calls % 2:
                x = layer(x)
        return self.head(self.norm(x))


@case(2)
def a_group_that_some_steps_skip(ranks):
    twins = Twins(ranks, made(Skipping)).attach()
    twins.train().assert_close()
    assert twins.opt.read_state("layers.1.up.weight")["step"] == (STEPS + 1) // 2
    assert twins.opt.read_state("layers.0.up.weight")["step"] == STEPS
    twins.opt.detach()


@case(2, 3)
def shards_of_columns(ranks):
    def placement(parameter):
        return Shard(1 if parameter.dim() == 2 and parameter.shape[1] % ranks.size == 0 else 0)

    twins = Twins(ranks, made(Net, 2, 12), shard_placement_fn=placement).attach()
    local = twins.ours.layers[0].up.weight.to_local()
    assert local.shape == (24, 12 // ranks.size)
    twins.train().assert_close()
    want = twins.torch_opt.state[twins.theirs.layers[0].up.weight]["exp_avg"].full_tensor()
    read = twins.opt.read_state("layers.0.up.weight")["exp_avg"]
    torch.testing.assert_close(read, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    assert len(set(ranks.everyone(twins.opt.state_sha256()))) == 1
    twins.opt.detach()


@case(2)
def tensor_parallelism_within_a_layer(ranks):
    """Columns of one matrix and rows of the other on each rank; both have the same batch."""
    meshes = init_device_mesh(computes_on(), (1, ranks.size), mesh_dim_names=("data", "tensor"))
    ranks.mesh = meshes["data"]

    def make():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
        return parallelize_module(
            model, meshes["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )

    def loss(model, _tokens):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(twins.first))
        return model(x).square().mean()

    twins = Twins(ranks, make, loss, layers=[]).attach()
    assert twins.ours[0].weight.to_local().shape == (16 // ranks.size, 8)
    twins.train().assert_close()
    twins.opt.detach()


def checkpointed(ranks, reentrant):
    twins = Twins(ranks, made(CheckpointedNet, reentrant)).attach()
    twins.train().assert_close()
    twins.opt.detach()


@case(1, 2)
def checkpointing_that_is_reentrant(ranks):
    checkpointed(ranks, reentrant=True)


@case(2)
def checkpointing_that_is_not_reentrant(ranks):
    checkpointed(ranks, reentrant=False)


def resharded(ranks, after_forward):
    """Evaluates before backward, between backward and step(), and after it: what is gathered when
    the step commits is not used again. torch's FSDP2 would use it where it is not resharded."""
    twins = Twins(ranks, reshard_after_forward=after_forward).attach()
    for _ in range(STEPS):
        evaluate(twins)
        twins.backward(twins.first)
        evaluate(twins)
        before = evaluate(twins)
        twins.step()
        reshard(twins.theirs)
        assert evaluate(twins) != before
        twins.first += 1
    for model in (twins.ours, twins.theirs):
        reshard(model)
    twins.assert_close()
    twins.opt.detach()


def evaluate(twins):
    tokens = twins.ranks.batch(1000)
    with torch.no_grad():
        ours, theirs = (loss_of(model, tokens).item() for model in (twins.ours, twins.theirs))
    assert abs(ours - theirs) <= 1e-5 * abs(theirs), (twins.first, ours, theirs)
    return ours


@case(2)
def evaluation_between_steps(ranks):
    resharded(ranks, after_forward=True)


@case(1, 2, 3)
def evaluation_between_steps_without_reshard_after_forward(ranks):
    resharded(ranks, after_forward=False)


@case(1, 2)
def a_plain_model_with_mode_sharded(ranks):
    twins = Twins(ranks)
    twins.ours = small_net()
    twins.attach(mode="sharded", sharding=forebay.Sharding(mesh=ranks.mesh))
    assert [type(layer).__name__ for layer in twins.ours.layers] == ["FSDPBlock"] * 2
    twins.train().assert_close()
    twins.opt.detach()


@case(2)
def a_plain_model_with_wrap_and_without_reshard(ranks):
    twins = Twins(ranks)
    twins.ours = small_net()
    wrap = [twins.ours.layers[0].up]
    sharding = forebay.Sharding(mesh=ranks.mesh, wrap=wrap, reshard_after_forward=False)
    twins.attach(mode="sharded", sharding=sharding)
    assert type(twins.ours.layers[1]).__name__ == "Block"
    assert type(twins.ours.layers[0].up).__name__ == "FSDPLinear"
    twins.train().assert_close()
    twins.opt.detach()


@case(1, 2, 3)
def bfloat16_parameters_with_exact_masters(ranks):
    """Torch's side has the masters as its parameters and computes with their rounding to bfloat16,
    as ours does. FSDP2 gives us the reduced float32 gradient as bfloat16, the type of the parameter:
    off by 2^-9 of itself, and so is each of the two moments; an update of at most 10 lr by less
    than 2^-7 of that. Losses are sums of bfloat16 products of weights that may round the other
    way: 2^-8 of the few units that logits have."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    ours = ranks.shard(small_net().bfloat16(), mp_policy=policy)
    theirs = small_net().bfloat16().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks.shard(theirs, mp_policy=policy)
    opt = ranks.attach(ours, forebay.AdamW(lr=LR, format="exact"))
    torch_opt = torch.optim.AdamW(theirs.parameters(), lr=LR)
    for step in range(1, STEPS + 1):
        losses = [loss_of(model, ranks.batch(step)) for model in (ours, theirs)]
        assert abs(losses[0].item() - losses[1].item()) <= 2**-6, (step, losses)
        for loss in losses:
            loss.backward()
        opt.step()
        torch_opt.step()
        torch_opt.zero_grad()
    for name, values in full(theirs).items():
        master = opt.read_state(name)["master"]
        torch.testing.assert_close(master, values.cpu(), rtol=1e-6, atol=STEPS * 10 * LR * 2**-7)
        rounded = full(ours)[name].cpu()
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded, master.bfloat16(), rtol=2**-8, atol=0)
    opt.detach()


@case(2, 3)
def replicas_of_shards(ranks):
    """A mesh of two dimensions (HSDP): of each shard all replicas train, one of them owns it."""
    shape = (ranks.size, 1) if ranks.size % 2 else (2, ranks.size // 2)
    mesh = init_device_mesh(computes_on(), shape, mesh_dim_names=("replicate", "shard"))
    ranks.mesh = mesh
    twins = Twins(ranks).attach().train()
    twins.assert_close()
    twins.opt.detach()


@case(2)
def pipeline_stages_with_a_prefix_each(ranks):
    """Each rank trains a model of its own within one job."""
    meshes = init_device_mesh(computes_on(), (ranks.size, 1), mesh_dim_names=("stage", "data"))
    ranks.mesh = meshes["data"]
    twins = Twins(ranks).attach(sharding=forebay.Sharding(name_prefix=f"stage{ranks.rank}."))
    twins.train().assert_close()
    name = f"stage{ranks.rank}.norm.weight"
    want = twins.torch_opt.state[twins.theirs.norm.weight]["exp_avg"].full_tensor()
    torch.testing.assert_close(twins.opt.read_state(name)["exp_avg"], want, rtol=1e-5, atol=1e-8)
    twins.opt.detach()


# ------------------------------------------------------- float32 parameters computed in 16 bits

WIDE_STEPS = 6


def wide_twins(ranks, make=small_net, loss=loss_of, dtype=torch.bfloat16, reduce=torch.float32):
    """Both have float32 masters and compute with their roundings to 16 bits. These are the same until
    a master that differs by some roundings of float32 rounds the other way, as about one in 2^8 does:
    by 2^-8 of itself. A loss of some units, whose gradients are below 1, then differs by less than
    1e-3 of itself."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
    return Twins(ranks, make, loss, loss_bound=1e-3, mp_policy=policy)


def assert_computes_the_same(twins):
    """Bit by bit: the values of the parameters, and what the model computes with them. No master here is a
    tie of two bfloat16 values, which the daemon rounds away from zero and torch to even."""
    assert_same(full(twins.ours), full(twins.theirs))
    with torch.no_grad():
        ours, theirs = (
            twins.loss(model, twins.ranks.batch(500)) for model in (twins.ours, twins.theirs)
        )
    assert ours.isfinite() and torch.equal(ours, theirs)
    for model in (twins.ours, twins.theirs):
        reshard(model)


def train_wide(twins, optimizer=None, **options):
    """The first loss is equal to the bit. Gradients differ where weights round the other way, by
    2^-8 of themselves, and by what the format of the moments rounds: an update, of at most 10 lr, by
    less than 2^-6 of that."""
    before = full(twins.ours)
    twins.attach(optimizer, **options)
    for parameter in twins.ours.parameters():
        assert parameter.dtype == torch.float32
    assert_same(full(twins.ours), before)
    assert_computes_the_same(twins)
    twins.train(WIDE_STEPS).assert_close(atol=WIDE_STEPS * 10 * LR * 2**-6)
    return twins


@case(2, 3)
def float32_masters_of_bfloat16_weights(ranks):
    """Reads give the masters, each in its own bits; detach() leaves them."""
    twins = train_wide(wide_twins(ranks))
    after = full(twins.ours)
    owned = sum(p.to_local().numel() for p in twins.ours.parameters())
    assert twins.opt.stats()["grad_bytes"] == 4 * WIDE_STEPS * owned, "in float32, as reduced"
    for name, values in after.items():
        assert torch.equal(twins.opt.read_state(name)["master"], values), name
        assert not torch.equal(values.bfloat16().float(), values), name
    assert len(set(ranks.everyone(twins.opt.state_sha256()))) == 1
    twins.opt.detach()
    assert_same(full(twins.ours), after)
    with torch.no_grad():
        for ours, theirs in zip(twins.ours.parameters(), twins.theirs.parameters()):
            theirs.copy_(ours)
    assert_computes_the_same(twins)


@case(2)
def every_format_of_wide_masters(ranks):
    for format_ in ("fp32", "bf16", "int8"):
        optimizer = forebay.AdamW(lr=LR, format=format_)
        train_wide(wide_twins(ranks), optimizer, job=f"{ranks.job}.{format_}").opt.detach()


@case(2)
def float16_weights(ranks):
    train_wide(wide_twins(ranks, dtype=torch.float16)).opt.detach()


@case(2)
def gradients_reduced_in_16_bits(ranks):
    twins = train_wide(wide_twins(ranks, reduce=None))
    owned = sum(p.to_local().numel() for p in twins.ours.parameters())
    assert twins.opt.stats()["grad_bytes"] == 2 * WIDE_STEPS * owned
    twins.opt.detach()


@case(3)
def uneven_and_empty_shards_of_wide_masters(ranks):
    train_wide(wide_twins(ranks, Uneven, loss_of_uneven)).opt.detach()


@case(2)
def a_wide_job_resumes_with_the_same_bits(ranks):
    def sharded(seed):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return ranks.shard(small_net(seed), mp_policy=policy)

    model = sharded(seed=1)
    opt = ranks.attach(model)
    train_alone(ranks, model, opt, range(1, 4))
    opt.detach()
    model = sharded(seed=50 + ranks.rank)
    opt = ranks.attach(model, resume=True)
    train_alone(ranks, model, opt, range(4, 7))
    whole = sharded(seed=1)
    whole_opt = ranks.attach(whole, job=f"{ranks.job}.whole")
    train_alone(ranks, whole, whole_opt, range(1, 7))
    assert opt.committed_step == 6 and opt.state_sha256() == whole_opt.state_sha256()
    assert_same(full(model), full(whole))
    opt.detach()
    whole_opt.detach()


# ------------------------------------------------------------------------------- hyper-parameters


@case(1, 3)
def max_grad_norm_is_the_norm_of_all_shards(ranks):
    twins = Twins(ranks).attach(forebay.AdamW(lr=LR, max_grad_norm=0.5))
    for step in range(1, STEPS + 1):
        twins.backward(step)
        norm = nn.utils.clip_grad_norm_(twins.theirs.parameters(), 0.5).full_tensor().item()
        assert norm > 0.5, "nothing to clip"
        twins.step()
        assert abs(twins.opt.grad_norm - norm) <= 1e-5 * norm, (twins.opt.grad_norm, norm)
    twins.assert_close()
    twins.opt.detach()


@case(2)
def two_param_groups_and_a_scheduler(ranks):
    twins = Twins(ranks)

    def groups(model):
        slow = [model.embedding.weight, *model.layers[0].parameters()]
        ids = {id(p) for p in slow}
        rest = [p for p in model.parameters() if id(p) not in ids]
        return [{"params": slow, "lr": LR / 10, "weight_decay": 0.1}, {"params": rest}]

    twins.attach(param_groups=groups(twins.ours))
    twins.torch_opt = torch.optim.AdamW(groups(twins.theirs), lr=LR)
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4) for opt in (twins.opt, twins.torch_opt)
    ]
    for _ in range(STEPS):
        twins.train(1)
        for scheduler in schedulers:
            scheduler.step()
    rates = [group["lr"] for group in twins.opt.param_groups]
    assert rates == schedulers[1].get_last_lr() and rates[0] < rates[1] < LR
    twins.assert_close()
    twins.opt.detach()


@case(2)
def param_groups_of_a_plain_model(ranks):
    """attach shards it, and replaces the parameters that the groups name."""

    def groups(model):
        matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == is_one] for is_one in (True, False))
        return [{"params": matrices, "lr": LR / 10, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    for given in ("param_groups", "params"):
        twins = Twins(ranks)
        twins.ours = small_net()
        listed = groups(twins.ours)
        options = {"param_groups": listed} if given == "param_groups" else {}
        optimizer = None if options else forebay.AdamW(lr=LR, params=listed)
        twins.attach(optimizer, job=f"{ranks.job}.{given}", mode="sharded", sharding=forebay.Sharding(mesh=ranks.mesh), **options)
        twins.torch_opt = torch.optim.AdamW(groups(twins.theirs), lr=LR)
        twins.train().assert_close()
        twins.opt.detach()


@case(2)
def other_optimizers(ranks):
    for ours, theirs in (
        (forebay.SGD(lr=LR, momentum=0.9, nesterov=True), torch.optim.SGD),
        (forebay.Adagrad(lr=LR), torch.optim.Adagrad),
        (forebay.Adam(lr=LR, weight_decay=0.1, amsgrad=True), torch.optim.Adam),
    ):
        twins = Twins(ranks).attach(ours, job=f"{ranks.job}.{ours.name}")
        options = {key: getattr(ours, key) for key in ours.hyper_parameters}
        for flag in ("nesterov", "amsgrad"):
            if hasattr(ours, flag):
                options[flag] = getattr(ours, flag)
        twins.torch_opt = theirs(twins.theirs.parameters(), **options)
        twins.train(3).assert_close()
        twins.opt.detach()


# ---------------------------------------------------------------------------------------- reading


@case(1, 2, 3)
def every_read_gives_the_present_values(ranks):
    twins = Twins(ranks).attach()
    early = twins.ours.state_dict()
    twins.train(2)
    weight = twins.ours.layers[1].up.weight
    whole = weight.full_tensor()
    want = twins.theirs.layers[1].up.weight
    torch.testing.assert_close(whole, want.full_tensor(), rtol=1e-6, atol=1e-6)
    part = weight.detach().to_local()
    assert torch.equal(part * 1, copy.deepcopy(part)) and torch.equal(part.clone(), part + 0)
    assert torch.equal(copy.deepcopy(weight).full_tensor(), whole)
    torch.testing.assert_close(part * 1, want.to_local(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weight.sum().full_tensor(), whole.sum())
    assert torch.equal((weight * 2).full_tensor(), whole * 2)
    assert torch.equal(weight.detach().clone().full_tensor(), whole)
    assert repr(part * 1) in repr(weight) and part.tolist() == (part * 1).tolist()
    assert (part.numpy(force=True) == (part * 1).numpy(force=True)).all()
    assert part[0, 0].item() == part.tolist()[0][0]
    for values in (early, twins.ours.state_dict()):
        assert torch.equal(values["layers.1.up.weight"].full_tensor(), whole)
    options = StateDictOptions(full_state_dict=True)
    exported = get_model_state_dict(twins.ours, options=options)
    assert torch.equal(exported.pop("head.weight"), exported["embedding.weight"])
    assert_same(exported, full(twins.ours))
    file = io.BytesIO()
    torch.save(part, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    assert type(saved) is torch.Tensor and torch.equal(saved, part * 1)
    twins.train(1).assert_close()
    assert not torch.equal(part * 1, saved), "a read after a step has the new values"
    saved = part * 1
    twins.opt.detach()
    assert torch.equal(part * 1, saved), "what was read from before goes on"
    assert torch.equal(early["layers.1.up.weight"].full_tensor(), weight.full_tensor())


@case(1, 2, 3)
def read_state_is_torchs_state(ranks):
    twins = Twins(ranks, Uneven, loss_of_uneven).attach().train()
    for (name, _), theirs in zip(twins.ours.named_parameters(), twins.theirs.parameters()):
        state = twins.torch_opt.state[theirs]
        read = twins.opt.read_state(name)
        assert read["step"] == state["step"] == STEPS
        # Each moment is a sum of STEPS terms. Each term is rounded a few times, and its gradient differs as the weights do.
        for key in ("exp_avg", "exp_avg_sq"):
            want = state[key].full_tensor().cpu()
            bound = 1e-5 * want.abs().max().item()
            torch.testing.assert_close(read[key], want, rtol=1e-5, atol=bound)
    twins.opt.detach()


# ----------------------------------------------------------------------------- attempts at a step


@case(2)
def zero_grad_between_forward_and_backward(ranks):
    """As many training loops call it."""
    twins = Twins(ranks).attach()
    for step in range(1, STEPS + 1):
        losses = [loss_of(model, ranks.batch(step)) for model in (twins.ours, twins.theirs)]
        twins.opt.zero_grad()
        for loss in losses:
            loss.backward()
        twins.step()
    twins.assert_close()
    twins.opt.detach()


@case(2)
def zero_grad_leaves_a_batch_out(ranks):
    twins = Twins(ranks).attach().train(1)
    loss_of(twins.ours, ranks.batch(77)).backward()
    assert twins.opt.delivered_groups > 0
    twins.opt.zero_grad()
    assert twins.opt.delivered_groups == 0
    assert all(p.grad is None for p in twins.ours.parameters())
    twins.train(3).assert_close()
    twins.opt.detach()


class Interrupted(Exception):
    """What a user's code raises."""


def interrupted(function):
    try:
        function()
    except Interrupted:
        return
    raise AssertionError("it was not interrupted")


def fail(*_args):
    raise Interrupted


def loss_that_fails(twins):
    """Of ours; its backward, in the midst, until the handle is removed."""
    hidden = []
    handle = twins.ours.layers[1].register_forward_hook(lambda _m, _i, out: hidden.append(out))
    loss = loss_of(twins.ours, twins.ranks.batch(77))
    handle.remove()
    return loss, hidden[0].register_hook(fail)


@case(1, 2)
def an_exception_in_backward(ranks):
    twins = Twins(ranks).attach().train(1)
    loss, _ = loss_that_fails(twins)
    interrupted(loss.backward)
    with refused("E_GRAD_PARTIAL", "only a part of the gradient", "forward and backward again"):
        twins.opt.step()
    twins.train(3).assert_close()
    assert twins.opt.committed_step == 4
    twins.opt.detach()


@case(2)
def an_exception_in_backward_and_zero_grad(ranks):
    twins = Twins(ranks).attach().train(1)
    loss, _ = loss_that_fails(twins)
    interrupted(loss.backward)
    twins.opt.zero_grad()
    twins.train(3).assert_close()
    twins.opt.detach()


@case(2)
def a_retained_graph_after_an_exception(ranks):
    """FSDP2 still has a part of the first gradient."""
    twins = Twins(ranks).attach().train(1)
    loss, handle = loss_that_fails(twins)
    interrupted(lambda: loss.backward(retain_graph=True))
    handle.remove()
    with refused("E_GRAD_PARTIAL", "without a forward", "forward and backward again"):
        loss.backward()
    twins.train(3).assert_close()
    twins.opt.detach()


@case(2)
def a_gradient_that_is_not_finite(ranks):
    """step() raises on every rank and applies nothing."""
    twins = Twins(ranks).attach().train(1)
    digest = twins.opt.state_sha256()
    handle = twins.ours.layers[0].register_full_backward_pre_hook(
        lambda _module, gradients: tuple(g * float("inf") for g in gradients)
    )
    loss_of(twins.ours, ranks.batch(77)).backward()
    handle.remove()
    with refused("E_NONFINITE", "group (embedding|root|layers.0|[0-9])", "."):
        twins.opt.step()
    assert (twins.opt.committed_step, twins.opt.state_sha256()) == (1, digest)
    twins.train(2).assert_close()
    twins.opt.detach()


@case(2)
def an_exception_in_forward(ranks):
    twins = Twins(ranks).attach().train(1)
    handle = twins.ours.layers[1].register_forward_pre_hook(fail)
    interrupted(lambda: loss_of(twins.ours, ranks.batch(77)))
    handle.remove()
    twins.train(3).assert_close()
    twins.opt.detach()


# ----------------------------------------------------------------------------------- the life time


@case(1, 2, 3)
def detach_leaves_a_plain_fsdp2_model(ranks):
    twins = Twins(ranks, Uneven, loss_of_uneven).attach().train(2)
    before = full(twins.ours)
    twins.opt.detach()
    assert_same(full(twins.ours), before)
    for name, parameter in twins.ours.named_parameters():
        assert type(parameter.to_local()) is torch.Tensor and parameter.grad is None, name
        assert not parameter._post_accumulate_grad_hooks, name
    with torch.no_grad():  # equal values again, so that both can be compared
        for ours, theirs in zip(twins.ours.parameters(), twins.theirs.parameters()):
            theirs.copy_(ours)
    twins.opt = torch.optim.AdamW(twins.ours.parameters(), lr=LR)
    twins.torch_opt = torch.optim.AdamW(twins.theirs.parameters(), lr=LR)
    for step in range(3, 6):
        twins.backward(step)
        twins.step()
        twins.opt.zero_grad()
    assert_same(full(twins.ours), full(twins.theirs))
    twins.ours.load_state_dict(twins.theirs.state_dict())


@case(1, 2)
def dropping_the_optimizer_leaves_a_plain_fsdp2_model(ranks):
    twins = Twins(ranks).attach().train(2)
    before = full(twins.ours)
    twins.opt = None
    assert_same(full(twins.ours), before)
    for name, parameter in twins.ours.named_parameters():
        assert type(parameter.to_local()) is torch.Tensor and parameter.grad is None, name


@case(2, 3)
def a_second_attach_goes_on_at_the_committed_step(ranks):
    twins = Twins(ranks).attach().train(2)
    digest = twins.opt.state_sha256()
    twins.opt.step(extra_state=bytes([ranks.rank]))
    twins.opt.detach()
    twins.ours = ranks.shard(small_net(seed=9 + ranks.rank))
    twins.opt = ranks.attach(twins.ours)
    assert (twins.opt.committed_step, twins.opt.extra_state) == (3, bytes([ranks.rank]))
    assert twins.opt.state_sha256() == digest, "a step without gradients changes nothing"
    twins.train(2).assert_close()
    twins.opt.detach()


RESUME_STEPS = 6


def train_alone(ranks, model, opt, steps):
    for step in steps:
        loss_of(model, ranks.batch(step)).backward()
        opt.step()


@case()
def half_of_the_steps(ranks):
    model = ranks.shard(small_net())
    opt = ranks.attach(model, job=f"resume.{ranks.size}")
    train_alone(ranks, model, opt, range(1, RESUME_STEPS // 2 + 1))
    ranks.kept = model, opt
    KEPT.append(ranks)  # attached until the process ends


KEPT = []


@case()
def the_other_half(ranks):
    model = ranks.shard(small_net(seed=50 + ranks.rank))
    opt = ranks.attach(model, job=f"resume.{ranks.size}", resume=True)
    assert opt.committed_step == RESUME_STEPS // 2
    train_alone(ranks, model, opt, range(RESUME_STEPS // 2 + 1, RESUME_STEPS + 1))
    whole = ranks.shard(small_net())
    whole_opt = ranks.attach(whole, job=f"whole.{ranks.size}")
    train_alone(ranks, whole, whole_opt, range(1, RESUME_STEPS + 1))
    assert opt.state_sha256() == whole_opt.state_sha256()
    assert len(set(ranks.everyone(opt.state_sha256()))) == 1
    assert_same(full(model), full(whole))
    opt.detach()
    whole_opt.detach()

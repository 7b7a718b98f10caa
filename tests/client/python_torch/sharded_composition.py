# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: sharded attachment with tensor parallelism, pipelines and both trains as one
process does on the same data."""

import forebay
import torch
from models import CheckpointedNet, Net, batch, loss_of
from sharded_ranks import LR, STEPS, Twins, case, computes_on, full, refused, small_net
from sharded_refusals import at_attach
from sharded_training import Interrupted, interrupted, loss_that_fails, train_wide
from sharded_writes import load_in_every_way
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

EPS = 1e-3
MAX_NORM = 0.25
CHUNKS = 4  # microbatches of a pipeline
ROWS, LENGTH, VOCAB = 8, 6, 11


def adamw():
    return forebay.AdamW(lr=LR, eps=EPS, max_grad_norm=MAX_NORM)


class OneProcess:
    """A plain model, and torch's AdamW over it: the same on every rank."""

    def __init__(self, model, loss=loss_of):
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
        self.norm = 0.0

    def step(self, batches, max_norm):
        """One step on all of them, which are equally large; returns the losses."""
        losses = [self.loss(self.model, tokens) for tokens in batches]
        (sum(losses) / len(losses)).backward()
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()
        assert self.norm > max_norm, "nothing to clip"
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def assert_close(self, ours):
        """`ours` are whole parameters by name. Sums over the ranks are in another order: a gradient
        of this size, below 1, differs by less than 1e-6. Of it an update takes at most lr / EPS (its
        derivative with respect to a gradient is largest where the second moment is 0), so STEPS steps
        STEPS * 1e-6 at most; they move a weight by some STEPS * 1e-3."""
        theirs = dict(self.model.named_parameters())
        for name, values in ours.items():
            want = theirs[name].detach()
            torch.testing.assert_close(
                values, want, rtol=1e-6, atol=STEPS * 1e-6, msg=lambda text: f"{name}: {text}"
            )

    def assert_close_states(self, model, opt):
        """Moments are sums of gradients, below 1, and of their squares."""
        theirs = dict(self.model.named_parameters())
        for name, _ in model.named_parameters():
            state = self.optimizer.state[theirs[name]]
            read = opt.read_state(name)
            assert read["step"] == state["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(read[key], state[key], rtol=1e-5, atol=1e-6)


def assert_same_loss(ours, theirs):
    assert abs(ours - theirs) <= 1e-5 * abs(theirs), (ours, theirs)


def assert_same_norm(opt, one):
    """Each element counts once."""
    assert abs(opt.grad_norm - one.norm) <= 1e-5 * one.norm, (opt.grad_norm, one.norm)


# ---------------------------------------------------------------------------------- tensor parallel


def parallelized(model, mesh, data=("dp",), **options):
    """Up by columns, down by rows, whose bias both tensor-parallel ranks have; norms, embedding and
    head are plain tensors, the same on both. `data` are the dimensions that FSDP2 uses."""
    for layer in layers_of(model):
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh[data], **options)
    return fully_shard(model, mesh=mesh[data], **options)


def layers_of(model):
    layers = model.layers
    return layers.values() if isinstance(layers, nn.ModuleDict) else layers


def mesh_of(**dims):
    return init_device_mesh(computes_on(), tuple(dims.values()), mesh_dim_names=tuple(dims))


def untied(seed=1, layers=2):
    torch.manual_seed(seed)
    model = Net(layers=layers)
    model.head.weight = nn.Parameter(torch.randn(VOCAB, 8) / 8)
    return model


def part_in(mesh):
    """Which batch of how many this rank has."""
    return mesh["dp"].get_local_rank(), mesh["dp"].size()


def train(model, opt, one, part, steps):
    """Both, on a batch for each data-parallel rank; norms are those of each element once."""
    own, count = part
    for step in steps:
        batches = [batch(100 * step + number) for number in range(count)]
        loss = loss_of(model, batches[own])
        loss.backward()
        opt.step()
        assert_same_loss(loss.item(), one.step(batches, max_norm=MAX_NORM)[own])
        assert_same_norm(opt, one)


@case(4)
def tensor_parallel_shards(ranks):
    mesh = mesh_of(dp=2, tp=2)
    one = OneProcess(untied())
    model = parallelized(untied(), mesh)
    up, down = model.layers[0].up.weight, model.layers[0].down.weight
    assert up.to_local().shape == (4, 8) and down.to_local().shape == (4, 8), "of 16 x 8, 8 x 16"
    opt = ranks.attach(model, adamw())
    train(model, opt, one, part_in(mesh), range(1, 4))
    digest = opt.state_sha256()
    assert len(set(ranks.everyone(digest))) == 1
    opt.detach()
    one.assert_close(full(model))
    model = parallelized(untied(seed=9 + ranks.rank), mesh)
    opt = ranks.attach(model, adamw())
    assert (opt.committed_step, opt.state_sha256()) == (3, digest)
    train(model, opt, one, part_in(mesh), range(4, STEPS + 1))
    one.assert_close(full(model))
    one.assert_close_states(model, opt)
    opt.detach()


@case(4)
def checkpointing_of_tensor_parallel_shards(ranks):
    mesh = mesh_of(dp=2, tp=2)
    for reentrant in (True, False):
        one = OneProcess(checkpointed(reentrant))
        model = parallelized(checkpointed(reentrant), mesh)
        opt = ranks.attach(model, adamw(), job=f"{ranks.job}.{reentrant}")
        train(model, opt, one, part_in(mesh), range(1, 4))
        one.assert_close(full(model))
        opt.detach()


def checkpointed(reentrant):
    torch.manual_seed(1)
    return CheckpointedNet(reentrant)


@case(4)
def loading_of_tensor_parallel_shards(ranks):
    """And training of float32 masters computed in bfloat16, beside torch's."""
    mesh = mesh_of(dp=2, tp=2)
    data = mesh["dp"].get_local_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks.shard = lambda model: parallelized(model, mesh, mp_policy=policy)
    ranks.batch = lambda step: batch(100 * step + data)
    twins = train_wide(Twins(ranks, loss_bound=1e-3))
    load_in_every_way(twins)
    twins.train(2).assert_close(atol=2 * 10 * LR * 2**-6)
    twins.opt.detach()


class Matrices(nn.Module):
    """Without plain tensors, whose norms torch cannot add to those of the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


@case(4)
def clip_grad_norm_of_tensor_parallel_shards(ranks):
    """torch's, of parameters that both tensor-parallel ranks have among them."""
    mesh = mesh_of(dp=2, tp=2)
    data = mesh["dp"].get_local_rank()
    one = OneProcess(Matrices(), loss=lambda model, x: (model(x) - x).square().mean())
    model = Matrices()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    opt = ranks.attach(model, forebay.AdamW(lr=LR, eps=EPS))
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(4, 8, generator=generator) for _ in range(2)]
        (model(batches[data]) - batches[data]).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor().item()
        opt.step()
        one.step(batches, max_norm=MAX_NORM)
        assert abs(norm - one.norm) <= 1e-5 * one.norm, (norm, one.norm)
    one.assert_close(full(model))
    opt.detach()


@case(4)
def writes_into_tensor_parallel_shards(ranks):
    """Of a plain tensor and of one that is replicated by tensor parallelism, whose owner is another
    rank for two of the four: each reads what was written, however late the owner comes to it."""
    mesh = mesh_of(dp=2, tp=2)
    model = parallelized(untied(), mesh)
    opt = ranks.attach(model, adamw())
    plain, replicated, rows = (
        model.norm.weight,
        model.layers[0].down.bias,
        model.layers[0].up.weight,
    )
    wants = [parameter.to_local() * 1 for parameter in (plain, replicated, rows)]
    for number in range(20):
        for parameter, want in zip((plain, replicated, rows), wants):
            with torch.no_grad():
                parameter.mul_(1 - number / 100)
            want.mul_(1 - number / 100)
            assert torch.equal(parameter.to_local() * 1, want), number
    opt.detach()


# ----------------------------------------------------------------------------------------- pipelines


class Stage(nn.Module):
    """One layer of an untied Net, with its names; the first has the embedding, the last the head."""

    def __init__(self, number, whole):
        super().__init__()
        if number == 0:
            self.embedding = whole.embedding
        self.layers = nn.ModuleDict({str(number): whole.layers[number]})
        if number == len(whole.layers) - 1:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x):
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def token_loss(logits, targets):
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rows(step, data=0):
    generator = torch.Generator().manual_seed(100 * step + data)
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)


def inputs_of(tokens):
    """Contiguous: torch 2.8's stages compare strides."""
    return tokens[:, :-1].contiguous()


class Pipeline:
    """This rank's stage of two, or its stages by number, and a schedule of CHUNKS microbatches."""

    def __init__(self, mesh, kind, model, **options):
        self.number = mesh["pp"].get_local_rank()
        group, device = mesh["pp"].get_group(), torch.device(computes_on())
        parts = model if isinstance(model, nn.ModuleDict) else {self.number: model}
        stages = [
            PipelineStage(part, int(number), 2 * len(parts), device, group=group)
            for number, part in parts.items()
        ]
        options = {"loss_fn": token_loss, **options}
        self.schedule = kind(stages if len(stages) > 1 else stages[0], CHUNKS, **options)

    def run(self, tokens):
        """Forward and backward; the last stage returns the loss."""
        if self.number == 0:
            self.schedule.step(inputs_of(tokens))
            return None
        losses = []
        self.schedule.step(target=tokens[:, 1:], losses=losses)
        return sum(loss.item() for loss in losses) / len(losses)

    def evaluate(self, tokens):
        """Its loss, on the last stage."""
        if self.number == 0:
            self.schedule.eval(inputs_of(tokens))
            return None
        losses = []
        self.schedule.eval(target=tokens[:, 1:], losses=losses)
        return sum(loss.item() for loss in losses) / len(losses)

    def train(self, opt, one, steps, mesh):
        data = mesh["dp"].get_local_rank()
        for step in steps:
            batches = [rows(step, number) for number in range(mesh["dp"].size())]
            loss = self.run(batches[data])
            opt.step()
            wants = one.step(batches, max_norm=MAX_NORM)
            if loss is not None:
                assert_same_loss(loss, wants[data])
            assert_same_norm(opt, one)


@case(2, 4)
def pipelines(ranks):
    """A step is one of all stages; norms are of the whole model."""
    mesh = mesh_of(pp=2, dp=ranks.size // 2)
    for kind in (ScheduleGPipe, Schedule1F1B):
        model = Stage(mesh["pp"].get_local_rank(), untied())
        ranks.mesh = mesh["dp"]
        ranks.shard(model, layers_of(model))
        pipeline, one = Pipeline(mesh, kind, model), OneProcess(untied())
        opt = ranks.attach(model, adamw(), job=f"{ranks.job}.{kind.__name__}")
        pipeline.train(opt, one, range(1, STEPS + 1), mesh)
        one.assert_close(full(model))
        one.assert_close_states(model, opt)
        opt.detach()


@case(8)
def pipelines_of_tensor_parallel_shards(ranks):
    mesh = mesh_of(pp=2, dp=2, tp=2)
    model = parallelized(Stage(mesh["pp"].get_local_rank(), untied()), mesh)
    pipeline, one = Pipeline(mesh, Schedule1F1B, model), OneProcess(untied())
    opt = ranks.attach(model, adamw())
    pipeline.train(opt, one, range(1, STEPS + 1), mesh)
    one.assert_close(full(model))
    one.assert_close_states(model, opt)
    opt.detach()


@case(2)
def a_pipeline_of_16_bit_gradients(ranks):
    """They need no room for sums: the chunks' gradients are reduced once. Torch's stages compute with
    the same roundings, of masters that differ by a few of float32; see wide_twins."""
    mesh = mesh_of(pp=2, dp=1)
    ranks.mesh = mesh["dp"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    models = [Stage(ranks.rank, untied()) for _ in range(2)]
    for model in models:
        ranks.shard(model, layers_of(model), mp_policy=policy)
    pipelines = [Pipeline(mesh, Schedule1F1B, model) for model in models]
    opt = ranks.attach(models[0])
    torch_opt = torch.optim.AdamW(models[1].parameters(), lr=LR)
    for step in range(1, STEPS + 1):
        losses = [pipeline.run(rows(step)) for pipeline in pipelines]
        assert losses[0] is None or abs(losses[0] - losses[1]) <= 1e-3 * losses[1], losses
        opt.step()
        torch_opt.step()
        torch_opt.zero_grad()
    elems = sum(parameter.numel() for parameter in models[0].parameters())
    assert opt.stats()["grad_bytes"] == 2 * STEPS * elems
    theirs = full(models[1])
    for name, values in full(models[0]).items():
        torch.testing.assert_close(values, theirs[name], rtol=1e-6, atol=STEPS * 10 * LR * 2**-6)
    opt.detach()


@case(2)
def two_schedules_a_step(ranks):
    """Their gradients are added. An evaluation after the step, behind which torch infers the
    pipeline's shapes again, brings no gradient."""
    mesh = mesh_of(pp=2, dp=1)
    ranks.mesh = mesh["dp"]
    model = ranks.shard(Stage(ranks.rank, untied()), [])
    one, opt = OneProcess(untied()), ranks.attach(model, adamw(), accumulate=2)

    def part_of_loss(logits, targets):
        return token_loss(logits, targets) / (2 * CHUNKS)

    pipeline = Pipeline(mesh, ScheduleGPipe, model, loss_fn=part_of_loss, scale_grads=False)
    for step in range(1, STEPS + 1):
        for half in range(2):
            pipeline.run(rows(step, half))
        opt.step()
        one.step([rows(step, half) for half in range(2)], max_norm=MAX_NORM)
        assert_same_norm(opt, one)
        if hasattr(pipeline.schedule, "eval"):  # torch 2.9 or newer
            loss = pipeline.evaluate(rows(77))
            with torch.no_grad():
                want = loss_of(one.model, rows(77)).item() / (2 * CHUNKS)
            if loss is not None:
                assert_same_loss(loss, want)
    one.assert_close(full(model))
    opt.detach()


@case(2)
def an_exception_in_a_pipeline(ranks):
    """Between its chunks, of which FSDP2 has gradients that it has not reduced: zero_grad() drops them.
    Each rank has all of the pipeline, so that none waits for one that has failed; torch's schedule keeps
    the losses of one that has, so that training continues with a new one."""
    mesh = mesh_of(pp=1, dp=2)
    ranks.mesh = mesh["dp"]
    model, one = ranks.shard(untied()), OneProcess(untied())
    opt = ranks.attach(model, adamw())
    calls = []

    def loss_that_fails_once(logits, targets):
        calls.append(None)
        if len(calls) == CHUNKS + 3:
            raise Interrupted
        return token_loss(logits, targets)

    def schedule():
        stage = PipelineStage(model, 0, 1, torch.device(computes_on()), group=mesh["pp"].get_group())
        return Schedule1F1B(stage, CHUNKS, loss_fn=loss_that_fails_once)

    present = schedule()
    for step in range(1, STEPS + 1):
        batches = [rows(step, data) for data in range(2)]
        inputs, targets = inputs_of(batches[ranks.rank]), batches[ranks.rank][:, 1:]
        if step == 2:
            interrupted(lambda: present.step(inputs, target=targets))
            opt.zero_grad()
            present = schedule()
        present.step(inputs, target=targets)
        opt.step()
        one.step(batches, max_norm=MAX_NORM)
        assert_same_norm(opt, one)
    one.assert_close(full(model))
    opt.detach()


@case(2)
def two_stages_a_rank(ranks):
    """A schedule that interleaves them; they are attached as one model."""
    mesh = mesh_of(pp=2, dp=1)
    ranks.mesh = mesh["dp"]
    numbers = [ranks.rank, ranks.rank + 2]
    model = nn.ModuleDict({str(number): Stage(number, untied(layers=4)) for number in numbers})
    for stage in model.values():
        ranks.shard(stage, layers_of(stage))
    one, opt = OneProcess(untied(layers=4)), ranks.attach(model, adamw())
    pipeline = Pipeline(mesh, ScheduleInterleaved1F1B, model)
    pipeline.train(opt, one, range(1, STEPS + 1), mesh)
    one.assert_close({name.split(".", 1)[1]: values for name, values in full(model).items()})
    opt.detach()


@case(2)
def an_exception_in_backward_of_a_part(ranks):
    """Of what is attached, each part that runs by itself notices it."""
    twins = Twins(ranks)
    twins.torch_opt = torch.optim.AdamW(twins.theirs.parameters(), lr=LR)
    twins.opt = ranks.attach(nn.ModuleDict({"part": twins.ours}))
    twins.train(1)
    loss, _ = loss_that_fails(twins)
    interrupted(loss.backward)
    with refused("E_GRAD_PARTIAL", "only a part of the gradient", "forward and backward again"):
        twins.opt.step()
    twins.train(3).assert_close()
    twins.opt.detach()


@case(2)
def stages_with_the_same_names(ranks):
    """They would be taken for replicas, of which the daemon has one; a prefix tells them apart."""
    ranks.mesh = mesh_of(pp=2, dp=1)["dp"]
    message = "parameter embedding.weight is on rank 0 and on rank 1, and no mesh has both"
    at_attach(ranks, ranks.shard(small_net()), "E_LAYOUT", message, "name_prefix=")
    ranks.attach(ranks.shard(small_net()), sharding=forebay.Sharding(name_prefix=f"{ranks.rank}.")).detach()


@case(2)
def a_tie_of_two_stages(ranks):
    """The embedding of the first stage, with its name, is the head of the last one too."""
    ranks.mesh = mesh_of(pp=2, dp=1)["dp"]
    whole = small_net()
    model = Stage(ranks.rank, whole)
    if ranks.rank == 1:
        del model.head
        model.embedding = whole.embedding
    ranks.shard(model, layers_of(model))
    message = "parameter embedding.weight is on rank 0 and on rank 1, and no mesh has both"
    at_attach(ranks, model, "E_LAYOUT", message, "name_prefix=")


@case(8)
def replicas_of_tensor_parallel_shards(ranks):
    """HSDP and tensor parallelism."""
    mesh = mesh_of(replicate=2, shard=2, tp=2)
    one, model = OneProcess(untied()), parallelized(untied(), mesh, ("replicate", "shard"))
    opt = ranks.attach(model, adamw())
    train(model, opt, one, (ranks.rank // 2, 4), range(1, STEPS + 1))
    one.assert_close(full(model))
    one.assert_close_states(model, opt)
    opt.detach()


# ------------------------------------------------------------------------------------- other meshes


@case(4)
def replicas_of_two_shards_each(ranks):
    """HSDP: two ranks have each shard, of which one counts in the norm."""
    mesh = mesh_of(replicate=2, dp=2)
    ranks.mesh = mesh
    one, model = OneProcess(untied()), ranks.shard(untied())
    opt = ranks.attach(model, adamw())
    train(model, opt, one, (ranks.rank, 4), range(1, STEPS + 1))
    one.assert_close(full(model))
    one.assert_close_states(model, opt)
    opt.detach()


@case(2)
def autocast(ranks):
    """Operations in bfloat16, of float32 weights; see wide_twins for the bounds."""

    def loss(model, tokens):
        with torch.autocast(computes_on(), dtype=torch.bfloat16):
            return loss_of(model, tokens)

    twins = Twins(ranks, loss=loss, loss_bound=1e-3).attach().train()
    twins.assert_close(atol=STEPS * 10 * LR * 2**-6)
    twins.opt.detach()

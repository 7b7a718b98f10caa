# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: a model on the meta device becomes a job. Its first values are those that
torch's FSDP2 has after to_empty() and the same initialization, bit by bit, or those of files; the rest
comes from the daemon."""

import contextlib
import json
import pathlib
import sys
import tempfile
import threading
import unittest.mock
import warnings
import weakref

import forebay
import torch
from models import Net, loss_of
from sharded_ranks import LR, Ranks, Twins, assert_same, case, computes_on, full, refused, small_net
from sharded_training import Uneven, loss_of_uneven
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from train_support import rss_anon_bytes

MIB = 1 << 20
WIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# -------------------------------------------------------------------------------------- the models


class Positions(nn.Module):
    """Buffers alone: one that a state_dict holds, one that it does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.empty(()))
        self.register_buffer("table", torch.empty(6, 8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.offset.fill_(0.25)
        # Computed on the CPU and then moved to the model's device: cos() of a GPU has other bits.
        self.table = torch.cos(torch.arange(48.0, device="cpu").view(6, 8)).to(self.table.device)

    def forward(self, x):
        return (x + self.table[: x.shape[1]] + self.offset).to(x.dtype)


class Placed(Net):
    """A tied head, and buffers."""

    def __init__(self):
        super().__init__(layers=2)
        self.positions = Positions()
        self.layers.append(self.positions)


class Resettable(Uneven):
    """Parameters beside modules; it sets one that a module inside it has set before."""

    def reset_parameters(self):
        nn.init.normal_(self.table, std=0.02)
        nn.init.ones_(self.scale)
        nn.init.uniform_(self.pair)
        nn.init.normal_(self.layers[0].weight, std=0.5)


def on_meta(kind, *args, **options):
    with torch.device("meta"):
        return kind(*args, **options)


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def normal(module):
    """As the models of transformers have it."""
    for parameter in module.parameters(recurse=False):
        parameter.data.normal_(std=0.02)


def materialize(model, initialize, seed):
    """What a user of torch's FSDP2 does. to_empty() forgets which parameters are tied."""
    model.to_empty(device=computes_on())
    if hasattr(model, "head"):
        model.head.weight = model.embedding.weight
    torch.manual_seed(seed)
    with torch.no_grad():
        model.apply(initialize)


def twins_of(ranks, kind, loss=loss_of, initial=None, before=lambda model: model, **sharding):
    """Both from meta, with the same values."""
    twins = Twins(ranks, lambda: before(on_meta(kind)), loss, **sharding)
    materialize(twins.theirs, initial or reset, seed=ranks.rank + 1)
    torch.manual_seed(ranks.rank + 1)
    parameters = list(twins.ours.parameters())
    twins.attach(initial=initial, param_groups=parameters)
    assert all(a is b for a, b in zip(parameters, twins.ours.parameters(), strict=True))
    assert {p.device.type for p in parameters} == {computes_on()}
    for (name, ours), (_, theirs) in zip(
        twins.ours.named_buffers(), twins.theirs.named_buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert_same(full(twins.ours), full(twins.theirs))
    return twins


# ------------------------------------------------------------------------------- by initialization


@case(1, 2, 3)
def meta_with_buffers_and_a_tied_head(ranks):
    twins = twins_of(ranks, Placed).train(3)
    twins.assert_close()
    twins.opt.detach()
    assert torch.equal(twins.ours.positions.table, twins.theirs.positions.table)
    twins.opt = torch.optim.AdamW(twins.ours.parameters(), lr=LR)  # a plain model of FSDP2
    loss_of(twins.ours, ranks.batch(9)).backward()
    twins.opt.step()


@case(1, 3)
def meta_with_uneven_and_empty_shards(ranks):
    twins = twins_of(ranks, Resettable, loss_of_uneven).train(3)
    twins.assert_close()
    twins.opt.detach()


@case(2)
def meta_with_wide_masters(ranks):
    """The masters have all bits of the float32 values."""
    twins = twins_of(ranks, Placed, loss_bound=1e-3, mp_policy=WIDE)
    for name, values in full(twins.theirs).items():
        assert torch.equal(twins.opt.read_state(name)["master"], values), name
        assert values.dtype == torch.float32
    twins.train(3).assert_close(atol=3 * 10 * LR * 2**-6)
    twins.opt.detach()


@case(2)
def meta_with_a_function_of_modules(ranks):
    twins = twins_of(ranks, Net, initial=normal, before=lambda model: model.bfloat16(), loss_bound=2**-6)
    twins.opt.detach()


@case(2)
def a_plain_model_on_meta_is_sharded(ranks):
    model, theirs = on_meta(Net), ranks.shard(on_meta(Net))
    materialize(theirs, reset, seed=ranks.rank)
    torch.manual_seed(ranks.rank)
    opt = ranks.attach(model, sharding=forebay.Sharding(mesh=ranks.mesh))
    assert opt.mode == "sharded" and type(model.layers[0]).__name__ == "FSDPBlock"
    assert_same(full(model), full(theirs))
    opt.detach()
    message, hint = "embedding.weight is on device meta; only CPU", 'attach.. without mode="shared"'
    with refused("E_UNSUPPORTED", message, hint):
        ranks.attach(on_meta(Net), mode="shared")


@case(2)
def replicas_from_meta_have_the_values_of_their_owner(ranks):
    mesh = torch.distributed.device_mesh.init_device_mesh(
        computes_on(), (2, 1), mesh_dim_names=("replicate", "shard")
    )
    alike = Ranks("", ranks.job, mesh)
    model, theirs = alike.shard(on_meta(Net)), alike.shard(on_meta(Net))
    materialize(theirs, reset, seed=0)
    torch.manual_seed(ranks.rank)
    opt = alike.attach(model)
    assert_same(full(model), full(theirs))
    opt.detach()


@case(2)
def a_warning_where_all_ranks_have_the_same_seed(ranks):
    for seed, count in ((7, 1), (ranks.rank, 0)):
        model = ranks.shard(on_meta(Net, vocab=12))  # all shards have the same size
        torch.manual_seed(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt = ranks.attach(model, job=f"{ranks.job}.{count}")
        ours = [one for one in caught if "all ranks have the same seed" in str(one.message)]
        assert len(ours) == count, ours
        rows = model.layers[0].up.weight.full_tensor().chunk(2)
        assert torch.equal(*rows) == bool(count)
        opt.detach()


# -------------------------------------------------------------------------------- of a job that is


@case(2)
def a_job_goes_on_from_meta(ranks):
    """Nothing is initialized but what the job does not have; files need not exist any more."""
    twins = twins_of(ranks, Placed).train(2)
    twins.ours.positions.offset.fill_(0.5)
    twins.theirs.positions.offset.fill_(0.5)
    twins.train(1)
    digest = twins.opt.state_sha256()
    twins.opt.detach()
    for initial in (None, "gone.safetensors"):
        twins.ours = ranks.shard(on_meta(Placed))
        state = torch.get_rng_state()
        twins.opt = ranks.attach(twins.ours, initial=initial)
        assert torch.equal(torch.get_rng_state(), state)
        assert (twins.opt.state_sha256(), twins.opt.committed_step) == (digest, twins.first - 1)
        assert twins.ours.positions.offset == 0.5
        twins.train(1).assert_close()
        digest = twins.opt.state_sha256()
        twins.opt.detach()
    other = on_meta(Placed)
    other.positions.register_buffer("more", torch.zeros(3))
    meta_stays(ranks, other, "E_LAYOUT", "other buffers than the model", "as it was", is_new=False)


# ---------------------------------------------------------------------------------------- by files


@contextlib.contextmanager
def folder_of_all(ranks):
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(ranks.everyone(folder)[0])
        ranks.everyone(None)  # waits for all ranks before rank 0 deletes the folder


def save(ranks, tensors, path):
    from safetensors.torch import save_file

    if ranks.rank == 0:
        save_file({name: values.contiguous() for name, values in tensors.items()}, path)
    ranks.everyone(None)


def saved_state(seed=7):
    """A state_dict of Placed, of which the tied head and the buffers are parts."""
    torch.manual_seed(seed)
    state = {name: values.clone() for name, values in Placed().state_dict().items()}
    state["positions.offset"].fill_(0.75)
    del state["layers.2.offset"]  # the same buffer as positions.offset
    return state


def attach_from(ranks, path, state, job, **sharding):
    model = ranks.shard(on_meta(Placed), **sharding)
    opt = ranks.attach(model, initial=path, job=f"{ranks.job}.{job}")
    for name, values in full(model).items():
        assert torch.equal(values, state[name].to(values.dtype)), name
    assert model.positions.offset == 0.75 and torch.equal(model.positions.table, Positions().table)
    loss_of(model, ranks.batch(1)).backward()
    opt.step()
    opt.detach()


@case(1, 2, 3)
def meta_from_files(ranks):
    state = saved_state()
    with folder_of_all(ranks) as folder:
        save(ranks, state, folder / "all.safetensors")
        attach_from(ranks, folder / "all.safetensors", state, "file")
        attach_from(ranks, str(folder), state, "masters", mp_policy=WIDE)
        rows = ranks.size != 3  # no number of columns is divisible by 3
        attach_from(
            ranks,
            folder,
            state,
            "columns",
            shard_placement_fn=lambda p: Shard(1 if p.dim() == 2 and rows else 0),
        )
        half = {k: v.bfloat16() for k, v in state.items() if k not in ("head.weight", "positions.offset")}
        half["positions.offset"] = state["positions.offset"]
        parts = folder / "parts"
        parts.mkdir(exist_ok=True)
        names = sorted(half)
        for number, part in enumerate((names[::2], names[1::2])):
            save(ranks, {name: half[name] for name in part}, parts / f"{number}.safetensors")
        save(ranks, {"of.another.model": torch.zeros(1)}, parts / "other.safetensors")
        index = {"weight_map": {name: f"{at % 2}.safetensors" for at, name in enumerate(names)}}
        (parts / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        ranks.everyone(None)
        attach_from(ranks, parts, {k: v.float() for k, v in half.items()}, "index")


@case(2)
def files_of_another_model(ranks):
    state = saved_state()

    def other(**changed):
        changed = {key.replace("__", "."): value for key, value in changed.items()}
        return {k: v for k, v in {**state, **changed}.items() if v is not None}

    with folder_of_all(ranks) as folder:
        path = folder / "other.safetensors"

        def is_refused(tensors, code, message, hint, make=lambda: on_meta(Placed)):
            save(ranks, tensors, path)
            meta_stays(ranks, make(), code, message, hint, initial=path)

        missing = other(norm__bias=None, norm__weight=None, old=torch.zeros(1))
        message = "has 16 tensors, the model 16 .*missing: norm.weight, norm.bias; not in the model: old"
        is_refused(missing, "E_LAYOUT", message, "as model.state_dict")
        is_refused(
            other(positions__offset=None), "E_LAYOUT", "missing: layers.2.offset\n", "state_dict"
        )
        message = r"parameter norm.bias is \[8\], and tensor norm.bias of .* \[9\]"
        is_refused(other(norm__bias=torch.zeros(9)), "E_LAYOUT", message, "whose weights were saved")
        message = "norm.bias is torch.float32, and tensor .* torch.float64, which it cannot hold"
        is_refused(other(norm__bias=torch.zeros(8).double()), "E_LAYOUT", message, "convert the file")
        message = "parameter .* is torch.bfloat16, and tensor .* torch.float32"
        is_refused(state, "E_LAYOUT", message, "hold float32", lambda: on_meta(Placed).bfloat16())
        message = "tensors embedding.weight and head.weight of .* differ"
        is_refused(other(head__weight=torch.ones(11, 8)), "E_LAYOUT|E_RANK_LOST", message, "leave one")
        nan = other(norm__bias=torch.full((8,), float("nan")))
        is_refused(nan, "E_NONFINITE|E_RANK_LOST", "norm.bias has 4 values", "checkpoint")
        if ranks.rank == 0:
            path.write_bytes(path.read_bytes()[:-1])
        ranks.everyone(None)
        message, hint = "initial='.*other.safetensors': other.safetensors: ", "a .safetensors file"
        meta_stays(ranks, on_meta(Placed), "E_OPTION", message, hint, initial=path)
        for place, message in ((folder / "gone", "gone: No such"), (folder / "empty", "the folder has no")):
            (folder / "empty").mkdir(exist_ok=True)
            meta_stays(ranks, on_meta(Placed), "E_OPTION", message, hint, initial=place)


# ---------------------------------------------------------------------------------------- refusals


def meta_stays(ranks, model, code, message, hint, is_new=True, **options):
    """Refused; the model is as it was, and the next attach finds no job that was begun. A rank may
    find that another has disconnected."""
    if not isinstance(model, FSDPModule):
        ranks.shard(model)
    before = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    try:
        ranks.attach(model, **options)
    except forebay.ForebayError as error:
        if error.code != "E_RANK_LOST":
            with refused(code, message, hint):
                raise
        assert not is_new or error.code in code.split("|") or error.code == "E_RANK_LOST", error
        found = error.code
    else:
        raise AssertionError(f"nothing was refused with {code}")
    assert set(ranks.everyone(found)) != {"E_RANK_LOST"}
    assert (ranks.job in [job["name"] for job in forebay.status()["jobs"]]) != is_new
    now = dict(model.named_parameters())
    assert now.keys() == before.keys()
    for name, parameter in now.items():
        assert parameter is before[name] and parameter.device.type == "meta", name
        assert type(parameter.to_local()) is torch.Tensor and parameter.to_local().is_meta, name
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name], name
    ranks.everyone(None)


class Bare(nn.Module):
    """Says nothing about how it begins."""

    def __init__(self, buffer=False):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        if buffer:
            self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        else:
            self.scale = nn.Parameter(torch.ones(8))


def net_with(module):
    def make():
        model = Net(layers=2)
        model.layers[1].extra = module()
        return model

    return make


class Replacing(nn.Linear):
    def reset_parameters(self):
        self.weight = nn.Parameter(torch.zeros(8, 8))
        nn.init.zeros_(self.bias)


class Forgetful(nn.Linear):
    def reset_parameters(self):
        nn.init.ones_(self.weight)


def fail(_module):
    raise forebay.errors.usage_error("E_OPTION", "by the initialization", "none")


@case(2)
def meta_that_nothing_initializes(ranks):
    name = "layers.1.extra"
    for module, message, hint in (
        (Bare, f"parameter scale of Bare {name} is on the meta device, and neither", "initial="),
        (lambda: Bare(buffer=True), f"buffer seen of Bare {name} is on the meta device", "initial="),
        (lambda: Forgetful(8, 8), f"{name}.bias is on the meta device, and nothing sets", "initial="),
        (lambda: Replacing(8, 8), f"{name}.weight was replaced when its module was", "copy_"),
    ):
        meta_stays(ranks, on_meta(net_with(module)), "E_UNSUPPORTED", message, hint)
    model = on_meta(net_with(lambda: Bare(buffer=True)))
    message = "buffer layers.1.extra.seen is on the meta device, and nothing sets it"
    meta_stays(ranks, model, "E_UNSUPPORTED", message, "on the CPU", initial=normal)
    meta_stays(ranks, on_meta(Net), "E_OPTION", "by the initialization", "none", initial=fail)

    def reach(module):
        if isinstance(module, nn.Embedding):
            nn.init.zeros_(model.layers[1].up.weight)

    model = on_meta(Net)
    message = "on parameter layers.1.up.weight while a module that does not hold it"
    meta_stays(ranks, model, "E_UNSUPPORTED", message, "in the modules inside", initial=reach)
    model = ranks.shard(on_meta(Net))
    kept = weakref.ref(model.norm.bias)  # torch does not exchange a tensor that has a weakref
    message = "parameter norm.bias cannot leave the meta device: .*weakref"
    meta_stays(ranks, model, "E_UNSUPPORTED", message, "drop what refers to it")
    del kept
    opt = ranks.attach(model, initial=normal)
    opt.detach()


@case(2)
def initial_values_for_a_model_that_has_some(ranks):
    model = ranks.shard(small_net())
    message, hint = "initial= for a model that has values: .* is on cpu", "leave initial out"
    with refused("E_OPTION", message, hint):
        ranks.attach(model, initial=normal)
    with refused("E_OPTION", 'initial without mode="sharded"', 'mode="sharded", initial'):
        ranks.attach(small_net(), initial=normal)
    for wrong in (7, nn.Linear(1, 1), nn.Linear):
        with refused("E_OPTION", f"initial is a {type(wrong).__name__}", "a function of a module"):
            ranks.attach(ranks.shard(on_meta(Net)), initial=wrong)
    with unittest.mock.patch.dict(sys.modules, safetensors=None):
        message = "initial='model.safetensors' needs the package safetensors"
        with refused("E_UNSUPPORTED", message, "pip install safetensors"):
            ranks.attach(ranks.shard(on_meta(Net)), initial="model.safetensors")
    half = on_meta(Net)
    half.norm = nn.LayerNorm(8)
    message = "parameter embedding.weight is on the meta device, and parameter norm.weight on cpu"
    with refused("E_UNSUPPORTED", message, "build the whole model"):
        ranks.attach(ranks.shard(half))


# ------------------------------------------------------------------------------------------ memory


class Peak:
    """The largest private memory within, beyond that before; sampled."""

    def __enter__(self):
        self.first = self.bytes = rss_anon_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._over.wait(0.0005):
            self.bytes = max(self.bytes, rss_anon_bytes())

    def __exit__(self, *_error):
        self._over.set()
        self._thread.join()
        self.bytes -= self.first


class Deep(nn.Module):
    """48 MiB in 12 layers of 4 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


# A rank holds 2 of the 4 MiB of a layer, in one tensor. Checks take a quarter of that, and 2 MiB (three
# tensors of 2^18 elements at most). Twice that for what the allocator holds back, and 6 MiB for what the
# first attach of a larger job makes, a thread among it. A rank's shards are 24 MiB, the model is 48.
PEAK_BYTES = 16 * MIB


@case(2)
def no_rank_holds_a_model(ranks):
    ranks.attach(ranks.shard(on_meta(Net))).detach()  # what the first attach loads and starts
    state = on_meta(Deep).state_dict()
    with folder_of_all(ranks) as folder:
        state = {name: torch.full_like(one, 0.5, device="cpu") for name, one in state.items()}
        save(ranks, state, folder / "deep.safetensors")
        del state
        for name, policy, initial in (
            ("modules", {}, None),
            ("masters", {"mp_policy": WIDE}, None),
            ("files", {}, folder),
        ):
            model = ranks.shard(on_meta(Deep), **policy)
            with Peak() as peak:
                opt = ranks.attach(model, job=f"{ranks.job}.{name}", initial=initial)
            assert peak.bytes <= PEAK_BYTES, f"{name}: {peak.bytes / MIB} MiB"
            opt.detach()

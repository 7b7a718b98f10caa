# SPDX-License-Identifier: Apache-2.0
# Goal    Calls that cannot work on an attached model raise an error with an id and a hint, which names the culprit. Committed
#         states do not change, and the same session continues to train.
# Method  Provoke each after a first step, check code and text, and the hash of every state before and
#         after; then train one more step and compare it with AdamW's formula.

import copy
import io
import pickle

import forebay
import pytest
import torch
from forebay import _optimizer
from models import Net, assert_trains_one_more_step, batch, loss_of, net, train
from torch import nn


@pytest.fixture
def attached(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train(model, opt, 1)
    yield model, opt
    assert_trains_one_more_step(model, opt)


def committed():
    """Step and bytes of every job that this process is attached to."""
    return {opt: (opt.committed_step, opt.state_sha256()) for opt in _optimizer._attached}


def refused(code="E_UNSUPPORTED", match=None):
    class Refusal:
        def __enter__(self):
            self.before = committed()
            self.context = pytest.raises(forebay.ForebayError, match=match)
            self.info = self.context.__enter__()
            return self.info

        def __exit__(self, *error):
            result = self.context.__exit__(*error)
            error = self.info.value
            assert error.code == code, error
            assert error.hint and str(error).startswith(f"error[{code}]: "), error
            after = committed()
            assert after.keys() == self.before.keys() and after == self.before
            return result

    return Refusal()


def test_one_gradient_that_is_cleared_before_a_further_backward(attached):
    model, opt = attached
    loss_of(model, batch(0)).backward()
    model.norm.bias.grad = None
    with refused(match="norm.bias received a second gradient after its gradient was cleared"):
        loss_of(model, batch(1)).backward()
    opt.zero_grad()
    opt.step()


def test_graph_kept_across_a_step_is_torchs_own_error(attached):
    model, opt = attached
    kept = loss_of(model, batch(0))
    train(model, opt, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    with refused("E_GRAD_PARTIAL", match="did not come to its end"):
        opt.step()
    opt.zero_grad()
    opt.step()


def test_what_a_gradient_does_not_take(attached):
    model, opt = attached
    loss_of(model, batch(0)).backward()
    for read in (
        lambda: model.head.weight.grad.clamp(-1.0, 1.0),
        lambda: model.head.weight.grad.sum(),
        lambda: model.head.weight.grad.norm(1),
        lambda: model.head.weight.grad + 1,
        lambda: model.head.weight.grad.clone(),
    ):
        with refused(match="gradient of parameter.*delivered to the daemon") as info:
            read()
        assert "its 2-norm, a factor and bounds" in info.value.hint
    assert "delivered to forebay" in repr(model.head.weight.grad)
    opt.step()
    assert model.head.weight.grad is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("made", ["before attach", "after attach"])
def test_another_optimizer(node, kind, made):
    model = net()
    other = kind(model.parameters(), lr=0.1) if made == "before attach" else None
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    other = other or kind(model.parameters(), lr=0.1)
    train(model, opt, 1)
    named = rf"{kind.__name__}.step\(\) on parameter embedding.weight"
    with refused(match=named):  # refused without a gradient too, though torch would do nothing
        other.step()
    loss_of(model, batch(0)).backward()
    with refused(match=named):
        other.step()
    opt.step()
    assert_trains_one_more_step(model, opt)


def test_other_optimizers_of_other_models_still_work(attached):
    other = nn.Linear(2, 2)
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    opt.step()


def test_load_state_dict(attached):
    model, _ = attached
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for options in ({}, {"strict": False}, {"assign": True}):
        with refused(match="load_state_dict on Net"):
            model.load_state_dict(state, **options)
    with refused(match="load_state_dict on Block"):
        model.layers[0].load_state_dict(model.layers[0].state_dict())


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.float64),
        lambda m: m.to("meta"),
        lambda m: m.layers[1].bfloat16(),
        lambda m: m.share_memory(),
    ],
)
def test_conversion(attached, convert):
    model, _ = attached
    with refused(match=r"parameter .* is attached and cannot change.*torch.float32 on cpu.*wanted"):
        convert(model)


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to_empty(device="cpu"),
        lambda m: m._apply(torch.zeros_like),
        lambda m: m._apply(torch.clone),
    ],
    ids=["to_empty", "zeros", "clone"],
)
def test_a_conversion_keeps_the_values_and_the_memory(attached, convert):
    model, _ = attached
    before = {name: (p.data_ptr(), p.sum()) for name, p in model.named_parameters()}
    try:
        convert(model)
    except forebay.UsageError as error:
        assert error.code == "E_UNSUPPORTED"
    assert {name: (p.data_ptr(), p.sum()) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
def test_conversion_that_changes_nothing_is_allowed(attached, device):
    model, _ = attached
    model.register_buffer("scale", torch.ones(1))
    random_numbers = torch.get_rng_state()
    assert model.float().to(device) is model
    assert model.layers[0].to(device, torch.float32) is model.layers[0]
    assert torch.equal(torch.get_rng_state(), random_numbers)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_ddp(attached, process_group):
    model, _ = attached
    with refused(match="DistributedDataParallel around Net, whose parameters are attached"):
        nn.parallel.DistributedDataParallel(model)
    with refused(match="DistributedDataParallel around Block layers.1"):
        nn.parallel.DistributedDataParallel(nn.Sequential(model.layers[1]))
    nn.parallel.DistributedDataParallel(net())  # allowed: another model
    with refused(match="DistributedDataParallel: it reduces gradients"):
        forebay.attach(nn.parallel.DistributedDataParallel(net(seed=3)), job="ddp")


def test_fsdp(node, process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = net()
    opt = forebay.attach(model)
    sha256 = opt.state_sha256()
    with refused(match="FullyShardedDataParallel around Net, whose parameters are attached"):
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with refused(match="was replaced or removed after attach"):
        opt.step()
    assert opt.state_sha256() == sha256
    with refused(match="FullyShardedDataParallel: it reduces gradients"):
        forebay.attach(
            FullyShardedDataParallel(net(seed=3), device_id=torch.device("cpu")), job="fsdp"
        )


def test_tensor_parallelism_alone(node, process_group):
    from torch.distributed.tensor import distribute_tensor

    model = net()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model.embedding.weight = nn.Parameter(distribute_tensor(model.embedding.weight.detach(), mesh))
    with refused(match="embedding.weight is a DTensor"):
        forebay.attach(model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_with_max_norm(node, kind):
    model = nn.ModuleDict({"words": kind(5, 3, max_norm=1.0)})
    with refused(match=rf"{kind.__name__} words with max_norm=1.0"):
        forebay.attach(model)


def test_parameter_moved_off_its_window(attached):
    model, opt = attached
    window = model.layers[1].up.weight.data
    model.layers[1].up.weight.data = torch.zeros_like(window)
    with refused(match="layers.1.up.weight no longer uses the daemon"):
        loss_of(model, batch(0))
    with refused(match="layers.1.up.weight no longer uses the daemon"):
        opt.step()
    model.layers[1].up.weight.data = window


@pytest.mark.parametrize("new", [nn.Parameter(torch.zeros(8)), None])
def test_parameter_replaced(attached, new):
    model, opt = attached
    before, model.norm.bias = model.norm.bias, new
    loss_of(model, batch(0)).backward()
    with refused(match="parameter norm.bias was replaced or removed after attach"):
        opt.step()
    model.norm.bias = before
    opt.step()


def test_gradient_set_by_hand(attached):
    model, opt = attached
    model.norm.bias.grad = torch.ones_like(model.norm.bias)
    with refused(match="norm.bias was set by hand before backward"):
        loss_of(model, batch(0)).backward()
    opt.zero_grad()
    loss_of(model, batch(0)).backward()
    model.norm.bias.grad = torch.ones_like(model.norm.bias)
    with refused(match="norm.bias was replaced after backward"):
        opt.step()
    opt.zero_grad()
    opt.step()


def test_create_graph(attached):
    model, opt = attached
    with refused(match="create_graph"):
        loss_of(model, batch(0)).backward(create_graph=True)
    with refused("E_GRAD_PARTIAL", match="did not come to its end"):
        opt.step()
    opt.zero_grad()
    opt.step()


def test_a_parameter_that_was_frozen_at_attach(node):
    model = net()
    model.norm.bias.requires_grad_(False)
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    model.norm.bias.requires_grad_(True)
    with refused(match="norm.bias was frozen at attach and has no states"):
        opt.step()
    model.norm.bias.requires_grad_(False)
    opt.step()


def test_groups_of_the_optimizer_are_fixed(attached):
    _, opt = attached
    with refused(match="add_param_group"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_one_gradient_cleared_between_backward_and_step(attached):
    model, opt = attached
    loss_of(model, batch(1)).backward()
    with refused(match="gradient of parameter norm.weight was cleared .* others were not"):
        model.norm.weight.grad = None
        opt.step()
    opt.step()  # nothing was lost


def test_the_gradient_of_one_parameter_is_dropped_by_zero_grad(attached):
    model, opt = attached
    model.layers[0].up.weight.sum().backward()
    assert opt.delivered_groups == 1
    opt.zero_grad()
    assert opt.delivered_groups == 0
    before = model.layers[0].up.weight.detach().clone()
    opt.step()
    assert torch.equal(model.layers[0].up.weight, before)


@pytest.mark.parametrize("value", [5, "text", [1]], ids=["int", "str", "list"])
def test_extra_state_that_is_no_bytes(attached, value):
    _, opt = attached
    with refused("E_OPTION", match="not bytes"):
        opt.step(extra_state=value)
    with refused("E_OPTION", match="not bytes"):
        opt.extra_state = value


@pytest.mark.parametrize("wrong", [1e-3, torch.optim.SGD, {"lr": 1e-3}], ids=["lr", "class", "dict"])
def test_an_optimizer_that_is_not_forebays(node, wrong):
    with refused("E_OPTION", match="none of Forebay's or torch's"):
        forebay.attach(net(), wrong)


def test_second_attach_of_a_model(attached):
    model, opt = attached
    loss_of(model, batch(1)).backward()  # delivered gradients do not change the refusal
    with refused(match="attached already"):
        forebay.attach(model)
    opt.step()


def test_a_job_attached_again_with_another_layout_is_refused_with_both(attached, node):
    both = r"embedding.weight\[11, ?8\].*this client wants embedding.weight\[11, ?16\]"
    with refused("E_LAYOUT", match=both):
        forebay.attach(net(width=16))


def test_another_run_continues_a_job_only_where_it_asks_to(node):
    for steps in (0, 2):  # 0: the job has its initial parameters
        model = net()
        opt = forebay.attach(model, forebay.AdamW(lr=1e-2), run="first")
        train(model, opt, steps)
        opt.detach()
        with pytest.raises(forebay.ForebayError) as info:
            forebay.attach(net(seed=2), run="second")
        assert info.value.code == "E_JOB_EXISTS" and info.value.hint
    opt = forebay.attach(net(seed=3), forebay.AdamW(lr=1e-2), run="first")
    assert opt.committed_step == 2
    opt.detach()
    opt = forebay.attach(net(seed=4), forebay.AdamW(lr=1e-2), run="second", resume=True)
    assert opt.committed_step == 2


def test_a_second_attach_of_a_rank_fences_the_first_and_has_its_extra_state(node):
    first, second = net(), net(seed=9)
    old = forebay.attach(first, forebay.AdamW(lr=1e-2))
    loss_of(first, batch(0)).backward()
    old.step(extra_state=b"one")
    loss = loss_of(first, batch(1))
    opt = forebay.attach(second, forebay.AdamW(lr=1e-2))
    assert (opt.committed_step, opt.extra_state) == (1, b"one")
    for use in (loss.backward, lambda: loss_of(first, batch(1)), old.step):
        with pytest.raises(forebay.UnavailableError, match="newer session of rank 0") as info:
            use()
        assert info.value.code == "E_FENCED" and info.value.hint and info.value.retryable
    assert_trains_one_more_step(second, opt)
    old.detach()
    assert_trains_one_more_step(second, opt)


def test_unknown_parameter_and_oversized_extra_state(attached):
    _, opt = attached
    with refused("E_OPTION", match="no parameter nobody"):
        opt.read_state("nobody")
    with refused("E_EXTRA_STATE"):
        opt.step(extra_state=bytes(1 << 20))


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_is_refused_and_the_step_can_be_repeated(attached, factor):
    model, opt = attached
    (loss_of(model, batch(0)) * factor).backward()
    with refused("E_NONFINITE", match=r"group \d \((root|layers.\d)\)"):
        opt.step()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": -1},
        {"rank": 2**40},
        {"rank": "x"},
        {"rank": 0.5},
        {"rank": False},
        {"world_size": 0},
        {"world_size": 1.5},
        {"world_size": True},
        {"timeout": float("nan")},
        {"timeout": -1},
        {"timeout": "soon"},
        {"timeout": 10**400},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_arguments_that_are_no_numbers_of_their_kind(node, wrong):
    (name, value) = next(iter(wrong.items()))
    with refused("E_RANK" if "rank" in name or "world" in name else "E_OPTION") as info:
        forebay.attach(net(), forebay.AdamW(), **wrong)
    assert name in str(info.value) and repr(value) in str(info.value)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (forebay.Durability, "daemon_wait", "soon"),
        (forebay.Durability, "daemon_wait", -1),
        (forebay.Memory, "extra_state_bytes", -1),
        (forebay.Memory, "extra_state_bytes", 65536.0),
        (forebay.Memory, "extra_state_bytes", True),
        (forebay.Memory, "grad_arena_bytes", -1),
        (forebay.Memory, "grad_arena_bytes", 1e6),
        (forebay.Memory, "grad_arena_bytes", True),
        (forebay.Memory, "grad_arena_bytes", 1 << 64),
        (forebay.Memory, "prefetch_bytes", None),
        (forebay.Memory, "activation_bytes", "1MB"),
    ],
)
def test_parts_of_options_that_are_no_numbers_of_their_kind(kind, name, value):
    with refused("E_OPTION") as info:
        kind(**{name: value})
    assert name in str(info.value) and repr(value) in str(info.value)


@pytest.mark.parametrize("level", [3, True, b"step", "", "hourly", "Step", "epoch=0", "epoch=ten"])
def test_a_durability_that_is_no_level(node, level):
    with refused("E_OPTION", match="durab") as info:
        forebay.attach(net(), forebay.AdamW(), durability=level)
    assert repr(level) in str(info.value) or f'"{level}" is no level' in str(info.value)


@pytest.mark.parametrize(
    "variable", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]
)
def test_a_launch_over_several_nodes(node, monkeypatch, variable):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv(variable, "8")
    with refused(match="several nodes: world size 16, of which 8 ranks are on this node"):
        forebay.attach(net())
    opt = forebay.attach(net(), rank=0, world_size=1)  # a job per node
    monkeypatch.setenv("WORLD_SIZE", "8")
    opt.detach()


def test_models_that_cannot_be_attached(node):
    with refused(
        match="mixed types: parameter embedding.weight is torch.float32, parameter layers.1"
    ):
        model = net()
        model.layers[1].bfloat16()
        forebay.attach(model)
    with refused(match="frozen is torch.float32 of layout torch.sparse_coo"):
        model = net()
        model.frozen = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
        forebay.attach(model)
    with refused(match="device meta"):
        forebay.attach(net().to("meta"), mode="shared")
    with refused(match="torch.float64"):
        forebay.attach(net().double())
    with refused("E_LAYOUT", match="no parameters"):
        forebay.attach(nn.ReLU())
    with refused("E_OPTION", match="does not support"):
        forebay.attach(net(), forebay.AdamW(format="exact"))
    with refused("E_OPTION", match="is in no param group"):
        model = net()
        forebay.attach(model, param_groups=[{"params": list(model.layers.parameters())}])
    with refused(match="share memory") as info:
        model = net()
        model.layers[0].up.weight.data = model.layers[1].up.weight.data
        forebay.attach(model)
    assert "very nn.Parameter of layers.0.up.weight" in info.value.hint


def test_nan_parameter_at_attach_leaves_the_model_as_it_was(node):
    model = net()
    with torch.no_grad():
        model.layers[1].up.bias[3] = float("inf")
    with refused("E_NONFINITE", match="layers.1.up.bias has 1 value that is NaN"):
        forebay.attach(model)
    with torch.no_grad():
        model.layers[1].up.bias[3] = 0.0
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    model.half().float().load_state_dict(net().state_dict())


def test_reading_an_attached_model(attached):
    model, opt = attached
    train(model, opt, 1)
    assert "Parameter containing" in repr(model.norm.weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = Net()
    plain.load_state_dict(torch.load(file))
    single = io.BytesIO()
    torch.save(model.norm.weight, single)
    assert len(single.getvalue()) < 4096, "saving one parameter saves that one alone"
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    moments = [opt.read_state(name)["exp_avg"] for name in ("head.weight", "embedding.weight")]
    assert torch.equal(*moments), "names of one tied parameter"
    for twin in (plain, copy.deepcopy(model), torch.load(whole, weights_only=False)):
        assert loss_of(twin, batch(3)).item() == loss_of(model, batch(3)).item()
        twin.double().float().load_state_dict(model.state_dict())
        train(twin, torch.optim.AdamW(twin.parameters()), 1)
        assert twin.norm.weight.data_ptr() != model.norm.weight.data_ptr()


def test_detach_gives_private_parameters(node):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train(model, opt, 1)
    opt.detach()
    train(model, torch.optim.AdamW(model.parameters()), 1)
    model.half()
    with refused("E_NOT_READY", match="detached"):
        opt.step()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: forebay.attach(model.parameters()), "the model is a generator"),
        (lambda model: forebay.AdamW(1e-3), "params is 0.001, not the parameters of a model"),
        (lambda model: forebay.SGD(lr=-1.0), "lr is -1.0, not a number from 0 on"),
        (lambda model: forebay.Lion(lr="1e-3"), "lr is '1e-3'"),
        (lambda model: forebay.Adam(lr=float("nan")), "lr is nan"),
        (lambda model: forebay.SGD(lr=torch.ones(2)), "lr is tensor"),
    ],
    ids=["parameters", "lr alone", "negative", "text", "nan", "tensor"],
)
def test_what_torch_would_be_given(node, make, words):
    with refused("E_OPTION", match=words) as info:
        make(net())
    assert "forebay.attach(model, forebay." in info.value.hint


def test_gradients_of_an_earlier_backward_that_are_put_back(attached):
    """As code that projects gradients keeps them: they are references to what the daemon has dropped."""
    model, opt = attached
    loss_of(model, batch(0)).backward()
    kept = [one.grad for one in model.parameters()]
    opt.zero_grad()
    for parameter, gradient in zip(model.parameters(), kept):
        parameter.grad = gradient
    with refused(match="is that of an earlier backward, which the daemon has dropped"):
        opt.step()
    opt.zero_grad()


def test_data_of_a_gradient(attached):
    model, opt = attached
    loss_of(model, batch(0)).backward()
    with refused(match="p.grad.data = ... of parameter norm.bias"):
        model.norm.bias.grad.data = torch.zeros(8)
    opt.zero_grad()


def test_states_that_are_replaced(attached):
    _, opt = attached
    with refused(match="opt.state = ...: the states are the daemon's"):
        opt.state = {}


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_the_optimizer(attached, call):
    _, opt = attached
    with refused(match="a copy of the optimizer of an attached model"):
        call(opt)


def test_attach_in_inference_mode(node):
    model = net()
    with torch.inference_mode(), pytest.raises(forebay.UsageError, match="attach within torch.inference_mode"):
        forebay.attach(model)
    opt = forebay.attach(model)
    with torch.inference_mode():
        opt.detach()
    assert not any(one.is_inference() for one in model.parameters())

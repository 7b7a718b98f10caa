# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: what a sharded attachment refuses, with code, message and hint. After
each the same session trains on as torch does, or the model is as it was before attach."""

import contextlib
import copy
import re
import types

import forebay
import torch
from forebay.sharded.nodes import _refuse_gaps
from forebay.sharded.shard_tensor import ShardTensor
from models import loss_of
from sharded_ranks import LR, Twins, case, refused, small_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


def at_attach(ranks, model, code, message, hint, optimizer=None, **options):
    """Refused; the model is as it was, and its job was not created."""
    before = {name: (p, copy.deepcopy(p)) for name, p in model.named_parameters()}
    with refused(code, message, hint):
        ranks.attach(model, optimizer, **options)
    jobs = [job["name"] for job in forebay.status()["jobs"]]
    assert ranks.job not in jobs
    for name, parameter in model.named_parameters():
        same, values = before[name]
        assert parameter is same and parameter.grad is None, name
        local = getattr(parameter, "_local_tensor", parameter)
        assert not isinstance(local, ShardTensor), name
        assert torch.equal(local, getattr(values, "_local_tensor", values)), name


@contextlib.contextmanager
def trains_on(ranks, **sharding):
    """Twins after a step; nothing committed changes, and two more steps are those of torch."""
    twins = Twins(ranks, **sharding).attach().train(1)
    digest = twins.opt.state_sha256()
    yield twins
    assert (twins.opt.committed_step, twins.opt.state_sha256()) == (1, digest)
    twins.train(2).assert_close()
    twins.opt.detach()


# ---------------------------------------------------------------------------------- after attach


@case(2)
def other_memory_for_a_shard(ranks):
    with trains_on(ranks) as twins, torch.no_grad():
        weight = twins.ours.layers[0].up.weight
        shard = weight.to_local()
        name = "would give parameter layers.0.up.weight another shape or memory"
        for change in (
            lambda: shard.set_(torch.zeros(shard.shape)),
            lambda: shard.resize_(3, 3),
            lambda: shard.t_(),
            lambda: shard[0].unsqueeze_(0),
            lambda: torch.add(torch.ones(1 + shard.numel()), 1, out=shard),
        ):
            with refused("E_UNSUPPORTED", name, r"copy_\(\)"):
                change()
        with refused("E_UNSUPPORTED", "DLPack of parameter layers.0.up.weight", "of a copy"):
            torch.from_dlpack(weight.detach().to_local())
        with refused("E_UNSUPPORTED", "share_memory_.* of parameter layers.0.up.weight", "of a copy"):
            shard.share_memory_()
        try:
            weight.detach().to_local().numpy().fill(1)
        except ValueError as error:  # numpy's own
            assert "read-only" in str(error)
        else:
            raise AssertionError("a write into a copy")


@case(2)
def other_data_for_a_parameter(ranks):
    """torch itself ignores it: FSDP2 has the shard."""
    with trains_on(ranks) as twins:
        parameters = list(twins.ours.parameters())
        weight = twins.ours.layers[0].up.weight
        kept = [parameter.data for parameter in parameters]
        is_same = kept[0].untyped_storage()._cdata == parameters[0].untyped_storage()._cdata
        zeros = torch.zeros(sum(parameter.numel() for parameter in parameters))
        other = nn.Parameter(weight.detach() * 2)

        def back():
            for parameter, data in zip(parameters, kept):
                parameter.data = data
            if not is_same:  # torch 2.8 cannot restore the old storage
                twins.opt.detach()
                twins.opt = ranks.attach(twins.ours)

        for change, undo in (
            (lambda: setattr(weight, "data", torch.zeros_like(weight)), back),
            (lambda: setattr(weight, "data", weight.data.bfloat16()), back),
            (lambda: nn.utils.vector_to_parameters(zeros, parameters), back),
            (lambda: torch.utils.swap_tensors(weight, other),) * 2,
        ):
            change()
            message = r"no longer is the daemon's: it was replaced or moved, or p.data"
            for use in (lambda: loss_of(twins.ours, ranks.batch(77)), twins.opt.step):
                with refused("E_UNSUPPORTED", message, r"p.copy_\(values\)"):
                    use()
            undo()


@case(2)
def load_state_dict_that_replaces(ranks):
    with trains_on(ranks) as twins:
        state = {key: values * 2 for key, values in twins.theirs.state_dict().items()}
        message, hint = "load_state_dict on the model with assign=True", "leave assign out"
        with refused("E_UNSUPPORTED", message, hint):
            twins.ours.load_state_dict(state, assign=True)
        with refused("E_UNSUPPORTED", "load_state_dict on layers.0 with assign", hint):
            twins.ours.layers[0].load_state_dict(twins.theirs.layers[0].state_dict(), assign=True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with refused("E_UNSUPPORTED", message, hint):
                twins.ours.load_state_dict(state)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


@case(2)
def another_type_or_optimizer(ranks):
    with trains_on(ranks) as twins:
        for convert in (twins.ours.half, twins.ours.bfloat16, lambda: twins.ours.to(torch.float64)):
            with refused("E_UNSUPPORTED", "half.* parameter .* is attached", "before forebay.attach"):
                convert()
        other = torch.optim.AdamW(twins.ours.parameters(), lr=LR)
        with refused("E_UNSUPPORTED", r"AdamW.step\(\) on parameter", "forebay.attach returned"):
            other.step()
        with refused("E_UNSUPPORTED", "is attached already", "detach"):
            ranks.attach(twins.ours, job=f"{ranks.job}.again")


@case(2)
def a_parameter_that_was_replaced(ranks):
    with trains_on(ranks) as twins:
        bias = twins.ours.norm.bias
        twins.ours.norm.bias = nn.Parameter(torch.zeros(8))
        with refused("E_UNSUPPORTED", "parameter norm.bias was replaced or removed", "put it back"):
            twins.opt.step()
        twins.ours.norm.bias = bias


# -------------------------------------------------------------------------------------- at attach


@case(2)
def cpu_offload(ranks):
    model = ranks.shard(small_net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    at_attach(ranks, model, "E_UNSUPPORTED", "with CPUOffloadPolicy", "delete offload_policy=")


@case(2)
def a_number_of_ranks_for_a_plain_model(ranks):
    at_attach(
        ranks,
        small_net(),
        "E_UNSUPPORTED",
        "reshard_after_forward as a number of ranks",
        "reshard_after_forward=True or False",
        mode="sharded",
        sharding=forebay.Sharding(mesh=ranks.mesh, reshard_after_forward=2),
    )


@case(4)  # with fewer ranks fully_shard() takes each number for True or False
def reshard_after_forward_to_two_of_four_ranks(ranks):
    model = ranks.shard(small_net(), reshard_after_forward=2)
    message, hint = "reshard_after_forward as a number of ranks", "True or False"
    at_attach(ranks, model, "E_UNSUPPORTED", message, hint)


@case(2)
def a_scalar_parameter_of_a_plain_model(ranks):
    model = small_net()
    model.layers[1].temperature = nn.Parameter(torch.tensor(2.0))
    message, hint = "parameter layers.1.temperature is a scalar", r"Parameter\(torch.tensor\(\[1.0\]"
    at_attach(
        ranks, model, "E_UNSUPPORTED", message, hint, mode="sharded", sharding=forebay.Sharding(mesh=ranks.mesh)
    )
    assert not any(type(module).__name__.startswith("FSDP") for module in model.modules())


@case(2)
def a_parameter_without_elements(ranks):
    model = small_net()
    model.layers[1].placeholder = nn.Parameter(torch.empty(0))
    message, hint = "layers.1.placeholder has no elements: FSDP2", "register it as a buffer"
    at_attach(ranks, model, "E_UNSUPPORTED", message, hint, mode="sharded", sharding=forebay.Sharding(mesh=ranks.mesh))
    assert not any(type(module).__name__.startswith("FSDP") for module in model.modules())
    at_attach(ranks, ranks.shard(model), "E_UNSUPPORTED", message, hint)


@case(2)
def parameters_of_a_loss(ranks):
    model, loss = ranks.shard(small_net()), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    message, hint = r"a tensor of shape \[2, 2\] is no parameter of the model", "into one module with the model"
    at_attach(ranks, model, "E_OPTION", message, hint, optimizer=optimizer)


@case(2)
def ignored_parameters(ranks):
    model = small_net()
    fully_shard(model, mesh=ranks.mesh, ignored_params={model.norm.bias})
    message, hint = "parameter norm.bias is in no module", "without ignored_params"
    at_attach(ranks, model, "E_UNSUPPORTED", message, hint)


@case(2)
def a_model_of_which_a_part_is_sharded(ranks):
    model = small_net()
    fully_shard(model.layers[0], mesh=ranks.mesh)
    message, hint = "parameter embedding.weight is in no module", "as the last call"
    at_attach(ranks, model, "E_UNSUPPORTED", message, hint)


@case(2)
def types_that_masters_cannot_have(ranks):
    """Parameters of 16 bits computed in others; gradients reduced in a third type."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    model = ranks.shard(small_net().bfloat16(), mp_policy=policy)
    message, hint = "is torch.bfloat16 and param_dtype is torch.float32", "float32 parameters take"
    at_attach(ranks, model, "E_UNSUPPORTED", message, hint)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    model = ranks.shard(small_net(), mp_policy=policy)
    message, hint = "reduce_dtype is torch.float16", "leave reduce_dtype out"
    at_attach(ranks, model, "E_UNSUPPORTED", message, hint)


@case(2)
def a_type_that_no_format_has(ranks):
    message, hint = "is torch.float64; float32, bfloat16", "before fully_shard"
    at_attach(ranks, ranks.shard(small_net().double()), "E_UNSUPPORTED", message, hint)


@case(2)
def types_that_differ_between_groups(ranks):
    model = small_net()
    model.layers[1].bfloat16()
    at_attach(ranks, ranks.shard(model), "E_UNSUPPORTED", "mixed types", "one type")


@case(2)
def a_gradient_before_attach(ranks):
    model = ranks.shard(small_net())
    loss_of(model, ranks.batch(1)).backward()
    with refused("E_UNSUPPORTED", "has a gradient already", "zero_grad"):
        ranks.attach(model)
    model.zero_grad(set_to_none=True)
    ranks.attach(model).detach()


@case(2)
def lamb(ranks):
    model = ranks.shard(small_net())
    with refused("E_UNSUPPORTED", "optimizer lamb with sharded", "another optimizer"):
        ranks.attach(model, forebay.Lamb(lr=LR))


class OnOtherGpu(torch.Tensor):
    """Says that it is on a GPU of another maker, which the machine does not have."""

    @staticmethod
    def __new__(cls, values):
        options = {"dtype": values.dtype, "device": "xpu:0"}
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, **options)

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), _kwargs=None):
        assert function is torch.ops.aten.detach.default, function
        return cls(args[0])


@case(2)
def a_model_on_another_kind_of_gpu(ranks):
    """It means sharded, which does not run on such a GPU: refused before fully_shard() was called."""
    model = small_net()
    model.norm.weight = nn.Parameter(OnOtherGpu(model.norm.weight))
    with refused("E_UNSUPPORTED", "parameter norm.weight is on device xpu:0; models on CPUs", "cpu"):
        ranks.attach(model)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@case(1, 2)
def a_mesh_of_devices_that_torch_does_not_see(ranks):
    """Refused before fully_shard() was called."""
    mesh = init_device_mesh("cuda", (ranks.size,))
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        for model in (small_net(), small_net().to("meta")):
            with refused("E_UNSUPPORTED", 'the mesh is on "cuda", and torch sees no GPU: .', "nvidia-smi"):
                ranks.attach(model, mode="sharded", sharding=forebay.Sharding(mesh=mesh))
            assert not any(isinstance(module, FSDPModule) for module in model.modules())
    finally:
        torch.cuda.is_available = is_available
    other = types.SimpleNamespace(device_type="xpu")
    with refused("E_UNSUPPORTED", "the mesh is on device xpu; models on CPUs", '"cpu"'):
        ranks.attach(small_net(), mode="sharded", sharding=forebay.Sharding(mesh=other))


@case(2)
def arguments_that_contradict_the_model(ranks):
    model = ranks.shard(small_net())
    message, hint = 'mode="shared" for a model that fully_shard', "leave mode out"
    at_attach(ranks, model, "E_OPTION", message, hint, mode="shared")
    message, hint = "mesh for a model that fully_shard", r"pass it to fully_shard\(\)"
    at_attach(ranks, model, "E_OPTION", message, hint, sharding=forebay.Sharding(mesh=ranks.mesh))
    at_attach(ranks, model, "E_OPTION", "mode is 'zero3'", 'mode="shared"', mode="zero3")
    message, hint = 'wrap without mode="sharded"', r'mode="sharded", sharding=forebay.Sharding\(wrap='
    at_attach(ranks, small_net(), "E_OPTION", message, hint, sharding=forebay.Sharding(wrap=[]))
    message, hint = 'name_prefix without mode="sharded"', r"sharding=forebay.Sharding\(name_prefix="
    at_attach(ranks, small_net(), "E_OPTION", message, hint, sharding=forebay.Sharding(name_prefix="stage0."))
    for wrong in (0, -1, 1.5, "many", None):
        message = f"accumulate is {wrong!r}, not a number of backward passes"
        at_attach(ranks, model, "E_OPTION", re.escape(message), "accumulate=8", accumulate=wrong)
    for wrong in ({"rank": ranks.rank + 1}, {"world_size": 3}, {"rank": 0, "world_size": 1}):
        message = f"rank {wrong.get('rank', ranks.rank)} of {wrong.get('world_size', 2)} for a process"
        at_attach(ranks, model, "E_RANK", message, "leave rank and world_size out", **wrong)
    ranks.attach(model, rank=ranks.rank, world_size=2).detach()


@case(2, 3)
def not_a_number_in_a_shard(ranks):
    """The first rank that finds one says so and disconnects; another may find that it has disconnected."""
    model = small_net()
    model.layers[1].up.weight.data.fill_(float("nan"))
    ranks.shard(model)
    try:
        ranks.attach(model)
        code = None
    except forebay.ForebayError as error:
        code = error.code
        if code == "E_NONFINITE":
            assert re.search(r"parameter layers.1.up.weight has \d+ values", str(error)), error
            assert "check the initialization" in error.hint, error
    codes = ranks.everyone(code)
    assert "E_NONFINITE" in codes and set(codes) <= {"E_NONFINITE", "E_RANK_LOST"}, codes
    for parameter in model.parameters():
        assert type(parameter.to_local()) is torch.Tensor
    healthy = Twins(ranks).attach().train(1)  # the job's name is free
    healthy.assert_close()
    healthy.opt.detach()


@case(2)
def ranks_that_disagree(ranks):
    model = small_net()
    if ranks.rank == 1:
        model.norm.bias.requires_grad_(False)
    message, hint = "parameter norm.bias is .* on a lower rank and .* on rank 1", "every rank"
    at_attach(ranks, ranks.shard(model), "E_LAYOUT", message, hint)


@case(2, 3)
def what_one_rank_alone_meets(ranks):
    """All ranks raise it, so that none waits for the one that has failed."""
    is_last = ranks.rank == ranks.size - 1
    name = "" if is_last else f"rank {ranks.size - 1}: "
    socket = "/nobody/is/here" if is_last else None
    model = ranks.shard(small_net())
    at_attach(ranks, model, "E_NO_DAEMON", f"{name}no daemon answers", "forebayd", socket=socket)
    optimizer = forebay.AdamW(lr=LR, format="int8") if is_last else None
    at_attach(ranks, model, "E_OPTION", f"{name}format 'int8'", "take", optimizer=optimizer)
    sizes = {"memory": forebay.Memory(extra_state_bytes=1 << 40)} if is_last else {}
    at_attach(ranks, model, "E_EXTRA_STATE", f"{name}extra_state_bytes is", "file", **sizes)
    groups = 5 if is_last else None  # 5 is no list: Python raises TypeError
    with contextlib.suppress(TypeError) if is_last else refused("E_RANK", f"{name}TypeError", "prints"):
        ranks.attach(model, param_groups=groups)
        raise AssertionError("nothing was refused")


@case(2)
def ranks_of_a_node_that_reach_several_daemons(ranks):
    model = ranks.shard(small_net())
    status = forebay._core.status
    if ranks.rank == 1:
        forebay._core.status = lambda socket: {"info": {"identity": "another", "pid": 0}}
    message = (
        r"the ranks of a machine reach several daemons; of the 2 ranks of this machine 1 reach this one \(process \d+\)"
    )
    try:
        with refused("E_OPTION", message, "the same socket="):
            ranks.attach(model)
    finally:
        forebay._core.status = status


@case(2)
def nodes_whose_ranks_do_not_follow_each_other(ranks):
    _refuse_gaps(["a", "a", "b", "c", "c"])
    with refused("E_UNSUPPORTED", "ranks 1 and 2 have two daemons, and that of rank 2 has lower ranks", "map-by slot"):
        _refuse_gaps(["a", "b", "a"])


@case()
def a_job_of_two_ranks(ranks):
    Twins(ranks).attach(job="other.size").train(1).opt.detach()


@case()
def another_world_size(ranks):
    model = ranks.shard(small_net())
    message = f"job other.size is sharded over 2 ranks; this client wants {ranks.size}"
    with refused("E_RANK", message, "start 2 ranks"):
        ranks.attach(model, job="other.size")

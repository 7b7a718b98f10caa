# SPDX-License-Identifier: Apache-2.0
"""Cases of sharded_ranks.py: the optimizer's states of a sharded attachment leave and enter it in torch's
format, each rank's shards as DTensors, or whole."""

import copy
import os
import tempfile

import forebay
import torch
from forebay.states import state_dict
from models import net
from sharded_ranks import LR, Twins, assert_same, case, computes_on, full, refused, small_net
from sharded_training import Uneven, loss_of_uneven, wide_twins
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

NAME = "layers.0.up.weight"


def states_of(opt, model):
    return {name: opt.read_state(name) for name, p in model.named_parameters() if p.requires_grad}


def assert_same_states(opt, model, wanted):
    for name, states in states_of(opt, model).items():
        assert_same(states, wanted[name])


@case(1, 2, 3)
def states_of_torchs_fsdp2_go_on(ranks):
    """What torch's optimizer has trained on, and it on what was trained here."""
    twins = Twins(ranks, Uneven, loss_of_uneven).attach().train(3)
    saved = copy.deepcopy(twins.torch_opt.state_dict())
    twins.opt.load_state_dict(saved)
    shards = twins.opt.state_dict()
    for index, states in saved["state"].items():
        ours = shards["state"][index]
        assert ours["exp_avg"].placements == states["exp_avg"].placements
        assert torch.equal(ours["exp_avg"].to_local(), states["exp_avg"].to_local())
        assert torch.equal(ours["exp_avg_sq"].to_local(), states["exp_avg_sq"].to_local())
        assert ours["step"] == states["step"] == 3
    twins.train(2).assert_close()
    twins.torch_opt.load_state_dict(twins.opt.state_dict())
    twins.train(1).assert_close()
    twins.opt.detach()


@case(2)
def fresh_states_and_other_formats(ranks):
    twins = Twins(ranks).attach(forebay.AdamW(lr=LR))
    fresh = copy.deepcopy(twins.opt.state_dict())
    twins.train(2)
    twins.opt.load_state_dict(fresh)
    read = twins.opt.read_state(NAME)
    assert read["step"] == 0 and not read["exp_avg"].any()
    twins.opt.detach()
    for format_ in ("exact", "bf16", "int8"):
        model = ranks.shard(small_net().bfloat16())
        opt = ranks.attach(model, forebay.AdamW(lr=LR, format=format_), job=f"{ranks.job}.{format_}")
        model(ranks.batch(1)).float().square().mean().backward()
        opt.step()
        before = states_of(opt, model)
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        if format_ == "int8":
            for name, states in states_of(opt, model).items():
                assert_same({"m": states["master"]}, {"m": before[name]["master"]})
                atol = 0.51 * float(before[name]["exp_avg"].abs().max()) / 127
                torch.testing.assert_close(
                    states["exp_avg"], before[name]["exp_avg"], rtol=0, atol=atol
                )
        else:
            assert_same_states(opt, model, before)
        opt.detach()


@case(2, 3)
def distributed_checkpoints_of_the_optimizer(ranks):
    twins = Twins(ranks).attach().train(2)
    before = states_of(twins.opt, twins.ours)
    with tempfile.TemporaryDirectory() as folder:
        folder = ranks.everyone(folder)[0]
        saved = {"optimizer": get_optimizer_state_dict(twins.ours, twins.opt)}
        checkpoint.save(saved, checkpoint_id=folder)
        twins.train(1)
        state = {"optimizer": get_optimizer_state_dict(twins.ours, twins.opt)}
        checkpoint.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(twins.ours, twins.opt, state["optimizer"])
        assert_same_states(twins.opt, twins.ours, before)
        # The checkpoint also loads into a new job.
        fresh = ranks.shard(small_net())
        opt = ranks.attach(fresh, job=f"{ranks.job}.fresh")
        state = {"optimizer": get_optimizer_state_dict(fresh, opt)}
        checkpoint.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(fresh, opt, state["optimizer"])
        assert_same_states(opt, fresh, before)
        opt.detach()
        ranks.everyone(None)
    twins.opt.detach()


@case(2, 3)
def a_load_that_one_rank_does_not_end(ranks):
    """The owners write at once: what one of them leaves out all know, and later attachments."""
    twins = Twins(ranks).attach().train(2)
    before, saved = states_of(twins.opt, twins.ours), copy.deepcopy(twins.opt.state_dict())
    twins.train(1)
    write, done = state_dict._write, []

    def fails_at_the_third(*args):
        done.append(1)
        assert ranks.rank != 1 or len(done) < 3
        write(*args)

    state_dict._write = fails_at_the_third
    try:
        twins.opt.load_state_dict(saved)
        raise RuntimeError("it has ended")
    except (AssertionError, forebay.UsageError):
        pass
    finally:
        state_dict._write = write
    for call in (twins.opt.step, twins.opt.state_dict, lambda: twins.opt.save_state("/no/file")):
        with refused("E_NOT_READY", "did not end", "on every rank"):
            call()
    twins.opt.load_state_dict(saved)
    assert_same_states(twins.opt, twins.ours, before)
    twins.train(1)
    twins.opt.detach()


@case(2)
def whole_states_of_one_process(ranks):
    """optimizer.pt of a script without FSDP2."""
    plain = small_net()
    plain_opt = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in (1, 2):
        plain(ranks.everyone(ranks.batch(step))[0]).square().mean().backward()
        plain_opt.step()
    twins = Twins(ranks).attach()
    twins.opt.load_state_dict(plain_opt.state_dict())
    for name, parameter in plain.named_parameters():
        read = twins.opt.read_state(name)
        assert_same(
            {key: read[key] for key in ("exp_avg", "exp_avg_sq", "step")},
            {key: plain_opt.state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step")},
        )
    twins.opt.detach()


@case(2, 3)
def replicas_load_their_states(ranks):
    shape = (ranks.size, 1) if ranks.size % 2 else (2, ranks.size // 2)
    ranks.mesh = init_device_mesh(computes_on(), shape, mesh_dim_names=("replicate", "shard"))
    twins = Twins(ranks).attach().train(2)
    before, saved = states_of(twins.opt, twins.ours), copy.deepcopy(twins.opt.state_dict())
    twins.train(1)
    twins.opt.load_state_dict(saved)
    assert_same_states(twins.opt, twins.ours, before)
    twins.opt.detach()


@case(2)
def a_file_for_any_number_of_ranks(ranks):
    twins = Twins(ranks).attach().train(2)
    before = states_of(twins.opt, twins.ours)
    with tempfile.TemporaryDirectory() as folder:
        folder = ranks.everyone(folder)[0]
        twins.opt.save_state(f"{folder}/file")
        twins.train(1)
        twins.opt.load_state(f"{folder}/file")
        assert_same_states(twins.opt, twins.ours, before)
        assert os.listdir(folder) == ["file"]
        if ranks.rank == 0:  # one rank also attaches a shared job
            model = net(1, layers=2)
            opt = forebay.attach(
                model, forebay.AdamW(), job=f"{ranks.job}.shared", rank=0, world_size=1
            )
            opt.load_state(f"{folder}/file")
            assert_same_states(opt, model, before)
            opt.detach()
        ranks.everyone(None)
    twins.opt.detach()


@case(2)
def states_of_pipeline_stages(ranks):
    """Each rank has other parameters: rank 0 writes those of all into the file."""
    meshes = init_device_mesh(computes_on(), (ranks.size, 1), mesh_dim_names=("stage", "data"))
    ranks.mesh = meshes["data"]
    twins = Twins(ranks).attach(sharding=forebay.Sharding(name_prefix=f"stage{ranks.rank}.")).train(2)
    name = f"stage{ranks.rank}.{NAME}"
    before, saved = twins.opt.read_state(name), copy.deepcopy(twins.opt.state_dict())
    twins.train(1)
    twins.opt.load_state_dict(saved)
    assert_same(twins.opt.read_state(name), before)
    with tempfile.TemporaryDirectory() as folder:
        folder = ranks.everyone(folder)[0]
        twins.opt.save_state(f"{folder}/file")
        twins.train(1)
        twins.opt.load_state(f"{folder}/file")
        assert_same(twins.opt.read_state(name), before)
        ranks.everyone(None)
    twins.opt.detach()


@case(2)
def states_of_wide_masters(ranks):
    """The float32 parameter is the master: the optimizer's states have none beside it."""
    twins = wide_twins(ranks).attach().train(2)
    before, saved = states_of(twins.opt, twins.ours), copy.deepcopy(twins.opt.state_dict())
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq", "step"}
    values = full(twins.ours)
    twins.opt.load_state_dict(saved)
    assert_same_states(twins.opt, twins.ours, before)
    assert_same(full(twins.ours), values)
    twins.opt.detach()


@case(2)
def states_that_do_not_fit(ranks):
    twins = Twins(ranks).attach().train(2)
    before = twins.opt.state_sha256()
    saved = copy.deepcopy(twins.opt.state_dict())
    local = copy.deepcopy(saved)
    local["state"][1]["exp_avg"] = local["state"][1]["exp_avg"].to_local()
    with refused("E_LAYOUT", "exp_avg of parameter layers.0.norm.weight", "build the model"):
        twins.opt.load_state_dict(local)
    if ranks.rank == 0:
        saved["state"][1]["exp_avg_sq"].to_local().fill_(-1)
    code, text = ("E_NONFINITE", "below 0") if ranks.rank == 0 else ("E_RANK", "failed on rank 0")
    with refused(code, text, ""):
        twins.opt.load_state_dict(saved)
    assert twins.opt.state_sha256() == before
    twins.train(1).assert_close()
    twins.opt.detach()

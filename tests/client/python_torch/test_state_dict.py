# SPDX-License-Identifier: Apache-2.0
# Goal    The optimizer's states leave and enter a job in torch's format. States that were read and loaded have the same bits if
#         their format retains the bits. Torch's optimizer continues from a job's states, and a job from torch's, as if nothing
#         had been moved, between ranks and through torch.save. What does not fit is refused by name before anything was
#         written. A load that does not end is noticed.
# Method  Small models on the daemon; torch's optimizers on losses that are linear in the
#         parameters, compared with the bound of test_optimizers.py; the bits by state_sha256().

import copy
import io
import os
import signal

import forebay
import pytest
import torch
from models import batch, loss_of, net, train
from test_optimizers import OPTIMIZERS, PARAMETER_BOUND, Plane, label, torchs
from test_two_ranks import attach_both, both, train_ranks

on_daemon = pytest.mark.parametrize("node", ["daemon"], indirect=True)
TORCHS = [one for one in OPTIMIZERS if type(one).__name__ in ("AdamW", "Adam", "Adagrad", "SGD")]


def job(name):
    return f"{os.environ['FOREBAY_JOB'][:80]}.{name}"


def attach(model, name, optimizer=None, **options):
    optimizer = optimizer or forebay.AdamW(lr=1e-2)
    return forebay.attach(model, optimizer, job=job(name), timeout=30, **options)


def refused(code, *texts):
    wanted = "".join(f"(?=.*{text})" for text in (code, *texts))
    return pytest.raises(forebay.UsageError, match=f"(?s){wanted}")


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plane_steps(model, opt, first, end):
    for step in range(first, end):
        model(step).backward()
        opt.step()
        opt.zero_grad()


# ------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_job_that_loads_anothers_states_is_that_job(node, dtype):
    first = net(seed=1).to(dtype)
    opt = attach(first, "first")
    train(first, opt, 3)
    saved = through_a_file(opt.state_dict())
    second = net(seed=2).to(dtype)
    second.load_state_dict(first.state_dict())
    other = attach(second, "second", forebay.AdamW(lr=0.5))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 1e-2
    assert other.state_sha256() == opt.state_sha256()
    assert other.committed_step == 0
    assert train(first, opt, 2, first=3) == train(second, other, 2, first=3)
    assert other.state_sha256() == opt.state_sha256()
    assert other.read_state("norm.weight")["step"] == 5


def test_the_master_of_a_16_bit_parameter_comes_along(node):
    first = net(seed=1).bfloat16()
    opt = attach(first, "first")
    train(first, opt, 3)
    saved = opt.state_dict()
    assert saved["state"][0]["master"].dtype == torch.float32
    second = net(seed=2).bfloat16()  # has other weights than `model`
    other = attach(second, "second")
    other.load_state_dict(saved)
    assert other.state_sha256() == opt.state_sha256()
    weight = second.embedding.weight
    assert torch.equal(weight, first.embedding.weight), "a master sets the parameter"
    for states in saved["state"].values():
        del states["master"]
    third = net(seed=3).bfloat16()
    before = third.embedding.weight.clone()
    attach(third, "third").load_state_dict(saved)
    assert torch.equal(third.embedding.weight, before), "without one it stays"


@on_daemon
@pytest.mark.parametrize("format_", ["bf16", "int8"])
def test_narrow_moments_come_back(node, format_):
    first = net(seed=1).bfloat16()
    opt = attach(first, "first", forebay.AdamW(lr=1e-2, format=format_))
    train(first, opt, 3)
    second = net(seed=1).bfloat16()
    other = attach(second, "second", forebay.AdamW(lr=1e-2, format=format_))
    other.load_state_dict(opt.state_dict())
    for name, _ in first.named_parameters():
        wanted, found = opt.read_state(name), other.read_state(name)
        assert torch.equal(wanted["master"], found["master"]), name
        for moment in ("exp_avg", "exp_avg_sq"):
            if format_ == "bf16":
                assert torch.equal(wanted[moment], found[moment]), (name, moment)
                continue
            # The bound is half a code of the group's scale, which is at most the parameter's largest value.
            root = torch.sqrt if moment == "exp_avg_sq" else (lambda values: values)
            codes = 255 if moment == "exp_avg_sq" else 127
            bound = 0.51 * float(root(wanted[moment]).abs().max()) / codes
            assert float((root(wanted[moment]) - root(found[moment])).abs().max()) <= bound


def test_states_before_the_first_step(node):
    """Fresh states are states: loading them removes a trained job's moments."""
    model = net(seed=1)
    opt = attach(model, "first")
    fresh = copy.deepcopy(opt.state_dict())
    assert len(fresh["state"]) == len(list(model.parameters()))
    assert all(not any(map(torch.any, states.values())) for states in fresh["state"].values())
    digest = opt.state_sha256()
    opt.load_state_dict(fresh)
    assert opt.state_sha256() == digest
    train(model, opt, 2)
    opt.load_state_dict(fresh)
    read = opt.read_state("norm.weight")
    assert read["step"] == 0 and not read["exp_avg"].any() and not read["exp_avg_sq"].any()
    train(model, opt, 2, first=2)
    opt.load_state_dict({"state": {}, "param_groups": fresh["param_groups"]})
    assert opt.read_state("norm.weight")["step"] == 0, "one without a state has had no update"


# --------------------------------------------------------------------------------------------- torch


@on_daemon
@pytest.mark.parametrize("optimizer", TORCHS, ids=label)
def test_torchs_optimizer_hands_over_and_takes_back(node, optimizer):
    reference, model = Plane(), Plane()
    reference_opt, plain_opt = (torchs(optimizer, one.parameters()) for one in (reference, model))
    plane_steps(reference, reference_opt, 0, 5)
    plane_steps(model, plain_opt, 0, 2)
    opt = attach(model, "job", optimizer)
    opt.load_state_dict(through_a_file(plain_opt.state_dict()))
    plane_steps(model, opt, 2, 4)
    saved = through_a_file(opt.state_dict())
    opt.detach()
    back = torchs(optimizer, model.parameters())
    back.load_state_dict(saved)
    assert back.state_dict()["param_groups"] == plain_opt.state_dict()["param_groups"]
    plane_steps(model, back, 4, 5)
    for have, want in zip(model.parameters(), reference.parameters()):
        assert (have.double() - want.double()).abs().max().item() <= PARAMETER_BOUND


@on_daemon
@pytest.mark.parametrize("optimizer", TORCHS, ids=label)
def test_torchs_optimizer_begins_with_fresh_states(node, optimizer):
    reference, model = Plane(), Plane()
    reference_opt = torchs(optimizer, reference.parameters())
    opt = attach(model, "job", optimizer)
    saved = through_a_file(opt.state_dict())
    opt.load_state_dict(reference_opt.state_dict())
    assert opt.read_state("a")["step"] == 0
    opt.detach()
    plain_opt = torchs(optimizer, model.parameters())
    plain_opt.load_state_dict(saved)
    plane_steps(reference, reference_opt, 0, 2)
    plane_steps(model, plain_opt, 0, 2)
    for have, want in zip(model.parameters(), reference.parameters()):
        assert torch.equal(have, want)


def test_losses_go_on_as_torchs(node):
    """As a script that moves over with its checkpoint: the model, then optimizer.pt."""
    plain, reference = net(seed=1), net(seed=1)
    plain_opt, reference_opt = (
        torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, reference)
    )
    train(plain, plain_opt, 3)
    losses = train(reference, reference_opt, 6)
    model = net(seed=5)
    model.load_state_dict(plain.state_dict())
    opt = attach(model, "job")
    opt.load_state_dict(through_a_file(plain_opt.state_dict()))
    ours = train(model, opt, 3, first=3)
    assert ours == pytest.approx(losses[3:], rel=1e-5)


def test_hooks_schedules_and_options_of_torch(node):
    model = net(seed=1)
    opt = attach(model, "job")
    schedule = torch.optim.lr_scheduler.LinearLR(opt, total_iters=4)
    train(model, opt, 1)
    schedule.step()
    seen = []
    opt.register_load_state_dict_pre_hook(lambda _, values: seen.append(len(values)))
    opt.register_load_state_dict_post_hook(lambda one: seen.append(one is opt))
    opt.register_state_dict_post_hook(lambda _, values: values.update(note=1))
    saved = opt.state_dict()
    assert saved["note"] == 1 and saved["param_groups"][0]["initial_lr"] == 1e-2
    saved["param_groups"][0].update(foreach=True, lr=torch.tensor(0.25))
    opt.load_state_dict(saved)
    assert seen == [3, True]
    assert float(opt.param_groups[0]["lr"]) == 0.25 and opt.param_groups[0]["foreach"] is True
    train(model, opt, 1, first=1)


def test_the_states_of_one_parameter(node):
    model = net(seed=1)
    opt = attach(model, "job")
    train(model, opt, 2)
    weight = model.norm.weight
    assert weight in opt.state and len(opt.state) == len(list(model.parameters()))
    assert torch.equal(opt.state[weight]["exp_avg"], opt.read_state("norm.weight")["exp_avg"])
    assert torch.ones(1) not in opt.state
    with refused("E_UNSUPPORTED", "opt.state", "load_state_dict"):
        opt.state[weight] = {}
    state = opt.state
    opt.detach()
    del opt
    assert "DaemonState" in repr(state)


def test_distributed_checkpoint_of_torch(node):
    from torch.distributed.checkpoint import state_dict as checkpoint

    model = net(seed=1)
    model.norm.bias.requires_grad_(False)
    opt = attach(model, "job")
    train(model, opt, 2)
    saved = copy.deepcopy(checkpoint.get_optimizer_state_dict(model, opt))
    assert set(saved["state"]) == {name for name, p in model.named_parameters() if p.requires_grad}
    digest = opt.state_sha256()
    train(model, opt, 1, first=2)
    weights = {name: values.clone() for name, values in model.state_dict().items()}
    checkpoint.set_optimizer_state_dict(model, opt, saved)
    assert opt.state_sha256() != digest, "the parameters are those of the third step"
    read = opt.read_state("norm.weight")
    assert torch.equal(read["exp_avg"], saved["state"]["norm.weight"]["exp_avg"]) and read["step"] == 2
    assert all(torch.equal(values, weights[name]) for name, values in model.state_dict().items())


# ---------------------------------------------------------------------------------------- the ranks


def test_two_ranks_load_together(node):
    models = [net(seed=1), net(seed=1)]
    opts = attach_both(models)
    train_ranks(models, opts, 2)
    saved = copy.deepcopy(opts[1].state_dict())
    train_ranks(models, opts, 1, first=2)
    both(lambda rank: opts[rank].load_state_dict(saved))
    for opt in opts:
        assert opt.read_state("norm.weight")["step"] == 2
        assert torch.equal(opt.read_state("head.weight")["exp_avg"], saved["state"][0]["exp_avg"])
    train_ranks(models, opts, 1, first=3)
    digest = opts[0].state_sha256()

    # If one rank cannot load a state_dict, no rank loads it.
    short = copy.deepcopy(saved)
    short["state"][0]["exp_avg"] = torch.zeros(3)
    met = both(lambda rank: _met(lambda: opts[rank].load_state_dict(short if rank else saved)))
    assert met[0].code == "E_RANK" and "rank 1" in str(met[0]) and "is [3]" in str(met[0])
    assert met[1].code == "E_LAYOUT"
    slower = copy.deepcopy(saved)
    slower["param_groups"][0]["lr"] = 0.125
    met = both(lambda rank: _met(lambda: opts[rank].load_state_dict(slower if rank else saved)))
    assert {one.code for one in met} == {"E_OPTION"} and "different" in str(met[0])
    assert [opt.param_groups[0]["lr"] for opt in opts] == [1e-2, 1e-2]
    assert opts[0].state_sha256() == digest
    train_ranks(models, opts, 1, first=4)


def test_a_rank_that_loads_alone_gets_an_error(node):
    models = [net(seed=1), net(seed=1)]
    opts = both(
        lambda rank: forebay.attach(
            models[rank], forebay.AdamW(lr=1e-2), rank=rank, world_size=2, timeout=1
        )
    )
    met = _met(lambda: opts[1].load_state_dict(opts[1].state_dict()))
    assert met.code == "E_TIMEOUT" and "another rank" in str(met)


def _met(work):
    try:
        work()
    except forebay.ForebayError as error:
        return error
    return None


def test_between_forward_and_backward(node):
    """Leases of the forward are released: a write waits for them."""
    model = net(seed=1)
    opt = attach(model, "job")
    train(model, opt, 1)
    loss = loss_of(model, batch(1))
    opt.load_state_dict(opt.state_dict())
    loss.backward()
    opt.step()


# ------------------------------------------------------------------------------ a load that does not end


def at_write(monkeypatch, number, do):
    """Calls do() before this write of the loads that follow; returns how many there were."""
    from forebay.states import state_dict

    write, done = state_dict._write, []

    def counted(*args):
        done.append(1)
        if len(done) == number + 1:
            do()
        write(*args)

    monkeypatch.setattr(state_dict, "_write", counted)
    return done


def fail():
    raise RuntimeError("between two writes")


def assert_is_half_loaded(model, opt, path):
    loss_of(model, batch(0)).backward()
    for call in (
        opt.step,
        opt.state_dict,
        lambda: opt.state[model.norm.weight],
        lambda: opt.save_state(path),
    ):
        with refused("E_NOT_READY", "did not end", "load the same states again", "jobs --delete"):
            call()
    assert not os.path.exists(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_load_that_fails_is_noticed_by_every_attachment_until_one_ends(
    node, folder, monkeypatch, dtype
):
    """At each of its writes, in the job that loads fresh states last: its counts are 0 meanwhile."""
    source = net(seed=1).to(dtype)
    opt = attach(source, "source")
    fresh = copy.deepcopy(opt.state_dict())
    train(source, opt, 2)
    saved, digest = copy.deepcopy(opt.state_dict()), opt.state_sha256()
    number, ended = 0, False
    while not ended:
        model = net(seed=1).to(dtype)
        name = f"job{number}"
        opt = attach(model, name)
        with monkeypatch.context() as patch:
            at_write(patch, number, fail)
            try:
                opt.load_state_dict(saved)
                ended = True
            except RuntimeError:
                assert_is_half_loaded(model, opt, f"{folder}/file")
        opt.detach()
        again = net(seed=1).to(dtype)
        opt = attach(again, name, resume=True)
        if not ended:
            assert_is_half_loaded(again, opt, f"{folder}/file")
            opt.load_state_dict(fresh)
            assert not opt.read_state("head.weight")["exp_avg"].any()
            opt.load_state_dict(saved)
        if dtype == torch.bfloat16:  # bfloat16 parameters have masters, which are loaded too
            assert opt.state_sha256() == digest
        assert opt.read_state("head.weight")["step"] == 2
        train(again, opt, 1)
        opt.detach()
        number += 1
    assert number > 2 * len(saved["state"])


@on_daemon
def test_a_process_that_is_killed_while_it_loads(node, folder, monkeypatch):
    model = net(seed=1)
    opt = attach(model, "job")
    train(model, opt, 2)
    saved = copy.deepcopy(opt.state_dict())
    opt.detach()
    child = os.fork()
    if child == 0:
        try:
            at_write(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
            attach(net(seed=1), "job", resume=True).load_state_dict(saved)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    again = net(seed=1)
    opt = attach(again, "job", resume=True)
    assert_is_half_loaded(again, opt, f"{folder}/file")
    opt.load_state_dict(saved)
    train(again, opt, 1)


def test_ctrl_c_while_states_are_written_comes_when_all_are(node, monkeypatch):
    model = net(seed=1)
    opt = attach(model, "job")
    train(model, opt, 2)
    saved, digest = copy.deepcopy(opt.state_dict()), opt.state_sha256()
    train(model, opt, 1, first=2)
    handler = signal.getsignal(signal.SIGINT)
    saved["param_groups"][0]["lr"] = 0.25
    done = at_write(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        opt.load_state_dict(saved)
    assert len(done) == 2 * len(saved["state"])
    assert signal.getsignal(signal.SIGINT) is handler
    assert opt.param_groups[0]["lr"] == 0.25 and opt.read_state("norm.weight")["step"] == 2
    assert opt.state_sha256() != digest, "the parameters are those of the third step"
    train(model, opt, 1, first=3)


# ---------------------------------------------------------------------------------------- refusals


def _wrong(change):
    """One that changes a state_dict of a trained net."""

    def apply(saved):
        change(saved)
        return saved

    return apply


REFUSED = {
    "no state_dict": (lambda saved: {"state": {}}, "E_LAYOUT", "keys"),
    "a shape": (
        _wrong(lambda saved: saved["state"][2].update(exp_avg=torch.zeros(4, 4))),
        "E_LAYOUT",
        "exp_avg of parameter layers.0.norm.bias is .4, 4.",
    ),
    "not a tensor": (
        _wrong(lambda saved: saved["state"][2].update(exp_avg=0.0)),
        "E_LAYOUT",
        "is a float",
    ),
    "another optimizer": (
        _wrong(lambda saved: saved["state"].update({1: {"momentum_buffer": torch.zeros(8)}})),
        "E_OPTION",
        "has momentum_buffer; AdamW has exp_avg, exp_avg_sq",
    ),
    "amsgrad": (
        _wrong(lambda saved: saved["state"][1].update(max_exp_avg_sq=torch.zeros(8))),
        "E_OPTION",
        "amsgrad",
    ),
    "a missing moment": (
        _wrong(lambda saved: saved["state"][1].pop("exp_avg_sq")),
        "E_OPTION",
        "layers.0.norm.weight has",
    ),
    "a parameter more": (
        _wrong(lambda saved: saved["state"].update({99: saved["state"][0]})),
        "E_LAYOUT",
        "parameter 99",
    ),
    "fewer parameters": (
        _wrong(lambda saved: saved["param_groups"][0]["params"].pop()),
        "E_LAYOUT",
        "parameter groups of",
    ),
    "another group": (
        _wrong(lambda saved: saved["param_groups"].append({"params": []})),
        "E_LAYOUT",
        "parameter groups of",
    ),
    "maximize": (
        _wrong(lambda saved: saved["param_groups"][0].update(maximize=True)),
        "E_OPTION",
        "maximize=True",
    ),
    "Adam": (
        _wrong(lambda saved: saved["param_groups"][0].update(decoupled_weight_decay=False)),
        "E_OPTION",
        "decoupled_weight_decay=False",
    ),
    "no betas": (_wrong(lambda saved: saved["param_groups"][0].pop("betas")), "E_OPTION", "betas"),
    "a rate": (
        _wrong(lambda saved: saved["param_groups"][0].update(betas=(0.9, 2.0))),
        "E_OPTION",
        "beta2",
    ),
    "NaN": (
        _wrong(lambda saved: saved["state"][1]["exp_avg"].fill_(float("nan"))),
        "E_NONFINITE",
        "layers.0.norm.weight",
    ),
    "a square": (
        _wrong(lambda saved: saved["state"][1]["exp_avg_sq"].fill_(-1.0)),
        "E_NONFINITE",
        "below 0",
    ),
    "half a step": (
        _wrong(lambda saved: saved["state"][1].update(step=torch.tensor(1.5))),
        "E_OPTION",
        "step of parameter layers.0.norm.weight",
    ),
    **{
        f"step {step}": (
            _wrong(lambda saved, step=step: saved["state"][1].update(step=step)),
            "E_OPTION",
            "step of parameter layers.0.norm.weight",
        )
        for step in (float("nan"), float("inf"), -1, 2**53, torch.ones(2), "two")
    },
    "step of 400 digits": (
        _wrong(lambda saved: saved["state"][1].update(step=10**400)),
        "E_OPTION",
        "step of parameter layers.0.norm.weight",
    ),
    "lr below 0": (
        _wrong(lambda saved: saved["param_groups"][0].update(lr=-1.0)),
        "E_OPTION",
        "lr is -1.0",
    ),
    "lr beyond floats": (
        _wrong(lambda saved: saved["param_groups"][0].update(lr=10**400)),
        "E_OPTION",
        "not the numbers",
    ),
    "two of lr": (
        _wrong(lambda saved: saved["param_groups"][0].update(lr=torch.ones(2))),
        "E_OPTION",
        "not the numbers",
    ),
    "moments of no step": (
        _wrong(lambda saved: saved["state"][1].update(step=0)),
        "E_OPTION",
        "its step is 0",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(node, what):
    change, code, text = REFUSED[what]
    model = net(seed=1)
    opt = attach(model, "job")
    train(model, opt, 2)
    saved = copy.deepcopy(opt.state_dict())
    train(model, opt, 1, first=2)
    digest, groups = opt.state_sha256(), copy.deepcopy(opt.state_dict()["param_groups"])
    with refused(code, text):
        opt.load_state_dict(change(saved))
    assert opt.state_sha256() == digest
    assert opt.state_dict()["param_groups"] == groups
    train(model, opt, 1, first=3)


def test_states_of_a_frozen_parameter(node):
    model = net(seed=1)
    model.norm.bias.requires_grad_(False)
    opt = attach(model, "job")
    train(model, opt, 1)
    saved = opt.state_dict()
    frozen = [p is model.norm.bias for p in opt.param_groups[0]["params"]].index(True)
    assert frozen not in saved["state"]
    saved["state"][frozen] = copy.deepcopy(saved["state"][frozen - 1])
    with refused("E_LAYOUT", "frozen"):
        opt.load_state_dict(saved)

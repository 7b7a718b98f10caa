# Goal    The optimizer's states leave and enter a job in torch's format: what was read and loaded has the same
#         bits where the format keeps them, torch's optimizer goes on from it and it from torch's as if nothing had
#         been moved, between ranks, through torch.save, through a file of pieces; what does not fit is refused by
#         name before anything was written.
# Method  Small models on the fake node and the real daemon; torch's optimizers on losses that are linear in the
#         parameters, compared with the bound of test_optimizers.py; the bits by state_sha256().

import copy
import io
import os
import pathlib
import signal

import forebay
import pytest
import torch
from models import batch, loss_of, net, train
from test_optimizers import OPTIMIZERS, PARAMETER_BOUND, Plane, label, torchs
from test_two_ranks import attach_both, both, train_ranks
from torch import nn

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
    second = net(seed=2).bfloat16()  # its weights are others
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
            # Half a code of the scale of its group, which is below the whole parameter's largest.
            root = torch.sqrt if moment == "exp_avg_sq" else (lambda values: values)
            codes = 255 if moment == "exp_avg_sq" else 127
            bound = 0.51 * float(root(wanted[moment]).abs().max()) / codes
            assert float((root(wanted[moment]) - root(found[moment])).abs().max()) <= bound


def test_states_before_the_first_step(node):
    """Fresh states are states: loading them takes a trained job's moments away."""
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

    # What one of them cannot load none does.
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
    """Leases of the forward are given back: a write waits for them."""
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
    from forebay import _state_dict

    write, done = _state_dict._write, []

    def counted(*args):
        done.append(1)
        if len(done) == number + 1:
            do()
        write(*args)

    monkeypatch.setattr(_state_dict, "_write", counted)
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
        if dtype == torch.bfloat16:  # whose masters are loaded too
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


# ------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_file_holds_the_states(node, folder, dtype):
    path = pathlib.Path(folder) / "optimizer.safetensors"
    first = net(seed=1).to(dtype)
    groups = [
        {"params": [p for n, p in first.named_parameters() if "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in first.named_parameters() if "norm" not in n]},
    ]
    opt = attach(first, "first", param_groups=groups)
    train(first, opt, 3)
    opt.save_state(path)
    assert os.listdir(folder) == [path.name]
    second = net(seed=2).to(dtype)
    second.load_state_dict(first.state_dict())
    groups = [
        {"params": [p for n, p in second.named_parameters() if "norm" in n]},
        {"params": [p for n, p in second.named_parameters() if "norm" not in n]},
    ]
    other = attach(second, "second", param_groups=groups)
    other.load_state(path)
    assert other.state_sha256() == opt.state_sha256()
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.01]
    assert train(first, opt, 2, first=3) == train(second, other, 2, first=3)
    safetensors = pytest.importorskip("safetensors.torch")
    stored = safetensors.load_file(path)
    assert stored["norm.weight.step"] == 3
    assert stored["embedding.weight.exp_avg"].shape == first.embedding.weight.shape


@on_daemon
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", [forebay.AdamW(lr=1e-3), forebay.Adagrad(lr=1e-3)], ids=label)
def test_the_default_dtype_is_another(node, folder, dtype, optimizer):
    """Moments and steps are float32; 70001 is none of 16 bits."""
    model = net(seed=1)
    opt = attach(model, "job", optimizer)
    torch.set_default_dtype(dtype)
    try:
        opt.save_state(f"{folder}/fresh")
        fresh = opt.state_dict()
        opt.load_state(f"{folder}/fresh")
        loaded = copy.deepcopy(fresh)
        for states in loaded["state"].values():
            states["step"] = torch.tensor(70001, dtype=torch.int64)
        opt.load_state_dict(loaded)
        opt.save_state(f"{folder}/file")
        opt.load_state(f"{folder}/file")
        for states in (opt.state_dict()["state"][0], opt.read_state("norm.weight")):
            assert states["step"] == 70001
        for states in (*fresh["state"].values(), opt.state_dict()["state"][0]):
            assert {values.dtype for values in states.values()} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_file_that_does_not_fit_is_refused(node, folder):
    model = net(seed=1)
    opt = attach(model, "first")
    train(model, opt, 2)
    path = f"{folder}/file"
    opt.save_state(path)
    whole = pathlib.Path(path).read_bytes()
    digest = opt.state_sha256()
    for broken, text in (
        (whole[:-4], "tensor"),
        (whole[:6], "header"),
        (b"\xff" * 64, "header"),
        (whole.replace(b'"forebay"', b'"forebax"'), "whose states"),
    ):
        pathlib.Path(path).write_bytes(broken)
        with refused("E_OPTION", text, "save_state"):
            opt.load_state(path)
    pathlib.Path(path).write_bytes(whole)
    larger = net(seed=1, layers=4)
    with refused("E_LAYOUT", "missing: ..layers.3"):
        attach(larger, "larger").load_state(path)
    wider = net(seed=1, width=16)
    with refused("E_LAYOUT", "and the parameter"):
        attach(wider, "wider").load_state(path)
    assert opt.state_sha256() == digest
    opt.load_state(path)
    assert opt.state_sha256() == digest
    with pytest.raises(FileNotFoundError):
        opt.save_state(f"{folder}/no/such/folder/file")


def test_a_file_that_becomes_shorter_while_it_is_loaded(node, folder, monkeypatch):
    path = f"{folder}/file"
    model = net(seed=1)
    opt = attach(model, "job")
    train(model, opt, 1)
    opt.save_state(path)
    with monkeypatch.context() as patch:
        at_write(patch, 2, lambda: os.truncate(path, 5000))
        with refused("E_OPTION", "load_state", "has become shorter"):
            opt.load_state(path)
    assert_is_half_loaded(model, opt, f"{folder}/other")


def test_what_is_no_regular_file_is_not_loaded(node, folder):
    opt = attach(net(seed=1), "job")
    os.mkfifo(f"{folder}/fifo")
    for path in (f"{folder}/fifo", folder, pathlib.Path("/dev/zero"), b"/dev/null"):
        with refused("E_OPTION", "no regular file"):
            opt.load_state(path)


def test_a_saved_file_takes_the_place_of_a_regular_file_alone(node, folder, monkeypatch):
    opt = attach(net(seed=1), "job")
    folder = pathlib.Path(folder)
    os.mkfifo(folder / "fifo")
    os.symlink(folder / "fifo", folder / "to_fifo")
    for path in (folder, folder / "fifo", folder / "to_fifo", "/dev/null"):
        with refused("E_OPTION", "save_state", "no regular file"):
            opt.save_state(path)
    # Of a name that a user could take nothing is touched.
    (folder / "mine").write_text("mine")
    os.symlink(folder / "mine", folder / "file.part")
    opt.save_state(bytes(folder / "file"))
    assert (folder / "mine").read_text() == "mine" and (folder / "file.part").is_symlink()
    os.symlink("target", folder / "link")
    umask = os.umask(0o027)
    try:
        opt.save_state(folder / "link")
    finally:
        os.umask(umask)
    assert (folder / "link").is_symlink() and (folder / "target").stat().st_mode & 0o777 == 0o640
    (folder / "target").chmod(0o600)
    opt.save_state(folder / "link")
    assert (folder / "target").stat().st_mode & 0o777 == 0o600
    opt.save_state(folder / ("n" * 255))
    opt.load_state(folder / "link")
    synced = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
        opt.save_state(folder / "file")
    assert ".forebay-" in synced[0] and synced[1:] == [str(folder)]
    held = sorted(os.listdir(folder))
    whole = (folder / "file").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        opt.save_state(folder / "file")
    assert sorted(os.listdir(folder)) == held and (folder / "file").read_bytes() == whole


@on_daemon
def test_a_file_of_another_optimizer_is_refused(node, folder):
    path = f"{folder}/file"
    attach(net(seed=1), "first", forebay.Lion()).save_state(path)
    with refused("E_OPTION", "states of Lion", "AdamW"):
        attach(net(seed=1), "second").load_state(path)


@on_daemon
@pytest.mark.parametrize(
    "optimizer", [forebay.Lion(lr=1e-3), forebay.Lamb(lr=1e-3), forebay.Adagrad(lr=1e-2)], ids=label
)
def test_files_of_the_other_optimizers(node, folder, optimizer):
    first, second = net(seed=1), net(seed=1)
    opt, other = attach(first, "first", optimizer), attach(second, "second", optimizer)
    for steps in (0, 2):  # fresh states too
        train(first, opt, steps)
        opt.save_state(f"{folder}/file")
        other.load_state(f"{folder}/file")
    for name, _ in first.named_parameters():
        wanted, found = opt.read_state(name), other.read_state(name)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(values, found[key]) for key, values in wanted.items()), name


@on_daemon
def test_two_ranks_save_one_file(node, folder):
    models = [net(seed=1), net(seed=1)]
    opts = attach_both(models)
    train_ranks(models, opts, 2)
    both(lambda rank: opts[rank].save_state(f"{folder}/file"))
    digest = opts[0].state_sha256()
    train_ranks(models, opts, 1, first=2)
    both(lambda rank: opts[rank].load_state(f"{folder}/file"))
    assert opts[1].read_state("norm.weight")["step"] == 2
    assert opts[0].state_sha256() != digest, "its parameters are those of the third step"
    met = both(lambda rank: _raised(lambda: opts[rank].save_state(f"{folder}/no/file")))
    assert isinstance(met[0], FileNotFoundError)
    assert met[1].code == "E_RANK" and "rank 0" in str(met[1])


def _raised(work):
    try:
        work()
    except Exception as error:
        return error
    return None


@on_daemon
def test_a_piece_at_a_time(node, folder, monkeypatch):
    """Of tensors of several pieces, the last one short."""
    from forebay import _state_dict

    monkeypatch.setattr(_state_dict, "PIECE_ELEMS", 128)
    preadv, read = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    model, again = nn.Linear(37, 41), nn.Linear(37, 41)
    again.load_state_dict(model.state_dict())
    opt, other = attach(model, "first"), attach(again, "second")
    model(torch.ones(2, 37)).square().sum().backward()
    opt.step()
    opt.save_state(f"{folder}/file")
    other.load_state(f"{folder}/file")
    assert max(read) == 4 * 128
    for name in ("weight", "bias"):
        wanted, found = opt.read_state(name), other.read_state(name)
        assert all(torch.equal(values, found[key]) for key, values in wanted.items())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_pieces_of_a_box(size):
    """Columns 1 to 3 of a matrix, whatever part of a row a piece ends in."""
    from forebay import _state_file

    matrix = torch.arange(24.0).view(4, 6)
    box = _state_file.BoxOf(matrix.view(-1), (1, 3, 6, 4))
    pieces = [box[begin : begin + size] for begin in range(0, len(box), size)]
    assert torch.equal(torch.cat(pieces), matrix[:, 1:4].reshape(-1))

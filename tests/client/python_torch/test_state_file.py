# SPDX-License-Identifier: Apache-2.0
# Goal    The optimizer's states leave and enter a job through a file of pieces, with the same bits, whatever torch's default
#         dtype is. A file that is broken, that changes or does not fit is refused by name. Writing a file touches nothing but
#         that file.
# Method  Small models on the daemon; headers that are written by hand.

import copy
import json
import os
import pathlib
import struct

import forebay
import pytest
import torch
from models import net, train
from test_optimizers import label
from test_state_dict import assert_is_half_loaded, at_write, attach, on_daemon, refused
from test_two_ranks import attach_both, both, train_ranks
from torch import nn


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


def _file_with(whole, change):
    """Of another header."""
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + whole[begin:]


def _group_with(**values):
    """Of the metadata's first parameter group."""

    def change(header):
        metadata = header["__metadata__"]
        described = json.loads(metadata["forebay"])
        described["param_groups"][0].update(values)
        metadata["forebay"] = json.dumps(described)

    return change


def _deep(depth):
    def change(header):
        header["__metadata__"]["forebay"] = (
            '{"optimizer": "AdamW", "param_groups": ' + "[" * depth + "]" * depth + "}"
        )

    return change


WEIGHT = "norm.weight.exp_avg"
BROKEN = {
    "a shape of Infinity": lambda header: header[WEIGHT].update(shape=[float("inf")]),
    "a shape of NaN": lambda header: header[WEIGHT].update(shape=[float("nan")]),
    "a shape of text": lambda header: header[WEIGHT].update(shape="8"),
    "offsets of floats": lambda header: header[WEIGHT].update(data_offsets=[0.0, 32.0]),
    "offsets before the file": lambda header: header[WEIGHT].update(data_offsets=[-32, 0]),
    "a list of metadata": lambda header: header.update(__metadata__=[]),
    "metadata 100,000 deep": _deep(100_000),
    "metadata 900 deep": _deep(900),
    "an option 900 deep": _group_with(note=json.loads("[" * 900 + "]" * 900)),
    "lr below 0": _group_with(lr=-1.0),
    "lr beyond floats": _group_with(lr=10**400),
    "one beta": _group_with(betas=[0.9]),
    "a step of NaN": lambda header: header["norm.weight.step"].update(header["nan"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused(node, folder, what):
    path = pathlib.Path(folder) / "file"
    opt = attach(net(seed=1), "job")
    opt.save_state(path)
    digest, whole = opt.state_sha256(), path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    end = len(whole) - begin

    def change(header):
        header["nan"] = {"dtype": "F32", "shape": [], "data_offsets": [end, end + 4]}
        BROKEN[what](header)

    path.write_bytes(_file_with(whole + struct.pack("<f", float("nan")), change))
    with refused("E_OPTION"):
        opt.load_state(path)
    assert opt.state_sha256() == digest and opt.param_groups[0]["lr"] == 1e-2


def test_a_parameter_that_the_model_does_not_have_and_that_has_no_name(node, folder):
    path = pathlib.Path(folder) / "file"
    opt = attach(net(seed=1), "job")
    opt.save_state(path)
    path.write_bytes(_file_with(path.read_bytes(), _group_with(params=["some", 5, None])))
    with refused("E_LAYOUT", "not in the model: ..5., .None., .some"):
        opt.load_state(path)


@pytest.mark.parametrize("value", [object(), torch.ones(2), {(1, 2): 3}], ids=["object", "two", "key"])
def test_an_option_that_a_file_cannot_hold(node, folder, value):
    opt = attach(net(seed=1), "job")
    opt.param_groups[0]["tag"] = value
    with refused("E_OPTION", "save_state", "parameter group 0 has .tag"):
        opt.save_state(f"{folder}/file")
    assert not os.listdir(folder)
    opt.param_groups[0]["tag"] = torch.tensor(2.0)
    opt.save_state(f"{folder}/file")


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
    # save_state() does not touch files whose names a user could have chosen, like file.part.
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
    from forebay.states import state_dict

    monkeypatch.setattr(state_dict, "PIECE_ELEMS", 128)
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
    from forebay.states import state_file

    matrix = torch.arange(24.0).view(4, 6)
    box = state_file.BoxOf(matrix.view(-1), (1, 3, 6, 4))
    pieces = [box[begin : begin + size] for begin in range(0, len(box), size)]
    assert torch.equal(torch.cat(pieces), matrix[:, 1:4].reshape(-1))

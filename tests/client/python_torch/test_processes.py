# SPDX-License-Identifier: Apache-2.0
# Goal    Killed processes leave nothing behind and change no bit; a dead daemon is an error.
# Method  The real daemon; trainers are processes that die by SIGKILL.

import atexit
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import forebay
import pytest
import torch
from daemon_process import CORE, Daemon, missing
from models import batch, loss_of, net, train

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
DEADLINE_S = 20
ROUNDS = 100
QUIET_LOOKS = 20


@pytest.fixture
def own_daemon(tmp_path, monkeypatch):
    if missing():
        pytest.skip(missing())
    monkeypatch.setattr(forebay, "_core", sys.modules["forebay._core"], raising=False)
    daemon = Daemon(tmp_path)
    monkeypatch.setenv("FOREBAY_SOCKET", daemon.socket)
    yield daemon
    if daemon.process.poll() is None:
        daemon.stop()


@functools.cache
def package():
    """A folder with this checkout's package and the extension; it goes with this process, so that
    no other checkout's tests ever find it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fb"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "forebay").mkdir()
    sources = ROOT / "client" / "python" / "forebay"
    for file in (*sources.glob("*.py"), *(init.parent for init in sources.glob("*/__init__.py"))):
        (folder / "forebay" / file.name).symlink_to(file)
    (folder / "forebay" / pathlib.Path(CORE).name).symlink_to(CORE)
    libraries = pathlib.Path(CORE).parents[1] / "forebay.libs"  # where the extension of a wheel looks: ../forebay.libs
    if libraries.exists():
        (folder / "forebay.libs").symlink_to(libraries)
    return folder


def environment():
    """Of a process that finds the package, its extension and these tests."""
    path = f"{package()}:{ROOT / 'tools'}:{HERE}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def held(daemon):
    """What the node holds, by its own books and by the kernel's."""
    status = forebay.status()
    memory = status["memory"]
    files = descriptors(daemon.process.pid)
    return {
        "sessions": [job["sessions"] for job in status["jobs"]],
        "leases": [job["leases"] for job in status["jobs"]],
        "arenas": sorted(
            (arena["kind"], arena["job"], arena["size_bytes"], arena["allocated_bytes"])
            for arena in memory["arenas"]
        ),
        "descriptors": len(files),
        "memfds": sorted(blocks for name, blocks in files if name.startswith("/memfd:")),
    }


def descriptors(pid):
    """Name and 512-byte blocks of each."""
    found = []
    for file in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append((os.readlink(file), file.stat().st_blocks))
        except FileNotFoundError:  # closed meanwhile
            pass
    return found


def held_at_rest(daemon, want=None):
    """The resources in use once the daemon is quiescent: no session exists and nothing changes any more (or once
    they equal `want`), within the deadline."""
    end = time.monotonic() + DEADLINE_S
    last, same = None, 0
    while True:
        have = held(daemon)
        same = same + 1 if have == last else 0
        last = have
        done = have == want if want else not any(have["sessions"]) and same >= QUIET_LOOKS
        if done or time.monotonic() > end:
            return have
        time.sleep(0.01)  # house: allow sleep: a poll with a deadline


def test_a_hundred_killed_trainers_leave_nothing(own_daemon, monkeypatch):
    monkeypatch.setenv("FOREBAY_JOB", "rounds")
    command = [sys.executable, str(HERE / "kill_rounds.py")]
    subprocess.run([*command, "3"], env=environment(), check=True, timeout=120)
    before = held_at_rest(own_daemon)
    steps = forebay.status()["jobs"][0]["committed_step"]
    subprocess.run([*command, str(ROUNDS)], env=environment(), check=True, timeout=600)
    after = held_at_rest(own_daemon, want=before)
    assert after == before
    # The last two of every five rounds commit a step.
    assert forebay.status()["jobs"][0]["committed_step"] == steps + ROUNDS * 2 // 5
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train(model, opt, 1)
    opt.detach()


def trainer(out, *flags, ranks=2):
    text = out.parent / "text"
    if not text.exists():
        words = "in the beginning was a word and the word was with the node".split()
        generator = torch.Generator().manual_seed(5)
        picks = torch.randint(len(words), (12_000,), generator=generator).tolist()
        text.write_text(" ".join(words[pick] for pick in picks))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", "1"]
    command += [str(ROOT / "tools" / "train_gpt.py"), "--width", "32", "--layers", "3"]
    command += ["--heads", "2", "--seq", "32", "--lr", "3e-3", "--warmup", "4"]
    command += ["--steps", "8", "--text", str(text), "--out", str(out), *flags]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        [json.loads(line) for line in (out / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]


def losses(log):
    return [row["loss"] for row in log if row["event"] == "step"]


def test_kill_and_resume_have_the_bits_of_an_uninterrupted_run(own_daemon, tmp_path, monkeypatch):
    plain = trainer(tmp_path / "plain", "--plain")
    monkeypatch.setenv("FOREBAY_JOB", "whole")
    ends = ("--sample", "20", "--save", str(tmp_path / "model.pt"))
    whole = trainer(tmp_path / "whole", "--sha", str(tmp_path / "whole.json"), *ends)
    said = next(row["text"] for row in whole[0] if row["event"] == "sample")
    assert len(said) >= 20
    assert torch.load(tmp_path / "model.pt")["head.weight"].shape == (256, 32)
    monkeypatch.setenv("FOREBAY_JOB", "killed")
    killed = trainer(tmp_path / "killed", "--sha", str(tmp_path / "killed.json"), "--kill", "1:4:2")
    for ours, theirs in zip(whole, plain):
        assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4)
    assert any(row["event"] == "kill" and row["groups"] == 2 for row in killed[1])
    for log in killed:
        assert [row["step"] for row in log if row["event"] == "resume"] == [3]
    for ours, theirs in zip(killed, whole):
        assert losses(ours) == losses(theirs), "RNG and data position came back"
    shas = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed")]
    assert shas[0] == shas[1]


def test_bf16_exact_equals_the_scalar_reference(own_daemon, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_JOB", "exact")
    logs = trainer(tmp_path / "exact", "--dtype", "bf16", "--format", "exact", "--reference-check")
    rows = [row for log in logs for row in log if row["event"] == "reference"]
    assert len(rows) == 2
    for row in rows:
        assert row["elements"] > 10_000 and row["mismatches"] == 0


def test_daemon_death_is_an_error_within_a_second(own_daemon):
    model = net()
    opt = forebay.attach(model, forebay.AdamW(lr=1e-2))
    train(model, opt, 1)
    own_daemon.process.kill()
    own_daemon.process.wait()
    began = time.monotonic()
    with pytest.raises(forebay.UnavailableError) as info:
        loss_of(model, batch(1)).backward()
        opt.step()
    assert info.value.code == "E_DAEMON_GONE"
    assert time.monotonic() - began < DEADLINE_S
    assert "Parameter containing" in repr(model.norm.weight), "the window can still be read"
    with pytest.raises(forebay.UnavailableError):
        opt.detach()
    model.half()


def test_write_into_a_window_is_explained(own_daemon):
    code = """
import torch, forebay
from models import net
model = net()
opt = forebay.attach(model, forebay.AdamW())
reader = forebay.attach_reader(net())  # a rank's own writes go on (test_writes.py)
window, theirs = (torch.from_dlpack(one.window()) for one in (opt._engine.attachment, reader._attachment))
theirs[model.layers[1].up.weight.data_ptr() - window.data_ptr()] = 1
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == -11
    assert "layers.1.up.weight" in done.stderr, done.stderr
    assert 'File "<string>", line 8 in <module>' in done.stderr, done.stderr

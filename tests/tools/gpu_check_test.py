# SPDX-License-Identifier: Apache-2.0
"""Goal    gpu_check runs all of its items without a GPU when it is asked to rehearse, also on a kernel that
        lacks what the service wants, and says in a line each what is missing; without a
        GPU it says so. It leaves nothing behind when it is ended, and finds what its caller finds.
Method  The folders of its archive, as links to what the checkout has built, under a filter of system
        calls that answers as an old kernel does.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from forebay_command import take_signals

torch = pytest.importorskip("torch")
core = pytest.importorskip("forebay._core")

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build" / "bin"))
BUILT_TESTS = BIN.parent / "tests"
DEADLINE_S = 600


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """As the archive is, for this interpreter alone."""
    folder = tmp_path_factory.mktemp("gpu_check")
    # The installed package: the source tree lacks the extension.
    package = pathlib.Path(core.__file__).parent
    backend = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in ("bin", "tests", "python", f"python/backends/{backend}"):
        (folder / name).mkdir(parents=True)
    programs = [BIN / "forebay", BIN / "forebay-bench", BIN / "forebayd"]
    programs += [BUILT_TESTS / "gpu_device_contract_test", BUILT_TESTS / "client_perceptron_test"]
    programs += [BUILT_TESTS / "gpu_communicator_contract_test"]
    cases = (ROOT / "tests" / "client" / "python_torch").glob("[!t]*.py")
    for place, files in {
        "bin": programs,
        "python": [package],
        "tests": [*cases, ROOT / "tools" / "train_support.py", BUILT_TESTS / "libfake_cuda.so"],
        ".": [ROOT / "tools" / "gpu_check" / name for name in ("train.py", "accelerate_loop.py")],
    }.items():
        for file in files:
            (folder / place / file.name).symlink_to(file)
    guide = [sys.executable, ROOT / "tools" / "apply_guide.py", "one-gpu.md", folder / "examples"]
    subprocess.run(guide, check=True)
    script = (ROOT / "tools" / "gpu_check" / "gpu_check.py").read_text(encoding="utf-8")
    (folder / "gpu_check").write_text(script, encoding="utf-8")
    return folder


def gpu_check(folder, *flags, before=()):
    """Exit status and output, and its items by name."""
    out = folder / "out.json"
    command = [*before, sys.executable, folder / "gpu_check", "--json", out, *flags]
    done = subprocess.run(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    items = json.loads(out.read_text(encoding="utf-8"))["items"] if out.exists() else []
    return done, {item["name"]: item for item in items}


def test_on_an_old_kernel_every_item_goes_on_and_names_what_is_missing(unpacked):
    some = ("kernel", "binding", "contracts", "copies", "losses", "python_cases")
    done, items = gpu_check(
        unpacked, "--rehearse", "--only", *some, before=[BUILT_TESTS / "old_kernel"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in {item["result"] for item in items.values()}
    for what, seen in {
        "memlock": "64.0 MiB could not be locked",
        "io_uring": "Function not implemented; threads are used instead",
        "pidfd": "pidfd_open: Function not implemented",
        "huge pages": "MADV_COLLAPSE gave 0 of 4 pages",
    }.items():
        assert seen in items[f"kernel: {what}"]["seen"]
    for name in ("device contract", "collectives' contract", "C++ loop", "losses as FSDP2's"):
        assert items[name]["result"] == "PASS"
    assert re.fullmatch(r"\d\d cases passed", items["sharded cases"]["seen"])
    assert len([name for name in items if name.startswith("copies/")]) == 10
    assert re.search(r"^\d+ PASS, 0 FAIL, \d+ INFO, 0 SKIP$", done.stdout, re.M)


def test_the_items_about_speed_print_both_sides(unpacked):
    done, items = gpu_check(unpacked, "--rehearse", "--only", "exposed", "peer", "largest")
    assert done.returncode == 0, done.stdout + done.stderr
    bare, ours, asked = items["exposed time, small, 256 tokens"]["figures"]
    assert (bare["who"], ours["who"]) == ("compute", "forebay")
    exposed = (ours["median_s"] - bare["median_s"]) / bare["median_s"]
    assert f" takes {exposed:.0%} more than compute alone " in items["exposed time, small, 256 tokens"]["seen"]
    assert bare["params"] == ours["params"] and bare["tokens"] == ours["tokens"] == 256
    assert asked["most_s"] > 1.1 * bare["median_s"]
    assert all(asked[name] > 0 for name in ("to_device", "from_device", "passes"))
    ours, theirs = items["beside FSDP2's offload, 256 tokens"]["figures"]
    assert theirs["who"] == "offload" and ours["tokens_per_s"] > 0
    deepspeed = items["beside DeepSpeed, 256 tokens"]
    if importlib.util.find_spec("deepspeed") is None:
        assert (deepspeed["result"], deepspeed["seen"]) == ("SKIP", "it is not installed")
    else:
        _, theirs = deepspeed["figures"]
        assert theirs["who"] == "deepspeed" and theirs["params"] == ours["params"]
        assert theirs["losses"][-1] < theirs["losses"][0]
    assert items["largest model"]["figures"]["format"] == "int8"


def test_the_loop_for_accelerate_and_the_script_of_the_page_train(unpacked):
    done, items = gpu_check(unpacked, "--rehearse", "--only", "accelerate", "page")
    assert done.returncode == 0, done.stdout + done.stderr
    assert items["script of docs/guide/one-gpu.md"]["result"] == "PASS"
    if all(importlib.util.find_spec(name) for name in ("accelerate", "transformers")):
        ours, theirs = items["FSDP2 through Accelerate"]["figures"]
        assert (ours["mode"], ours["optimizer"]) == ("sharded", "ForebayOptimizer")
        assert theirs["optimizer"] == "AdamW"


def test_without_time_or_gpu_it_says_so(unpacked):
    done, items = gpu_check(unpacked, "--rehearse", "--minutes", "0", "--only", "copies")
    assert done.returncode == 0 and items["copies"]["seen"].startswith("no time left")
    if not torch.cuda.is_available():
        done, items = gpu_check(unpacked)
        assert done.returncode == 1 and items["gpu"]["seen"].startswith("torch sees no GPU")


def test_a_python_without_a_binding_in_the_archive_reads_which_it_has(unpacked, tmp_path):
    script = (unpacked / "gpu_check").read_text(encoding="utf-8")
    (tmp_path / "gpu_check").write_text(script, encoding="utf-8")
    (tmp_path / "python" / "backends" / "cp27").mkdir(parents=True)
    done, _ = gpu_check(tmp_path, "--rehearse")
    assert done.returncode == 1
    assert "error[E_UNSUPPORTED]: no binding for cp" in done.stderr and "one of cp27" in done.stderr


def loaded(folder):
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(folder / "gpu_check"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    return module


def test_what_goal_g9_asks_of_a_step(unpacked):
    check = loaded(unpacked)
    shape = check.SHAPES["3B"]
    rates = {"to_device": 55.0, "from_device": 55.0, "passes": 155.0}
    assert check.most_step_s(shape, 16384, 1.0, rates) == pytest.approx(1.08)
    # The passes take longer than compute and copies. A layer is the largest group.
    params = 26 * (4 * 3200**2 + 3 * 3200 * 8640 + 2 * 3200) + 2 * 32000 * 3200 + 3200
    group = 4 * 3200**2 + 3 * 3200 * 8640 + 2 * 3200
    tail_s = group * (2 / 55e9 + 30 / 155e9 + 2 / 55e9) + 0.010
    assert check.most_step_s(shape, 4096, 0.27, rates) == pytest.approx(1.10 * params * 30 / 155e9 + tail_s)
    slow = {**rates, "to_device": 5.0}
    assert check.most_step_s(shape, 4096, 0.27, slow) > 1.10 * params * 4 / 5e9
    assert check.most_step_s(shape, 4096, 9.0, rates) == pytest.approx(9.9 + tail_s)


def test_embedding_and_head_of_the_trained_model_are_groups_of_their_own(unpacked):
    """In a process of its own, whose process group has one rank."""
    program = """
import sys, train
from torch.distributed.fsdp import FSDPModule
sys.argv = ["train.py", "--who=offload", "--device=cpu", "--shape=2,64,4,128,256"]
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model, _ = train.prepare(train.parse_args(), [2, 64, 4, 128, 256])
modules = [model, model.embedding, *model.layers, model.head]
assert all(isinstance(module, FSDPModule) for module in modules)
assert not isinstance(model.norm, FSDPModule)
"""
    subprocess.run([sys.executable, "-c", program], cwd=unpacked, check=True, timeout=DEADLINE_S)


def test_libraries_and_modules_of_the_caller_are_found_behind_its_own(
    unpacked, tmp_path, monkeypatch
):
    (tmp_path / "libcuda.so.1").symlink_to(BUILT_TESTS / "libfake_cuda.so")
    (tmp_path / "only_there.py").touch()
    (tmp_path / "forebay.py").write_text("raise ImportError('not the archive')", encoding="utf-8")
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, f"{tmp_path}:{os.environ.get(name, '')}")
    checks = loaded(unpacked).Checks(argparse.Namespace(minutes=DEADLINE_S / 60))
    program = "import ctypes, only_there, forebay; ctypes.CDLL('libcuda.so.1'); print(forebay.__file__)"
    file = checks.run([sys.executable, "-c", program]).strip()
    assert pathlib.Path(file).is_relative_to(unpacked / "python")
    # An empty entry would mean the working folder.
    assert "" not in checks.environment["LD_LIBRARY_PATH"].split(":")
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "PATH"):
        monkeypatch.delenv(name)
    environment = loaded(unpacked).Checks(argparse.Namespace(minutes=1)).environment
    assert environment["PATH"] == str(unpacked / "bin")
    assert not environment["PYTHONPATH"].endswith(":")


def started_in(folder):
    """Command lines of the processes that name the folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # the process has ended
            continue
        if os.fsencode(folder) in line:
            found.append(line)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_neither_daemon_nor_folder(unpacked, tmp_path, number):
    command = [sys.executable, unpacked / "gpu_check", "--rehearse", "--only", "python_cases"]
    check = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_signals,
    )
    end = time.monotonic() + DEADLINE_S
    while not any(b"forebayd ready" in log.read_bytes() for log in tmp_path.glob("*/log")):
        assert check.poll() is None and time.monotonic() < end, check.communicate()
        time.sleep(0.02)  # house: allow sleep: a poll with a deadline
    assert started_in(tmp_path)
    for _ in range(2):  # a closing terminal sends the signal twice: shell and kernel
        check.send_signal(number)
    _, errors = check.communicate(timeout=DEADLINE_S)
    assert (check.returncode, errors) == (1, "")
    assert not started_in(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_hangup_that_is_ignored_stays_ignored(unpacked):
    """As nohup starts it."""
    command = [sys.executable, unpacked / "gpu_check", "--rehearse", "--only", "kernel", "binding"]
    check = subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert check.stdout.readline().startswith("INFO  kernel: ")
    check.send_signal(signal.SIGHUP)
    output, _ = check.communicate(timeout=DEADLINE_S)
    assert check.returncode == 0 and "PASS  binding: " in output


def test_output_that_nobody_reads_is_no_traceback(unpacked):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for flags in (["--rehearse", "--only", "binding"], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, str(unpacked / "gpu_check"), *flags],
            env=buffered,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, ""), flags


@pytest.mark.parametrize("minutes", ["nan", "inf", "-inf", "-1"])
def test_a_time_that_is_no_number_of_minutes_is_refused(unpacked, minutes):
    done, _ = gpu_check(unpacked, f"--minutes={minutes}", "--rehearse", "--only", "kernel")
    assert done.returncode == 1
    wanted = f"error[E_OPTION]: --minutes is {minutes}\nhint: a finite number from 0 on\n"
    assert (done.stdout, done.stderr) == ("", wanted)

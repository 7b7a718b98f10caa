"""Goal    gpu_check runs all of its items without a GPU when it is asked to rehearse, also on a kernel that
        lacks what the service wants, and says in a line each what is missing there; where there is no
        GPU it says so.
Method  The folders of its archive, made of links to what the checkout has built, under a filter of system
        calls that answers as an old kernel does.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("forebay")

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build" / "bin"))
BUILT_TESTS = BIN.parent / "tests"
DEADLINE_S = 600


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """As the archive is, for this interpreter alone."""
    folder = tmp_path_factory.mktemp("gpu_check")
    package = pathlib.Path(importlib.util.find_spec("forebay").origin).parent
    backend = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in ("bin", "tests", "python", f"python/backends/{backend}"):
        (folder / name).mkdir(parents=True)
    programs = [BIN / "forebay", BIN / "forebayd"]
    programs += [BUILT_TESTS / "gpu_device_contract_test", BUILT_TESTS / "client_perceptron_test"]
    programs += [BUILT_TESTS / "gpu_communicator_contract_test"]
    cases = (ROOT / "tests" / "client" / "python_torch").glob("[!t]*.py")
    for place, files in {
        "bin": programs,
        "python": [package],
        "tests": [*cases, ROOT / "tools" / "train_support.py", BUILT_TESTS / "libfake_cuda.so"],
        ".": [ROOT / "tools" / "gpu_check" / "train.py"],
    }.items():
        for file in files:
            (folder / place / file.name).symlink_to(file)
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
    bare, ours = items["exposed time, 256 tokens"]["figures"]
    assert (bare["who"], ours["who"]) == ("compute", "forebay")
    assert bare["params"] == ours["params"] and bare["tokens"] == ours["tokens"] == 256
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

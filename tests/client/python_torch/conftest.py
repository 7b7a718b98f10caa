"""Every test that takes `node` runs on the fake node; on the real daemon as well where its programs
are built.

FOREBAY_BIN_DIR  folder of forebayd (default: build/bin of this checkout)
FOREBAY_CORE     the built extension, a file _core*.so (default: that of an installed forebay)
"""

import gc
import glob
import importlib.util
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [
    str(ROOT / "client" / "python"),
    str(ROOT / "tools"),
    str(pathlib.Path(__file__).parent),
]

START_DEADLINE_S = 30


def _find_core():
    places = [os.environ.get("FOREBAY_CORE", "")]
    places += glob.glob(sysconfig.get_paths()["platlib"] + "/forebay/_core*.so")
    places += glob.glob(str(ROOT / "build" / "**" / "_core*.so"), recursive=True)
    return next((place for place in places if place and os.path.exists(place)), None)


CORE = _find_core()
if CORE:
    spec = importlib.util.spec_from_file_location("forebay._core", CORE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["forebay._core"] = module
    spec.loader.exec_module(module)

import forebay  # noqa: E402
import fake_core  # noqa: E402

FOREBAYD = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build" / "bin")) / "forebayd"


class Daemon:
    """A forebayd of our own on a socket in a folder of its own."""

    def __init__(self, folder, *settings):
        self.folder = pathlib.Path(folder)
        self.socket = str(self.folder / "s")
        values = (f"socket.path={self.socket}", "memlock=best_effort", "dram.limit=1GiB", *settings)
        command = [str(FOREBAYD)]
        for value in values:
            command += ["--set", value]
        self.log = self.folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        end = time.monotonic() + START_DEADLINE_S
        while b"forebayd ready" not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"forebayd did not start: {self.log.read_text()}")
            time.sleep(0.01)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(START_DEADLINE_S) == 0, self.log.read_text()


@pytest.fixture(scope="session")
def daemon():
    if not CORE or not FOREBAYD.exists():
        pytest.skip(
            f"no daemon: extension {CORE}, program {FOREBAYD} "
            f"{'is there' if FOREBAYD.exists() else 'is missing'}"
        )
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        own = Daemon(folder)
        yield own
        own.stop()


@pytest.fixture(params=["fake", "daemon"])
def node(request, monkeypatch):
    """A fresh job on a node; forebay.attach(model, ...) finds it without arguments."""
    monkeypatch.setenv(
        "FOREBAY_JOB", f"{request.node.name[:60].translate(_JOB_NAME)}.{time.monotonic_ns()}"
    )
    if request.param == "fake":
        monkeypatch.setattr(forebay, "_core", fake_core, raising=False)
        fake_core.reset()
        yield "fake"
        return
    own = request.getfixturevalue("daemon")
    monkeypatch.setenv("FOREBAY_SOCKET", own.socket)
    monkeypatch.setattr(forebay, "_core", sys.modules["forebay._core"], raising=False)
    yield "daemon"


_JOB_NAME = {ord(char): "-" for char in "[]/: "}


@pytest.fixture(autouse=True)
def no_attachment_is_left():
    """Each test detaches, so that the next one finds no guard and no hook of torch's own
    classes."""
    from forebay import _guards, _optimizer

    yield
    for opt in list(_optimizer._attached):
        opt.detach()
    gc.collect()
    assert not _guards._owners and _guards._global_hook is None

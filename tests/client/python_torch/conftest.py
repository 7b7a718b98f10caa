# SPDX-License-Identifier: Apache-2.0
"""Tests that take `node` share one daemon (see daemon_process.py). After each of them a healthy job of it trains one more
step.
"""

import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [
    str(ROOT / "client" / "python"),
    str(ROOT / "tools"),
    str(pathlib.Path(__file__).parent),
]

from daemon_process import CORE, FOREBAYD, Daemon, missing  # noqa: E402

if CORE and "forebay._core" not in sys.modules:
    spec = importlib.util.spec_from_file_location("forebay._core", CORE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["forebay._core"] = module
    spec.loader.exec_module(module)

import forebay  # noqa: E402
import network_nodes  # noqa: E402
import remote_gateway  # noqa: E402
import torch  # noqa: E402
from models import HealthyJob  # noqa: E402

torch.set_num_threads(1)
os.environ.setdefault("FOREBAY_RUN", "test")  # processes that a test starts belong to the same run


def pytest_collection_finish():
    """Freezes all imported objects: the collection after each test looks at the tests' objects, in milliseconds."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # the interpreter may collect all objects at its end


@pytest.fixture
def folder():
    """On a disk: swap wants O_DIRECT."""
    with tempfile.TemporaryDirectory(prefix="fb", dir=os.environ.get("TMPDIR", "/var/tmp")) as path:
        yield path


@pytest.fixture(scope="session")
def daemon():
    if missing():
        pytest.skip(missing())
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        own = Daemon(folder)
        own.healthy = HealthyJob(own.socket)
        _shared.append(own)
        yield own
        own.stop()


_shared = []  # the shared daemon, once a test has started it


@pytest.fixture(scope="module", autouse=True)
def jobs_end_with_their_file():
    """Of the shared daemon: names of jobs are a file's own, and what they hold is free for the next one."""
    yield
    for daemon in _shared:
        gc.collect()  # ends the sessions of unreferenced optimizers
        for job in forebay.status(daemon.socket)["jobs"]:
            if job["name"] != "healthy" and job["sessions"] == 0:
                subprocess.run(
                    [FOREBAYD.parent / "forebay", "jobs", "--socket", daemon.socket, "--delete", job["name"]],
                    stdout=subprocess.DEVNULL,
                    check=True,
                )


@pytest.fixture
def node(request, monkeypatch, daemon):
    """A fresh job on a node; forebay.attach(model, ...) finds it without arguments."""
    monkeypatch.setenv(
        "FOREBAY_JOB", f"{request.node.name[:60].translate(_JOB_NAME)}.{time.monotonic_ns()}"
    )
    monkeypatch.setenv("FOREBAY_SOCKET", daemon.socket)
    monkeypatch.setattr(forebay, "_core", sys.modules["forebay._core"], raising=False)
    yield
    assert daemon.process.poll() is None
    daemon.healthy.train_one_more_step()


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Two nodes, in network namespaces of this machine; where none can be had, what needs them is skipped with why."""
    if reason := missing() or network_nodes.missing():
        pytest.skip(reason)
    with network_nodes.two_nodes(tmp_path_factory.mktemp("network")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def gateway_network(network):
    """The same, for a gateway on one of them; likewise."""
    if reason := remote_gateway.missing():
        pytest.skip(reason)
    return network


_JOB_NAME = {ord(char): "-" for char in "[]()/: <>,='"}


@pytest.fixture(autouse=True)
def no_attachment_is_left():
    """Each test detaches, so that the next one finds no guard and no hook of torch's own
    classes."""
    from forebay import _guards, _optimizer

    yield
    for opt in list(_optimizer._attached):
        opt.detach()
    gc.collect()
    assert not _guards._owners and not _guards._global_hooks

# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import core_daemon  # noqa: E402

os.environ.setdefault("FOREBAY_RUN", "test")  # processes that a test starts belong to the same run


@pytest.fixture(scope="session")
def core_node():
    if core_daemon.missing():
        pytest.skip(core_daemon.missing())
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        daemon = core_daemon.Daemon(folder)
        yield daemon.socket
        daemon.stop()


@pytest.fixture
def job(request):
    return request.node.name.translate({ord(char): "-" for char in "[]/: "})


@pytest.fixture
def own_daemon(tmp_path_factory):
    if core_daemon.missing():
        pytest.skip(core_daemon.missing())
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        daemon = core_daemon.Daemon(folder)
        yield daemon
        daemon.process.kill()
        daemon.process.wait(30)

# SPDX-License-Identifier: Apache-2.0
"""Goal    "A remote daemon, step by step" in docs/guide/multi-node.md is true.
Method  Its blocks are typed on the two nodes of a cluster in namespaces, in their order, with a folder in the place of
        /etc/forebay. The script is the page's own.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

from daemon_process import FOREBAYD, Daemon

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEADLINE_S = 120


def blocks(language):
    page = (ROOT / "docs" / "guide" / "multi-node.md").read_text(encoding="utf-8")
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", page, re.S | re.M)
    return [textwrap.dedent(block) for block in found]


def typed(node, folder, script):
    programs = [FOREBAYD.parent, pathlib.Path(sys.executable).parent, os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": ":".join(map(str, programs)),
        "FOREBAY_REMOTE": str(folder / "remote"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        node.command("bash", "-euo", "pipefail", "-c", script.replace("/etc/forebay", str(folder)), folder=folder),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_what_the_page_shows_trains_on_a_daemon_of_another_node(gateway_network, tmp_path):
    authority, start = blocks("sh on-daemon-node")
    [settings], [train], [script, *_] = blocks("toml gateway"), blocks("sh on-trainer-node"), blocks("python")
    nodes = gateway_network
    daemon = Daemon(tmp_path, launcher=nodes[0].command())
    made = typed(nodes[0], tmp_path, authority)
    said, _ = made.communicate(timeout=DEADLINE_S)
    assert made.returncode == 0, said
    # The daemon's socket is not where it is by default.
    text = settings.replace("/etc/forebay", str(tmp_path)) + f'[daemon]\nsocket = "{daemon.socket}"\n'
    (tmp_path / "gateway.toml").write_text(text, encoding="utf-8")
    gateway = typed(nodes[0], tmp_path, start + "wait\n")
    line = gateway.stdout.readline()
    assert "ready bind=worker-0:7700" in line, line + gateway.stdout.read()
    remote = tmp_path / "remote"
    remote.mkdir()
    for name, to in (("ca.pem", "ca.pem"), ("trainer.pem", "cert.pem"), ("trainer.key", "key.pem")):
        (remote / to).write_bytes((tmp_path / name).read_bytes())
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    ranks = typed(nodes[1], tmp_path, train)
    said, _ = ranks.communicate(timeout=DEADLINE_S)
    assert ranks.returncode == 0, said
    assert "is sharded over 2 ranks" in said
    os.killpg(gateway.pid, signal.SIGKILL)  # kills the shell and the gateway, its child
    gateway.communicate(timeout=DEADLINE_S)
    daemon.stop()

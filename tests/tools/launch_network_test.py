# SPDX-License-Identifier: Apache-2.0
"""Goal    `forebay launch` starts torchrun on two nodes over ssh, whose ranks meet over the network between them, and
        `forebay status --all` sees the daemons of both.
Method  Two nodes in namespaces of this machine, each with a network, a host name, an sshd and a forebayd of its own
        (network_nodes.py). What docs/guide/multi-node.md shows is typed on the first one. Without root, ssh or namespaces it
        is skipped.
"""

import contextlib
import json
import os
import pathlib
import re
import select
import subprocess
import sys
import tempfile

import network_nodes
import pytest
from forebay_command import FOREBAY, ROOT, await_end

DEADLINE_S = 240
RANK = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
held = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(held)
print(f"rank {dist.get_rank()} local {os.environ['LOCAL_RANK']} on {socket.gethostname()}: {int(held)}", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster():
    if reason := network_nodes.missing(ssh=True):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="fb") as folder, contextlib.ExitStack() as stack:
        nodes, ssh = stack.enter_context(network_nodes.two_nodes_with_ssh(folder))
        for node in nodes:
            stack.enter_context(daemon_on(node))
        path = pathlib.Path(folder)
        (path / "hosts").write_text("# two nodes\nworker-0 slots=1\nworker-1 slots=1\n", encoding="utf-8")
        (path / "train.py").write_text(RANK, encoding="utf-8")
        (path / "bin").mkdir()  # an `ssh` in PATH for commands without --ssh
        (path / "bin" / "ssh").write_text(f'#!/bin/sh\nPATH=${{PATH#*:}} exec {ssh} "$@"\n', encoding="utf-8")
        (path / "bin" / "ssh").chmod(0o755)
        yield nodes, ["--hostfile", path / "hosts", "--ssh", ssh], path


@contextlib.contextmanager
def daemon_on(node):
    """A daemon as a service has it: at the default socket, which everything finds."""
    settings = ("dram.limit=64MiB", "memlock=best_effort", "socket.mode=\"0600\"", "swap.paths=[]")
    words = [word for setting in settings for word in ("--set", setting)]
    daemon = subprocess.Popen(
        node.command(FOREBAY.parent / "forebayd", *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert select.select([daemon.stdout], [], [], DEADLINE_S)[0], "forebayd says nothing"
        line = daemon.stdout.readline()
        assert "ready socket=/run/forebay/forebay.sock" in line, line + daemon.stdout.read()
        yield
    finally:
        daemon.terminate()
        daemon.wait(timeout=DEADLINE_S)
        daemon.stdout.close()


def typed(node, *words, folder=ROOT, programs=()):
    """programs  Folders in front of PATH."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FOREBAY_")}
    environment["PATH"] = ":".join(map(str, [*programs, pathlib.Path(sys.executable).parent, environment["PATH"]]))
    return subprocess.run(
        node.command(*words, folder=folder), env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def test_what_the_page_shows_trains_on_two_nodes(cluster):
    nodes, _, folder = cluster
    page = (ROOT / "docs" / "guide" / "multi-node.md").read_text(encoding="utf-8")
    script = "".join(re.findall(r"```sh on-nodes\n(.*?)```", page, re.S))
    programs = [folder / "bin", FOREBAY.parent]
    done = typed(nodes[0], "bash", "-euc", script, folder=folder, programs=programs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()[:2]) == [
        "worker-0: rank 0 local 0 on worker-0: 11",
        "worker-1: rank 1 local 0 on worker-1: 11",
    ], done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["HOST", "worker-0", "worker-1"]


def test_the_failure_of_one_node_ends_what_runs_on_the_other(cluster):
    nodes, flags, _ = cluster
    script = 'echo $$; if [ $(hostname) = worker-1 ]; then read -r line <go; exit 3; fi; sleep 600 & echo go >go; wait'
    with tempfile.TemporaryDirectory(prefix="fb") as folder:
        os.mkfifo(pathlib.Path(folder, "go"))
        done = typed(nodes[0], FOREBAY, "launch", *flags, "--chdir", folder, "--", "sh", "-c", script)
    assert done.returncode == 3
    assert "error[E_RANK_LOST]: host worker-1: the command ended with exit status 3" in done.stderr
    for line in done.stdout.splitlines():
        await_end(int(line.split(": ")[1]))


def test_status_of_all_hosts_sees_both_daemons(cluster):
    nodes, flags, _ = cluster
    both = json.loads(typed(nodes[1], FOREBAY, "status", "--all", *flags, "--json").stdout)["nodes"]
    assert len({node["status"]["info"]["pid"] for node in both}) == 2
    wrong = typed(nodes[1], FOREBAY, "status", "--all", *flags, "--include", "worker-0", "--ssh-port", 9)
    assert wrong.returncode == 3
    assert wrong.stdout == "worker-0 does not answer: ssh: connect to host worker-0 port 9: Connection refused\n"

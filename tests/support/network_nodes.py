# SPDX-License-Identifier: Apache-2.0
"""Nodes of a small cluster on this machine: each has a network, a host name and a /run of its own, and where it is asked
for an sshd; all reach each other by name. Nothing of them is outside their namespaces, which end with their
processes."""

import contextlib
import ctypes
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time
import traceback

DEADLINE_S = 60
CLONE_NEWNET = 0x40000000
PORT = 2222
NAMES = ("worker-0", "worker-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "eth0"
SETUP = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/sshd /run/forebay
mount --bind {folder}/etc_hosts /etc/hosts
hostname {name}
ip link set lo up
echo made
read -r go
exec {sshd} -D -e -f {folder}/sshd_config
"""
SSHD_CONFIG = """Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PrintMotd no
"""
SSH_CONFIG = """Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


def missing(ssh=False):
    """Why nodes are impossible here, with or without ssh between them; empty if they are possible."""
    programs = {"ip": "iproute2", "nsenter": "util-linux"}
    if ssh:
        programs |= {"sshd": "openssh-server", "ssh": "openssh-client"}
    for program, package in programs.items():
        if not _find(program):
            return f"no {program} here: apt-get install {package}"
    if os.geteuid() != 0:
        return "namespaces, and sshd for several users, need root"
    made = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


def _find(program):
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Node:
    """One node. `command` enters it."""

    def __init__(self, name, folder):
        self.name = name
        script = SETUP.format(folder=folder, name=name, sshd=_find("sshd"))
        self.process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.log").open("w", encoding="utf-8"),
            text=True,
        )
        assert self.process.stdout.readline() == "made\n", (folder / f"{name}.log").read_text(encoding="utf-8")

    def command(self, *words, folder="/"):
        spaces = ("--net", "--uts", "--mount")
        return ["nsenter", "--target", str(self.process.pid), *spaces, f"--wd={folder}", *map(str, words)]

    def run(self, *words):
        subprocess.run(self.command(*words), check=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)

    def start_sshd(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)
        self.process.stdin.close()
        self.process.stdout.close()


class Forked:
    """A function of this process in a child of it, in a node's network: nothing is imported again. As a Popen, with
    its standard input and output as pipes."""

    def __init__(self, node, environment, function, *arguments):
        output, child_output = os.pipe()
        child_input, own_input = os.pipe()
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()  # tests stop its children (kill_at_once.py)
                os.dup2(child_input, 0)
                os.dup2(child_output, 1)
                os.dup2(child_output, 2)
                os.closerange(3, max(output, child_output, child_input, own_input) + 1)
                sys.stdin = os.fdopen(0, closefd=False)
                sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
                sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
                _enter_network(node.process.pid)
                os.environ.clear()
                os.environ.update(environment)
                function(*map(str, arguments))
                status = 0
            except BaseException:  # noqa: BLE001: reports every error, no caller sees it
                os.write(2, traceback.format_exc().encode())
            os._exit(status)
        os.close(child_output)
        os.close(child_input)
        self.stdout = os.fdopen(output, encoding="utf-8", errors="replace")
        self.stdin = os.fdopen(own_input, "w", encoding="utf-8")

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self.stdin.close()
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked child", timeout)
            else:
                time.sleep(0.01)  # house: allow sleep: a poll with a deadline
        return self.returncode

    def kill(self):
        os.kill(self.pid, 9)


def limit_link(nodes, mbit):
    """What each node sends is so fast at most; limited again, as the last call says."""
    for node in nodes:
        rate = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms")
        node.run("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *rate)


def _enter_network(pid):
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)


def _make_keys(folder, names):
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    public = (folder / "host_key.pub").read_text(encoding="utf-8")
    known = "".join(f"[{name}]:{PORT} {public}" for name in names)
    (folder / "known_hosts").write_text(known, encoding="utf-8")


def await_link(node):
    """Returns once the kernel says that the link works, which may be a second after it was set up."""
    end = time.monotonic() + DEADLINE_S
    show = node.command("ip", "link", "show", "dev", LINK, "up")
    while "state UP" not in subprocess.run(show, capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < end, f"no link on {node.name}"
        select.select([], [], [], 0.05)


def _await_port(node):
    """Returns once sshd listens on the node."""
    probe = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 1)"
    end = time.monotonic() + DEADLINE_S
    while subprocess.run(node.command(sys.executable, "-c", probe), capture_output=True, check=False).returncode:
        assert time.monotonic() < end, f"no sshd on {node.name}"
        select.select([], [], [], 0.05)


@contextlib.contextmanager
def two_nodes(folder):
    """Nodes worker-0 and worker-1, joined by a link."""
    folder = pathlib.Path(folder)
    hosts = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES))
    (folder / "etc_hosts").write_text("127.0.0.1 localhost\n" + hosts, encoding="utf-8")
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in NAMES:
            nodes.append(Node(name, folder))
            stack.callback(nodes[-1].end)
        ends = [("name", LINK, "netns", str(node.process.pid)) for node in nodes]
        link = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
        subprocess.run(link, check=True, timeout=DEADLINE_S)
        for address, node in zip(ADDRESSES, nodes):
            node.run("ip", "addr", "add", f"{address}/24", "dev", LINK)
            node.run("ip", "link", "set", LINK, "up")
        for node in nodes:
            await_link(node)
        yield nodes


@contextlib.contextmanager
def two_nodes_with_ssh(folder):
    """(The same nodes, the ssh command that reaches them.)"""
    folder = pathlib.Path(folder)
    for name, text in (("sshd_config", SSHD_CONFIG), ("ssh_config", SSH_CONFIG)):
        (folder / name).write_text(text.format(port=PORT, folder=folder), encoding="utf-8")
    _make_keys(folder, NAMES)
    with two_nodes(folder) as nodes:
        for node in nodes:
            node.start_sshd()
        for node in nodes:
            _await_port(node)
        yield nodes, f"ssh -F {folder / 'ssh_config'}"

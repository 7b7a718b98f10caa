# SPDX-License-Identifier: Apache-2.0
"""The processes, folders and file systems of faults.py."""

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time

import quiet
from faults_outcome import Trial

HERE = pathlib.Path(__file__).resolve().parent
FIRST, SECOND, END = 4, 6, 8  # two steps that are saved, and the last step
DEADLINE_S = 90  # longest wait for an event of a process
START_S = 600  # DeepSpeed may compile first
PLACES = 3  # bits flipped in each kind of file or slot
MIB = 1 << 20
PAGE = 4096
SEED = 14


class Missing(Exception):
    """Something that a process was waited for has not come."""


class Training:
    """A process of faults_worker.py."""

    def __init__(self, server, words, log):
        stdin, self.stdin = os.pipe()
        self.reader, events = os.pipe()
        self.log = log
        with open(log, "ab") as out:
            order = {"words": [str(word) for word in words]}
            self.pid = server.ask(order, [stdin, out.fileno(), events])
        os.close(stdin)
        os.close(events)
        self.server, self.handle = server, os.pidfd_open(self.pid)
        self.events, self.rest = [], b""
        self.closed = False

    def _read_more(self, until):
        ready, _, _ = select.select([self.reader], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise Missing
        piece = os.read(self.reader, 1 << 16)
        self.closed = not piece
        *lines, self.rest = (self.rest + piece).split(b"\n")
        self.events += map(json.loads, lines)

    def wait_for(self, *event):
        """Until it has said that, or has ended: whether it has."""
        until = time.monotonic() + DEADLINE_S
        while not self.closed:
            if any(tuple(said[: len(event)]) == event for said in self.events):
                return True
            try:
                self._read_more(until)
            except Missing:
                return False
        return False

    def go_on(self):
        with contextlib.suppress(BrokenPipeError):  # ended before
            os.write(self.stdin, b"\n")

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def end(self):
        """Waits for its end: the Trial."""
        until, hung = time.monotonic() + DEADLINE_S, False
        try:
            while not self.closed:
                self._read_more(until)
            if not select.select([self.handle], [], [], max(0.0, until - time.monotonic()))[0]:
                raise Missing
        except Missing:
            hung = True
            self.kill()
            select.select([self.handle], [], [])
        status = self.server.ask({"wait": self.pid})
        for descriptor in (self.stdin, self.reader, self.handle):
            os.close(descriptor)
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return Trial(self.events, None if hung else status, text.rpartition("\n")[2])


class Server:
    """Of one side: imports once, forks trainings."""

    def __init__(self, by, python, variables, log):
        self.by, self.count = by, 0
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(START_S)
        command = [python, HERE / "faults_worker.py", by, str(theirs.fileno())]
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                command, env=variables, stdout=out, stderr=out, pass_fds=[theirs.fileno()]
            )
        theirs.close()
        if not self.socket.recv(1 << 10):
            sys.exit(f"{by} did not start: see {log}")
        self.logs = log.with_suffix("")
        self.logs.mkdir(exist_ok=True)

    def ask(self, order, descriptors=()):
        socket.send_fds(self.socket, [json.dumps(order).encode()], descriptors)
        return json.loads(self.socket.recv(1 << 10))

    def start(self, *words):
        self.count += 1
        log = self.logs / f"{self.count:03}.log"
        log.write_text(f"{' '.join(map(str, words))}\n", encoding="utf-8")
        return Training(self, ["--by", self.by, *words], log)

    def close(self):
        self.socket.close()
        self.process.wait(DEADLINE_S)


class Folders:
    """New ones under a folder that is removed in the end; and small file systems."""

    def __init__(self, root):
        self.root, self.count = pathlib.Path(root), 0

    def new(self):
        self.count += 1
        folder = self.root / f"{self.count:03}"
        folder.mkdir()
        return folder

    @contextlib.contextmanager
    def small(self, size_bytes):
        """An ext4 of that size."""
        base = self.new()
        device, mounted = base / "ext4", base / "mounted"
        mounted.mkdir()
        with open(device, "wb") as file:
            file.truncate(size_bytes)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", device], check=True, timeout=DEADLINE_S)
        subprocess.run(["mount", "-o", "loop", device, mounted], check=True, timeout=DEADLINE_S)
        try:
            yield mounted
        finally:
            until = time.monotonic() + DEADLINE_S
            unmount = {"args": ["umount", mounted], "stderr": subprocess.DEVNULL, "check": False}
            # The io_uring of a dead process holds its files open for a moment.
            while subprocess.run(**unmount).returncode:
                if time.monotonic() > until:
                    sys.exit(f"{mounted} cannot be unmounted")
                quiet.pause(0.1)
            device.unlink()


def fill(folder, but_bytes):
    """Takes all space of a file system but that much; the file that has it."""
    filler = folder / "filler"
    with open(filler, "wb") as file:
        for piece in (MIB, PAGE):
            with contextlib.suppress(OSError):  # ENOSPC
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, piece)
        file.truncate(max(0, os.fstat(file.fileno()).st_size - but_bytes))
    return filler


def flip(path, offset, bit):
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def wait_until(moment):
    quiet.pause(max(0.0, moment - time.monotonic()))


def kill_at(training, seconds):
    """SIGKILL so long after what it has just said."""
    wait_until(time.monotonic() + seconds)
    training.kill()

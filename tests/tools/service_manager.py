# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the service manager: runs one service and keeps its descriptors, as systemd does.

It speaks the protocol of sd_notify(3) and sd_listen_fds(3): messages count from the service's main process
alone (NotifyAccess=main); FDSTORE=1 adds the descriptors of a message, one by one, while there is room;
one that is in the store already is dropped; FDSTOREREMOVE=1 closes all of a name; BARRIER=1 is answered
when all messages before it are done. The next process gets the newest descriptor first, from number 3 on.

Not as systemd: two open file descriptions of one file with the same flags count as one, pidfds aside
(systemd asks kcmp(2), and compares files only where it may not); descriptors are not polled.
"""

import array
import fcntl
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

DEADLINE_S = 60
FIRST_FD = 3  # SD_LISTEN_FDS_START
FDS_PER_MESSAGE_MAX = 253  # SCM_MAX_FD

# Program that moves the descriptors of its first argument to 3, 4, … and becomes the service by exec, with the same process id.
_START = """
import fcntl, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 3 + 2 * len(fds) + max(fds)) for fd in fds]
for number, fd in enumerate(high, 3):
    os.dup2(fd, number)
os.closerange(3 + len(fds), max(high, default=3) + 1)
if fds:
    os.environ["LISTEN_PID"] = str(os.getpid())
os.execvp(sys.argv[2], sys.argv[2:])
"""


def _is_name(name):
    return len(name) <= 255 and name.isprintable() and ":" not in name


def _same(one, other):
    if "pidfd" in os.readlink(f"/proc/self/fd/{one}"):
        return False  # before Linux 6.9 all pidfds are the same file
    some, others = os.fstat(one), os.fstat(other)
    flags = fcntl.fcntl(one, fcntl.F_GETFL), fcntl.fcntl(other, fcntl.F_GETFL)
    return (some.st_dev, some.st_ino) == (others.st_dev, others.st_ino) and flags[0] == flags[1]


class ServiceManager:
    """Runs `command` in `folder`; its stderr is `folder`/log. Use as a context: the end stops all.

    store     [name, descriptor] of what it keeps, oldest first; the next process gets the newest first
    messages  texts of all messages of the running process
    """

    def __init__(self, folder, command, fds_max=9232, environment=None):
        self.folder = pathlib.Path(folder)
        self.command = [str(word) for word in command]
        self.fds_max = fds_max
        self.environment = dict(os.environ if environment is None else environment)
        self.log = self.folder / "log"
        self.process = None
        self.store = []
        self.messages = []
        self._drained = None
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._path = self.folder / "notify"
        self._socket.bind(str(self._path))
        self._receiver = threading.Thread(target=self._receive_all, daemon=True)
        self._receiver.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._receiver.join(DEADLINE_S)
        self._socket.close()
        self._path.unlink()
        self._close_store()

    def start(self):
        """Starts the service with what the store holds and waits for READY=1."""
        environment = {**self.environment, "NOTIFY_SOCKET": str(self._path)}
        for variable in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE"):
            environment.pop(variable, None)
        if self.fds_max > 0:
            environment["FDSTORE"] = str(self.fds_max)
        handed = list(reversed(self.store))
        if handed:
            environment["LISTEN_FDS"] = str(len(handed))
            environment["LISTEN_FDNAMES"] = ":".join(name for name, _ in handed)
        fds = [fd for _, fd in handed]
        start = [sys.executable, "-I", "-S", "-c", _START, ",".join(map(str, fds)), *self.command]
        # The lock delays messages of the new process until its id is known.
        with self._changed, open(self.log, "ab") as log:
            self.messages = []
            self.process = subprocess.Popen(
                start, env=environment, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.wait_for("READY=1")

    def stop(self):
        """SIGTERM; what the store holds is closed, as by `systemctl stop`. The exit status."""
        status = self.end(signal.SIGTERM)
        self._close_store()
        return status

    def restart(self):
        """SIGTERM, then the next process with what the store holds. The exit status of the first."""
        status = self.end(signal.SIGTERM)
        self.start()
        return status

    def begin_restart(self):
        """SIGTERM; returns when the process says that it stops. `end_restart` does the rest of restart()."""
        self.process.send_signal(signal.SIGTERM)
        self.wait_for("STOPPING=1")

    def end_restart(self):
        status = self._await_end()
        self.start()
        return status

    def kill(self):
        """The same as restart() with SIGKILL, as a crash."""
        status = self.end(signal.SIGKILL)
        self.start()
        return status

    def forget(self):
        """Closes what the store holds, once the process has ended."""
        self._drain()
        self._close_store()

    def names(self):
        """Of what the store holds, oldest first."""
        with self._changed:
            return [name for name, _ in self.store]

    def wait_for(self, line):
        """Waits until the running process has sent a message with this line."""
        end = time.monotonic() + DEADLINE_S
        with self._changed:
            while not self._has_said(line):
                has_ended = self.process.poll() is not None
                if has_ended:
                    self._drain()
                    if self._has_said(line):
                        return
                if has_ended or time.monotonic() > end:
                    raise RuntimeError(f"no {line} from {self.command}: {self.log.read_text()}")
                self._changed.wait(0.1)

    def _has_said(self, line):
        return any(line in text.split("\n") for text in self.messages)

    def end(self, sign):
        self.process.send_signal(sign)
        return self._await_end()

    def _await_end(self):
        status = self.process.wait(DEADLINE_S)
        # The last messages of the process are handled before its end. systemd does the same.
        self._drain()
        return status

    def _drain(self):
        """Returns when all messages that are in the socket are done."""
        marker = f"X_DRAINED={os.urandom(8).hex()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
            ours.sendto(marker.encode(), str(self._path))
        with self._changed:
            assert self._changed.wait_for(lambda: self._drained == marker, DEADLINE_S)

    def _close_store(self):
        with self._changed:
            while self.store:
                os.close(self.store.pop()[1])

    def _receive_all(self):
        room = socket.CMSG_SPACE(4 * FDS_PER_MESSAGE_MAX) + socket.CMSG_SPACE(struct.calcsize("3i"))
        while True:
            text, ancillary, _, address = self._socket.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
            if not text and not ancillary:
                return
            fds, sender = array.array("i"), 0
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    sender = struct.unpack("3i", data)[0]
            with self._changed:
                left = self._handle(sender, text.decode(), list(fds))
                for fd in left:
                    os.close(fd)
                self._changed.notify_all()

    def _handle(self, sender, text, fds):
        """Does what a message says; returns the descriptors that are not in the store now."""
        if sender == os.getpid() and text.startswith("X_DRAINED="):
            self._drained = text
            return fds
        if self.process is None or sender != self.process.pid:
            return fds
        self.messages.append(text)
        lines = text.rstrip("\n").split("\n")
        if "BARRIER=1" in lines:
            return fds  # the service sees its pipe close
        name = next((line[7:] for line in lines if line.startswith("FDNAME=")), None)
        if name is not None and not _is_name(name):
            name = None
        if "FDSTOREREMOVE=1" in lines:
            if name is not None:
                for _, fd in [entry for entry in self.store if entry[0] == name]:
                    os.close(fd)
                self.store = [entry for entry in self.store if entry[0] != name]
            return fds
        if "FDSTORE=1" not in lines:
            return fds
        left = []
        for fd in fds:
            is_there = any(_same(fd, stored) for _, stored in self.store)
            if is_there or len(self.store) >= self.fds_max:
                left.append(fd)
            else:
                self.store.append([name or "stored", fd])
        return left

# SPDX-License-Identifier: Apache-2.0
"""A process that imports a script once and runs it in forked copies of itself: for most runs of ranks, the imports of
torch take longer than all that follows.

usage: preloaded.py SCRIPT, a module with main(arguments). Each line of stdin is a run, {"arguments", "variables",
"folder"} in JSON; a line of stdout is the process of one that has begun. Its streams and its exit status are in the
folder.
"""

import atexit
import functools
import importlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback

OUT, ERR, STATUS = "out", "err", "status"


class Run:
    """A run that has begun, with what tests use of subprocess.Popen; standard output is text that is read meanwhile,
    standard error the text of it so far. Several processes may write to them: the output ends with the last."""

    def __init__(self, command, folder, pid, stdout):
        self.args, self.pid, self.stdout, self.returncode = command, pid, stdout, None
        self._folder = folder
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # the process has ended
            self._pidfd = None

    @property
    def stderr(self):
        return open(pathlib.Path(self._folder.name) / ERR)

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout):
        if self.returncode is None:
            if self._pidfd is not None:
                poll = select.poll()
                poll.register(self._pidfd, select.POLLIN)
                if not poll.poll(1000 * timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout)
                os.close(self._pidfd)
            status = pathlib.Path(self._folder.name) / STATUS
            self.returncode = int(status.read_text()) if status.exists() else -signal.SIGKILL
        return self.returncode

    def kill(self):
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def communicate(self, timeout):
        """(standard output, standard error), whole."""
        until, read = time.monotonic() + timeout, b""
        while select.select([self.stdout], [], [], max(0, until - time.monotonic()))[0]:
            more = os.read(self.stdout.fileno(), 1 << 16)
            if not more:
                break
            read += more
        else:
            raise subprocess.TimeoutExpired(self.args, timeout, stderr=self.stderr.read())
        self.wait(max(0, until - time.monotonic()))
        return read.decode(), self.stderr.read()


class Preloaded:
    """Of one script; begins with its first run and ends with this process.

    environment  Called for the variables that it begins with.
    """

    def __init__(self, script, environment):
        self.command = [sys.executable, __file__, script]
        self.environment = environment
        self.process = None

    def start(self, arguments, variables):
        """`variables` are set beside those that it has."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
            self.process = subprocess.Popen(
                self.command, env=self.environment(), start_new_session=True, **pipes
            )
            atexit.register(self.process.wait)
            # Called before wait(): ends the process's loop.
            atexit.register(self.process.stdin.close)
        folder = tempfile.TemporaryDirectory(prefix="fb")
        out = pathlib.Path(folder.name) / OUT
        os.mkfifo(out)
        stdout = open(os.open(out, os.O_RDONLY | os.O_NONBLOCK))
        arguments = [str(argument) for argument in arguments]
        run = {"arguments": arguments, "variables": variables, "folder": folder.name}
        self.process.stdin.write(json.dumps(run).encode() + b"\n")
        pid = int(self.process.stdout.readline())  # sent after the run has opened its streams
        os.set_blocking(stdout.fileno(), True)
        return Run([*self.command, *arguments], folder, pid, stdout)

    def run(self, arguments, variables, timeout):
        """As subprocess.run() of the script with captured output."""
        process = self.start(arguments, variables)
        try:
            out, err = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # the ranks too
            self.process.wait()
            self.process = None
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@functools.cache
def preloaded(script, environment):
    """The one of this script that all tests share."""
    return Preloaded(script, environment)


def _run_forked(module, run):
    """In the copy; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = pathlib.Path(run["folder"])
    status = 1
    try:
        begun = os.dup(1)
        for descriptor, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, folder / OUT, os.O_WRONLY),
            (2, folder / ERR, os.O_WRONLY | os.O_CREAT),
        ):
            opened = os.open(path, flags)
            os.dup2(opened, descriptor)
            os.close(opened)
        # With PYTHONUNBUFFERED Python writes a line and its end separately, so lines of ranks that write to one pipe would mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
        os.write(begun, b"%d\n" % os.getpid())
        os.close(begun)
        os.environ |= run["variables"]
        module.main(run["arguments"])
        status = 0
    except SystemExit as exit:
        print(exit.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        (folder / STATUS).write_text(str(status))
        os._exit(status)


def _serve(script):
    module = importlib.import_module(script)
    importlib.import_module("torch._dynamo")  # as the first fully_shard() does
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait() is called for the copies
    for line in sys.stdin.buffer:
        if os.fork() == 0:
            _run_forked(module, json.loads(line))


if __name__ == "__main__":
    _serve(sys.argv[1])

"""A process that imports a script once and runs it in forked copies of itself: for most runs of ranks, the imports of
torch take longer than all that follows.

usage: preloaded.py SCRIPT, a module with main(arguments). Each line of stdin is a run, {"arguments", "variables", "out",
"err"} in JSON; its exit status is a line of stdout.
"""

import atexit
import importlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import traceback


class Preloaded:
    """Of one script; begins with its first run and ends with this process.

    environment  Called for the variables that it begins with.
    """

    def __init__(self, script, environment):
        self.command = [sys.executable, __file__, script]
        self.environment = environment
        self.process = None

    def run(self, arguments, variables, timeout):
        """As subprocess.run() of the script with captured output. `variables` are set beside those that it has."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
            self.process = subprocess.Popen(
                self.command, env=self.environment(), start_new_session=True, **pipes
            )
            atexit.register(self.process.wait)
            atexit.register(self.process.stdin.close)  # before it: the end of its runs
        with tempfile.TemporaryDirectory(prefix="fb") as folder:
            out, err = (pathlib.Path(folder) / name for name in ("out", "err"))
            run = {"arguments": arguments, "variables": variables, "out": str(out), "err": str(err)}
            self.process.stdin.write(json.dumps(run).encode() + b"\n")
            if not select.select([self.process.stdout], [], [], timeout)[0]:
                os.killpg(self.process.pid, signal.SIGKILL)  # the ranks too
                self.process.wait()
                self.process = None
                raise subprocess.TimeoutExpired([*self.command, *arguments], timeout, stderr=err.read_text())
            status = int(self.process.stdout.readline())
            return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())


def _run_forked(module, run):
    """In the copy; does not return."""
    status = 1
    try:
        for path, descriptor in ((run["out"], 1), (run["err"], 2), (os.devnull, 0)):
            opened = os.open(path, os.O_RDWR | os.O_CREAT)
            os.dup2(opened, descriptor)
            os.close(opened)
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
        os._exit(status)


def _serve(script):
    module = importlib.import_module(script)
    importlib.import_module("torch._dynamo")  # as the first fully_shard() does
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _run_forked(module, json.loads(line))
        _, ended = os.waitpid(pid, 0)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(ended))


if __name__ == "__main__":
    _serve(sys.argv[1])

# SPDX-License-Identifier: Apache-2.0
"""A forebayd as a service runs it, on persistent swap: it can be killed, and started again on the same swap."""

import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
import time

START_DEADLINE_S = 60
PROGRESS = re.compile(r"^step +(\d+)/")


class Service:
    """The daemon of one run. `stop` it, however the run ends."""

    def __init__(self, program, swap, settings):
        """`swap`: an empty folder of its own on a disk. `settings`: KEY=VALUE."""
        self.swap = pathlib.Path(swap)
        shutil.rmtree(self.swap, ignore_errors=True)
        self.swap.mkdir(parents=True)
        self.folder = tempfile.mkdtemp(prefix="forebay-")  # a socket's path has at most 107 bytes
        self.socket = f"{self.folder}/s"
        places = [f"socket.path={self.socket}", "socket.mode=0600", f"swap.paths={self.swap}"]
        self.command = [str(program)]
        for setting in [*places, "memlock=best_effort", *settings]:
            self.command += ["--set", setting]
        self.process = None

    def start(self):
        with open(self.swap / "log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        end = time.monotonic() + START_DEADLINE_S
        while (self.swap / "log").read_bytes().count(b"forebayd ready") == 0:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"forebayd did not start: {self.log()}")
            time.sleep(0.05)  # house: allow sleep: a poll with a deadline

    def log(self):
        return (self.swap / "log").read_text(encoding="utf-8", errors="replace")

    def kill(self):
        self.process.kill()
        self.process.wait()
        (self.swap / "log").unlink()

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(START_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.swap, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class KillWithinAStep:
    """Kills the service in the midst of the step after one that rank 0 has reported. Give it every line of the run."""

    def __init__(self, service, after_step, part_of_a_step):
        self.service, self.after_step, self.part = service, after_step, part_of_a_step
        self.reported_at = time.monotonic()
        self.timer = None

    def has_killed(self):
        """Once the run has ended."""
        if self.timer is not None:
            self.timer.join()
        return self.timer is not None

    def __call__(self, line):
        match = PROGRESS.match(line)
        if not match:
            return
        now = time.monotonic()
        step_s, self.reported_at = now - self.reported_at, now
        if int(match[1]) == self.after_step:
            self.timer = threading.Timer(self.part * step_s, self.service.kill)
            self.timer.start()

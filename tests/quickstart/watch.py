#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a command beside a daemon and writes down what the kernel and the daemon say about it.

usage: watch.py FOREBAY OUT COMMAND...   (in `forebay run`, which sets FOREBAY_SOCKET)

OUT/node.json: {"samples": [{"t", "step", "dram", "updates", "early", "rpc_calls", "sessions"}],
"dram_peak_bytes", "grad_arena_bytes", "io": /proc/PID/io, "direct": [descriptor is O_DIRECT],
"status", "trace", "kept_trace"}. The figures of memory and I/O are the kernel's, of the daemon's process;
`status` and `trace` are the daemon's own, taken after the command; `kept_trace`, of the newest step seen
with early updates, during it.
"""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

MEMORY_PERIOD_S = 0.1
STATUS_PERIOD_S = 0.4


def forebay_json(forebay, *words):
    done = subprocess.run([forebay, *words, "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def descriptors(pid):
    """(number, what it points to) of every descriptor of the process."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            yield number, os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue  # the descriptor was closed


def dram_bytes(pid):
    """Allocated bytes of every memfd the daemon holds, and its private memory."""
    allocated = {}
    for number, target in descriptors(pid):
        if target.startswith("/memfd:"):
            try:
                stat = os.stat(f"/proc/{pid}/fd/{number}")
            except OSError:
                continue
            allocated[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        private = next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))
    return sum(allocated.values()) + private


def direct_flags(pid):
    """For each descriptor of a swap file or block device: whether it has O_DIRECT."""
    flags = []
    for number, target in descriptors(pid):
        if ".swap" in target or target.startswith(("/dev/nvme", "/dev/sd", "/dev/vd")):
            text = pathlib.Path(f"/proc/{pid}/fdinfo/{number}").read_text(encoding="ascii")
            fields = dict(line.split(":", 1) for line in text.splitlines())
            flags.append(bool(int(fields["flags"], 8) & os.O_DIRECT))
    return flags


def process_io(pid):
    with open(f"/proc/{pid}/io", encoding="ascii") as file:
        return {key: int(value) for key, value in (line.split(":") for line in file)}


class Watch:
    """Two sampling threads: memory by the kernel, progress by the daemon."""

    def __init__(self, forebay):
        self.forebay = forebay
        self.pid = forebay_json(forebay, "status")["info"]["pid"]
        self.dram_peak = 0
        self.dram = 0
        self.grad_arena_bytes = 0
        self.samples = []
        self.kept_trace = []  # trace of a step whose updates ran during compute
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=run, daemon=True) for run in (self._memory, self._status)
        ]
        for thread in self.threads:
            thread.start()

    def _memory(self):
        while not self.over.wait(MEMORY_PERIOD_S):
            try:
                self.dram = dram_bytes(self.pid)
            except OSError:
                return  # the daemon has ended; the command reports that
            self.dram_peak = max(self.dram_peak, self.dram)

    def _status(self):
        while not self.over.wait(STATUS_PERIOD_S):
            try:
                status = forebay_json(self.forebay, "status")
            except subprocess.CalledProcessError:
                return
            arenas = status["memory"]["arenas"]
            self.grad_arena_bytes = max(
                self.grad_arena_bytes,
                sum(arena["size_bytes"] for arena in arenas if arena["kind"] == "grad"),
            )
            for job in status["jobs"][:1]:
                self.samples.append(
                    {
                        "t": time.time(),
                        "step": job["committed_step"],
                        "dram": self.dram,
                        "updates": job["update_reads"],
                        "early": job["update_reads_prefetched"],
                        "rpc_calls": job["rpc_calls"],
                        "sessions": job["sessions"],
                    }
                )
                if job["last_step_early_updates"] > 0:
                    self.kept_trace = forebay_json(self.forebay, "trace", job["name"])

    def finish(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        status = forebay_json(self.forebay, "status")
        trace = (
            forebay_json(self.forebay, "trace", status["jobs"][0]["name"]) if status["jobs"] else []
        )
        return {
            "samples": self.samples,
            "dram_peak_bytes": max(self.dram_peak, dram_bytes(self.pid)),
            "grad_arena_bytes": self.grad_arena_bytes,
            "io": process_io(self.pid),
            "direct": direct_flags(self.pid),
            "status": status,
            "trace": trace,
            "kept_trace": self.kept_trace,
        }


def main(arguments):
    forebay, out, command = arguments[1], pathlib.Path(arguments[2]), arguments[3:]
    watch = Watch(forebay)
    status = subprocess.run(command, check=False).returncode
    (out / "node.json").write_text(json.dumps(watch.finish()), encoding="utf-8")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv))

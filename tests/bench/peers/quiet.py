# SPDX-License-Identifier: Apache-2.0
"""The guard against a noisy machine: what others used of it while something was measured."""

import contextlib
import os
import pathlib
import time

TICKS = os.sysconf("SC_CLK_TCK")
NOISE_MAX = 0.08  # CPUs; a round in which other processes used more is discarded
WINDOW_S = 0.5
ROUNDING_TICKS = 2  # difference that rounding to ticks may cause


def pause(seconds):
    time.sleep(seconds)  # house: allow sleep: lets spinning threads of the last sample park


def machine_seconds():
    """CPU seconds of everybody, and those that the host gave to other guests."""
    fields = pathlib.Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[1:9])
    return (user + nice + system + irq + softirq) / TICKS, steal / TICKS


def parents():
    """{process: (parent, CPU seconds)} of all that run, ended children counted with their parent."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        found[int(path.parent.name)] = (
            int(fields[1]),
            sum(int(field) for field in fields[11:15]) / TICKS,
        )
    return found


def tree(roots):
    """{process: CPU seconds} of the processes `roots` with their descendants."""
    processes, mine = parents(), set()
    grown = set(roots) & set(processes)
    while grown:
        mine |= grown
        grown = {pid for pid, (parent, _) in processes.items() if parent in grown} - mine
    return {pid: processes[pid][1] for pid in mine}


class Watch:
    """Runs in each with block; `noise` is what others and the host took of those stretches, as a
    share of a CPU."""

    def __init__(self):
        self.seconds = self.foreign = 0.0

    @contextlib.contextmanager
    def running(self, roots=None):
        """Own is this process, and what `roots` names: processes with their descendants."""

        def read():
            own = time.process_time() + (sum(tree(roots).values()) if roots else 0)
            busy, steal = machine_seconds()
            return own, busy + steal

        own, total = read()
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began
        own_after, total_after = read()  # same order as before: the cost of reading cancels out
        self.foreign += total_after - total - (own_after - own)

    @property
    def noise(self):
        return max(0.0, self.foreign) / self.seconds


def wait_quiet(noise_max, deadline):
    """Until two windows in a row had half of that noise, or until `deadline`."""
    windows = 0
    while windows < 2 and time.monotonic() < deadline:
        watch = Watch()
        with watch.running():
            pause(WINDOW_S)
        windows = windows + 1 if watch.noise < noise_max / 2 else 0


class Rounds:
    """Rounds of samples until `wanted` quiet ones are stored in `kept`, or the patience is over.

    ahead  Before all others by priority: does not wait for them to be quiet.
    """

    def __init__(self, wanted, patience_s, noise_max, ahead):
        self.wanted, self.noise_max, self.ahead = wanted, noise_max, ahead
        self.deadline = time.monotonic() + patience_s
        self.kept, self.noise, self.rejected = [], [], 0

    def collect(self, take):
        """take(number of the round, Watch) returns its samples; the watch has run during them."""
        number, last_quiet = 0, False
        while len(self.kept) < self.wanted and (number == 0 or time.monotonic() < self.deadline):
            if not self.ahead and not last_quiet:
                wait_quiet(self.noise_max, self.deadline)
            watch = Watch()
            samples = take(number, watch)
            number += 1
            last_quiet = watch.noise <= self.noise_max + ROUNDING_TICKS / TICKS / watch.seconds
            if last_quiet:
                self.kept.append(samples)
                self.noise.append(watch.noise)
            else:
                self.rejected += 1


def go_ahead(priority=2):
    """Puts this process, and all that it starts from now on, before everybody else's. Niceness
    would not do: it counts within a session alone where the kernel groups processes by session."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))

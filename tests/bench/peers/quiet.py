"""The guard against a noisy machine: what others used of it while something was measured."""

import os
import pathlib
import time

TICKS = os.sysconf("SC_CLK_TCK")
NOISE_MAX = 0.08  # of a CPU: a round in which others used more is thrown away
WINDOW_S = 0.5
ROUNDING_TICKS = 2  # what counting in ticks alone may show


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
            continue  # ended meanwhile
        found[int(path.parent.name)] = (
            int(fields[1]),
            sum(int(field) for field in fields[11:15]) / TICKS,
        )
    return found


def tree_seconds(roots, alone):
    """CPU seconds of the processes `roots` with their descendants, and of `alone` without."""
    processes = parents()
    mine = set(alone) & set(processes)
    grown = set(roots) & set(processes)
    while grown:
        mine |= grown
        grown = {pid for pid, (parent, _) in processes.items() if parent in grown} - mine
    return sum(processes[pid][1] for pid in mine)


class Span:
    """A with block; afterwards `noise` is what others and the host took of it, as a share of a CPU."""

    def __init__(self, roots=None, alone=()):
        self.roots = [os.getpid()] if roots is None else roots
        self.alone = alone

    def __enter__(self):
        self._own = tree_seconds(self.roots, self.alone)
        self._busy, self._steal = machine_seconds()
        self._began = time.monotonic()
        return self

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self._began
        busy, steal = machine_seconds()
        own = tree_seconds(self.roots, self.alone)
        foreign = max(0.0, (busy - self._busy) - (own - self._own))
        self.noise = (foreign + steal - self._steal) / self.seconds


def wait_quiet(noise_max, deadline):
    """Until two windows in a row had half of that noise; False where `deadline` came first."""
    windows = 0
    while windows < 2 and time.monotonic() < deadline:
        with Span() as span:
            pause(WINDOW_S)
        windows = windows + 1 if span.noise < noise_max / 2 else 0
    return windows == 2


class Rounds:
    """Rounds of samples until `wanted` are kept or the patience is over."""

    def __init__(self, wanted, patience_s, noise_max):
        self.wanted, self.noise_max = wanted, noise_max
        self.deadline = time.monotonic() + patience_s
        self.kept, self.noise, self.rejected = [], [], 0

    def collect(self, take):
        """take(number of the round) returns its samples and the Span that it lay in."""
        number = 0
        wait_quiet(self.noise_max, self.deadline)
        while len(self.kept) < self.wanted and (number == 0 or time.monotonic() < self.deadline):
            samples, span = take(number)
            number += 1
            if span.noise <= self.noise_max + ROUNDING_TICKS / TICKS / span.seconds:
                self.kept.append(samples)
                self.noise.append(span.noise)
            else:
                self.rejected += 1
                wait_quiet(self.noise_max, self.deadline)

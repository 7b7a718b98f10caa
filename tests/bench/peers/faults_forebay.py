# SPDX-License-Identifier: Apache-2.0
"""The same faults on Forebay."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import quiet
from faults_outcome import HANGS, as_saved, counted, outcome, scrub_words
from faults_process import (
    DEADLINE_S,
    END,
    FIRST,
    MIB,
    PAGE,
    PLACES,
    SECOND,
    SEED,
    fill,
    flip,
    wait_until,
)

SWAP = {
    "swap.capacity": "64MiB",
    "swap.ledger": "1MiB",
    "swap.staging": "2MiB",
    "dram.limit": "14MiB",  # too small for any block: all are on swap
}


class Daemon:
    """A forebayd on a folder's swap. `error` says why it did not start."""

    def __init__(self, build, folder, swap, more=None):
        settings = SWAP | {"socket.path": folder / "s", "swap.paths": swap}
        settings |= {"memlock": "best_effort", "update.workers": 1, "swap.probe": "never"}
        settings |= {"update.block_elems": 1 << 16}
        command = [build / "bin" / "forebayd"]
        for key, value in (settings | (more or {})).items():
            command += ["--set", f"{key}={value}"]
        self.socket, self.log = folder / "s", folder / "log"
        with open(self.log, "wb") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self.process = subprocess.Popen(command, **streams)
        until = time.monotonic() + DEADLINE_S
        self.error = None
        while b"forebayd ready" not in self.log.read_bytes():
            if self.process.poll() is not None:
                self.error = self.error_line()
                return
            if time.monotonic() > until:
                self.kill()
                self.error = HANGS
                return
            quiet.pause(0.01)

    def error_line(self):
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        errors = [line for line in text.splitlines() if "error[" in line]
        return (errors or [text.rpartition("\n")[2]])[-1]

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)


class Forebay:
    """A job at durability step, states on swap."""

    by = "Forebay"

    def __init__(self, server, folders, rows, build):
        self.server, self.folders, self.rows, self.build = server, folders, rows, build
        self.whole, self.daemons = None, []

    def daemon(self, folder, swap=None, more=None):
        swap = swap or folder / "swap"
        swap.mkdir(exist_ok=True)
        self.daemons.append(Daemon(self.build, folder, swap, more))
        return self.daemons[-1]

    def kill_daemons(self):
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.kill()
        self.daemons.clear()

    def start(self, daemon, to=END, seed=1, pause=(), job="faults", run="one"):
        words = ["--to", to, "--seed", seed, "--socket", daemon.socket, "--job", job, "--run", run]
        return self.server.start(*words, "--pause-before", *pause)

    def outcome(self, trial, whole=None):
        return outcome(trial, whole or self.whole, {})

    def resume(self, folder, swap=None):
        """Starts a daemon on the present swap, and the trainer: (step that it began at, outcome)."""
        daemon = self.daemon(folder, swap)
        if daemon.error:
            return None, f"error: {daemon.error}"
        trial = self.start(daemon).end()
        self.kill_daemons()
        return (trial.began() or [None])[0], self.outcome(trial)

    def begin(self):
        trials, in_dram = [], None
        for _ in range(2):
            daemon = self.daemon(self.folders.new())
            training = self.start(daemon, pause=[1])
            if not training.wait_for("paused", 1):
                sys.exit(f"Forebay does not train: {training.end().error()}")
            in_dram = self.jobs(daemon)[0]
            training.go_on()
            trials.append(training.end())
            self.kill_daemons()
        ends = [trial.of("end")[0][1] for trial in trials]
        same = "same digests" if ends[0] == ends[1] else "others"
        blocks = {"blocks": in_dram["blocks"], "blocks_in_dram": in_dram["resident_blocks"]}
        self.rows.note("none", self.by, "two runs", same, **blocks)
        self.whole = ends[0]
        self.losses = dict(trials[0].of("step"))
        for step in (FIRST, SECOND):
            digests = self.start(self.daemon(self.folders.new()), to=step).end().of("end")[0][1]
            self.kill_daemons()
            trial = self.start(self.daemon(self.saved(step))).end()
            self.kill_daemons()
            more = as_saved(trial, digests, self.losses)
            self.rows.note("resume", self.by, f"from step {step}", self.outcome(trial), **more)

    def jobs(self, daemon):
        command = [self.build / "bin" / "forebay", "jobs", "--json", "--socket", daemon.socket]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
        return json.loads(done.stdout)

    def saved(self, step=FIRST):
        """A folder where trainer and daemon got SIGKILL once that step was answered."""
        folder = self.folders.new()
        daemon = self.daemon(folder)
        training = self.start(daemon, pause=[step + 1])
        training.wait_for("paused", step + 1)
        daemon.kill()
        training.kill()
        training.end()
        self.kill_daemons()
        return folder

    def scrub(self, swap):
        command = [self.build / "bin" / "forebay", "scrub", "--json", "--swap", swap]
        options = {"capture_output": True, "text": True, "timeout": DEADLINE_S, "check": False}
        done = subprocess.run(command, **options)
        return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr.strip()

    def slots(self, swap):
        """What of the file the newest ledger names: by a scrub of a copy with every page damaged."""
        copy = self.folders.new()
        file = copy / "forebay.swap"
        command = ["cp", "--sparse=always", swap / file.name, file]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        with open(file, "r+b") as volume:
            ledger = int.from_bytes(volume.read(48)[40:], "little")  # ledger_bytes_max of the label
            begin = 3 * PAGE + 2 * ledger
            for at in range(begin, volume.seek(0, os.SEEK_END) - begin, PAGE):
                volume.seek(at)
                if any(volume.read(PAGE)):
                    volume.seek(at)
                    volume.write(b"damage")
        _, report = self.scrub(copy)
        shutil.rmtree(copy)
        return report["jobs"][0]["damaged"], begin

    def places(self, swap, chance):
        """(kind, offset) of bits to flip."""
        slots, begin = self.slots(swap)
        kinds = {"states": [], "weights": []}
        for slot in slots:
            kind = "weights" if "weights" in slot["what"] else "states"
            kinds[kind].append(slot["offset_bytes"])
        for kind, offsets in kinds.items():
            for _ in range(PLACES if offsets else 0):
                yield f"slot of {kind}", chance.choice(offsets) + chance.randrange(PAGE)
        for page in range(PLACES):  # label, records
            yield "label or record", page * PAGE + chance.randrange(56)
        yield "ledger", 3 * PAGE + chance.randrange(64)
        size = (swap / "forebay.swap").stat().st_size
        yield "free space", size // 2 // PAGE * PAGE + begin % PAGE

    def flipped(self):
        chance = random.Random(SEED)
        folder = self.saved()
        places = list(self.places(folder / "swap", chance))
        results = {}
        for kind, offset in places:
            folder = self.saved()
            file = folder / "swap" / "forebay.swap"
            flip(file, offset, chance.randrange(8))
            status, report = self.scrub(file.parent)
            _, result = self.resume(folder)
            results.setdefault(kind, []).append((result, scrub_words(status, report)))
        for kind, pairs in results.items():
            texts = [f"{words}; resume: {result}" for result, words in pairs]
            self.rows.count("flipped bit", self.by, kind, texts)

    def truncated(self):
        cuts = {"half is left": lambda size: size // 2, "its end is gone": lambda size: size - PAGE}
        for name, share in cuts.items():
            folder = self.saved()
            file = folder / "swap" / "forebay.swap"
            os.truncate(file, share(file.stat().st_size))
            _, result = self.resume(folder)
            self.rows.note("truncated file", self.by, f"forebay.swap, {name}", result)

    def full_disk(self):
        with self.folders.small(40 * MIB) as mounted:
            daemon = self.daemon(self.folders.new(), mounted / "swap")
            self.rows.note("full disk", self.by, "swap.paths, too small", f"error: {daemon.error}")
            self.kill_daemons()
        for first in (1, SECOND):
            with self.folders.small(80 * MIB) as mounted:
                folder, swap = self.folders.new(), mounted / "swap"
                training = self.start(self.daemon(folder, swap), pause=[first])
                training.wait_for("paused", first)
                fill(mounted, 0)
                training.go_on()
                result = self.outcome(training.end())
                self.rows.note("full disk", self.by, f"swap.paths, before step {first}", result)
                self.kill_daemons()

    def two_jobs(self):
        room = {"dram.limit": "32MiB", "swap.capacity": "128MiB"}
        daemon = self.daemon(self.folders.new())
        wholes = [self.whole, self.start(daemon, seed=2).end().of("end")[0][1]]
        self.kill_daemons()
        folder = self.folders.new()
        daemon = self.daemon(folder, more=room)
        seeds = {"a": 1, "b": 2}
        both = [self.start(daemon, seed=seed, pause=[1], job=name) for name, seed in seeds.items()]
        for training in both:
            training.wait_for("paused", 1)
        other = self.start(daemon, job="a", run="two").end()
        result = self.outcome(other)
        self.rows.note("two jobs on one path", self.by, "one daemon, same name", result)
        second = self.folders.new()
        daemon = self.daemon(second, folder / "swap")
        self.rows.note("two jobs on one path", self.by, "second daemon", f"error: {daemon.error}")
        for training in both:
            training.go_on()
        for name, training, whole in zip(seeds, both, wholes):
            result = self.outcome(training.end(), whole)
            self.rows.note("two jobs on one path", self.by, f"one daemon, job {name}", result)
        self.kill_daemons()

    def killed(self, kills):
        """Trainer and daemon, at random moments of a step."""
        times = []
        training = self.start(self.daemon(self.folders.new()))
        for step in range(2, END + 1):
            training.wait_for("stepping", step)
            began = time.monotonic()
            training.wait_for("step", step)
            times.append(time.monotonic() - began)
        training.end()
        self.kill_daemons()
        seconds, chance, results = max(times), random.Random(SEED), []
        for _ in range(kills):
            folder = self.folders.new()
            daemon = self.daemon(folder)
            training = self.start(daemon)
            training.wait_for("stepping", SECOND)
            wait_until(time.monotonic() + chance.uniform(0, 1.05) * seconds)
            victims = [training.kill, daemon.process.kill]
            chance.shuffle(victims)
            for victim in victims:
                victim()
            daemon.process.wait(DEADLINE_S)
            answered = training.end().of("step")[-1][0]
            step, result = self.resume(folder)
            kept = "" if step in (answered, answered + 1) else f"lost: step {answered}; "
            results.append(f"from step {step}: {kept}{result}")
        fault, where = "kill -9 during a save", "trainer and daemon"
        # Each result contains the step from which the training resumed.
        self.rows.note(fault, self.by, where, counted(results), results=results, step_s=seconds)

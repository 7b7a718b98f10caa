# SPDX-License-Identifier: Apache-2.0
"""The faults of faults.py on DeepSpeed."""

import os
import random
import shutil
import signal

from faults_outcome import as_saved, lost, outcome
from faults_process import END, FIRST, MIB, PAGE, PLACES, SECOND, SEED, fill, flip, kill_at


class DeepSpeed:
    """With states on NVMe, or in memory."""

    def __init__(self, server, folders, rows, on_nvme):
        self.server, self.folders, self.rows, self.on_nvme = server, folders, rows, on_nvme
        self.by = "DeepSpeed, NVMe" if on_nvme else "DeepSpeed, CPU"
        self.whole, self.undisturbed = None, {}

    def start(self, folder, *more, to=END, load=False, save_at=(), checkpoints=None, nvme=None):
        """`more`: of the worker's arguments."""
        words = ["--to", to, *more]
        checkpoints = checkpoints or folder / "saved"
        if self.on_nvme:
            words += ["--nvme", nvme or folder / "nvme"]
        if load:
            words += ["--load", checkpoints]
        if save_at:
            words += ["--save", checkpoints, "--save-at", *save_at]
        return self.server.start(*words)

    def train(self, *words, **options):
        return self.start(*words, **options).end()

    def outcome(self, trial):
        return outcome(trial, self.whole, self.undisturbed)

    def begin(self):
        """Trainings that nothing disturbs, resumes, and saves to copy for other faults."""
        trials = [self.train(self.folders.new(), save_at=[FIRST, SECOND]) for _ in range(2)]
        ends = [trial.of("end")[0][1] for trial in trials]
        same = "same digests" if ends[0] == ends[1] else f"others: {', '.join(lost(*ends))}"
        self.rows.note("none", self.by, "two runs", same)
        self.whole = ends[0]
        self.losses = dict(trials[0].of("step"))
        saves = [save for one in trials for save in one.of("saved")]
        self.save_seconds = [seconds for step, seconds in saves if step == SECOND]
        self.saved = {}
        for step in (FIRST, SECOND):
            folder = self.folders.new()
            at = self.train(folder, to=step, save_at=[FIRST, step])
            self.saved[step] = folder
            self.save_seconds += [seconds for at_step, seconds in at.of("saved") if at_step == SECOND]
            self.resume(step, at.of("end")[0][1])
        if self.on_nvme:
            trial = self.train(self.copy(FIRST), "--step-first", load=True)
            where = f"from step {FIRST}, loaded after a step"
            self.rows.note("resume", self.by, where, self.outcome(trial))

    def resume(self, step, digests):
        trial = self.train(self.copy(step), load=True)
        result = self.outcome(trial)
        more = {}
        if trial.of("end"):
            self.undisturbed[step] = trial.of("end")[0][1]
            more = as_saved(trial, digests, self.losses)
        self.rows.note("resume", self.by, f"from step {step}", result, **more)

    def copy(self, step=FIRST):
        """Of a folder with that save."""
        folder = self.folders.new()
        shutil.copytree(self.saved[step], folder, dirs_exist_ok=True)
        return folder

    def files(self):
        """{kind: path within a folder} of those with states or weights."""
        tag = f"saved/global_step{FIRST}"
        found = {}
        for path in sorted((self.saved[FIRST] / tag).rglob("*")):
            if path.is_file():
                found[path.name] = path.relative_to(self.saved[FIRST])
        return found

    def damage(self, fault, kind, works, more=""):
        """A resume after each of works(path, its size); a row of the kind of file."""
        results = []
        for work in works:
            folder = self.copy()
            path = folder / (self.files() | {"latest": "saved/latest"})[kind]
            work(path, path.stat().st_size)
            results.append(self.outcome(self.train(folder, load=True)))
            shutil.rmtree(folder)
        self.rows.count(fault, self.by, kind + more, results)

    def flipped(self):
        chance = random.Random(SEED)

        def work(path, size):
            flip(path, chance.randrange(size), chance.randrange(8))

        for kind in self.files():
            self.damage("flipped bit", kind, [work] * PLACES)

    def truncated(self):
        def half(path, size):
            os.truncate(path, size // 2)

        def less(path, size):
            os.truncate(path, size - min(PAGE, size // 8))

        for kind in self.files():
            self.damage("truncated file", kind, [half], ", half is left")
            self.damage("truncated file", kind, [less], ", its end is gone")
        self.damage("truncated file", "latest", [lambda path, size: os.truncate(path, 0)], ", empty")

    def full_disk(self):
        for free in (16 << 10, 4 * MIB):
            with self.folders.small(40 * MIB) as mounted:
                folder, checkpoints = self.folders.new(), mounted / "saved"
                both = {"checkpoints": checkpoints, "save_at": [FIRST, SECOND]}
                training = self.start(folder, "--pause-before", SECOND, **both)
                training.wait_for("paused", SECOND)
                filler = fill(mounted, free)
                training.go_on()
                trial = training.end()
                unsaved = trial.of("unsaved")
                said = f"error: {unsaved[0][1]}" if unsaved else self.outcome(trial)
                where = f"save_checkpoint, {free >> 10} KiB free"
                self.rows.note("full disk", self.by, where, said, then=self.outcome(trial))
                filler.unlink()
                self.after_a_save("full disk", f"{where}, then resume", folder, checkpoints)
        if self.on_nvme:
            for first in (1, SECOND):
                self.full_nvme(first)

    def after_a_save(self, fault, where, folder, checkpoints):
        trial = self.train(folder, load=True, checkpoints=checkpoints, save_at=[SECOND])
        step = f"from step {trial.began()[0]}: " if trial.began() else ""
        self.rows.note(fault, self.by, where, step + self.outcome(trial))
        for step, error in trial.of("unsaved"):
            self.rows.note(fault, self.by, f"{where}, next save of step {step}", f"error: {error}")

    def full_nvme(self, first):
        """The file system of nvme_path is full from this step on."""
        with self.folders.small(40 * MIB) as mounted:
            training = self.start(
                self.folders.new(), "--pause-before", first, nvme=mounted / "nvme"
            )
            training.wait_for("paused", first)
            fill(mounted, 0)
            training.go_on()
            result = self.outcome(training.end())
        self.rows.note("full disk", self.by, f"nvme_path, before step {first}", result)

    def two_jobs(self):
        if not self.on_nvme:
            return
        wholes = [self.whole, self.train(self.folders.new(), "--seed", 2).of("end")[0][1]]
        folder = self.folders.new()
        both = [self.start(folder, "--pause-before", 1, "--seed", seed) for seed in (1, 2)]
        for training in both:
            training.wait_for("paused", 1)
        for training in both:
            training.go_on()
        results = [outcome(training.end(), whole, {}) for training, whole in zip(both, wholes)]
        for number, result in enumerate(results, 1):
            self.rows.note("two jobs on one path", self.by, f"nvme_path, job {number}", result)

    def killed(self, kills):
        """At random moments of the second save."""
        seconds = max(self.save_seconds)
        chance = random.Random(SEED)
        results, again, damaged = [], [], []
        for _ in range(kills):
            folder = self.folders.new()
            training = self.start(folder, save_at=[FIRST, SECOND])
            training.wait_for("saving", SECOND)
            kill_at(training, chance.uniform(0, 1.05) * seconds)
            died = training.end()
            if died.status != -signal.SIGKILL:
                damaged.append(died.error() or "it had ended")
                continue
            trial = self.train(folder, load=True, save_at=[SECOND])
            step = f"from step {trial.began()[0]}: " if trial.began() else ""
            results.append(step + self.outcome(trial))
            if trial.of("saving"):
                unsaved = trial.of("unsaved")
                again.append(f"error: {unsaved[0][1]}" if unsaved else "saved")
            shutil.rmtree(folder)
        fault = "kill -9 during a save"
        more = {"save_s": seconds, "not_killed": damaged}
        self.rows.count(fault, self.by, "resume", results, **more)
        if again:
            self.rows.count(fault, self.by, f"next save of step {SECOND}", again)

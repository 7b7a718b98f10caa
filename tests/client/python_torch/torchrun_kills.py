# SPDX-License-Identifier: Apache-2.0
"""Kills ranks that torchrun has started, their daemon, or both, at random moments of a training whose steps are durable,
and compares the result with the same training without kills.

usage: torchrun_kills.py KILLS [SEED]      FOREBAY_BIN_DIR and FOREBAY_CORE as in daemon_process.py
"""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

from daemon_process import Daemon
from test_processes import ROOT, environment

RANKS = 2
STEPS_A_KILL = 4  # steps of the training for each kill
DEADLINE_S = 120  # most seconds without a step
EARLY_S = 6.0  # seconds in which a kill may hit ranks that have not attached
PROGRESS = re.compile(r"^step +(\d+)/")
TARGETS = ("daemon", "rank", "daemon and rank", "ranks")  # in turn


def start_daemon(folder):
    settings = [f"swap.paths={folder}", "swap.capacity=64MiB", "swap.staging=2MiB"]
    settings += ["update.block_elems=4096", "jobs.durability=step"]
    return Daemon(folder, *settings)


def command(out, text, steps, restarts):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}"]
    torchrun += ["--monitor-interval=0.1"]
    model = ["--width=32", "--layers=2", "--heads=2", "--seq=32", "--heldout=0"]
    places = [f"--text={text}", f"--out={out}", f"--sha={out / 'sha.json'}"]
    return [*torchrun, str(ROOT / "tools" / "train_gpt.py"), *model, f"--steps={steps}", *places]


def children(pid):
    try:
        found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(child) for child in found.split()]


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Campaign:
    """A training that is killed `kills` times."""

    def __init__(self, folder, kills, seed):
        self.folder, self.kills = pathlib.Path(folder), kills
        self.chance = random.Random(seed)
        self.counts = dict.fromkeys(TARGETS, 0)
        self.step = 0
        self.stepped = threading.Condition()
        self.daemon = start_daemon(folder)
        self.text = self.folder / "text"
        words = "in the beginning was a word and the word was with the node".split()
        picks = random.Random(5).choices(words, k=40_000)
        self.text.write_text(" ".join(picks), encoding="utf-8")

    def start(self, name, restarts):
        steps = STEPS_A_KILL * self.kills + 4
        node = {"FOREBAY_SOCKET": self.daemon.socket, "FOREBAY_JOB": name, "FOREBAY_RUN": "kills"}
        return subprocess.Popen(
            command(self.folder / name, self.text, steps, restarts),
            env={**environment(), **node},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def whole(self):
        """The training without kills."""
        launch = self.start("whole", 0)
        launch.communicate(timeout=600)
        assert launch.returncode == 0, "the training without kills failed"

    def follow(self, launch):
        for line in launch.stdout:
            if match := PROGRESS.match(line):
                with self.stepped:
                    self.step = int(match[1])
                    self.stepped.notify_all()
        with self.stepped:
            self.step = -1  # the launch has ended
            self.stepped.notify_all()

    def wait_for_a_moment(self):
        """After some steps from now on, within one of them; or, one time in four, at any time."""
        with self.stepped:
            goal = self.step + self.chance.randint(1, STEPS_A_KILL - 1)
            is_early = self.chance.random() < 0.25
            timeout_s = self.chance.uniform(0, EARLY_S) if is_early else DEADLINE_S
            done = self.stepped.wait_for(lambda: self.step >= goal or self.step < 0, timeout_s)
            assert self.step >= 0, "the launch ended before all kills"
            assert done or is_early, "no step within the deadline"
        until = time.monotonic() + self.chance.uniform(0, 0.03)
        while time.monotonic() < until:
            os.sched_yield()

    def kill_once(self, launch, target):
        self.wait_for_a_moment()
        self.counts[target] += 1
        ranks = children(launch.pid)
        self.chance.shuffle(ranks)
        if target.startswith("rank"):
            ranks = ranks if target == "ranks" else ranks[:1]
        else:
            ranks = ranks[:1] if target.endswith("rank") else []
        for pid in ranks:
            kill(pid)
        if target.startswith("daemon"):
            self.daemon.process.kill()
            self.daemon.process.wait()
            self.daemon = start_daemon(self.folder)

    def killed(self):
        # A kill of the daemon may cost two restarts: ranks that restart first may find no daemon yet.
        launch = self.start("killed", 3 * self.kills + 3)
        follower = threading.Thread(target=self.follow, args=(launch,))
        follower.start()
        try:
            for number in range(self.kills):
                self.kill_once(launch, TARGETS[number % len(TARGETS)])
            launch.wait(timeout=600)
        finally:
            launch.terminate()
            launch.wait()
            follower.join()
        assert launch.returncode == 0, "the training with kills failed"

    def check(self):
        """Raises if an answered step is lost, or bits differ; returns how often ranks resumed."""
        logs = []
        for rank in range(RANKS):
            text = (self.folder / "killed" / f"rank{rank}.jsonl").read_text(encoding="utf-8")
            logs.append([json.loads(line) for line in text.splitlines()])
        steps = [row for log in logs for row in log if row["event"] == "step"]
        resumes = [row for log in logs for row in log if row["event"] == "resume"]
        for resume in resumes:
            before = (row["step"] for row in steps if row["time"] < resume["time"])
            answered = max(before, default=0)
            # The resumed step is one more than was answered if a kill came between the step and its answer.
            assert answered <= resume["step"] <= answered + 1, f"{resume}, answered {answered}"
        for log in logs:
            numbers = [row["step"] for row in log if row["event"] == "step"]
            assert numbers == sorted(set(numbers)), "a step was trained twice"
        whole, killed = [
            json.loads((self.folder / name / "sha.json").read_text(encoding="utf-8"))
            for name in ("whole", "killed")
        ]
        assert whole == killed
        return len(resumes)

    def stop(self):
        self.daemon.process.kill()
        self.daemon.process.wait()


def run(kills, seed):
    """{target: kills of it}, how often ranks resumed, seconds."""
    # A folder on a disk: a tmpfs survives no power cut.
    place = os.environ.get("TMPDIR", "/var/tmp")
    with tempfile.TemporaryDirectory(prefix="fb", dir=place) as folder:
        campaign = Campaign(folder, kills, seed)
        try:
            campaign.whole()
            began = time.monotonic()
            campaign.killed()
            seconds = time.monotonic() - began
            return campaign.counts, campaign.check(), seconds
        finally:
            campaign.stop()


if __name__ == "__main__":
    number, chosen_seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    counts, went_on, took_s = run(number, chosen_seed)
    print(f"{number} kills in {took_s:.0f} s, seed {chosen_seed}: {counts}")
    print(f"ranks went on {went_on} times; no step lost, SHA-256 as without kills")

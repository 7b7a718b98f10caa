# SPDX-License-Identifier: Apache-2.0
"""The optimizer phase of a training step: each side in a process of its own, one at a time."""

import multiprocessing.connection
import os
import pathlib
import subprocess
import tempfile
import time

import ours
import quiet

# Pause before each turn. OpenMP threads of the previous side stop spinning, and other processes get their share of the CPUs.
PARK_S = 0.15
WARM_ROUNDS = 3
START_S = 600  # DeepSpeed may compile its communication first
TURN_S = 120
LIMIT = "limit"


class Side:
    """A worker process that waits for its next step."""

    def __init__(self, name, command, variables, log):
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="forebay-peers-")
        address = str(pathlib.Path(self.folder.name) / "s")
        with multiprocessing.connection.Listener(address, "AF_UNIX") as listener:
            with open(log, "w", encoding="utf-8") as out:
                self.process = subprocess.Popen(
                    [*command, "--connect", address], env=variables, stdout=out, stderr=out
                )
            self.log = log
            self._await(listener._listener._socket, START_S)
            self.connection = listener.accept()
        self.facts = self._receive(START_S)

    def _await(self, what, deadline_s):
        sentinel = os.pidfd_open(self.process.pid)
        try:
            ready = multiprocessing.connection.wait([what, sentinel], deadline_s)
        finally:
            os.close(sentinel)
        if what not in ready:
            raise SystemExit(f"{self.name} ended or stalled: see {self.log}")

    def _receive(self, deadline_s):
        self._await(self.connection, deadline_s)
        try:
            return self.connection.recv()
        except EOFError:
            raise SystemExit(f"{self.name} ended: see {self.log}") from None

    def turn(self):
        self.connection.send("step")
        return self._receive(TURN_S)

    def end(self):
        self.connection.send("end")
        self.connection.close()
        self.process.wait(TURN_S)
        self.folder.cleanup()

    def kill(self):
        if self.process.poll() is None:
            self.process.terminate()


class Limit:
    """The limit loops over as many parameters, in this process."""

    def __init__(self, library, params, cpus):
        sizes = {"weights": 4, "remainder": 2, "m": 4, "v": 4, "grad": 4}
        self.buffers = {
            name: ours.Buffer(params * width, stagger=place * ours.STAGGER)
            for place, (name, width) in enumerate(sizes.items())
        }
        at = {name: buffer.address for name, buffer in self.buffers.items()}
        self.planes = ours.Planes(n=params, master=at["weights"], **at)
        self.pool = ours.Ours(library, cpus)
        for work in ("fp32", "exact"):
            self.pool.touch(work, self.planes)

    def turn(self):
        seconds = {}
        for work in ("fp32", "exact"):
            began = time.perf_counter()
            self.pool.touch(work, self.planes)
            seconds[f"touch_{work}"] = time.perf_counter() - began
        return seconds


def deepspeed_sides(smoke):
    """Settings that are tried: {name: arguments}."""
    if smoke:
        return {"deepspeed/sub_group=1e9": ["--sub-group", "1000000000"]}
    return {
        "deepspeed/sub_group=1e9": ["--sub-group", "1000000000"],
        "deepspeed/sub_group=2e7": ["--sub-group", "20000000"],
    }


def start_sides(place, build, cpus, out, smoke):
    """Each started when the one before is ready: they do not disturb each other's start."""
    worker = [place.python, pathlib.Path(__file__).with_name("phase_worker.py")]
    size = ["--size", "smoke" if smoke else "110M"]
    sides = []
    try:
        for port, (name, words) in enumerate(deepspeed_sides(smoke).items()):
            variables = place.variables(cpus) | {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",  # any
            }
            print(f"starting {name}", flush=True)
            command = [*worker, "--by", "deepspeed", *size, *words]
            sides.append(Side(name, command, variables, out / f"phase-{port}.log"))
        run = [build / "bin" / "forebay", "run", "--dram", "256MiB" if smoke else "6GiB"]
        run += ["--set", f"update.workers={len(cpus)}", "--"]
        command = [*run, *worker, "--by", "forebay", *size]
        print("starting forebay", flush=True)
        sides.append(Side("forebay", command, place.variables(cpus), out / "phase-forebay.log"))
    except BaseException:
        for side in sides:
            side.kill()
        raise
    return sides


def measure(place, build, library, cpus, out, rounds, smoke):
    """Samples of every side in alternation: {name: [{part: seconds}]}, and what they ran with."""
    os.sched_setaffinity(0, cpus)
    hold = ours.Hold(library, [])
    if rounds.ahead:  # low-priority threads occupy the CPUs that a side leaves idle
        quiet.go_ahead(priority=1)
        hold = ours.Hold(library, cpus)
        quiet.go_ahead()
    sides = start_sides(place, build, cpus, out, smoke)
    try:
        limit = Limit(library, sides[0].facts["params"], cpus)
        print("warming up", flush=True)
        for _ in range(WARM_ROUNDS):
            for side in sides:
                side.turn()

        def take(number, watch):
            """One turn each. What a parked side computes meanwhile counts as noise."""
            shift = number % len(sides)
            samples = {}
            for side in [*sides[shift:], *sides[:shift], limit]:
                quiet.pause(PARK_S)
                roots = [side.process.pid] if isinstance(side, Side) else []
                with hold, watch.running(roots):
                    got = side.turn()
                samples[side.name if isinstance(side, Side) else LIMIT] = got
            return samples

        rounds.collect(take)
        for side in sides:
            side.end()
    finally:
        for side in sides:
            side.kill()
    return {
        "samples": {
            name: [samples[name] for samples in rounds.kept]
            for name in [*(side.name for side in sides), LIMIT]
        },
        "facts": {side.name: side.facts for side in sides},
        "huge_pages_of_limit": ours.huge_page_share(limit.buffers.values()),
        "params": sides[0].facts["params"],
        "threads": len(cpus),
        "rejected": rounds.rejected,
        "noise": rounds.noise,
    }

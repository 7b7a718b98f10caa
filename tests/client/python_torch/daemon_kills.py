# SPDX-License-Identifier: Apache-2.0
"""Kills a daemon under trainings of two ranks at random moments, four times in each, and compares SHA-256 of weights and
states in the end with that of the same training without a kill. A stand-in for the service manager starts it again.

usage: daemon_kills.py TRAININGS [SEED]      FOREBAY_BIN_DIR and FOREBAY_CORE as in daemon_process.py
"""

import collections
import os
import pathlib
import random
import re
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
os.environ["FOREBAY_WIDTH"] = "448"  # of the model: an update takes as long as the rest of a step
sys.path.insert(0, str(HERE))

from ordered_steps import RANKS  # noqa: E402
from test_daemon_kill import CASES  # noqa: E402
from test_daemon_restart import Service, room_without_states  # noqa: E402

KILLS = 4
STEPS_OF_KILL = 6  # steps that ranks take while the daemon is killed
STEPS = KILLS * STEPS_OF_KILL

GOES_ON = re.compile(r"job durable goes on (at|in the middle of the update of) step")


def training(chance, case, folder, counts):
    """Whether it ended as it should."""
    mode, level, place = case
    room = ["dram.limit=1GiB"] if place == "dram" else room_without_states(folder, mode, level)
    service = Service(folder, *room)
    with service.manager as manager:
        manager.start()
        with service.ranks("durable_ranks", mode, level, "ordered") as ranks:
            for first in range(1, STEPS, STEPS_OF_KILL):
                for _ in range(STEPS_OF_KILL):
                    ranks.orders.give("step")
                ranks.hear_answers(first)
                time.sleep(chance.uniform(0, 0.06))  # house: allow sleep: anywhere in the steps that follow
                manager.kill()
                ranks.hear_answers(first + STEPS_OF_KILL - 1)
            status, error = ranks.end()
        log = service.log()
    found = GOES_ON.findall(log)
    counts["kills"] += KILLS
    counts["kills in an update"] += sum(where != "at" for where in found)
    counts["repeated steps"] += len(ranks.of("repeated")) // RANKS
    ends = [line[3] == line[4] and line[2] == STEPS for line in ranks.of("digests")]
    is_good = status == 0 and ends == [True] * RANKS and len(found) == KILLS
    counts["the same SHA-256" if is_good else "another end"] += 1
    if not is_good:
        print(f"{case}: status {status}, {ends}, {len(found)} of {KILLS}\n{error[-2000:]}\n{log[-3000:]}", flush=True)
    return is_good


def main(arguments):
    trainings, seed = int(arguments[0]), arguments[1] if len(arguments) > 1 else "1"
    counts, good = collections.Counter(), True
    for number in range(trainings):
        chance = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory(prefix="fb", dir="/var/tmp") as folder:
            good = training(chance, CASES[number % len(CASES)], folder, counts) and good
        print(f"{number + 1}: {dict(counts)}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

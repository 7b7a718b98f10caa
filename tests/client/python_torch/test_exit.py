# SPDX-License-Identifier: Apache-2.0
"""Goal    A process ends when its main thread does, also while another thread waits in step().
Method  The real daemon; the script tells that the step was sent, and is awaited with a deadline.
"""

import subprocess
import sys

from test_processes import environment, own_daemon  # noqa: F401

DEADLINE_S = 180
SCRIPT = """
import threading
import time

import forebay
import torch

opt = forebay.attach(torch.nn.Linear(2, 2), rank=0, world_size=2, timeout=3600)
sent = opt.stats()["commands"]
threading.Thread(target=opt.step, daemon=True).start()
while opt.stats()["commands"] == sent:
    time.sleep(0.01)  # house: allow sleep: a poll with a deadline
print("main ends")
"""


def test_the_main_thread_ends_the_process_while_another_waits_in_step(own_daemon):  # noqa: F811
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "main ends\n"), done.stderr

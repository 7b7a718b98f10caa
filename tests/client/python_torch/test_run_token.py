# SPDX-License-Identifier: Apache-2.0
# Goal    Processes of one launch have one run token, another launch has another.
# Method  Tokens of child processes with the environments that torchrun makes.

import os
import subprocess
import sys

from forebay._run import run_token
from test_processes import environment

SCRIPT = "from forebay._run import run_token; print(run_token())"
LAUNCHER = f"""
import os, subprocess, sys
for _ in range(2):
    print(subprocess.run([sys.executable, "-c", {SCRIPT!r}], capture_output=True, text=True).stdout)
"""


def tokens_of_a_launch(**extra):
    """What two children of one launcher say."""
    plain = {key: value for key, value in environment().items() if key != "FOREBAY_RUN"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER],
        env={**plain, **extra},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_named_run_is_one_run_wherever_it_starts():
    assert run_token({"FOREBAY_RUN": "night", "TORCHELASTIC_RUN_ID": "7"}) == "night"


def test_the_workers_of_torchrun_are_one_run():
    assert run_token({"TORCHELASTIC_RUN_ID": "7"}) == run_token({"TORCHELASTIC_RUN_ID": "7"})
    assert run_token({"TORCHELASTIC_RUN_ID": "7"}) != run_token({"TORCHELASTIC_RUN_ID": "8"})


def test_torchruns_default_id_is_no_run_but_its_launcher_is():
    first = tokens_of_a_launch(TORCHELASTIC_RUN_ID="none")
    second = tokens_of_a_launch(TORCHELASTIC_RUN_ID="none")
    assert len(first) == 2 and first[0] == first[1] != second[0] == second[1]
    assert first[0].startswith("launcher.")


def test_a_process_without_a_launcher_is_a_run_of_its_own():
    own = tokens_of_a_launch()
    assert len(set(own)) == 2 and all(token.startswith("process.") for token in own)
    assert run_token({}) == run_token({}) and run_token({}).startswith(f"process.{os.getpid()}.")

# SPDX-License-Identifier: Apache-2.0
# Goal    Ranks that are forked from one process and print to one pipe write whole lines, also with PYTHONUNBUFFERED.
# Method  Two processes print some thousand lines at once.

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
LINES = 5000

PRINTERS = f"""
import os, sys, types
import preloaded

def main(arguments):
    for rank in range(2):
        if os.fork() == 0:
            for line in range({LINES}):
                print(f"rank {{rank}} line {{line}}")
            os._exit(0)
    os.wait()
    os.wait()

preloaded._run_forked(types.SimpleNamespace(main=main), {{"folder": sys.argv[1], "arguments": [], "variables": {{}}}})
"""


def test_lines_of_two_ranks_stay_whole(tmp_path):
    os.mkfifo(tmp_path / "out")
    variables = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", PRINTERS, str(tmp_path)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL) as process:
        lines = (tmp_path / "out").read_text().splitlines()
    assert process.returncode == 0
    assert len(lines) == 2 * LINES
    assert [line for line in lines if not re.fullmatch(r"rank [01] line \d+", line)] == []

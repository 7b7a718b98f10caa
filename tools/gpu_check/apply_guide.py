#!/usr/bin/env python3
"""Writes the script of docs/one-gpu.md, as it was and with the page's diff. usage: apply_guide.py DOCS FOLDER"""

import pathlib
import re
import shutil
import subprocess
import sys

SCRIPT, CHANGED = "one_gpu_loop.py", "one_gpu_loop_changed.py"


def main():
    docs, folder = map(pathlib.Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SCRIPT, "small_model.py"):
        shutil.copy(docs / "examples" / name, folder / name)
    page = (docs / "one-gpu.md").read_text(encoding="utf-8")
    diff = re.search(r"```diff guide\n(.*?)```", page, re.S)[1]
    (folder / CHANGED).write_bytes((folder / SCRIPT).read_bytes())
    patch = f"--- a/{CHANGED}\n+++ b/{CHANGED}\n{diff}"
    command = ["git", "apply", "--unidiff-zero", "--unsafe-paths", "--directory", str(folder), "-"]
    subprocess.run(command, input=patch, text=True, check=True, cwd="/")


if __name__ == "__main__":
    main()

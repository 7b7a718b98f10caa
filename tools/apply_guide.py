#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The diffs of the guides in docs/guide/, applied to the scripts that they are of.

usage: apply_guide.py PAGE FOLDER      the first diff of docs/guide/PAGE: FOLDER/SCRIPT.py, and FOLDER/SCRIPT_changed.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = re.compile(
    r"<!-- applied to (\S+), and run, by tests/client/python_torch/\w+.py -->\n"
    r"```diff guide\n(.*?)```",
    re.S,
)


def diffs_of(page):
    """[(script, diff)] in the order of the page."""
    text = (ROOT / "docs" / "guide" / page).read_text(encoding="utf-8")
    found = [(match[1], match[2]) for match in GUIDE.finditer(text)]
    assert found, f"docs/guide/{page} has no diff"
    return found


def applied(page, number, folder):
    """The path of the changed script."""
    script, diff = diffs_of(page)[number]
    source = ROOT / script
    changed = folder / source.name
    changed.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        ["git", "apply", "--unidiff-zero", "-"],
        input=f"--- a/{source.name}\n+++ b/{source.name}\n{diff}",
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
    )
    assert done.returncode == 0, f"docs/guide/{page} does not fit {script}: {done.stderr}"
    compile(changed.read_text(encoding="utf-8"), changed.name, "exec")
    return changed


def main():
    page, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    changed = applied(page, 0, folder)
    changed.rename(changed.with_stem(f"{changed.stem}_changed"))
    examples = ROOT / "docs" / "examples"
    for name in (changed.name, "small_model.py"):
        shutil.copy(examples / name, folder / name)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Goal    The tables of memory and speed in docs/ are what `forebay plan` says.
Method  Each row names its options; every table is generated under one private daemon. `plan_tables_test.py --write`
        writes them: a new row needs its options alone.
"""

import json
import re
import shlex
import sys

import pytest
from forebay_command import FOREBAY, ROOT, folders_of_run, forebay

TABLE = re.compile(r"(<!-- plan: (?P<common>[^>]*) -->\n)(?P<rows>(?:\|.*\n)+)")
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if TABLE.search(page.read_text(encoding="utf-8"))
]
# Options of the daemon. The size of the staging arena depends on the number of workers, whose default is the number of CPUs.
DAEMON = ["--dram", "256MiB", "--set", "update.workers=2", "--set", "swap.probe=never"]
HEADER = ("options", "parameters", "weights", "states", "gradients", "DRAM total", "swap", "on swap a step")
HEADER += ("step", "gathered")


def gib(count):
    return "-" if count == 0 else f"{count / 2**30:.1f} GiB"


def billions(count):
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def placed(in_dram, on_swap):
    if in_dram == 0:
        return "on swap"
    return gib(in_dram) + (f", {gib(on_swap)} on swap" if on_swap else "")


def row(common, options, plan, text):
    """Of the JSON and the text that one call each has printed."""
    elements = int(re.search(r"(\d+) parameters in", text)[1])
    shown = re.search(r"a step takes ([\d.]+) s", text)
    assert bool(shown) == (plan["swap"] > 0)
    traffic = f"{gib(plan['step_read'])} read, {gib(plan['step_written'])} written" if shown else "-"
    seconds = shown or re.search(r"--compute (\d+)", common)
    node = sum(plan[key] for key in ("weights", "weights_cache", "states", "sums", "extra_state"))
    node += sum(plan[key] for key in ("sessions", "tables", "new_weights", "node"))
    resident = plan["resident_blocks"] / plan["blocks"]
    states = "on swap" if resident == 0 else gib(plan["states"])
    states += f" ({resident:.0%})" if 0 < resident < 1 else ""
    cells = [f"`{options}`", billions(elements), placed(plan["weights"], plan["weights_on_swap"]), states]
    cells += [placed(plan["sums"], plan["gradients_on_swap"]), gib(node), gib(plan["swap"]), traffic]
    cells.append(f"{float(seconds[1]):.0f} s")
    if gathered := re.search(r"gathered groups: ([\d.]+ \w+) of two layers.*?and ([\d.]+ \w+) of what", text):
        cells.append(f"{gathered[1]} + {gathered[2]}")
    return "| " + " | ".join(cells) + " |"


def made(text, folders):
    """The page with each table as the command has it now."""
    commands, tables = [], []
    for match in TABLE.finditer(text):
        common, rows = match["common"], re.findall(r"^\| `(--[^`]*)` \|", match["rows"], re.M)
        assert rows, f"a table without options: {match[0]}"
        tables.append((common, rows))
        for options in rows:
            words = shlex.split(f"{common} {options}")
            commands += [shlex.join([str(FOREBAY), "plan", *words, *more]) for more in ([], ["--json"])]
    environment, _, swap = folders
    script = "\n".join(f"{command} || exit 1; printf '\\0'" for command in commands)
    flags = ["--swap", swap, "--swap-size", "64MiB"]
    done = forebay("run", *DAEMON, *flags, "--", "sh", "-c", script, env=environment)
    assert done.returncode == 0, done.stderr
    answers = iter(done.stdout.split("\0"))
    written = {}
    for common, rows in tables:
        lines = []
        for options in rows:
            text_of = next(answers)
            lines.append(row(common, options, json.loads(next(answers)), text_of))
        columns = lines[0].count(" | ") + 1
        header = [f"| {' | '.join(HEADER[:columns])} |", "| --- " * columns + "|"]
        written[common] = "".join(f"{line}\n" for line in (*header, *lines))
    return TABLE.sub(lambda match: match[1] + written[match["common"]], text)


def test_there_are_tables():
    assert len(PAGES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_what_the_command_says(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    with folders_of_run(tmp_path, f"tables-{page.stem}") as folders:
        assert made(text, folders) == text, "run python3 tests/tools/plan_tables_test.py --write"


def write():
    import pathlib
    import tempfile

    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder:
            with folders_of_run(pathlib.Path(folder), "tables") as folders:
                page.write_text(made(page.read_text(encoding="utf-8"), folders), encoding="utf-8")


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()

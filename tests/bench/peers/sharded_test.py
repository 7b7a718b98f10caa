"""Goal    The comparison with FSDP2's CPU offload runs as docs/benchmarks.md says, with every row; so does
        the cost of a group.
Method  Both scripts on tiny models, as processes. Their times are not looked at.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch.distributed.fsdp")
pytest.importorskip("forebay")

HERE = pathlib.Path(__file__).resolve().parent
BIN = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", HERE.parents[2] / "build" / "bin"))
DEADLINE_S = 600


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_sides_train_and_are_compared(tmp_path):
    script = HERE / "sharded.py"
    run(sys.executable, script, "--smoke", "--build", BIN.parent, "--out", tmp_path)
    lines = (tmp_path / "sharded.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["case"]: row for row in map(json.loads, lines)}
    for dtype in ("fp32", "bf16"):
        case = f"sharded/format={dtype}"
        for part in ("step", "all"):
            theirs, own = (rows[f"{case}/part={part}/by={by}"]["value"] for by in ("fsdp2", "forebay"))
            ratio = rows[f"{case}/part={part}/fsdp2-over-forebay"]["value"]
            assert own > 0 and ratio == pytest.approx(theirs / own)
        assert rows[f"{case}/peak/by=forebay"]["value"] > 0
        copied = rows[f"{case}/copied/by=forebay"]  # gathers read in place, gradients are delivered
        assert (copied["gathered"], copied["delivered"]) == (0, 4 if dtype == "fp32" else 2)
    assert rows["sharded/format=bf16/arenas/by=forebay-on-swap"]["value"] > 0


def test_the_cost_of_a_group_is_printed():
    script = HERE / "group_cost.py"
    text = run(BIN / "forebay", "run", "--dram", "256MiB", "--", sys.executable, script)
    for direction in ("forward", "backward"):
        assert re.search(rf"^{direction}, 12 parameters a group: [\d.]+ us", text, re.M), text

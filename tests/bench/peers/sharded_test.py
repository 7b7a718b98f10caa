# SPDX-License-Identifier: Apache-2.0
"""Goal    The comparison with FSDP2's CPU offload runs as docs/reports/benchmarks.md says, with every row; so does
        the cost of a group. Of the comparison with DeepSpeed, what needs no DeepSpeed: the side that only
        computes, and the rows.
Method  The scripts on tiny models, as processes. Their times are not looked at. Rows from invented samples.
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

pytest.importorskip("torch.distributed.fsdp")
pytest.importorskip("forebay")

import figures  # noqa: E402
import infinity  # noqa: E402
import phase  # noqa: E402

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_side_that_only_computes_takes_its_turns(tmp_path, ranks):
    worker = [sys.executable, HERE / "sharded_worker.py", "--size", "smoke", "--dtype", "bf16"]
    command = [*worker, "--by", "compute", "--ranks", str(ranks), "--steps", "2"]
    side = phase.Side("compute", command, os.environ, tmp_path / "log")
    try:
        turns = [side.turn() for _ in range(2)]
        side.end()
    finally:
        side.kill()
    assert side.process.returncode == 0, (tmp_path / "log").read_text()
    for turn in turns:
        assert min(turn[part] for part in ("forward", "backward", "step")) > 0
        assert turn["loss"] == pytest.approx(math.log(256), rel=0.1), "of an untrained model"


def test_the_rows_beside_deepspeed_name_the_limit_of_a_step():
    seconds = {"deepspeed": (0.4, 0.6, 1.0), "forebay": (0.4, 0.5, 0.1), "compute": (0.3, 0.45, 0.05)}
    counted = {"read_bytes": 8000, "written_bytes": 4000, "trainers_s": 2.0, "trainers_kernel_s": 0.4}
    counted |= {"daemon_s": 0, "daemon_kernel_s": 0, "trainers_faults": 800}
    one = {by: dict(zip(figures.PARTS["all"], taken)) | counted for by, taken in seconds.items()}
    one["forebay"] |= {"daemon_s": 1.0, "daemon_kernel_s": 0.8}
    peaks = {by: types.SimpleNamespace(bytes=2**30) for by in one}
    facts = {"forebay": {"params": 1000, "threads": 2, "blocks": 4, "blocks_in_dram": 1}}
    rounds = types.SimpleNamespace(kept=[one] * 3, rejected=0)
    rows = {row["case"]: row for row in infinity.rows_of(rounds, peaks, facts, "infinity")}
    assert rows["infinity/part=all/deepspeed-over-forebay"]["value"] == pytest.approx(2.0)
    assert rows["infinity/part=all/limit/deepspeed-over-compute"]["value"] == pytest.approx(2.5)
    assert rows["infinity/part=all/by=compute"]["value"] == pytest.approx(0.8)
    assert rows["infinity/read_bytes/by=forebay"]["value"] == 8000 / 1000 / infinity.STEPS
    trainers, daemon = (rows[f"infinity/cpu/of={of}/by=forebay"] for of in ("trainers", "daemon"))
    assert (trainers["value"], trainers["kernel"]) == (2.0 / infinity.STEPS, 0.4 / infinity.STEPS)
    assert (daemon["value"], daemon["kernel"]) == (1.0 / infinity.STEPS, 0.8 / infinity.STEPS)
    assert "infinity/cpu/of=daemon/by=deepspeed" not in rows
    assert rows["infinity/faults/of=trainers/by=compute"]["value"] == 800 / infinity.STEPS


def test_the_cpu_seconds_of_a_step_are_counted_without_deepspeed(tmp_path):
    name = "optimizer, one group"
    options = ["--smoke", "--sides", "forebay,compute", "--python", sys.executable, "--ranks", "1"]
    options += ["--settings", name, "--build", BIN.parent, "--out", tmp_path]
    run(sys.executable, HERE / "infinity.py", *options)
    lines = (tmp_path / "infinity.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["case"]: row for row in map(json.loads, lines)}
    case = f"infinity/ranks=1/on_disk={name}"
    assert f"{case}/part=all/by=deepspeed" not in rows
    assert rows[f"{case}/part=all/forebay-over-compute"]["value"] > 0
    for of in ("trainers", "daemon"):
        row = rows[f"{case}/cpu/of={of}/by=forebay"]
        assert 0 <= row["kernel"] <= row["value"]  # may be below a clock tick
    assert rows[f"{case}/cpu/of=trainers/by=compute"]["value"] > 0
    assert f"{case}/cpu/of=daemon/by=compute" not in rows
    assert rows[f"{case}/facts"]["threads"] == 2, "bound to a core each"

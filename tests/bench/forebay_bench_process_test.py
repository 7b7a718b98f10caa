# SPDX-License-Identifier: Apache-2.0
"""Goal    forebay-bench runs the benches of `forebay bench` and those of Forebay's own work, a line a case.
Method  Real processes of build/bin; each case once, small, on a private daemon of its own.
"""

import json
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "tools"))
from forebay_command import BENCH_KEYS, folders_of_run, forebay_bench  # noqa: E402


@pytest.fixture
def folders(tmp_path):
    with folders_of_run(tmp_path, "bench") as made:
        yield made


@pytest.mark.parametrize(
    "flags, cases",
    [
        (
            ["fetch", "--samples", 1, "--params", 2**22],
            ["fetch/place=dram/ranks=1", "fetch/place=nvme/ranks=1", "fetch/place=nvme/ranks=4"],
        ),
        (
            ["pipeline", "--samples", 1],
            ["pipeline/device=host/dir=forward", "pipeline/device=host/dir=backward"],
        ),
        (
            ["update", "--samples", 1, "--params", 8 << 20],
            [
                "update/opt=adamw/format=exact/place=dram",
                "update/opt=adamw/format=fp32/place=dram",
                "update/opt=adamw/format=exact/place=dram/recorded",
                "update/opt=adamw/format=fp32/place=dram/recorded",
                "update/opt=adamw/format=bf16/place=dram/recorded",
                "update/opt=adamw/format=int8/place=dram/recorded",
                "update/opt=adamw/format=fp32/place=nvme",
                "update/opt=adamw/format=fp32/place=nvme/in_dram=0.50",
                "update/opt=adamw/format=fp32/place=nvme/in_dram=0.75",
            ],
        ),
    ],
)
def test_each_bench_prints_one_line_a_case(folders, flags, cases):
    environment, _, swap = folders
    done = forebay_bench(*flags, "--swap", swap, "--json", deadline_s=300, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == cases
    for line in lines:
        assert list(line)[: len(BENCH_KEYS)] == BENCH_KEYS
        more = {key: line[key] for key in list(line)[len(BENCH_KEYS) :]}
        if line["case"].startswith("update"):
            assert 0 < more.pop("loop_us_per_event") < 10_000
        if line["case"].startswith("fetch/place=dram"):
            assert more.pop("p99") >= line["value"] and more.pop("limit_p99") >= line["limit"]
        loops = more.values()
        of_adam = line["case"].startswith("update") and line["case"].endswith("place=dram")
        assert bool(loops) == of_adam and line["limit"] == max(loops, default=line["limit"])
        assert line["value"] > 0 and line["limit"] > 0 and line["samples"] == 1


def test_bench_commit_shows_what_a_durable_step_writes_and_costs(folders):
    environment, _, swap = folders
    params = 4 << 20
    flags = ["--samples", 1, "--params", params, "--swap", swap, "--json"]
    done = forebay_bench("commit", *flags, deadline_s=300, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["case"] for line in lines] == [f"commit/level=step/place={place}" for place in ("dram", "nvme")]
    for line in lines:
        # A step writes weights and states of format exact, rounded up to whole pages, and the ledger twice.
        assert 1 <= line["written_bytes"] / (12 * params) < 1.02
        assert line["value"] > 0 and line["limit"] >= line["memory_s"] > 0
    assert os.listdir(swap) == []


def test_update_limits_the_rate_of_swap(folders):
    environment, _, swap = folders
    flags = ["--samples", 1, "--params", 4 << 20, "--limit-rate", "512MiB", "--swap", swap, "--json"]
    done = forebay_bench("update", *flags, deadline_s=300, env=environment)
    assert done.returncode == 0, done.stderr
    [line] = (
        line
        for line in map(json.loads, done.stdout.splitlines())
        if line["case"] == "update/opt=adamw/format=fp32/place=nvme/rate=512MiB"
    )
    assert line["value"] > 0 and line["limit"] == pytest.approx(512 * 2**20 / 1e9)
    flags[flags.index("512MiB")] = "512MiB,256MiB"
    done = forebay_bench("update", *flags, deadline_s=300, env=environment)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["case"].endswith("/rate=512MiB,256MiB")
    assert line["value"] > 0 and line["limit"] == pytest.approx(768 * 2**20 / 1e9)


def test_an_option_of_another_bench_is_refused():
    for flags in (("--list",), ("--driver", "libcuda.so.1"), ("--compute-ms", 50), ("--limit-rate", "512MiB")):
        refused = forebay_bench("fetch", *flags)
        assert refused.returncode == 1 and f"bench fetch has no {flags[0]}\n" in refused.stderr
    assert "it belongs to step and update" in refused.stderr


def test_it_has_the_benches_of_the_command_and_names_them_all():
    names = forebay_bench("adam", "--list", "--params", 100_000).stdout.splitlines()
    assert "adam/opt=adamw/format=exact/grad=bf16/param=bf16/place=inplace/threads=1/shape=flat" in names
    refused = forebay_bench("nonsense")
    assert refused.returncode == 1
    assert "one of: adam, cluster, commit, copies, disk, fetch, pipeline, step, update\n" in refused.stderr
    assert forebay_bench("adam", "--no-such-option").returncode == 2
    shown = forebay_bench("--help")
    assert shown.returncode == 0 and "--staging" in shown.stdout

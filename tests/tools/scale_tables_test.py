# SPDX-License-Identifier: Apache-2.0
"""Goal    The tables of docs/reports/scale.md and gpu.md are what `forebay plan --nodes` and `forebay-bench cluster` say. The two
        agree within 5 %.
Method  Each row names its options; both commands are run with them and those of its table. Time is virtual: the same
        numbers on every machine. The last cell, what was published or measured, does not change. `scale_tables_test.py
        --write` writes the tables.
"""

import json
import re
import shlex
import sys

import pytest
from forebay_command import ROOT, forebay, forebay_bench

PAGES = [ROOT / "docs/reports" / name for name in ("scale.md", "gpu.md")]
TABLE = re.compile(r"(<!-- (?P<kind>cluster|step): (?P<common>[^>]*) -->\n)(?P<rows>(?:\|.*\n)+)")
ROW = re.compile(r"^\| `(?P<options>--[^`]*)` \|(?:.*\|)? (?P<last>[^|]*) \|$", re.M)
HEADERS = {
    "cluster": ("options", "DRAM a node", "on swap a node", "compute", "links", "swap", "closed form", "simulated")
    + ("TFLOPS a GPU", "published"),
    "step": ("options", "compute", "update", "closed form", "virtual time", "exposed", "measured"),
}
ONLY_OF_BENCH = {"--blocks", "--ranks", "--no-drain", "--workers", "--staging"}
SMALL = "--nodes 4 --gpus 2 --params 400000000 --layers 16 --gpu-tflops 0.4"
DEADLINE_S = 300


def answer(run, *words):
    done = run(*words, "--json", deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def for_plan(words):
    """Without the options that only the simulation has."""
    kept, i = [], 0
    while i < len(words):
        if words[i] not in ONLY_OF_BENCH:
            kept.append(words[i])
        elif words[i] != "--no-drain":
            i += 1
        i += 1
    return kept


def both(options):
    words = shlex.split(options)
    return answer(forebay, "plan", *for_plan(words)), answer(forebay_bench, "cluster", *words)


def tib(count):
    return "-" if count < 1e9 else f"{count / 2**40:.2f} TiB"


def cells_of(kind, plan, simulated):
    node, seconds = plan["node"], plan["seconds"]
    if kind == "step":
        shown = [seconds["compute"], seconds["update"], seconds["step"], simulated["value"]]
        return [*(f"{shown_s:.2f} s" for shown_s in shown), f"{simulated['exposed']:.0%}"]
    cells = [tib(node["dram"]), tib(node["states_on_swap"] + node["weights_on_swap"])]
    cells += [f"{seconds['compute']:.0f} s", f"{max(seconds['link'], seconds['gpu_link']):.0f} s"]
    cells += [f"{seconds['swap']:.0f} s", f"{seconds['step']:.0f} s", f"{simulated['value']:.0f} s"]
    return [*cells, f"{simulated['tflops_per_gpu']:.1f}"]


def line(cells):
    return "| " + " | ".join(cells) + " |\n"


def made(match):
    """A table as the commands have it now."""
    rows = [(found["options"], found["last"]) for found in ROW.finditer(match["rows"])]
    assert rows, f"a table without options: {match[0]}"
    header = HEADERS[match["kind"]]
    text = line(header) + "| --- " * len(header) + "|\n"
    for options, last in rows:
        plan, simulated = both(f"{match['common']} {options}")
        assert plan["seconds"]["step"] == pytest.approx(simulated["value"], rel=0.05), options
        text += line([f"`{options}`", *cells_of(match["kind"], plan, simulated), last])
    return match[1] + text


def tables():
    return [match for page in PAGES for match in TABLE.finditer(page.read_text(encoding="utf-8"))]


def test_there_are_tables():
    assert {match["kind"] for match in tables()} == set(HEADERS)


@pytest.mark.parametrize("match", tables(), ids=range(len(tables())))
def test_tables_are_what_the_commands_say(match):
    assert made(match) == match[0], "run python3 tests/tools/scale_tables_test.py --write"


@pytest.mark.parametrize(
    ("slow", "seconds", "longer"),
    [
        # The GPU computes 8 x 4e8 x 2048 operations at 0.4 TFLOPS, a quarter of them in forward.
        ("--recompute", 16.38, 1.15),
        # Each node's link transfers three quarters of three times 8e8 bytes.
        ("--link-rate 0.05", 36.0, 1.05),
        # Each node copies 2e8 bytes to the GPUs twice. Each copy takes longer than the compute that it overlaps.
        ("--host-link-rate 0.01", 40.0, 1.05),
        # The update moves 26 bytes for each parameter, and follows backward. Additions end before the decision.
        ("--update-rate 0.1", 26.0 + 8.2, 1.05),
    ],
)
def test_the_simulation_waits_for_what_is_slow(slow, seconds, longer):
    plan, simulated = both(f"{SMALL} {slow}")
    assert seconds * 0.999 <= simulated["value"] <= seconds * longer
    assert plan["seconds"]["step"] == pytest.approx(simulated["value"], rel=0.05)


GPU = "--nodes 1 --recompute --gpu-tflops 450 --blocks 1024"
ONE_GPU = f"{GPU} --gpus 1 --host-link-rate 45"
EIGHT_GPUS = f"{GPU} --gpus 8 --host-link-rate 360 --gpu-link-rate 350"


@pytest.mark.parametrize("format", ["exact", "bf16", "int8"])
@pytest.mark.parametrize("tokens", [16384, 8192, 4096])
@pytest.mark.parametrize(
    "machine",
    [
        f"{ONE_GPU} --params 3430000000 --layers 28 --update-rate 155",
        f"{ONE_GPU} --params 3430000000 --layers 28 --update-rate 110",
        f"{ONE_GPU} --params 3430000000 --layers 28 --update-rate 480",
        f"{ONE_GPU} --params 7000000000 --layers 32 --update-rate 155",
        f"{EIGHT_GPUS} --params 7000000000 --layers 32 --update-rate 480",
        f"{EIGHT_GPUS} --params 7000000000 --layers 32 --update-rate 300",
        f"{EIGHT_GPUS} --params 70000000000 --layers 80 --update-rate 480",
    ],
)
def test_the_closed_form_is_within_5_percent_if_states_are_in_dram(machine, tokens, format):
    plan, simulated = both(f"{machine} --tokens {tokens} --format {format}")
    assert simulated["resident_blocks"] == simulated["blocks"]
    assert plan["seconds"]["step"] == pytest.approx(simulated["value"], rel=0.05)
    assert plan["seconds"]["exposed"] == pytest.approx(plan["seconds"]["step"] / plan["seconds"]["compute"] - 1)
    assert simulated["exposed"] == pytest.approx(simulated["value"] / simulated["compute_s"] - 1)


# GiB of DRAM, and what the closed form may be off by. The simulation also has staging and arenas in DRAM.
@pytest.mark.parametrize(("dram_gib", "off"), [(46, 0.01), (40, 0.085), (30, 0.06), (22, 0.04), (10, 0.03)])
@pytest.mark.parametrize("tokens", [16384, 65536])
@pytest.mark.parametrize("rates", ["--read-rate 6 --write-rate 3.6", "--read-rate 40 --write-rate 24"])
def test_the_closed_form_is_near_if_states_are_on_swap(dram_gib, off, tokens, rates):
    job = f"--params 3430000000 --layers 28 --update-rate 155 --tokens {tokens} --dram {dram_gib}GiB"
    plan, simulated = both(f"{ONE_GPU} {job} {rates}")
    assert plan["seconds"]["step"] == pytest.approx(simulated["value"], rel=off)


def test_the_simulation_moves_the_bytes_of_the_closed_form():
    disk = "--dram 900MiB --read-rate 0.2 --write-rate 0.1 --staging 64MiB"
    plan, simulated = both(f"{SMALL} {disk}")
    # The closed form omits staging and arenas, about 150 of the 900 MiB. The simulation therefore has more on swap.
    expected = plan["traffic"]["swap_read"]
    assert expected > 5e8
    assert simulated["bytes_read"] == pytest.approx(expected, rel=0.25)
    assert simulated["bytes_read"] >= expected
    assert simulated["bytes_read"] == simulated["bytes_written"]
    assert simulated["disk_s"] == pytest.approx(simulated["bytes_read"] * (1 / 0.2 + 1 / 0.1) / 1e9, rel=0.01)
    late = both(f"{SMALL} {disk} --no-early-updates --no-drain")[1]
    assert late["value"] > simulated["value"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nodes 2 --gpus 4 --tensor-parallel 3 --params 1000000", "cannot be cut into groups of 3"),
        ("--nodes 2 --gpus 4 --params 7 --layers 1", "fewer than the 8 GPUs"),
        ("--nodes 2", "plan needs one model"),
        ("--nodes 2 --params 1000000000 --dram 900MiB", "two layers of weights"),
        ("--nodes 2 --params 1000000000 --dram 3GiB --swap-size 1GiB", "on swap, which has 1.0 GiB"),
        ("--nodes 2 --params 1000000 --dtype float32 --format exact", "does not take weights"),
        ("--nodes 0 --params 1000000", "--nodes"),
        ("--nodes 2 --params 1000000 --ranks 3", "--ranks"),
        ("--params 1000000 --gpus 3", "--nodes"),
    ],
)
def test_a_plan_of_no_cluster_says_why(words, says):
    done = forebay("plan", *shlex.split(words))
    assert done.returncode != 0
    assert says in done.stdout + done.stderr


def test_only_bench_cluster_has_a_cluster():
    for option in (("--nodes", 2), ("--staging", "64MiB"), ("--width", 512), ("--no-drain",)):
        refused = forebay_bench("step", *option)
        assert refused.returncode == 1
        assert f"error[E_OPTION]: bench step has no {option[0]}\n" in refused.stderr
        assert f"hint: leave out {option[0]}: it belongs to cluster" in refused.stderr
    assert "needs a cluster" in forebay_bench("cluster", "--params", 1000000).stderr
    assert "more than bench update makes" in forebay_bench("update", "--params", 1 << 40).stderr


def test_a_plan_of_a_cluster_reads_as_text():
    text = forebay("plan", *shlex.split(f"{SMALL} --link-rate 0.05")).stdout
    assert "400000000 parameters in 16 layers on 4 nodes of 2 GPUs" in text
    assert re.search(r"a step takes 37\.\d+ s, and waits for link: .*, 2\d\d % exposed\n", text)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    for page in PAGES:
        page.write_text(TABLE.sub(made, page.read_text(encoding="utf-8")), encoding="utf-8")

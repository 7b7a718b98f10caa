# SPDX-License-Identifier: Apache-2.0
"""Goal    What the comparison with other systems calls of ours does what it is timed for, and it
        counts no run in which a peer was held back.
Method  The shared object through ctypes, on small buffers: steps of blocks, values unchanged
        by the limit loops. The figures from invented samples. The peers themselves are not installed
        here.
"""

import ctypes
import os
import pathlib
import struct

import pytest

import figures
import ours

ROOT = pathlib.Path(__file__).resolve().parents[3]
BIN = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build" / "bin"))
N = 3 * 4096 + 77
CPUS = sorted(os.sched_getaffinity(0))[:1]
WIDTHS = {"weights": 2, "master": 4, "remainder": 2, "m": 4, "v": 4, "grad": 4}


@pytest.fixture(name="library", scope="module")
def fixture_library():
    return ours.Library(BIN.parent / "tests" / "libforebay_peers.so")


class State:
    """Planes of N elements with the same plausible values each time."""

    def __init__(self, work):
        self.work = work
        self.buffers = {name: ours.Buffer(N * width) for name, width in WIDTHS.items()}
        # The masters are exact in bfloat16, so that both formats start from the same values.
        self.write("master", "I", [0x3C000000 + (i % 127 << 16) for i in range(N)])
        self.write("weights", "H", [0x3C00 + i % 127 for i in range(N)])
        gradients = [0x3A80 + i % 61 for i in range(N)]
        if work == "fp32":
            self.write("grad", "I", [bits << 16 for bits in gradients])
        else:
            self.write("grad", "H", gradients)

    def write(self, name, kind, values):
        packed = struct.pack(f"<{len(values)}{kind}", *values)
        ctypes.memmove(self.buffers[name].address, packed, len(packed))

    def bytes(self, name):
        return ctypes.string_at(self.buffers[name].address, N * WIDTHS[name])

    def planes(self):
        at = {name: one.address for name, one in self.buffers.items()}
        if self.work == "fp32":
            at |= {"weights": at["master"], "remainder": None}
        return ours.Planes(n=N, **at)


@pytest.mark.parametrize("work", list(ours.WORKS))
def test_steps_of_the_daemons_blocks_leave_finite_weights(library, work):
    pool = ours.Ours(library, CPUS)
    for parameters in (1, 100):
        pool.make_blocks(work, N, parameters)
        for _ in range(3):
            pool.step()  # aborts if a weight is not finite
        pool.step_from_delivery()
    pool.close()


@pytest.mark.parametrize("work", list(ours.WORKS))
def test_limit_loops_leave_the_values(library, work):
    state, untouched = State(work), State(work)
    pool = ours.Ours(library, CPUS)
    pool.touch(work, state.planes())
    pool.close()
    for name in WIDTHS:
        if (work, name) != ("master", "weights"):
            assert state.bytes(name) == untouched.bytes(name), name


def kernel_result(**milliseconds):
    """Six rounds of one shape, alike but for noise, which slows all sides."""
    sides = {
        "torch-fused": 51,
        "deepspeed": 52,
        "deepspeed-3-passes": 100,
        "prime-rl": 78,
        "ours-fp32": 50,
        "ours-exact": 50,
        "ours-exact-from-delivery": 60,
        "limit-fp32": 50,
        "limit-exact": 48,
        "limit-master": 50,
    } | milliseconds
    moods = (1, 1, 2, 1, 1.5, 1)
    return {
        "samples": {side: [ms / 1e3 * mood for mood in moods] for side, ms in sides.items()},
        "shape": "flat",
        "threads": 2,
        "n": 10**8,
        "rejected": 2,
        "huge_pages": 1.0,
    }


def row_of(rows, case):
    (row,) = (row for row in rows if case in row["case"])
    return row


def test_ratios_are_of_the_same_round():
    rows = figures.kernel_rows(kernel_result())
    ratio = row_of(rows, "deepspeed-3-passes-over-ours-exact")
    assert ratio["value"] == ratio["q1"] == ratio["q3"] == pytest.approx(2.0)
    assert ratio["goal"] == 1.8
    assert row_of(rows, "prime-rl-over-ours")["value"] == pytest.approx(1.3)
    assert row_of(rows, "by=prime-rl")["bytes_per_elem"] == 36
    assert figures.void_reasons(rows) == []


def test_a_peer_that_is_not_installed_has_no_rows():
    result = kernel_result()
    del result["samples"]["prime-rl"]
    assert not any("prime-rl" in row["case"] for row in figures.kernel_rows(result))


def slowed(samples, factor):
    """The first two rounds as they are, the others slower by the factor."""
    return samples[:2] + [factor * seconds for seconds in samples[2:]]


def test_a_peer_below_its_own_best_makes_the_run_void():
    result = kernel_result()
    fused = result["samples"]["torch-fused"]
    result["samples"]["torch-fused"] = slowed(fused, 1.2)
    (reason,) = figures.void_reasons(figures.kernel_rows(result))
    assert "by=torch-fused" in reason
    result["samples"]["torch-fused"] = slowed(fused, 1.05)
    assert figures.void_reasons(figures.kernel_rows(result)) == []


def test_a_peer_that_is_slow_in_every_round_does_not_make_the_run_void():
    rows = figures.kernel_rows(kernel_result(**{"torch-fused": 80}))
    assert figures.void_reasons(rows) == []
    assert row_of(rows, "by=torch-fused")["share"] == pytest.approx(50 / 80)


def test_too_few_quiet_rounds_make_the_run_void():
    result = kernel_result()
    result["samples"] = {side: values[:4] for side, values in result["samples"].items()}
    (reason,) = figures.void_reasons(figures.kernel_rows(result))
    assert "4 quiet rounds" in reason
    assert figures.void_reasons([]) != []


def phase_result(step_ms):
    part = {"forward": 0.1, "backward": 0.2, "loss": 9.0}
    return {
        "samples": {
            "deepspeed/sub_group=1e9": [part | {"step": step_ms / 1e3} for _ in range(6)],
            "deepspeed/sub_group=2e7": [part | {"step": 2 * step_ms / 1e3}] * 6,
            "forebay": [part | {"step": 0.03}] * 6,
            "limit": [{"touch_fp32": 0.03, "touch_exact": 0.028}] * 6,
        },
        "params": 110_300_000,
        "threads": 2,
        "rejected": 0,
    }


def test_the_better_settings_of_the_peer_are_compared():
    rows = figures.phase_rows(phase_result(step_ms=90))
    ratio = row_of(rows, "deepspeed-over-forebay/part=step/")
    assert ratio["value"] == pytest.approx(3.0)
    assert ratio["peer"] == "deepspeed/sub_group=1e9"
    assert row_of(rows, "deepspeed-over-forebay/part=backward+step/")["value"] == pytest.approx(
        0.29 / 0.23
    )
    assert figures.void_reasons(rows) == []
    slow = phase_result(step_ms=90)
    for one in slow["samples"]["deepspeed/sub_group=1e9"][2:]:
        one["step"] *= 1.2
    assert len(figures.void_reasons(figures.phase_rows(slow))) == 1

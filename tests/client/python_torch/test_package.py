# SPDX-License-Identifier: Apache-2.0
# Goal    The package imports anywhere; the trainer's two paths differ by little; its helpers are
#         right.
# Method  Subprocesses without torch; the trainer's source is read; arithmetic is compared with
#         exact fractions.

import difflib
import fractions
import pathlib
import re
import subprocess
import sys
import textwrap

import exact_reference
import forebay
import pytest
import torch
import train_support
from test_processes import environment

ROOT = pathlib.Path(__file__).resolve().parents[3]
LINES_MOST = 5


def python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_needs_no_torch_and_no_daemon():
    done = python("""
        import sys
        sys.modules["torch"] = None
        import forebay
        assert forebay.AdamW(lr=2e-3).lr == 2e-3
        assert issubclass(forebay.UsageError, forebay.ForebayError)
    """)
    assert done.returncode == 0, done.stderr


def test_no_daemon_is_an_error_with_a_hint(tmp_path, monkeypatch):
    if "forebay._core" not in sys.modules:
        pytest.skip("the extension is not built")
    monkeypatch.setattr(forebay, "_core", sys.modules["forebay._core"], raising=False)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(forebay.UnavailableError) as info:
        forebay.attach(model, socket=str(tmp_path / "nobody"))
    assert info.value.code == "E_NO_DAEMON" and info.value.hint and info.value.retryable
    model.half()


def paths_of_trainer():
    """The lines of train_gpt.py as each of its two paths reads, without the shared rest."""
    source = (ROOT / "tools" / "train_gpt.py").read_text(encoding="utf-8")
    found = re.findall(
        r"^( *)if args\.plain:\n((?:\1 +.*\n)+)(?:\1else:\n((?:\1 +.*\n)+))?", source, re.MULTILINE
    )
    plain = [line for _, ours, _ in found for line in textwrap.dedent(ours).splitlines()]
    ours = [line for _, _, other in found for line in textwrap.dedent(other).splitlines()]
    return source, plain, ours


def trainer_diff():
    _, plain, ours = paths_of_trainer()
    return [line for line in difflib.unified_diff(plain, ours, lineterm="", n=0)][3:]


def test_the_two_paths_of_the_trainer_differ_by_at_most_five_lines():
    source, plain, ours = paths_of_trainer()
    assert plain and ours
    assert len(trainer_diff()) <= LINES_MOST, "\n".join(trainer_diff())
    assert source.count("args.plain") == source.count("if args.plain:"), "another use of args.plain"
    helpers = (ROOT / "tools" / "train_support.py").read_text(encoding="utf-8")
    assert ".plain" not in helpers


def test_fma_of_the_reference_is_rounded_once():
    generator = torch.Generator().manual_seed(3)

    def values(count):
        mantissa = torch.rand(count, generator=generator) + 1
        exponent = torch.randint(-20, 20, (count,), generator=generator)
        sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        return torch.ldexp(mantissa, exponent) * sign

    a, b = values(4000), values(4000)
    c = torch.cat([values(2000), -(a * b)[2000:] + values(2000) * 2.0**-30])
    for x, y, z, got in zip(
        a.tolist(), b.tolist(), c.tolist(), exact_reference.fma(a, b, c).tolist()
    ):
        exact = fractions.Fraction(x) * fractions.Fraction(y) + fractions.Fraction(z)
        below = torch.tensor(got)
        neighbours = [torch.nextafter(below, torch.tensor(end)).item() for end in (-1e38, 1e38)]
        error = abs(fractions.Fraction(got) - exact)
        assert all(error <= abs(fractions.Fraction(other) - exact) for other in neighbours)


def test_split_master_of_the_reference_adds_up():
    master = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    param, remainder = exact_reference.split(master)
    bits = (param.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)
    assert torch.equal(bits.view(torch.float32), master)


def test_batches_are_new_text_for_every_step_and_rank():
    text = torch.arange(60_000).remainder(251).to(torch.uint8)
    ranks = [
        train_support.Batches(text, batch=2, seq=32, rank=rank, world=2, seed=7) for rank in (0, 1)
    ]
    torch.manual_seed(1)
    starts = set()
    for _ in range(200):
        for batches in ranks:
            first = batches.position + batches.rank * batches.batch
            starts.update(batches.order[first : first + 2].tolist())
            assert batches.next().shape == (2, 33)
    assert len(starts) == 800
    assert max(starts) * ranks[0].stride + ranks[0].stride <= len(text) * 9 // 10
    assert all(len(batches.heldout(3)) == 3 for batches in ranks)


def test_extra_state_restores_position_and_random_numbers():
    text = torch.zeros(60_000, dtype=torch.uint8)
    make = dict(batch=1, seq=32, rank=0, world=1, seed=7)
    batches = train_support.Batches(text, **make)
    batches.next()
    packed = train_support.pack(5, batches)
    want = torch.rand(3)
    again = train_support.Batches(text, **make)
    assert train_support.restore(packed, again) == 5
    assert again.position == batches.position and torch.equal(torch.rand(3), want)
    assert len(packed) < 64 * 1024

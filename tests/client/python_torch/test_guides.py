# SPDX-License-Identifier: Apache-2.0
# Goal    The diffs of the guides in docs/ do what the pages say: the patched scripts train to the losses that the scripts have
#         in plain torch, and a run that was killed continues to the same digits.
# Method  `git apply` on a copy of the script. Each run is a forked process on the daemon, with the environment that torchrun
#         gives a rank.

import os
import re
import runpy
import signal
import sys

import pytest
import torch
from apply_guide import GUIDE, ROOT, applied, diffs_of
from rendezvous import Rendezvous
from torch import multiprocessing

DEADLINE_S = 120
KILLED_IN = 12  # the step
# Bound of the losses' difference, as a share: float32 differs in the order of its operations; weights of 16 bits are
# rounded ties away from zero, 2^-9 of a value each step; with 8-bit moments or another rule of rounding, losses fall alike.
SAME, ROUNDED = 1e-4, 5e-3
# Losses of docs/examples/deepspeed_loop.py with DeepSpeed 0.19.8 on one CPU rank. It was run by hand with two changes: states
# in CPU memory, which needs no libaio, and torch's Adam, which needs no compiler.
DEEPSPEEDS_LOSSES = [
    4.30019, 4.31690, 4.34399, 4.22714, 4.07473, 3.87909, 3.60161, 3.25112, 2.96438, 2.72900,
    2.49428, 2.24579, 2.03533, 2.31410, 1.61225, 1.44272, 1.31845, 1.46526, 1.34484, 1.09405,
]


def rank_main(rank, world, script, folder, meeting, killed_in):
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in launch.items()} | meeting)
    with open(folder / f"out{rank}", "a", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
    os.chdir(folder)
    sys.path.insert(0, str(ROOT / "docs" / "examples"))
    sys.stdout = open(1, "w", encoding="utf-8")
    torch.set_num_threads(1)
    if killed_in:
        steps = []

        def counted(*arguments):
            steps.append(1)
            if len(steps) == killed_in:
                os.kill(os.getpid(), signal.SIGKILL)
            return clip(*arguments)

        clip = torch.nn.utils.clip_grad_norm_
        torch.nn.utils.clip_grad_norm_ = counted
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


def output_of(script, folder, world=1, killed_in=0):
    """What rank 0 has printed in all runs in this folder."""
    folder.mkdir(exist_ok=True)
    forked = multiprocessing.get_context("fork")
    rendezvous = Rendezvous()
    arguments = (world, script, folder, rendezvous.environment(), killed_in)
    ranks = [forked.Process(target=rank_main, args=(rank, *arguments)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(DEADLINE_S)
        if rank.exitcode is None:
            rank.kill()
    expected = -signal.SIGKILL if killed_in else 0
    printed = (folder / "out0").read_text(encoding="utf-8")
    assert [rank.exitcode for rank in ranks] == [expected] * world, printed
    return printed


def losses_of(printed):
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", printed, re.M)
    assert [int(step) for step, _ in found] == list(range(1, len(found) + 1)) and len(found) >= 10
    return [float(loss) for _, loss in found]


def train_both(page, folder, world=1):
    """Losses of the script as it is, and with the page's first diff."""
    script, _ = diffs_of(page)[0]
    plain = losses_of(output_of(ROOT / script, folder / "plain", world))
    changed = applied(page, 0, folder)
    ours = losses_of(output_of(changed, folder / "changed", world))
    assert len(plain) == len(ours) and ours[-1] < ours[0] / 2
    assert (folder / "changed" / "model.pt").exists()
    return plain, ours


def assert_near(plain, ours, bound):
    for step, (one, other) in enumerate(zip(plain, ours, strict=True), 1):
        assert other == pytest.approx(one, rel=bound), f"step {step}"


def test_plain_pytorch(node, tmp_path):
    plain, ours = train_both("from-pytorch.md", tmp_path)
    assert_near(plain, ours, SAME)
    saved = torch.load(tmp_path / "changed" / "model.pt")
    assert saved.keys() == torch.load(tmp_path / "plain" / "model.pt").keys()


def test_plain_pytorch_that_is_killed_goes_on(node, tmp_path, monkeypatch):
    script = applied("from-pytorch.md", 1, tmp_path)
    monkeypatch.setenv("FOREBAY_JOB", os.environ["FOREBAY_JOB"] + "-whole")
    whole = output_of(script, tmp_path / "whole")
    monkeypatch.setenv("FOREBAY_JOB", os.environ["FOREBAY_JOB"] + "-killed")
    half = output_of(script, tmp_path / "killed", killed_in=KILLED_IN)
    assert len(half.splitlines()) == KILLED_IN - 1
    assert output_of(script, tmp_path / "killed") == whole


def test_fsdp2(node, tmp_path):
    assert_near(*train_both("from-fsdp2.md", tmp_path, world=2), ROUNDED)


def test_deepspeed(node, tmp_path):
    """The script as it was is compiled alone: the tests have no DeepSpeed, but what it has printed once."""
    script, _ = diffs_of("from-deepspeed.md")[0]
    compile((ROOT / script).read_text(encoding="utf-8"), script, "exec")
    changed = applied("from-deepspeed.md", 0, tmp_path)
    assert "deepspeed" not in re.sub(r'""".*?"""', "", changed.read_text(encoding="utf-8"), flags=re.S)
    ours = losses_of(output_of(changed, tmp_path / "changed"))
    assert_near(DEEPSPEEDS_LOSSES, ours, ROUNDED)
    assert (tmp_path / "changed" / "model.pt").exists()


def test_one_gpu(node, tmp_path):
    """On the CPU. Torch rounds bfloat16 weights after each update, the daemon keeps masters: both fall alike."""
    plain, ours = train_both("one-gpu.md", tmp_path)
    assert plain[-1] < plain[0] / 2
    assert ours[-1] == pytest.approx(plain[-1], rel=0.2)


def changed_lines(diff):
    """A line that replaces another one counts once, a blank one not at all."""
    total = removed = added = 0
    for line in [*diff.splitlines(), " "]:
        if line.startswith("-"):
            removed += line != "-"
        elif line.startswith("+"):
            added += line != "+"
        else:
            total += max(removed, added)
            removed = added = 0
    return total


@pytest.mark.parametrize("page", ["from-pytorch.md", "from-fsdp2.md", "from-deepspeed.md", "one-gpu.md"])
def test_the_page_says_how_many_lines_change(page):
    text = (ROOT / "docs" / "guide" / page).read_text(encoding="utf-8")
    counts = [changed_lines(diff) for _, diff in diffs_of(page)]
    assert [int(count) for count in re.findall(r"(\d+) changed lines", text)] == counts


def test_every_script_beside_the_pages_is_named_by_one():
    named = {script for page in (ROOT / "docs" / "guide").glob("*.md") for script, _ in GUIDE.findall(page.read_text())}
    scripts = {f"docs/examples/{path.name}" for path in (ROOT / "docs" / "examples").glob("*.py")}
    assert named == scripts - {"docs/examples/small_model.py"}

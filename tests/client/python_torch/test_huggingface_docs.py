# SPDX-License-Identifier: Apache-2.0
# Goal    The diffs of docs/guide/huggingface.md are all that a script of Hugging Face needs: few lines, the same loss.
# Method  Each is applied to its script in docs/examples/; the script runs as it was and as it then is.

import re
import time

import pytest
from apply_guide import GUIDE, ROOT, applied, diffs_of
from huggingface import needs_huggingface, start

pytestmark = needs_huggingface
LINES_MAX = 5
PAGE = "huggingface.md"
DIFFS = diffs_of(PAGE)


def changed_lines(diff):
    return max(len(re.findall(rf"^\{sign}", diff, re.M)) for sign in "+-")


def loss_of(script, ranks, folder, daemon):
    name = f"docs.{time.monotonic_ns()}"
    variables = {"FOREBAY_SOCKET": daemon.socket, "FOREBAY_JOB": name, "FOREBAY_RUN": name}
    done = start(["script", ranks, script, f'["{folder / name}"]'], variables)
    return float(re.search(r"^loss (\S+)$", done.stdout, re.M)[1])


def test_the_page_counts_the_changed_lines():
    page = (ROOT / "docs" / "guide" / PAGE).read_text(encoding="utf-8")
    counts = [int(count) for count in re.findall(r"^(\d) changed lines?:$", page, re.M)]
    assert counts == [changed_lines(diff) for _, diff in DIFFS] and max(counts) <= LINES_MAX


def test_readme_shows_a_diff_of_the_page():
    shown = GUIDE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown and set(shown) <= set(DIFFS)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", range(len(DIFFS)), ids=[script for script, _ in DIFFS])
def test_the_changed_script_has_the_loss_of_the_plain_one(number, ranks, tmp_path, daemon):
    script, _ = DIFFS[number]
    plain = loss_of(ROOT / script, ranks, tmp_path, daemon)
    assert loss_of(applied(PAGE, number, tmp_path), ranks, tmp_path, daemon) == pytest.approx(plain, rel=1e-5)

# SPDX-License-Identifier: Apache-2.0
# Goal    If any process of a launch of torchrun dies, or the daemon dies, the training continues at its last answered step and
#         ends with the bits of a training without kills.
# Method  A daemon with durability step on persisted swap, and tools/train_gpt.py. The daemon is killed, then a rank.
#         `torchrun_kills.py KILLS` is the long form. FOREBAY_SEED gives other moments.

import os

import pytest
from daemon_process import missing
from torchrun_kills import run

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

KILLS = 2


def test_kills_under_torchrun_lose_no_step():
    counts, went_on, _ = run(KILLS, int(os.environ.get("FOREBAY_SEED", "1")))
    assert counts["daemon"] == counts["rank"] == 1
    assert went_on > 0

# SPDX-License-Identifier: Apache-2.0
# Goal    Training scripts of any form give the same results attached as with torch's optimizer: losses and gradients are equal
#         bit by bit; parameters, moments and `step` are within the bound that the roundings of one update give. Or a script is
#         refused with a documented id and a hint, and nothing was applied. The same holds for loops with two models and two
#         optimizers, as GANs have them, and for scripts over a model that FSDP2 shards.
# Method  Scripts come from the grammar of script_grammar.py, by a seed. Each script is a separate job, which is deleted
#         afterwards. Sharded scripts run in one rank over gloo, and are compared with torch's FSDP2. FOREBAY_FUZZ_SCRIPTS=5000
#         runs more scripts, FOREBAY_FUZZ_SEED=N begins elsewhere; a difference names its seed.

import collections
import os
import pathlib
import re
import warnings

import forebay
import pair_fuzz
import pytest
import script_fuzz
import script_grammar
import sharded_ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

SCRIPTS = int(os.environ.get("FOREBAY_FUZZ_SCRIPTS", "200"))
PAIRS_EACH = 5  # scripts with one optimizer for each script with two
SHARDED_EACH = 4  # shared scripts for each sharded script
FIRST = int(os.environ.get("FOREBAY_FUZZ_SEED", "0"))
PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "reference" / "troubleshooting.md"


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignores warnings about what scripts do on purpose
        yield


@pytest.fixture(params=["shared", "sharded"])
def ranks(request, tmp_path):
    """None where models are not sharded."""
    if request.param == "shared":
        yield None
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield sharded_ranks.Ranks("", "", init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def run_one(seed, ranks, break_update=None):
    job = f"{os.environ['FOREBAY_JOB']}.{seed}"
    try:
        return script_fuzz.run(seed, job, break_update, ranks)
    finally:
        forebay._core.delete_job(os.environ["FOREBAY_SOCKET"], job)


def test_scripts_are_as_with_torch_or_refused(node, quiet, ranks):
    count = SCRIPTS // SHARDED_EACH if ranks else SCRIPTS
    documented = set(re.findall(r"^## (E_\w+)$", PAGE.read_text(encoding="utf-8"), re.M))
    results = [run_one(seed, ranks) for seed in range(FIRST, FIRST + count)]
    outcomes = collections.Counter(result.outcome for result in results)
    refused = collections.Counter(
        f"{result.outcome} at {result.operation}" for result in results if result.outcome.startswith("E_")
    )
    print(dict(outcomes), dict(refused.most_common()))
    assert outcomes.keys() - {"equal", "invalid"} <= documented
    assert outcomes["equal"] >= 0.3 * count, "too much is refused for the rest to say anything"
    assert outcomes["invalid"] <= (0.25 if ranks else 0.15) * count, "too much is no script at all"
    reached = {operation.partition(" ")[2] for result in results for operation in result.operations}
    operations = {"step", *script_grammar.ZERO} | {"nothing", "clip_norm", "clip_value", "norm_of_one"}
    operations |= {"evaluate", "deepcopy", "lr", "hook", "read_state", "autograd_grad"}
    operations |= {"once", "sum", "accumulate", "retain", "dropped", "broken"}
    operations -= script_grammar.NOT_SHARDED if ranks else set()
    assert operations <= reached, "of what was carried out on both sides"


def test_loops_with_two_optimizers_are_as_with_torch_or_refused(node, quiet):
    count = SCRIPTS // PAIRS_EACH
    results = []
    for seed in range(FIRST, FIRST + count):
        job = f"{os.environ['FOREBAY_JOB']}.{seed}"
        results.append(pair_fuzz.run(seed, job))
        for index in range(2):
            forebay._core.delete_job(os.environ["FOREBAY_SOCKET"], f"{job}.{index}")
    outcomes = collections.Counter(result.outcome for result in results)
    print(dict(outcomes))
    assert outcomes.keys() <= {"equal", "E_UNSUPPORTED"} and outcomes["equal"] >= 0.6 * count
    forms = {word for result in results for one in result.operations for word in one.split()[1:2]}
    assert {form + "," for form in pair_fuzz.FORMS} <= forms, "of what was carried out on both sides"


def test_an_update_that_is_off_by_more_than_roundings_is_found(node, quiet, ranks):
    """Each of these is what a subtle error would do; nearly every script that steps sees it."""

    def scaled(side):
        with torch.no_grad():
            for one in side.model.parameters():
                if one.requires_grad:
                    one.mul_(1 + 2.0**-18)

    def forgetful(side):
        for state in side.opt.state.values():
            for name in ("exp_avg", "momentum_buffer", "sum"):
                if state.get(name) is not None:
                    state[name].mul_(1 - 2.0**-16)

    for broken in (scaled, forgetful):
        found = stepped = 0
        for seed in range(30):
            try:
                result = run_one(seed, ranks, broken)
                stepped += any(one.startswith("call") for one in result.operations)
            except script_fuzz.Difference as difference:
                assert f"script {seed}, call" in str(difference)
                found += 1
        assert found >= 10 and stepped <= 3, (broken.__name__, found, stepped)

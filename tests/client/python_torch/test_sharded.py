# SPDX-License-Identifier: Apache-2.0
# Goal    A model that FSDP2 shards trains attached as it does with torch's AdamW, and resumes with the same bits. A reader gets
#         the model's present values. A refusal names what is refused.
# Method  1, 2 and 3 ranks over gloo on the real daemon, each case compared with torch's FSDP2 of the same model on the same
#         batches; 4 and 8 ranks compared with one process. All cases of a number of ranks share one launch of sharded_ranks.py;
#         the result of each case is a test here.

import json
import subprocess
import sys

import forebay
import pytest
import sharded_activations  # noqa: F401
import sharded_calls  # noqa: F401
import sharded_composition  # noqa: F401
import sharded_devices  # noqa: F401
import sharded_gathers  # noqa: F401
import sharded_meta  # noqa: F401
import sharded_passes  # noqa: F401
import sharded_ranks
import sharded_refusals  # noqa: F401
import sharded_training  # noqa: F401
import sharded_states  # noqa: F401
import sharded_unreduced  # noqa: F401
import sharded_writes  # noqa: F401
import torch
from daemon_process import Daemon, missing
from test_processes import HERE, ROOT, environment, package

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

DEADLINE_S = 120
# Mean seconds of a case. A case that hangs is ended by the limits of its collectives and calls (sharded_ranks.DEADLINE_S).
CASE_S = 5
SIZES = (1, 2, 3)
MESHES = (4, 8)  # ranks of meshes of two and of three dimensions


# Launches of a case each, in this order: (case, ranks, run).
ALONE = [
    *[("half_of_the_steps", size, "first") for size in SIZES],
    *[("the_other_half", size, "second") for size in SIZES],
    ("a_job_of_two_ranks", 2, "third"),
    ("another_world_size", 1, "third"),
    ("another_world_size", 3, "third"),
]


WITHOUT_WAITS = "without_waits_a_rank_alone_computes_something_else"

# Cases on a GPU that works late, as (ranks, case). The cases cover each path of the bytes. The GPU of even ranks can register
# read-only memory, the GPU of odd ranks cannot.
ON_A_DEVICE = [
    (1, "uneven_and_empty_shards"),
    (1, "clip_grad_norm_of_torch"),
    (1, "tied_embedding"),
    (1, "checkpointing_that_is_not_reentrant"),
    (1, "passes_are_added"),
    (1, "evaluation_between_steps_without_reshard_after_forward"),
    (1, "a_rank_alone_waits_for_what_is_copied_ahead"),
    (1, WITHOUT_WAITS),
    *[
        (2, case)
        for case in (
            "weights_and_gradients_are_copied",
            "a_machine_without_a_gpu",
            "two_devices_of_one_rank",
            "uneven_and_empty_shards",
            "tied_embedding",
            "a_group_that_some_steps_skip",
            "checkpointing_that_is_not_reentrant",
            "evaluation_between_steps",
            "float32_masters_of_bfloat16_weights",
            "bfloat16_parameters_with_exact_masters",
            "replicas_of_shards",
            "every_read_gives_the_present_values",
            "zero_grad_leaves_a_batch_out",
            "an_exception_in_backward",
            "detach_leaves_a_plain_fsdp2_model",
            "passes_are_added",
            "a_grad_scaler",
            "what_was_gathered_in_vain_is_not_used_when_it_is_old",
            "writes_into_wide_masters",
            "meta_with_wide_masters",
            "meta_from_files",
            "a_job_goes_on_from_meta",
            "two_schedules_a_step",
            "offloaded_activations",
            "offloaded_checkpoints",
            "offloaded_activations_leave_the_device",
            "a_second_backward_of_offloaded_activations",
            "a_tensor_that_changes_while_it_is_copied",
            "a_buffer_that_is_filled_again",
            "gradients_through_conjugated_and_negated_tensors",
            "a_gpu_that_fails",  # the last case: its processes cannot continue
        )
    ],
]


def launches(items):
    """The arguments of sharded_ranks.py for the tests that were collected."""
    together, alone, on_a_device = {}, [], {}
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if item.originalname == test_on_ranks.__name__:
            together.setdefault(values["size"], []).append(values["case"])
        if item.originalname == test_on_a_device.__name__:
            on_a_device.setdefault(values["size"], []).append(values["case"])
        if item.originalname == test_in_a_launch_of_its_own.__name__:
            alone.append("alone{size}:{size}:{run}:{case}".format(**values))
    whole = {"together": together, "device": on_a_device}
    return [
        f"{name}{size}:{size}:whole:{':'.join(cases)}"
        for name, by_size in whole.items()
        for size, cases in by_size.items()
    ] + alone


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """By launch and case, the errors of its ranks."""
    # Has room for a job of each case.
    daemon = Daemon(tmp_path_factory.mktemp("sharded"), "dram.limit=2GiB")
    items = [item for item in request.session.items if item.path == request.path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREBAY_SOCKET", daemon.socket)
        command = [sys.executable, str(HERE / "sharded_ranks.py"), *launches(items)]
        limit_s = DEADLINE_S + CASE_S * len(items)
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=limit_s, check=False
        )
    assert done.returncode == 0, done.stderr
    found = {}
    for launch, case, rank, error in map(json.loads, done.stdout.splitlines()):
        found.setdefault((launch, case), {})[rank] = error
    yield found
    daemon.stop()


def assert_passed(errors, size):
    failed = {rank: error for rank, error in errors.items() if error}
    assert not failed, "\n".join(f"rank {rank}:\n{error}" for rank, error in failed.items())
    assert sorted(errors) == list(range(size))


@pytest.mark.parametrize(
    ("size", "case"),
    [(size, case) for size in SIZES + MESHES for case in sharded_ranks.cases_of(size)],
)
def test_on_ranks(results, size, case):
    assert_passed(results[f"together{size}", case], size)


@pytest.mark.parametrize(("size", "case"), ON_A_DEVICE)
def test_on_a_device(results, size, case):
    errors = results[f"device{size}", case]
    if case != WITHOUT_WAITS or not (errors[0] or "").startswith(("the process ended: -6\n", "the process ended: -11\n")):
        assert_passed(errors, size)


@pytest.mark.parametrize(("case", "size", "run"), ALONE)
def test_in_a_launch_of_its_own(results, case, size, run):
    assert_passed(results[f"alone{size}", case], size)


def test_every_case_runs():
    common = {case for size in SIZES + MESHES for case in sharded_ranks.cases_of(size)}
    on_a_device = {case for _, case in ON_A_DEVICE}
    assert common | {case for case, *_ in ALONE} | on_a_device == set(sharded_ranks.CASES)


def test_the_command_of_the_documentation_finds_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_SOCKET", str(tmp_path / "nobody"))
    command = [sys.executable, "tests/client/python_torch/sharded_ranks.py"]  # docs/reports/gpu.md; no launch
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(package())},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_process_group(node):
    model = torch.nn.Linear(4, 2)
    with pytest.raises(forebay.UsageError, match="process group, and there is none") as info:
        forebay.attach(model, mode="sharded")
    assert info.value.code == "E_RANK" and "init_process_group" in info.value.hint
    model.half()


# Script of a process that changes torch by `start`, then attaches a shared job and tries to attach a sharded job. It prints the
# errors of the sharded job.
OTHER_TORCH = """
import sys
import tempfile
import torch
{start}
import forebay
model = torch.nn.Linear(4, 2)
opt = forebay.attach(model)
model(torch.ones(3, 4)).sum().backward()
opt.step()
assert (opt.mode, opt.committed_step) == ("shared", 1)
opt.detach()
assert "forebay.sharded.fsdp" not in sys.modules
with tempfile.TemporaryDirectory() as folder:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{{folder}}/store", rank=0, world_size=1
    )
    for _ in range(2):
        try:
            forebay.attach(model, mode="sharded")
        except forebay.UsageError as error:
            print(error, file=sys.stderr)
    torch.distributed.destroy_process_group()
assert not any(type(p) is not torch.nn.Parameter for p in model.parameters())
"""


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ('sys.modules["torch.distributed.fsdp"] = None', "has no torch.distributed.fsdp.fully_shard"),
        ("vars(torch.cpu)['Stream'] = type('Stream', (), {})", "FSDP2 does not run on CPUs"),
    ],
)
def test_an_older_torch_attaches_shared_and_is_refused_sharded(node, start, message):
    done = subprocess.run(
        [sys.executable, "-c", OTHER_TORCH.format(start=start)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refusals = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert len(refusals) == 2, done.stderr
    for refusal in refusals:
        assert refusal.startswith(f"error[E_UNSUPPORTED]: torch {torch.__version__}: "), refusal
        assert message in refusal
    assert done.stderr.count("hint: use torch 2.8 to 2.15") == 2

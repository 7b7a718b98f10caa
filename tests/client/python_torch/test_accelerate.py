# SPDX-License-Identifier: Apache-2.0
# Goal    A loop written by hand for Accelerate trains an attached model to the numbers of the plain model, on one rank and two.
#         prepare() does not wrap the model in DDP, and a scheduler from before prepare() still works.
# Method  The method of test_transformers.py.

import pytest
from huggingface import (  # noqa: F401
    assert_same_numbers,
    assert_same_training,
    needs_huggingface,
    runs,
)
from safetensors.torch import load_file

pytestmark = needs_huggingface
STEPS = 16  # 32 sentences, 4 a step, two epochs; on two ranks half of them


def assert_is_as(ours, plain, steps):
    for own, theirs in zip(ours.ranks, plain.ranks):
        for name in ("losses", "norms", "rates"):
            assert_same_numbers(own[name], theirs[name])
        assert own["wrapped"] == "GPT2LMHeadModel" and own["committed"] == steps
    assert_same_training(ours, plain, steps)
    saved = load_file(ours.folder / "saved0" / "model.safetensors")
    assert all((saved[name] == ours.weights[name]).all() for name in saved)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loop_trains_to_the_numbers_of_the_plain_one(runs, ranks, by_hand):  # noqa: F811
    plain = runs.once("loop", ranks, plain=True)
    assert plain.ranks[0]["wrapped"] == ("GPT2LMHeadModel" if ranks == 1 else "DistributedDataParallel")
    assert_is_as(runs("loop", ranks, by_hand=by_hand), plain, STEPS // ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_accumulated(runs, ranks):  # noqa: F811
    plain = runs("loop", ranks, accumulate=2, plain=True)
    assert_is_as(runs("loop", ranks, accumulate=2), plain, STEPS // ranks // 2)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {"loss": True}), (1, {"loss": False}), (1, {"loss": False, "ours": True}), (2, {"loss": False})],
)
def test_one_optimizer_over_two_models(runs, ranks, options):  # noqa: F811
    """With one norm over both; DDP averages the gradients of two models, not those of a loss."""
    plain = runs("several", ranks, plain=True, loss=options["loss"])
    ours = runs("several", ranks, **options)
    for own, theirs in zip(ours.ranks, plain.ranks):
        for name in ("losses", "norms"):
            assert_same_numbers(own[name], theirs[name])
        assert own["named"] == [["exp_avg", "exp_avg_sq", "step"]] * 2
        assert own["buffers"] == [f"0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert_same_training(ours, plain, 8)

# SPDX-License-Identifier: Apache-2.0
# Goal    Adapters of peft train on a frozen base to the numbers of the plain Trainer; the base has no states.
# Method  The method of test_transformers.py. Under a base of bfloat16 an adapter's last bit can turn the rounding of an
#         activation, by 2^-9 of the activation. In that case the plain Trainer has an AdamW with the daemon's roundings, and
#         all weights are compared to the bit.

import pytest
import torch
from huggingface import (  # noqa: F401
    assert_same_numbers,
    assert_same_training,
    needs_huggingface,
    runs,
)
from safetensors.torch import load_file

pytestmark = needs_huggingface


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_train_as_with_the_plain_trainer(runs, dtype, ranks):  # noqa: F811
    exact = {"optimizer": "exact"} if dtype == "bfloat16" else {}
    plain = runs("trainer", ranks, lora=dtype, plain=True, **exact)
    ours = runs("trainer", ranks, lora=dtype)
    for own, theirs in zip(ours.ranks, plain.ranks):
        assert_same_numbers(own["logged"], theirs["logged"])
    assert_same_training(ours, plain, plain.ranks[0]["outputs"][0][0])
    if exact:
        assert all(torch.equal(ours.weights[name], theirs) for name, theirs in plain.weights.items())
    saved = load_file(ours.folder / "saved0" / "adapter_model.safetensors")
    assert len(saved) == 4  # two layers, A and B
    for name, values in saved.items():
        assert (values == ours.weights[name.replace(".weight", ".default.weight")]).all(), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_are_merged_behind_train(runs, ranks):  # noqa: F811
    plain = runs("trainer", ranks, lora="float32", merge=True, plain=True)
    ours = runs("trainer", ranks, lora="float32", merge=True)
    assert not any("lora" in name for name in plain.weights)
    assert_same_training(ours, plain, plain.ranks[0]["outputs"][0][0])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_in_the_middle_of_a_training(runs, dtype, ranks):  # noqa: F811
    """And taken out again, which leaves roundings in the base: those of the plain Trainer's."""
    exact = {"optimizer": "exact"} if dtype == "bfloat16" else {}
    plain = runs("trainer", ranks, lora=dtype, merge_within=True, plain=True, **exact)
    ours = runs("trainer", ranks, lora=dtype, merge_within=True)
    for own, theirs in zip(ours.ranks, plain.ranks):
        assert_same_numbers(own["logged"], theirs["logged"])
    assert_same_training(ours, plain, plain.ranks[0]["outputs"][0][0])
    before = runs.once("trainer", lora=dtype, plain=True, arguments={"max_steps": 1})
    base = "base_model.model.transformer.h.0.attn.c_attn.base_layer.weight"
    assert (ours.weights[base] != before.weights[base]).any(), "no rounding: this shows nothing"


def test_a_killed_run_goes_on(runs):  # noqa: F811
    whole = runs("trainer", lora="float32")
    kill = {"rank": 0, "step": 5, "event": "on_optimizer_step"}
    again = runs("trainer", lora="float32", kill=kill)
    assert again.ranks[0] == {**whole.ranks[0], "attempt": 1}

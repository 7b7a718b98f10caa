# SPDX-License-Identifier: Apache-2.0
# Goal    Hugging Face's Trainer trains an attached model to the numbers of the plain model, on one rank and two. After kill -9
#         the Trainer continues behind the committed step with the bits of a run that was not killed.
# Method  Tiny GPT-2 and BERT with random weights, with dropout and shuffled data. Ranks are forked from one process
#         that has imported transformers (huggingface_ranks.py), on the real daemon.

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


def assert_is_as(ours, plain):
    """The same losses, evaluations, norms and rates, and weights within the bound."""
    steps = sum(steps for steps, _ in plain.ranks[0]["outputs"])
    for own, theirs in zip(ours.ranks, plain.ranks):
        assert_same_numbers(own["logged"], theirs["logged"])
        assert_same_numbers(own["outputs"], theirs["outputs"])
        assert own["evaluated"] == pytest.approx(theirs["evaluated"], rel=1e-5)
    assert_same_training(ours, plain, steps)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_losses_and_weights_are_those_of_the_plain_trainer(runs, model, ranks):  # noqa: F811
    plain = runs.once("trainer", ranks, model=model, plain=True)
    ours = runs.once("trainer", ranks, model=model)
    assert_is_as(ours, plain)
    for own in ours.ranks:
        assert own["committed"] == own["outputs"][0][0]
        assert own["sha256"] == ours.ranks[0]["sha256"]
    saved = load_file(ours.folder / "saved0" / "model.safetensors")
    assert saved.keys() <= ours.weights.keys()
    assert all((saved[name] == ours.weights[name]).all() for name in saved)
    files = {path.name for path in (ours.folder / "out" / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_clipping_and_the_tokens_of_each_rank(runs, ranks, clip):  # noqa: F811
    arguments = {"max_grad_norm": clip, "average_tokens_across_devices": False, "optim": "sgd"}
    plain = runs("trainer", ranks, arguments=arguments, plain=True)
    assert_is_as(runs("trainer", ranks, arguments=arguments), plain)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_gradients_are_accumulated(runs, model, ranks):  # noqa: F811
    # An epoch has 11 batches, or 6 on two ranks. The last step of an epoch has fewer than 4 batches.
    arguments = {"gradient_accumulation_steps": 4}
    plain = runs("trainer", ranks, model=model, arguments=arguments, plain=True)
    ours = runs("trainer", ranks, model=model, arguments=arguments)
    assert_is_as(ours, plain)
    kill = {"rank": 0, "step": 2, "event": "on_substep_end"}
    again = runs("trainer", ranks, model=model, arguments=arguments, kill=kill)
    assert_goes_on(again, ours)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_resumed_from(runs, ranks):  # noqa: F811
    """Each Trainer's by the other too."""
    whole, plain = (runs.once("trainer", ranks, model="gpt2", **more) for more in ({}, {"plain": True}))
    for source, options in ((whole, {}), (plain, {}), (whole, {"plain": True})):
        folder = str(source.folder / "out" / "checkpoint-8")
        resumed = runs("trainer", ranks, model="gpt2", resume=folder, **options)
        for own, theirs in zip(resumed.ranks, whole.ranks):
            # The last entry has the mean loss of one call.
            assert_same_numbers(own["logged"][:-1], theirs["logged"][:-1])
        assert_same_training(resumed, whole, whole.ranks[0]["outputs"][0][0])


def assert_goes_on(ours, whole):
    """Killed once, and everything is as in the run that was not: losses, evaluations, bits."""
    for own, theirs in zip(ours.ranks, whole.ranks):
        assert own == {**theirs, "attempt": 1}
    assert all((ours.weights[name] == whole.weights[name]).all() for name in whole.weights)


EVENTS = [
    ("on_step_begin", 4),
    ("on_pre_optimizer_step", 4),
    # After the commit; before the scheduler, logging, evaluation and saving.
    ("on_optimizer_step", 5),
    ("on_evaluate", 6),  # the end of an epoch on two ranks
    ("on_save", 8),
    ("on_epoch_end", 5),
    ("on_train_end", 0),
]


@pytest.mark.parametrize("event,step", EVENTS)
def test_a_killed_run_goes_on_with_the_bits_of_one_that_was_not(runs, event, step):  # noqa: F811
    kill = {"rank": 0, "step": step, "event": event}
    assert_goes_on(runs("trainer", kill=kill), runs.once("trainer"))


@pytest.mark.parametrize("event,step", EVENTS[2:4])
def test_a_killed_rank_and_its_neighbour_go_on(runs, event, step):  # noqa: F811
    kill = {"rank": 1, "step": step, "event": event}
    assert_goes_on(runs("trainer", 2, kill=kill), runs.once("trainer", 2))


def test_what_callbacks_and_schedulers_know_goes_on_too(runs):  # noqa: F811
    """A scheduler that evaluation steps, a callback that counts evaluations, the best of them, workers of the data."""
    arguments = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "save_steps": 3,
        "dataloader_num_workers": 1,
        "include_num_input_tokens_seen": "all",
        "bf16": True,
    }
    whole = runs("trainer", arguments=arguments, patience=4)
    rates = [entry["learning_rate"] for entry in whole.ranks[0]["logged"] if "learning_rate" in entry]
    assert len(set(rates)) > 3, "the scheduler was to act"
    kill = {"rank": 0, "step": 9, "event": "on_evaluate"}
    assert_goes_on(runs("trainer", arguments=arguments, patience=4, kill=kill), whole)
    plain = runs("trainer", arguments=arguments, patience=4, plain=True)
    assert_same_numbers(whole.ranks[0]["logged"], plain.ranks[0]["logged"], 2**-8)  # computed in bfloat16


def test_the_best_model_is_loaded_at_the_end(runs):  # noqa: F811
    arguments = {"load_best_model_at_end": True, "save_steps": 3, "metric_for_best_model": "loss"}
    arguments["greater_is_better"] = True  # makes an earlier model than the last one the best
    ours = runs("trainer", arguments=arguments)
    logged = [entry for entry in ours.ranks[0]["logged"] if "eval_loss" in entry]
    best = max(logged, key=lambda entry: entry["eval_loss"])
    assert best["step"] < logged[-1]["step"], "the last one is the best: this shows nothing"
    saved = load_file(ours.folder / "out" / f"checkpoint-{best['step']}" / "model.safetensors")
    assert all((saved[name] == ours.weights[name]).all() for name in saved)


def test_a_second_train_begins_a_schedule_on_the_same_weights(runs):  # noqa: F811
    plain = runs("trainer", calls=2, plain=True)
    ours = runs("trainer", calls=2)
    assert ours.ranks[0]["committed"] == sum(steps for steps, _ in ours.ranks[0]["outputs"])
    assert_is_as(ours, plain)


def test_a_model_that_is_changed_between_two_calls_of_train(runs):  # noqa: F811
    plain = runs("trainer", calls=2, scale=0.9, plain=True)
    assert_is_as(runs("trainer", calls=2, scale=0.9), plain)


def test_behind_train_a_model_can_be_converted(runs):  # noqa: F811
    ours = runs("trainer", to="float16")
    assert {values.dtype for values in ours.weights.values()} == {torch.float16}


def test_optimizer_and_scheduler_of_the_script(runs):  # noqa: F811
    plain = runs("trainer", optimizer="torch", plain=True)
    assert_is_as(runs("trainer", optimizer="torch"), plain)
    kill = {"rank": 0, "step": 12, "event": "on_evaluate"}
    assert_goes_on(runs("trainer", optimizer="lion", kill=kill), runs("trainer", optimizer="lion"))


def test_a_model_that_the_script_has_attached(runs):  # noqa: F811
    """With little room for extra_state, to which the log is cut."""
    arguments = {"num_train_epochs": 30, "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    whole = runs("trainer", by_hand=32 << 10, arguments=arguments)
    (found,) = whole.ranks
    assert found["committed"] == 330 and len(found["logged"]) == 331
    kill = {"rank": 0, "step": 320, "event": "on_optimizer_step"}
    (again,) = runs("trainer", by_hand=32 << 10, arguments=arguments, kill=kill).ranks
    assert again["sha256"] == found["sha256"] and again["outputs"] == found["outputs"]
    assert again["logged"] == found["logged"][-len(again["logged"]) :] and 10 < len(again["logged"]) < 331


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_of_another_library_with_a_loss_of_its_own(runs, ranks):  # noqa: F811
    plain = runs("trainer", ranks, trainer="theirs", plain=True)
    assert "theirs" in plain.ranks[0]["logged"][0]
    assert_is_as(runs("trainer", ranks, trainer="theirs"), plain)


def test_a_loss_with_parameters_trains_with_the_model(runs):  # noqa: F811
    """Clipped and cleared with it too, which the plain Trainer of the test does by methods of its own."""
    for clip in (0.0, 0.5):
        options = {"model": "bert", "trainer": "lossy", "arguments": {"max_grad_norm": clip}}
        whole = runs("trainer", **options)
        assert_is_as(whole, runs("trainer", plain=True, **options))
    kill = {"rank": 0, "step": 5, "event": "on_optimizer_step"}
    assert_goes_on(runs("trainer", kill=kill, **options), whole)


def test_a_batch_that_shrinks_after_a_memory_error(runs):  # noqa: F811
    """44 sentences make 22 steps with four of them, 30 with three: two steps are taken, then all of the smaller ones."""
    options = {"trainer": "narrow", "arguments": {"auto_find_batch_size": True}}
    plain = runs("trainer", plain=True, **options)
    whole = runs("trainer", **options)
    assert_is_as(whole, plain)
    assert [steps for steps, _ in whole.ranks[0]["outputs"]] == [30] and whole.ranks[0]["committed"] == 32
    for event, step in (("on_optimizer_step", 5), ("on_step_begin", 1), ("on_evaluate", 15), ("on_train_end", 0)):
        kill = {"rank": 0, "step": step, "event": event}
        assert_goes_on(runs("trainer", kill=kill, **options), whole)


def test_a_second_trainer_on_one_model(runs):  # noqa: F811
    """With states, data and a job of its own."""
    plain = runs("trainer", trainers=2, plain=True)
    whole = runs("trainer", trainers=2)
    assert_is_as(whole, plain)
    assert whole.ranks[0]["committed"] == whole.ranks[0]["outputs"][1][0]
    for event, step in (("on_step_begin", 0), ("on_optimizer_step", 5), ("on_train_end", 0)):
        kill = {"rank": 0, "step": step, "event": event}  # the second trainer is killed
        assert_goes_on(runs("trainer", trainers=2, kill=kill), whole)


def test_examples_run(runs):  # noqa: F811
    (found,) = runs("examples").ranks
    found.pop("attempt")
    assert len(found) >= 9
    assert all(examples > 0 and failed == 0 for examples, failed in found.values()), found


def test_what_would_train_on_another_trainings_state_is_refused(runs):  # noqa: F811
    (found,) = runs("refused").ranks
    assert found["two models"] == 1
    for name, (code, text) in {
        "another Trainer": ("E_BUSY", 'forebay={"job": "second"}'),
        "resume after train": ("E_UNSUPPORTED", "train(resume_from_checkpoint="),
        "large buffers": ("E_EXTRA_STATE", "hint: register_buffer(..., persistent=False)"),
        "adafactor": ("E_UNSUPPORTED", "Adafactor"),
        "an optimizer of another Trainer": ("E_BUSY", 'forebay.attach(model, ..., job="second")'),
        "train of the first": ("E_UNSUPPORTED", "a new Trainer with the same model"),
        "a job of a loop": ("E_JOB_EXISTS", "1 committed steps that no Trainer has made"),
        "model_init again": ("E_UNSUPPORTED", "model_init"),
        "another transformers": ("E_UNSUPPORTED", "_run_epoch()"),
        "no model": ("E_UNSUPPORTED", "prepare(model, optimizer)"),
        "no rule": ("E_UNSUPPORTED", "RMSprop"),
        "second model": ("E_UNSUPPORTED", "beside another optimizer"),
        "two pairs": ("E_UNSUPPORTED", 'forebay.attach(model, optimizer, job="...") for each'),
        "half": ("E_UNSUPPORTED", "optimizer.optimizer.detach() of Accelerate"),
        "load_state": ("E_UNSUPPORTED", "load before forebay.attach"),
    }.items():
        assert found[name] is not None, name
        assert found[name].startswith(f"error[{code}]") and text in found[name], found[name]

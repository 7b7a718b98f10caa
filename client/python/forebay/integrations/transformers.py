# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer on attached models:

-    from transformers import Trainer
+    from forebay.integrations.transformers import Trainer

A restarted run resumes by itself after the last committed step of the killed run, with the bits of one that was
not killed: the Trainer's own state (position in the data, scheduler, random numbers, losses to be logged) commits with
each step.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import transformers
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from .. import api, optimizers
from .._buffers import EXTRA_STATE_BYTES_MAX, Buffers
from .._optimizer import ForebayOptimizer
from ..errors import unsupported, usage_error
from ..options import _option, _regroup
from . import accelerate

STATE_BYTES = 256 << 10  # room for a Position
LOG_ENTRIES = 512  # newest entries of log_history that commit with a step
MAGIC = b"forebay Trainer 1\0"  # in front of a Position
COMMITTED = "committed step"  # in place of a checkpoint's folder
# Fields of TrainerState that commit with a step. The arguments or the launch determine the other fields.
STATE_FIELDS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "stateful_callbacks",
)
# Undocumented members of transformers.Trainer that Forebay's Trainer overrides or calls.
PRIVATE = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_init_training_state",
    "_inner_training_loop",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_run_epoch",
)

# job -> claim of the Trainer that has trained the job in this process
_claims: dict[str, object] = {}
_attached: weakref.WeakSet[ForebayOptimizer] = weakref.WeakSet()  # by Trainers

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class RandomNumbers:
    """The states of the generators that a Trainer uses."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> RandomNumbers:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return cls(random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@dataclass(frozen=True)
class Position:
    """Where a Trainer is as it calls the optimizer's step(); commits with the step. What follows a step (the scheduler,
    logging, evaluation, saving) is done again from here."""

    call: int  # number of the call of train(), from 1
    epoch: int
    updates: int  # updates of the epoch, this step included
    state: dict[str, Any]  # fields of TrainerState before the step
    control: dict[str, Any]
    callbacks: list[tuple[str, dict[str, Any]]]
    scheduler: dict[str, Any]
    grad_norm: float
    losses: tuple[float, float, int]  # since the last logging, before it, the step of that
    initial: tuple[int, int]  # global_step and tokens as train() began
    flos: float
    epoch_began: RandomNumbers
    random_numbers: RandomNumbers
    # attempts of this call of train(), one more after each memory error (auto_find_batch_size)
    tries: int = 1
    batch_size: int = 0  # batch size of this attempt


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer on an attached model; makes a subclass of it one too: class Mine(Trainer, SFTTrainer).

    forebay  Further arguments of forebay.attach: {"durability": "step", "job": "bert"}. Its Memory without
             extra_state_bytes gets room for what the Trainer commits.

    The optimizer is that of the arguments (optim="adamw_torch" and its like, "adagrad", "sgd"), or what optimizers=
    has: one of torch's, or of forebay.optimizers. The model is attached while train() runs; behind it it is a plain one,
    which can be merged, converted and saved. What the script has attached itself stays attached.

    Errors  E_UNSUPPORTED  what would train without the daemon, or on another training's state; names the call.
            E_BUSY         the job is another Trainer's of this process.
            E_JOB_EXISTS   as forebay.attach.

    >>> from forebay.integrations import transformers as ours
    >>> arguments = transformers.TrainingArguments(folder, use_cpu=True)
    >>> trainer = ours.Trainer(model, arguments, forebay={"job": "bert", "durability": "memory"})
    """

    optimizer: Any
    control: Any

    def __init__(self, *args: Any, forebay: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        missing = [name for name in PRIVATE if not hasattr(transformers.Trainer, name)]
        if missing:
            raise unsupported(
                f"transformers {transformers.__version__}, whose Trainer has no {missing[0]}()",
                "pip install -U transformers (its Trainer of 5.24 is known to work)",
            )
        self._options, self._room_bytes = _regroup(forebay or {}), STATE_BYTES
        self._claim = object()
        self._position: Position | None = None  # where training resumes
        self._call, self._tries, self._epoch, self._updates = 0, 0, 0, 0
        self._has_attached = False
        self._epoch_began = self._random_numbers = RandomNumbers.now()
        super().__init__(*args, **kwargs)

    # ---------------------------------------------------------------------------------- attaching

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers.Trainer's; the Accelerator is Forebay's, which does not wrap an attached model in DDP.

        >>> from forebay.integrations import transformers as ours
        >>> trainer = ours.Trainer(model, transformers.TrainingArguments(folder, use_cpu=True))
        >>> type(trainer.accelerator).__module__
        'forebay.integrations.accelerate'
        """
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = accelerate.Accelerator
        self.accelerator.refuse_other_wrappers()
        if self.accelerator.is_fsdp2:
            raise unsupported(
                "Forebay's Trainer with FSDP2, whose checkpoints it cannot write",
                "forebay.integrations.accelerate.Accelerator, or forebay.attach(model, ...) behind fully_shard()",
            )

    def create_optimizer(self, model: Any = None) -> Any:
        """As transformers.Trainer's; attaches the model and prepares the optimizer.

        >>> from forebay.integrations import transformers as ours
        >>> trainer = ours.Trainer(model, transformers.TrainingArguments(folder, use_cpu=True))
        >>> trainer.create_optimizer().optimizer.mode
        'shared'
        """
        if self._is_prepared():
            if self.optimizer.optimizer._engine.attachment is None:
                raise unsupported(
                    "train() of a Trainer whose model was detached (another Trainer has it, or the script)",
                    "a new Trainer with the same model and arguments",
                )
            self.optimizer.optimizer._resume()
            return self.optimizer
        model = self.model if model is None else model
        buffers_bytes = Buffers(model).size_bytes()
        opt = self.optimizer
        if isinstance(opt, ForebayOptimizer):  # the script has attached the optimizer
            if opt._engine.node is not None:
                self._claim_job(opt._engine.node.job)
        else:
            room_bytes = min(buffers_bytes + STATE_BYTES, EXTRA_STATE_BYTES_MAX)
            options, memory = dict(self._options), _option("memory", self._options.get("memory"))
            if memory.extra_state_bytes is None:
                memory = dataclasses.replace(memory, extra_state_bytes=room_bytes)
            options["memory"] = memory
            if self.args.gradient_accumulation_steps > 1:
                options.setdefault("accumulate", self.args.gradient_accumulation_steps)
            if not isinstance(opt, optimizers.Optimizer):
                opt = super().create_optimizer(model)
            options["job"] = self._claim_job(options.get("job"))
            _release(model)
            opt = accelerate.attach(model, opt, **options)
            _attached.add(opt)
            self._has_attached = True
        self._room_bytes = opt._extra_state_bytes - buffers_bytes
        self.optimizer = self.accelerator.prepare(opt)
        return self.optimizer

    def _rest(self) -> None:
        if self._has_attached and self._is_prepared():
            self.optimizer.optimizer._rest()

    def _is_prepared(self) -> bool:
        return isinstance(getattr(self.optimizer, "optimizer", None), ForebayOptimizer)

    def _claim_job(self, job: str | None) -> str:
        """The job of this Trainer: the one that the script names, or a numbered one where an earlier Trainer has it."""
        first = name = api._job_name(job)
        number = 1
        while _claims.setdefault(name, self._claim) is not self._claim:
            if job:
                raise usage_error(
                    "E_BUSY",
                    f"job {job} is that of another Trainer of this process: this one would go on with its weights and step",
                    'another name: Trainer(..., forebay={"job": "second"}), or forebay.attach(model, ..., job="second") '
                    "of what optimizers= has",
                )
            number += 1
            name = f"{first}-{number}"
        if number > 1:
            logger.warning(f"Job {first} is an earlier Trainer's: this one trains job {name}.")
        return name

    # ------------------------------------------------------------------------------- what commits

    def _clip_grad_norm(self, model: Any) -> Any:
        """One norm over the model and what else the optimizer has (a loss): the daemon scales the whole gradient."""
        own = {id(tensor) for tensor in model.parameters()}
        others = [one.tensor for one in self.optimizer.optimizer._members if id(one.tensor) not in own]
        if not others:
            return super()._clip_grad_norm(model)
        return self.accelerator.clip_grad_norm_([*model.parameters(), *others], self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The Trainer's last call before it steps: what it knows commits with the step."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._updates += 1
        position = self._position_now(float(grad_norm))
        packed = MAGIC + pickle.dumps(position)
        logged = position.state["log_history"]
        while len(packed) > self._room_bytes and logged:  # drops the older half
            del logged[: -(len(logged) // 2) or None]
            packed = MAGIC + pickle.dumps(position)
        self.optimizer.optimizer.extra_state = packed
        return grad_norm

    def _position_now(self, grad_norm: float) -> Position:
        state = {name: getattr(self.state, name) for name in STATE_FIELDS}
        return Position(
            call=self._call,
            epoch=self._epoch,
            updates=self._updates,
            state={**state, "log_history": self.state.log_history[-LOG_ENTRIES:]},
            control=dataclasses.asdict(self.control),
            callbacks=[(type(one).__name__, one.state()) for one in self._exportable()],
            scheduler=self.lr_scheduler.state_dict(),
            grad_norm=grad_norm,
            losses=(self._tr_loss.item(), self._total_loss_scalar, self._globalstep_last_logged),
            initial=(self._initial_global_step, self._initial_num_input_tokens_seen),
            flos=self.current_flos,
            epoch_began=self._epoch_began,
            random_numbers=RandomNumbers.now(),
            tries=self._tries,
            batch_size=self._train_batch_size,
        )

    def _exportable(self) -> list[Any]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, ExportableState)]

    # -------------------------------------------------------------------------------- resuming

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as transformers.Trainer.train does. Attaches the model, and resumes after the step with which a killed run ended.
        After train() the model is a plain one, until train() is called again.

        Errors  E_UNSUPPORTED  a second model in one Trainer.

        >>> from forebay.integrations import transformers as ours
        >>> off = {"report_to": [], "disable_tqdm": True}
        >>> arguments = transformers.TrainingArguments(folder, use_cpu=True, num_train_epochs=0, **off)
        >>> trainer = ours.Trainer(model, arguments, train_dataset=[{"input": row} for row in inputs])
        >>> trainer.remove_callback(transformers.PrinterCallback)
        >>> trainer.train().global_step
        0
        >>> model = model.half()
        """
        if trial is not None or (self.model_init is not None and self._call > 0):
            raise unsupported(
                "a second model in one Trainer (hyperparameter_search, or model_init and train() again): it would go "
                "on with the job of the first",
                'one Trainer for each, with a job of its own: Trainer(..., forebay={"job": "second"})',
            )
        self._call, self._tries = self._call + 1, 0
        try:
            return super().train(resume_from_checkpoint, trial, *args, **kwargs)
        finally:
            self._rest()

    def _inner_training_loop(self, batch_size: int | None = None, args: Any = None, **loop: Any) -> Any:
        """train() calls it, and again with a smaller batch after a memory error (auto_find_batch_size)."""
        self._tries += 1
        if args.auto_find_batch_size and self._tries == 1:
            self.create_optimizer()
            if (position := self._committed()) is not None:
                self._tries, batch_size = position.tries, position.batch_size
        return super()._inner_training_loop(batch_size, args, **loop)

    def _init_training_state(
        self, max_steps: int, updates_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Attaches, so that the job says whether it has steps to resume after."""
        self.create_optimizer()
        self._position = position = self._committed()
        if position is None:
            begin: tuple[int, int] = super()._init_training_state(
                max_steps, updates_per_epoch, epochs, checkpoint, trial
            )
            return begin
        if checkpoint is not None:
            logger.warning(
                f"The job goes on behind its committed step {position.state['global_step'] + 1}; {checkpoint} is not "
                "used. To begin from it give the training another FOREBAY_JOB, or delete the job."
            )
        super()._init_training_state(max_steps, updates_per_epoch, epochs, None, trial)
        for name, value in position.state.items():
            setattr(self.state, name, value)
        return position.epoch, 0

    def _committed(self) -> Position | None:
        """Where this call of train() was killed; None where it begins."""
        opt = self.optimizer.optimizer
        committed = opt.extra_state or b""
        if not committed.startswith(MAGIC):
            if opt.committed_step > 0 and self._call == 1:
                raise usage_error(
                    "E_JOB_EXISTS",
                    f"the job has {opt.committed_step} committed steps that no Trainer has made: this one would begin "
                    "its schedule anew on their weights",
                    'a job of its own: FOREBAY_JOB, or Trainer(..., forebay={"job": "second"})',
                )
            return None
        position: Position = pickle.loads(committed[len(MAGIC) :])
        if (position.call, position.tries) < (self._call, self._tries):
            return None
        if position.call > self._call:
            raise unsupported(
                f"going on in call {position.call} of train() of this script, in which it was killed: the weights "
                f"of call {self._call} are gone",
                "save between the calls, and give each training a Trainer with a job of its own: "
                'Trainer(..., forebay={"job": "second"})',
            )
        return position

    def _run_epoch(self, **loop: Any) -> None:
        """In the epoch in which the run was killed: the rest of the committed step, then the rest of the epoch."""
        position, self._position = self._position, None
        self._epoch, self._updates = loop["epoch"], 0
        if position is None:
            if loop["epoch"] == loop["epochs_trained"] and loop["resume_from_checkpoint"] is not None:
                self._updates = loop["steps_trained_in_current_epoch"] // self.args.gradient_accumulation_steps
            self._epoch_began = RandomNumbers.now()
            super()._run_epoch(**loop)
            return
        self._updates = position.updates
        self._restore(position)
        batches = min(position.updates * self.args.gradient_accumulation_steps, loop["steps_in_epoch"])
        learning_rate = self._finish_step(loop, position, batches)
        is_over = self.control.should_epoch_stop or self.control.should_training_stop
        if is_over or position.updates >= loop["num_update_steps_per_epoch"]:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._log_save_evaluate(loop, position, learning_rate)
            return
        self._random_numbers, self._epoch_began = RandomNumbers.now(), position.epoch_began
        position.epoch_began.restore()  # the order of the data, and the workers' seeds
        rest = {"resume_from_checkpoint": COMMITTED, "epochs_trained": loop["epoch"]}
        super()._run_epoch(**{**loop, **rest, "steps_trained_in_current_epoch": batches})

    def _restore(self, position: Position) -> None:
        position.random_numbers.restore()
        for name, value in position.control.items():
            setattr(self.control, name, value)
        states = list(position.callbacks)
        for callback in self._exportable():
            found = next((one for one in states if one[0] == type(callback).__name__), None)
            if found is not None:
                states.remove(found)
                for name, value in found[1].get("attributes", {}).items():
                    setattr(callback, name, value)
        self.lr_scheduler.load_state_dict(position.scheduler)
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr()):
            group["lr"] = rate
        loss, self._total_loss_scalar, self._globalstep_last_logged = position.losses
        self._tr_loss = torch.tensor(loss, device=self.args.device)
        self._initial_global_step, self._initial_num_input_tokens_seen = position.initial
        self.current_flos = position.flos

    def _finish_step(self, loop: dict[str, Any], position: Position, batches: int) -> float:
        """What Trainer does behind optimizer.step(). Returns the learning rate of the step."""
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        learning_rate: float = self._get_learning_rate()
        plateau = (torch.optim.lr_scheduler.ReduceLROnPlateau, transformers.optimization.GreedyLR)
        if not isinstance(self.lr_scheduler, plateau):
            self.optimizer._opt_called = True  # the scheduler's order check: it stepped before the kill
            self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = loop["epoch"] + batches / loop["steps_in_epoch"]
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        self._log_save_evaluate(loop, position, learning_rate)
        return learning_rate

    def _log_save_evaluate(self, loop: dict[str, Any], position: Position, learning_rate: float) -> None:
        self._maybe_log_save_evaluate(
            self._tr_loss,
            position.grad_norm,
            loop["model"],
            loop["trial"],
            loop["epoch"],
            loop["ignore_keys_for_eval"],
            loop["start_time"],
            learning_rate=learning_rate,
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint == COMMITTED:
            self._random_numbers.restore()
        else:
            super()._load_rng_state(checkpoint)

    # ------------------------------------------------------------------------------ files

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._position is None:  # else the daemon has something newer
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if self._is_prepared():
            raise unsupported(
                f"train(resume_from_checkpoint={checkpoint!r}) after train(): the model is attached, and its weights "
                "are the daemon's",
                "a new model, and a Trainer with a job of its own",
            )
        super()._load_from_checkpoint(checkpoint, model)

    def _load_best_model(self) -> None:
        """The best model's weights are files; the job keeps those of the last step."""
        if self._is_prepared() and not self._has_attached:
            self.optimizer.optimizer.detach()
        self._rest()
        super()._load_best_model()


def _release(model: Any) -> None:
    """An earlier Trainer's optimizer gives the model back, with the weights of its last step."""
    own = {id(tensor) for tensor in model.parameters()}
    for opt in list(_attached):
        if opt._engine.attachment is not None and any(id(member.tensor) in own for member in opt._members):
            opt.detach()


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """transformers.Seq2SeqTrainer on an attached model. For the rest see Trainer.

    >>> from forebay.integrations import transformers as ours
    >>> trainer = ours.Seq2SeqTrainer(model, transformers.Seq2SeqTrainingArguments(folder, use_cpu=True))
    """

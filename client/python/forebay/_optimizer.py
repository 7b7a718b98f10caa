# SPDX-License-Identifier: Apache-2.0
"""The optimizer that attach() returns."""

from __future__ import annotations

import atexit
import ctypes
import enum
import hashlib
import os
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from . import _writes
from ._base import UNBOUNDED, Backward, StepCall, profiled
from ._buffers import Buffers, users_part
from ._engine import WindowMember, windows_of
from ._hooks import drop_empty_gradients, install
from .errors import ForebayError, unsupported, usage_error
from .states.reader import parameter_named, read_states, state_names
from .states.state_dict import DaemonState, StateDicts

if TYPE_CHECKING:
    from ._core import Attachment
    from ._engine import Engine
    from ._guards import Guards
    from ._plan import Plan
    from .optimizers import HyperRow, Optimizer

PIECE_ELEMS = 1 << 20  # states are hashed in pieces of this many
# After these errors the step restarts from scratch. After other errors the same step can be called again.
GRADIENTS_LOST = {"E_NONFINITE", "E_OVERFLOW", "E_GRAD_DROPPED", "E_DRAM_LIMIT"}
# After these errors the outcome of the step is unknown. After other errors of a step, the step was not applied.
OUTCOME_UNKNOWN = {"E_TIMEOUT", "E_INTERRUPTED", "E_DAEMON_GONE", "E_RANK_LOST", "E_FENCED", "E_FORKED"}

_attached: weakref.WeakSet[ForebayOptimizer] = weakref.WeakSet()


class Phase(enum.Enum):
    """What an optimizer is doing."""

    CONSTRUCTING = enum.auto()
    TRAINING = enum.auto()
    STEPPING = enum.auto()  # within step(), perhaps on another thread
    RESTING = enum.auto()  # between rest() and resume()
    DETACHED = enum.auto()


class ForebayOptimizer(StateDicts):
    """A torch.optim.Optimizer whose state and arithmetic are the daemon's.

    step() reads lr and the other hyper-parameters from param_groups at each call, so torch's LR
    schedulers work. A parameter without a gradient in a step is skipped, as by torch; where only
    some ranks have one, the others count as zero.

    Ownership  Dropping it ends the session and gives the model private parameters, as detach()
               does.
    Threads    One thread trains.
    Errors     See forebay.ForebayError.

    >>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3))
    >>> model(inputs).square().mean().backward()
    >>> opt.step()
    >>> opt.committed_step
    1
    """

    is_forebay = True

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        plan: Plan,
        engine: Engine,
        handles: list[RemovableHandle],
        guards: Guards,
        rule: Optimizer,
        buffers: Buffers,
        extra_state_bytes: int,
    ) -> None:
        self._phase = Phase.CONSTRUCTING
        super().__init__(param_groups, defaults)
        self.state = DaemonState(self)  # type: ignore[assignment]
        self._plan, self._engine, self._guards, self._handles = plan, engine, guards, handles
        self._rule = rule  # an instance of a class of forebay.optimizers
        self._max_grad_norm = float(rule.max_grad_norm or 0.0)
        self._grad_norm: float | None = None
        self._members = [member for group in engine.groups for member in group.members]
        self._buffers, self._extra_state_bytes = buffers, extra_state_bytes
        assert engine.attachment is not None
        self._extra_state = users_part(bytes(engine.attachment.extra_state)) or None
        self._pending_state: bytes | None = None
        self._edit = (1.0, *UNBOUNDED)  # edit of the gradient in the last step
        self._loss: Any = None  # result of the last step's closure
        self._finalizer = weakref.finalize(self, _end, engine, handles, guards, os.getpid())
        self._finalizer.atexit = False  # _leave_all() is
        self._phase = Phase.TRAINING
        _attached.add(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" and getattr(self, "_phase", None) not in (None, Phase.CONSTRUCTING):
            raise unsupported(
                "opt.state = ...: the states are the daemon's",
                "opt.load_state_dict(...) sets them; detach() and attach as another job to begin with none",
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise unsupported(
            "a copy of the optimizer of an attached model (copy.deepcopy, pickle): there is one for each rank of the job",
            "opt.state_dict(), which another optimizer loads",
        )

    # ---------------------------------------------------------------------------------- the step

    @property
    def committed_step(self) -> int:
        """The number of the last step that no crash of a trainer undoes; 0 before the first.

        Errors  E_NOT_READY  this optimizer is detached.

        >>> opt = forebay.attach(model)
        >>> opt.committed_step
        0
        """
        return self._live().committed_step

    @property
    def extra_state(self) -> bytes | None:
        """What this rank committed with committed_step, or None. What is assigned commits with the
        next step.

        Errors  E_OPTION  what is assigned is not bytes.

        >>> opt = forebay.attach(model)
        >>> opt.extra_state is None
        True
        >>> opt.extra_state = b"epoch 3"
        >>> opt.step()
        >>> opt.extra_state
        b'epoch 3'
        """
        return self._extra_state

    @extra_state.setter
    def extra_state(self, value: Any) -> None:
        self._pending_state = _as_bytes(value)

    @property
    def mode(self) -> str:
        """"shared" or "sharded": how the model is attached.

        >>> opt = forebay.attach(model)
        >>> opt.mode
        'shared'
        """
        return self._engine.mode

    @property
    def delivered_groups(self) -> int:
        """The number of groups whose gradient this rank has delivered to the daemon in this attempt at the step.

        >>> opt = forebay.attach(model)
        >>> model(inputs).sum().backward()
        >>> opt.delivered_groups
        1
        """
        return self._engine.delivered_groups()

    def step(self, closure: Callable[[], Any] | None = None, extra_state: bytes | None = None) -> Any:
        """Applies one step over all ranks, exactly once; returns when it is committed: mode "sharded" at
        its decision, while the daemon updates under the next forward (see drain of forebay.Sharding), mode
        "shared" when everything is updated.

        A call that ended without an answer (E_TIMEOUT, Ctrl-C) is repeated by the next one: it asks
        for the same step again, never for the next, and commits extra_state and buffers of the
        first call, also where the buffers have changed since.

        closure      Called first, as torch's optimizers do: forward and backward, and its loss is
                     returned. Where this call repeats one without an answer, it is not called again.
        extra_state  bytes that commit with the step; a later attach returns them. To repeat a
                     call leave it out, or pass the same bytes.

        Errors  E_TIMEOUT      another rank has not called it, or the update waits for swap or a
                               reader; call again.
                E_GRAD_PARTIAL the backward before it did not come to its end, or FSDP2 has not reduced
                               all its gradients: zero_grad(), or run it again.
                E_GRAD_DROPPED another rank has restarted the step: run forward and backward of the
                               step again, then call it again.
                E_NONFINITE    a gradient is NaN or infinite: nothing was applied on any rank.
                E_OVERFLOW     the step is committed, and a master is infinite now: in this step or, where
                               step() returns before the update, in the one before.
                E_RANK_LOST    another rank ended: attach again; where it had only detached, attach
                               that rank again and call step again.
                E_STEP         the step under way has other scalars (lr, ...) or extra_state.
                E_EXTRA_STATE  extra_state has no room (extra_state_bytes of forebay.Memory).
                E_NOT_READY    a load of states did not end: load again.
                and, shared, of writes into parameters since the step before (docs/reference/calls.md): E_NONFINITE,
                E_UNSUPPORTED, E_OPTION, where the parameters are as they were before the writes.

        >>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3))
        >>> model(inputs).sum().backward()
        >>> opt.step(extra_state=b"batch 7")
        """
        self._refuse_half_loaded("step()")
        attachment = self._live()
        if self._engine.under_way is None:
            self._loss = None
            if closure is not None:
                with torch.enable_grad():
                    self._loss = closure()
            if self._engine.is_cleared(zeros=False):
                self._engine.begin_attempt(attachment)
            self._engine.collect_assigned()
        self._send_writes()
        began = time.monotonic_ns()
        before = self._engine.under_way
        call = self._step_call(attachment, extra_state)
        scalars = (self._hyper_parameters(), self._max_grad_norm)
        self._check_members()
        self._check_backward(attachment)
        edit = self._edit = self._engine.gradient_edit
        if self._max_grad_norm > 0 and edit[1:] != UNBOUNDED:
            raise unsupported(
                f"clip_grad_value_ beside max_grad_norm={self._max_grad_norm}",
                "clip gradients by value or by norm",
            )
        ended = False
        self._phase = Phase.STEPPING
        try:
            self._engine.release_all()
            self._engine.under_way = call
            with profiled("forebay.step", ""):
                timeout = self._engine.timeout
                answer = attachment.step(
                    call.number, *scalars, call.extra_state or b"", timeout, *edit, call.buffers
                )
            _, norm, _, repeated = answer
            ended = True
            if repeated and before is not None:
                call = before  # what was committed
            self._grad_norm = norm if self._max_grad_norm > 0 else None
        except ForebayError as error:
            ended = error.code in GRADIENTS_LOST
            if error.code == "E_OVERFLOW":  # the step is committed nevertheless
                self._extra_state = call.extra_state or None
            if error.code not in OUTCOME_UNKNOWN:
                # this call was refused: an older call is still in flight
                self._engine.under_way = before
            raise
        finally:
            self._phase = Phase.TRAINING
            if ended:
                self._engine.under_way = None
                self._engine.forget_gradients()
                self._engine.after_step()
            for member in self._members:
                if member.trainable:
                    torch.autograd.graph.increment_version(member.tensor)
            self._engine.clock.add("step", "", began)
        self._extra_state, self._pending_state = call.extra_state or None, None
        self._engine.clock.end_step()
        _writes.refuse_within_step(self)
        loss, self._loss = self._loss, None
        return loss

    @property
    def grad_norm(self) -> float | None:
        """Norm of the whole gradient before clipping, of the last step; None without max_grad_norm.

        >>> opt = forebay.attach(model, forebay.AdamW(max_grad_norm=1.0))
        >>> model(inputs).sum().backward()
        >>> opt.step()
        >>> opt.grad_norm > 0
        True
        """
        return self._grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing after step(), which forgets the gradients, and where this rank has none.
        Before step() it drops the gradients of the step and restarts the step: step() on
        another rank that has already delivered some raises E_GRAD_DROPPED. model.zero_grad()
        does the same, when the next backward or step() begins.

        set_to_none  False has no other effect, and a warning: where torch would update a parameter by
                     a gradient of zeros, the parameter is not updated.

        Errors  E_STEP  a step() ended without an answer and has to be repeated first.

        >>> opt = forebay.attach(model)
        >>> model(inputs).sum().backward()
        >>> opt.zero_grad()
        >>> opt.delivered_groups
        0
        """
        attachment = self._live()
        self._engine.refuse_while_under_way("zero_grad()")
        if not set_to_none:
            warnings.warn(
                "zero_grad(set_to_none=False): gradients are forgotten, not kept as zeros: a parameter "
                "without a gradient in the next step is left alone",
                stacklevel=2,
            )
        self._engine.begin_attempt(attachment)

    def _send_writes(self, *, alone: bool = False) -> None:
        engine = self._engine
        if not alone or (engine.world_size == 1 and engine.under_way is None):
            _writes.send(self)

    def _check_backward(self, attachment: Attachment) -> None:
        self._engine.check_reduced(attachment)
        if self._engine.backward == Backward.UNFINISHED:
            attachment.drop_gradients()  # raises also what has ended the session, if anything has
        if self._engine.backward in (Backward.RUNNING, Backward.UNFINISHED):
            raise usage_error(
                "E_GRAD_PARTIAL",
                "step() after a backward that did not come to its end (an exception, Ctrl-C, or it "
                "still runs): only a part of the gradient was delivered",
                "run forward and backward again, or opt.zero_grad() to leave the batch out",
            )

    def _step_call(self, attachment: Attachment, extra_state: bytes | None) -> StepCall:
        """The call under way where this one repeats it. Errors: E_OPTION, E_EXTRA_STATE."""
        own = self._pending_state if extra_state is None else _as_bytes(extra_state)
        under_way = self._engine.under_way
        if under_way is not None and own in (None, under_way.extra_state):
            return under_way
        number = under_way.number if under_way else attachment.committed_step + 1
        return StepCall(number, own, self._buffers.pack(len(own or b""), self._extra_state_bytes))

    def _check_members(self) -> None:
        if self._engine.world is not None:
            self._engine.world.check_group()
        self._guards.check_parameters()
        for member in self._members:
            member.check()
            tensor = member.tensor
            # A parameter frozen after attach gets no more gradients, and is not updated.
            if tensor.requires_grad and not member.trainable:
                raise unsupported(
                    f"parameter {member.name} was frozen at attach and has no states: it would not train",
                    "freeze it after attach, so that it has states; or go on in another job with the states of "
                    "this one (docs/reference/calls.md)",
                )
            if tensor.grad is None and member.arrived:
                for other in self._members:  # as they were: the next call applies them
                    if other.arrived:
                        other.tensor.grad = other.delivered
                raise unsupported(
                    f"the gradient of parameter {member.name} was cleared between backward and "
                    "step(), and others were not: the daemon has it, and it would be applied",
                    "opt.zero_grad() or model.zero_grad() leave a batch out, all gradients of it",
                )
            if tensor.grad is not None and tensor.grad is not member.delivered:
                raise unsupported(
                    f"the gradient of parameter {member.name} was set by hand"
                    + ("" if member.trainable else ", and it was frozen at attach"),
                    "p.grad = None",
                )

    def _announcement(self) -> Callable[[], None]:
        """Says the scalars that step() will have, as far as is known before the backward: the gradient
        is edited as it was in the step before."""
        own = weakref.ref(self)

        def announce() -> None:
            opt = own()
            if opt is None or opt._engine.under_way is not None:
                return
            try:
                rows = opt._hyper_parameters()
            except ForebayError:
                return  # step() raises it
            attachment, timeout = opt._live(), opt._engine.timeout
            attachment.announce_step(attachment.committed_step + 1, rows, timeout, *opt._edit)

        return announce

    def _hyper_parameters(self) -> list[HyperRow]:
        return self._rule._rows(self.param_groups)

    # ----------------------------------------------------------------------------------- reading

    def read_state(self, name: str) -> dict[str, torch.Tensor]:
        """The states of one parameter, decoded to float32 tensors of its shape and named as torch
        names them: "exp_avg" and its like, "step" (how many updates the parameter has had) and,
        if the weights have 16 bits, "master". A frozen parameter has no states: {}. Over several nodes this call
        is a collective: call it on every rank.

        name  as in model.named_parameters(); of a tied parameter any of its names.

        Errors  E_OPTION  no such parameter.

        >>> opt = forebay.attach(model, forebay.AdamW())
        >>> {state: list(values.shape) for state, values in opt.read_state("weight").items()}
        {'exp_avg': [2, 4], 'exp_avg_sq': [2, 4], 'step': []}
        """
        parameter = parameter_named(self._plan, name)
        engine = self._engine
        self._send_writes(alone=True)
        return read_states(
            self._live(),
            parameter,
            engine.timeout,
            lambda state, elements: engine.read_elements(parameter.name, state, elements),
        )

    def state_sha256(self) -> str:
        """SHA-256 over the model, as 64 hexadecimal digits: for each parameter in the model's order
        its name, a zero byte, its bytes, and those of every state as float32; then for each
        buffer of the model's state_dict its name, a zero byte and its bytes. Ranks whose forward
        updates buffers have different ones.

        Over several nodes it is a collective: call it on every rank.

        >>> opt = forebay.attach(model)
        >>> len(opt.state_sha256())
        64
        """
        digest = hashlib.sha256()
        attachment = self._live()
        self._send_writes(alone=True)
        for parameter in self._plan.named:
            digest.update(parameter.name.encode() + b"\0")
            _hash(digest, self._engine.values_of(parameter))
            count = parameter.tensor.numel()
            for state in state_names(attachment, parameter):
                for first in range(0, count, PIECE_ELEMS):
                    piece = range(first, min(first + PIECE_ELEMS, count))
                    _hash(digest, self._engine.read_elements(parameter.name, state, piece)[0])
        for name, buffer in self._buffers.named():
            digest.update(name.encode() + b"\0")
            _hash(digest, buffer.detach().cpu().contiguous())
        return digest.hexdigest()

    def stats(self) -> dict[str, Any]:
        """exposed_wait_s (seconds that the training thread spent in Forebay's calls, those of its hooks
        among them, whether it waited or worked) and timeline ((kind, group, began_ns, ended_ns)
        on CLOCK_MONOTONIC) since the last call; the client's counters since attach.

        >>> opt = forebay.attach(model)
        >>> opt.step()
        >>> [kind for kind, *_ in opt.stats()["timeline"]]
        ['step']
        """
        clock = self._engine.clock
        exposed_ns, clock.reported_ns = clock.exposed_ns - clock.reported_ns, clock.exposed_ns
        timeline = list(clock.timeline)
        clock.timeline.clear()
        counters = self._live().counters()
        if (activations := self._engine.activations) is not None:
            counters["activation_bytes"] = activations.store.used_bytes
            counters["activation_bytes_max"] = activations.store.used_bytes_max
            counters["activation_bytes_stayed"] = activations.stayed_bytes
        return {**counters, "exposed_wait_s": exposed_ns / 1e9, "timeline": timeline}

    def metrics(self, *, daemon: bool = True) -> dict[str, float]:
        """Numbers for TensorBoard, W&B and the like: a flat dict with stable names that end with
        their unit.

        forebay/step                    the committed step
        forebay/step_s                  wall time of the newest step, from the end of the one before
        forebay/exposed_wait_s          of that, the seconds spent in Forebay's calls and hooks
        forebay/grad_norm               before clipping, with max_grad_norm
        forebay/activation_bytes        with activation_bytes of forebay.Memory: in the daemon's memory now

        and of the daemon, for all jobs of the node but where it says "job":

        forebay/update_s                the job's newest step, from the last rank's call on
        forebay/dram_used_bytes         forebay/dram_limit_bytes, forebay/job_dram_bytes
        forebay/swap_used_bytes         of all paths
        forebay/swap_read_bytes_per_s   between this call and the one before; not in the first
        forebay/swap_write_bytes_per_s  the same

        daemon  False: what this process knows alone, in microseconds. Else the daemon is asked once,
                which takes milliseconds: every tenth step is often enough. While it does not
                answer, its numbers are missing.

        >>> opt = forebay.attach(model)
        >>> opt.step()
        >>> opt.metrics()["forebay/step"], opt.metrics(daemon=False)["forebay/step_s"] > 0
        (1.0, True)
        """
        attachment, engine = self._live(), self._engine
        values = {
            "forebay/step": float(attachment.committed_step),
            "forebay/step_s": engine.clock.step_ns / 1e9,
            "forebay/exposed_wait_s": engine.clock.step_exposed_ns / 1e9,
        }
        if self._grad_norm is not None:
            values["forebay/grad_norm"] = self._grad_norm
        if engine.activations is not None:
            values["forebay/activation_bytes"] = float(engine.activations.store.used_bytes)
        if daemon and engine.node is not None:
            values |= engine.node.metrics()
        return values

    def offload_activations(self) -> AbstractContextManager[Any]:
        """While it is entered, what a forward keeps for its backward goes to the daemon's memory, at most
        activation_bytes of forebay.Memory, and returns to the device for the backward: the same bits. What
        does not fit, parameters, tensors below 64 KiB, and those that are no plain memory (conjugated,
        quantized, nested, subclasses) stay on the device. With torch.utils.checkpoint, what each
        checkpoint keeps goes to the daemon's memory.

        What several layers of a forward keep is copied once. Memory that is filled again where torch does
        not see it (through numpy, or x.data) while an older graph lives has to be used by a new forward
        of the model, or after this was entered again.

        stats() has activation_bytes (in the daemon's memory now), activation_bytes_max, and
        activation_bytes_stayed of what did not fit.

        Errors  E_OPTION       attach was called without activation_bytes of forebay.Memory.
                E_UNSUPPORTED  of a backward: a tensor that it needs was changed in place.

        >>> ranks = torch.distributed
        >>> ranks.init_process_group("gloo", store=ranks.HashStore(), rank=0, world_size=1)
        >>> opt = forebay.attach(model, mode="sharded", memory=forebay.Memory(activation_bytes=1 << 20))
        >>> with opt.offload_activations():
        ...     loss = model(inputs).square().mean()
        >>> loss.backward()
        >>> opt.step()
        >>> ranks.destroy_process_group()
        """
        self._live()
        if self._engine.activations is None:
            raise usage_error(
                "E_OPTION",
                "offload_activations() of an attachment without room for them",
                "forebay.attach(..., memory=forebay.Memory(activation_bytes=2 << 30))",
            )
        return self._engine.activations.offload()

    # ----------------------------------------------------------------------- a pause in training

    def _rest(self) -> None:
        """Makes the model a plain one until _resume(): it can be merged, converted, loaded. Its parameters are a copy
        in this process's memory meanwhile; the session continues. Shared attachment alone."""
        if self._phase != Phase.TRAINING:
            return
        with torch.inference_mode(False):
            for member in self._members:
                member.make_private()
        while self._handles:
            self._handles.pop().remove()
        self._guards.remove()
        self._phase = Phase.RESTING

    def _resume(self) -> None:
        """After _rest(): the job continues with the values that the model has now, on each rank the same.

        Errors  E_UNSUPPORTED  a parameter was replaced or converted meanwhile.
        """
        if self._phase != Phase.RESTING:
            return
        attachment, model = self._live(), self._guards.model
        now = self._guards.outside_ids() | {id(tensor) for tensor in (model.parameters() if model is not None else ())}
        members = [member for member in self._members if isinstance(member, WindowMember)]
        for member in members:
            if id(member.tensor) not in now or not member.fits():
                raise unsupported(
                    f"parameter {member.name} was replaced, or has another type, shape or device than at attach",
                    "opt.detach(), then attach the model as another job",
                )
        assert model is not None
        with torch.inference_mode(False), torch.no_grad():
            for member, window in zip(members, windows_of(self._plan, attachment)):
                member.bind(window)
        self._guards.put(model, self._plan)
        self._handles += install(self._engine, self._plan.hook_points) + drop_empty_gradients(self._plan.named)
        self._phase = Phase.TRAINING

    # ----------------------------------------------------------------------------------- the end

    def detach(self) -> None:
        """Gives every parameter a private copy, removes hooks and guards, ends the session.

        Errors  E_NOT_READY    it is detached already.
                E_DAEMON_GONE  the daemon has died; the model is detached nevertheless.

        >>> opt = forebay.attach(model)
        >>> opt.detach()
        >>> model = model.half()
        """
        attachment = self._live()
        with torch.inference_mode(False):
            for member in self._members:
                member.make_private()
        self._phase, self._engine.attachment = Phase.DETACHED, None
        self._finalizer()
        _attached.discard(self)
        attachment.detach()

    def _leave(self) -> None:
        """Ends the session as the process ends."""
        if self._phase == Phase.STEPPING:
            return  # another thread waits in step, and detach() would wait for it
        self._finalizer.detach()
        self._phase = Phase.DETACHED
        _end_session(self._engine, os.getpid())

    # ------------------------------------------------ of torch.optim.Optimizer, refused or limited

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the layout of an attached model is fixed.

        Errors  E_UNSUPPORTED  always.

        >>> opt = forebay.attach(model)
        >>> opt.add_param_group({"params": []})
        Traceback (most recent call last):
        forebay.UsageError: error[E_UNSUPPORTED]: add_param_group on an attached model: its layout is fixed
        hint: list all groups at attach, or go on in another job with the states of this one (docs/reference/calls.md)
        """
        if self._phase != Phase.CONSTRUCTING:
            raise unsupported(
                "add_param_group on an attached model: its layout is fixed",
                "list all groups at attach, or go on in another job with the states of this one (docs/reference/calls.md)",
            )
        super().add_param_group(param_group)


def _as_bytes(value: Any) -> bytes | None:
    """None, or the bytes of a bytes-like object."""
    if value is None:
        return None
    try:
        return memoryview(value).tobytes()
    except TypeError:
        raise usage_error(
            "E_OPTION",
            f"extra_state is of type {type(value).__name__}, not bytes",
            "pickle.dumps(state), or json.dumps(state).encode()",
        ) from None


def _end(engine: Engine, handles: list[RemovableHandle], guards: Guards, process: int) -> None:
    """Removes hooks and guards; where the session still runs (the optimizer was dropped without
    detach()) gives what lives of the model private parameters and ends it."""
    for handle in handles:
        handle.remove()
    engine.end()
    if engine.attachment is not None:
        guards.give_private_copies()
    guards.remove()
    _end_session(engine, process)


def _end_session(engine: Engine, process: int) -> None:
    attachment, engine.attachment = engine.attachment, None
    if attachment is not None and os.getpid() == process:
        try:
            attachment.detach()
        except ForebayError:
            pass  # the daemon frees what a lost session held


def _hash(digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    """Adds the bytes of a contiguous tensor of the processor's, without a copy and without numpy."""
    assert tensor.device.type == "cpu", tensor.device
    size = tensor.numel() * tensor.element_size()
    digest.update((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))


@atexit.register
def _leave_all() -> None:
    for optimizer in list(_attached):
        optimizer._leave()

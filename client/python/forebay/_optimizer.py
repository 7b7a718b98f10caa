"""The optimizer that attach() returns."""

import atexit
import ctypes
import hashlib
import os
import time
import warnings
import weakref

import torch

from .errors import ForebayError, unsupported, usage_error

PIECE_ELEMS = 1 << 20  # states are read back through the client in pieces of this many
SCALE_ELEMS = 128  # of format int8: elements that share a scale
GRADIENTS_GONE = {
    "E_NONFINITE",
    "E_OVERFLOW",
}  # after these the step starts anew; after others it can be repeated

_attached = weakref.WeakSet()


class ForebayOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose state and arithmetic are the daemon's.

    step() reads lr and its like from param_groups at each call, so torch's LR
    schedulers work. A parameter without a gradient in a step counts as zero if another one of its
    group has one (torch would skip it); a group without any is skipped by all.

    Threads  One thread trains. Errors: see forebay.ForebayError.
    """

    is_forebay = True

    def __init__(
        self, param_groups, defaults, *, plan, engine, handles, guards, rule, frozen_group
    ):
        self._ready = False
        super().__init__(param_groups, defaults)
        self._plan, self._engine = plan, engine
        self._attachment = engine.attachment
        self._rule = rule  # one of forebay.optimizers
        self._max_grad_norm = float(rule.max_grad_norm or 0.0)
        self._grad_norm = None
        self._frozen_group = (
            frozen_group  # parameters that take no gradient have a group of their own, with lr 0
        )
        self._members = [member for group in engine.groups for member in group.members]
        self._extra_state = bytes(self._attachment.extra_state or b"") or None
        self._pending_state = None
        self._guards = guards
        self._stepping = False
        self._step_under_way = None  # number of a step that was asked for, its outcome unknown
        self._process = os.getpid()
        self._ready = True
        engine.owner = self  # lives as long as a hook does
        self._strip = weakref.finalize(self, _strip, handles, guards)
        _attached.add(self)

    # ---------------------------------------------------------------------------------- the step

    @property
    def committed_step(self):
        """The last step that no crash of a trainer undoes."""
        return self._live().committed_step

    @property
    def extra_state(self):
        """What was committed with committed_step by this rank, or None. What is assigned commits
        with the next step."""
        return self._extra_state

    @extra_state.setter
    def extra_state(self, value):
        self._pending_state = _as_bytes(value)

    @property
    def delivered_groups(self):
        """Groups whose gradient the daemon has, of the step that is being gathered."""
        return self._engine.delivered

    def step(self, closure=None, extra_state=None):
        """Applies one step over all ranks, exactly once; returns when it is committed.

        A call that ended without an answer (E_TIMEOUT, Ctrl-C) is repeated by the next one: it asks
        for the same step again, never for the next.

        extra_state  bytes that commit with the step and come back from a later attach.
        """
        if closure is not None:
            raise unsupported(
                "step(closure): the daemon cannot evaluate the model again",
                "call backward() yourself, then opt.step(extra_state=...)",
            )
        attachment = self._live()
        began = time.monotonic_ns()
        engine = self._engine
        extra = self._pending_state if extra_state is None else _as_bytes(extra_state)
        self._check_members()
        gone = False
        self._stepping = True
        try:
            engine.deliver_open()
            engine.release_all()
            if self._step_under_way is None:
                self._step_under_way = attachment.committed_step + 1
            _, norm, _, _ = attachment.step(
                self._step_under_way,
                self._hyper_parameters(),
                self._max_grad_norm,
                extra or b"",
                engine.timeout,
            )
            gone = True
            self._grad_norm = norm if self._max_grad_norm > 0 else None
        except ForebayError as error:
            gone = error.code in GRADIENTS_GONE
            if error.code == "E_OVERFLOW":  # the step is committed nevertheless
                self._extra_state = extra or None
            raise
        finally:
            self._stepping = False
            if gone:
                self._step_under_way = None
                self._forget_gradients(attachment)
            for member in self._members:
                if member.trainable:
                    torch.autograd.graph.increment_version(member.tensor)
            engine.clock.add("step", "", began)
        self._extra_state, self._pending_state = (extra or None), None

    @property
    def grad_norm(self):
        """Norm of the whole gradient before clipping, of the last step; None without
        max_grad_norm."""
        return self._grad_norm

    def zero_grad(self, set_to_none=True):
        """Nothing after step(), which forgets the gradients. Before it, drops those that the daemon
        has not got yet. Errors: E_UNSUPPORTED where it has some of this step."""
        engine = self._engine
        if engine.delivered:
            raise unsupported(
                f"zero_grad() before step(): the daemon has the gradients of {engine.delivered} "
                "groups already, and they would be applied",
                "call step() after each backward; leave a bad batch out before its backward",
            )
        self._forget_gradients(self._live())

    def _forget_gradients(self, attachment):
        """Ours first: they are forgotten also where the client's call fails."""
        self._engine.forget_gradients()
        attachment.drop_gradients()

    def _check_members(self):
        self._guards.check_places()
        for member in self._members:
            self._engine.check_place(member)
            tensor = member.tensor
            if tensor.requires_grad != member.trainable:
                raise unsupported(
                    f"requires_grad of parameter {member.name} was changed after attach",
                    "opt.detach(), change it, attach as another job",
                )
            if tensor.grad is None and member.arrived:
                for other in self._members:  # as they were: the next call applies them
                    if other.arrived:
                        other.tensor.grad = other.taken
                raise unsupported(
                    f"the gradient of parameter {member.name} was cleared between backward and "
                    "step(): the daemon has it, and it would be applied",
                    "call step() after each backward; leave a bad batch out before its backward",
                )
            if tensor.grad is not None and tensor.grad is not member.taken:
                raise unsupported(
                    f"the gradient of parameter {member.name} was set by hand before step()",
                    "leave p.grad alone, or p.grad = None",
                )

    def _hyper_parameters(self):
        groups = list(self.param_groups)
        if self._frozen_group:
            groups.append({**self.defaults, "lr": 0.0, "weight_decay": 0.0})
        return self._rule.rows(groups)

    # ----------------------------------------------------------------------------------- reading

    def read_state(self, name):
        """{plane: tensor} of one parameter: its moments under torch's names (those of format int8
        decoded to float32), and its remainder or master where the format has one."""
        parameter = next((p for p in self._plan.parameters if p.name == name), None)
        if parameter is None:
            raise usage_error(
                "E_OPTION",
                f"no parameter {name} in the attached model",
                "model.named_parameters() names them; of a tied one the first name counts",
            )
        raw = {
            plane: torch.cat(list(self._pieces(parameter, number)))
            for number, (plane, _) in enumerate(self._live().planes)
        }
        shape, count = parameter.tensor.shape, parameter.tensor.numel()
        return {
            plane: _decoded(values, raw.get(f"{plane}_scale"))[:count].view(shape)
            for plane, values in raw.items()
            if not plane.endswith("_scale")
        }

    def _pieces(self, parameter, plane):
        """One plane of a parameter, read back through the client; in whole scales."""
        count = parameter.tensor.numel()
        if any(elems > 1 for _, elems in self._live().planes):
            count = -(-count // SCALE_ELEMS) * SCALE_ELEMS
        for begin in range(0, count, PIECE_ELEMS):
            elems = min(PIECE_ELEMS, count - begin)
            yield torch.from_dlpack(
                self._live().read_state(
                    parameter.group, plane, parameter.offset + begin, elems, self._engine.timeout
                )
            )

    def state_sha256(self):
        """SHA-256 over the model: for each parameter in the model's order its name, a zero byte,
        its bytes, and those of every plane of its state."""
        planes = range(len(self._live().planes))
        digest = hashlib.sha256()
        for parameter in self._plan.named:
            digest.update(parameter.name.encode() + b"\0")
            _hash(digest, parameter.tensor)
            for plane in planes:
                for piece in self._pieces(parameter, plane):
                    _hash(digest, piece)
        return digest.hexdigest()

    def stats(self):
        """exposed_wait_s (wall time of the training thread inside our hooks and calls) and timeline
        ((kind, group, began_ns, ended_ns) on CLOCK_MONOTONIC) since the last call; the client's
        counters since attach."""
        clock = self._engine.clock
        exposed_ns, clock.exposed_ns = clock.exposed_ns, 0
        timeline = list(clock.timeline)
        clock.timeline.clear()
        return {**self._live().counters(), "exposed_wait_s": exposed_ns / 1e9, "timeline": timeline}

    # ----------------------------------------------------------------------------------- the end

    def detach(self):
        """Gives every parameter a private copy, takes hooks and guards away, ends the session."""
        attachment = self._live()
        for member in self._members:
            member.tensor.grad = None
            member.tensor.data = member.tensor.detach().clone()
        self._strip()
        self._attachment = self._engine.attachment = None
        _attached.discard(self)
        attachment.detach()

    def _live(self):
        if self._attachment is None:
            raise usage_error(
                "E_NOT_READY", "this optimizer is detached", "forebay.attach(model, ...) again"
            )
        return self._attachment

    def _leave(self):
        if self._stepping:
            return  # another thread waits in step, and detach() would wait for it
        attachment, self._attachment, self._engine.attachment = self._attachment, None, None
        if attachment is not None and os.getpid() == self._process:
            try:
                attachment.detach()
            except ForebayError:
                pass  # the process ends; the daemon frees what a lost session held

    # ------------------------------------------------------------------------- of
    # torch.optim.Optimizer, refused

    def add_param_group(self, param_group):
        if self._ready:
            raise unsupported(
                "add_param_group on an attached model: its layout is fixed",
                "list all groups at attach",
            )
        super().add_param_group(param_group)

    def state_dict(self):
        warnings.warn(
            "state_dict() of an attached optimizer holds param_groups alone: moments are the "
            "daemon's and come back with forebay.attach; read_state() reads them",
            stacklevel=2,
        )
        return super().state_dict()

    def load_state_dict(self, state_dict):
        raise unsupported(
            "load_state_dict on the optimizer of an attached model: its state is the daemon's",
            "attach again to go on at the committed step; set lr in opt.param_groups",
        )


def _as_bytes(value):
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


def _decoded(values, scales):
    """Values of one plane; codes of format int8 (cpu_adam/update_kernel.h) as float32."""
    if scales is None:
        return values
    byte = torch.arange(SCALE_ELEMS)
    place = 4 * (byte % 64 // 2) + 2 * (byte // 64) + byte % 2
    codes = values.view(-1, SCALE_ELEMS)[:, place]
    if codes.dtype == torch.uint8:  # of roots
        return (codes.clamp(min=1).float() * scales[:, None]).square().flatten()
    return (codes.float() * scales[:, None]).flatten()


def _strip(handles, guards):
    for handle in handles:
        handle.remove()
    guards.remove()


def _hash(digest, tensor):
    """Adds the bytes of a contiguous tensor, without a copy and without numpy."""
    size = tensor.numel() * tensor.element_size()
    digest.update((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))


@atexit.register
def _leave_all():
    for optimizer in list(_attached):
        optimizer._leave()

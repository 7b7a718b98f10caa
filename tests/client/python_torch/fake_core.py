# SPDX-License-Identifier: Apache-2.0
"""A node in this process with the interface of forebay._core: jobs, ranks (one thread each), AdamW
in torch.

As careful as the daemon where the Python half can go wrong: leases, slots, repeated and missing
gradients, step numbers, ranks that disagree, groups nobody delivered. No memory is protected: a
write into a window is not noticed.
"""

import re
import threading

import torch

from forebay import errors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAGE_BYTES = 4096

jobs = {}


def refusal(code, message):
    return errors.usage_error(code, message, "ask the daemon for a better hint")


def dropped():
    error = refusal("E_GRAD_DROPPED", "another rank has begun the step anew")
    error.retryable = True
    return error


def reset():
    jobs.clear()


class Job:
    def __init__(self, world_size, dtype, format_, params, group_names):
        self.layout = (
            world_size,
            dtype,
            format_,
            [tuple(map(str, p)) for p in params],
            group_names,
        )
        self.world_size, self.dtype, self.format = world_size, DTYPES[dtype], format_
        self.params, self.group_names = params, group_names
        self.offsets, self.elems = [], [0] * len(group_names)
        for _, shape, group, _, _ in params:
            self.offsets.append(self.elems[group])
            self.elems[group] += torch.Size(shape).numel()
        width = torch.empty((), dtype=self.dtype).element_size()
        self.weights_offsets, end = [], 0
        for elems in self.elems:
            self.weights_offsets.append(end)
            end += -(-elems * width // PAGE_BYTES) * PAGE_BYTES
        self.weights = [torch.zeros(elems, dtype=self.dtype) for elems in self.elems]
        self.masters = [torch.zeros(elems) for elems in self.elems]
        self.moments = [[torch.zeros(elems), torch.zeros(elems)] for elems in self.elems]
        self.updates = [0] * len(params)
        self.ready = False
        self.committed_step = 0
        self.extra_state = {}
        self.changed = threading.Condition()
        self.sessions = {}
        self.faults = {}
        self.exchanges = {}  # by number, what each rank has passed
        self.begin_attempt(0)

    def begin_attempt(self, number):
        """Of the step after committed_step: discards what the ranks have brought for it."""
        self.attempt = number
        self.faults = self.faults if number else {}  # of attempts that were not finite
        self.gradients = [{} for _ in self.params]  # of each parameter, by pass and rank
        self.step_calls = {}
        self.asked = set()  # ranks that have asked for a norm
        with self.changed:
            self.changed.notify_all()

    def sums(self):
        sums = []
        for contributions in self.gradients:
            total = None
            for turn in sorted(contributions):
                part = contributions[turn].float()
                total = part.clone() if total is None else total + part
            sums.append(total)
        return sums

    def norm_of(self, sums):
        squares = sum(float(s.double().pow(2).sum()) for s in sums if s is not None)
        return squares**0.5 / self.world_size

    def bad_groups(self):
        return [
            self.params[param][2]
            for param, turns in enumerate(self.gradients)
            for gradient in turns.values()
            if not gradient.isfinite().all()
        ]

    def apply(self, hyper, max_grad_norm, grad_scale, grad_min, grad_max):
        sums = self.sums()
        norm = self.norm_of(sums) * grad_scale
        scale = grad_scale / self.world_size
        clipped = max_grad_norm > 0 and norm > max_grad_norm
        if clipped:
            scale *= max_grad_norm / (norm + 1e-6)
        for param, total in enumerate(sums):
            if total is None:
                continue
            self.updates[param] += 1
            _, shape, group, param_group, _ = self.params[param]
            span = slice(self.offsets[param], self.offsets[param] + torch.Size(shape).numel())
            gradient = (total * scale).clamp(grad_min, grad_max)
            self.update(group, span, gradient, self.updates[param], hyper[param_group])
        return norm, clipped

    def update(self, number, span, gradient, t, hyper):
        lr, beta1, beta2, eps, weight_decay = (
            hyper[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")
        )
        w = self.masters[number][span]
        m, v = (plane[span] for plane in self.moments[number])
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        d = v.sqrt() / (1 - beta2**t) ** 0.5 + eps
        w.mul_(1 - lr * weight_decay).sub_(lr / (1 - beta1**t) * m / d)
        self.weights[number][span] = w.to(self.dtype)


class Attachment:
    def __init__(self, job, rank, extra_state_bytes):
        self.job, self.rank, self.extra_state_bytes = job, rank, extra_state_bytes
        self.writes_initial = False
        self.groups = list(zip(job.weights_offsets, job.elems))
        self.param_offsets = list(job.offsets)
        self.states = ["master", "exp_avg", "exp_avg_sq"]
        self.committed_step, self.went_back_from = job.committed_step, 0
        self.extra_state = job.extra_state.get(rank, b"")
        self.rank0_extra_state = job.extra_state.get(0, b"")
        self.leases = {}
        self.attempt = job.attempt
        self.present = set()  # parameters that were delivered in this pass
        self.passes, self.delivered = 0, False  # that were begun; in this attempt
        self.next_lease = 1
        self.exchanges = 0
        self.alive = True
        self.calls = {"fetch": 0, "release": 0, "add_gradient": 0, "grad_norm": 0, "step": 0}

    def _check(self, call=None):
        if not self.alive or self.job.sessions.get(self.rank) is not self:
            error = errors.UnavailableError("error[E_RANK_LOST]: another rank of the job ended")
            error.code, error.hint, error.retryable = "E_RANK_LOST", "attach again", True
            raise error
        if call:
            self.calls[call] += 1

    has_written_weights = False  # its memory is the job's: no page becomes a rank's own

    def allow_weight_writes(self):
        pass

    def weights(self, group):
        return self.job.weights[group]

    def write_initial(self, group, values, _timeout):
        self._check()
        assert self.writes_initial and not self.job.ready
        self.job.weights[group].copy_(values)
        self.job.masters[group].copy_(values.float())

    def initial_done(self, _timeout):
        with self.job.changed:
            self.job.ready = True
            self.job.changed.notify_all()

    def fetch(self, group, _timeout):
        self._check("fetch")
        lease, self.next_lease = self.next_lease, self.next_lease + 1
        self.leases[lease] = group
        return lease

    def release(self, lease):
        self._check("release")
        if self.leases.pop(lease, None) is None:
            raise refusal("E_LEASE", f"lease {lease} is not open")

    def release_all(self):
        for lease in list(self.leases):
            self.release(lease)

    def add_gradient(self, param, values, _timeout):
        self._check("add_gradient")
        job = self.job
        assert values.dtype == job.dtype and tuple(values.shape) == tuple(job.params[param][1])
        if self.rank in job.asked and self.attempt == job.attempt:
            raise refusal("E_STEP", f"rank {self.rank} has asked for a norm")
        if param in self.present:
            raise refusal("E_GRAD_REPEAT", f"a second gradient of parameter {job.params[param][0]}")
        with job.changed:
            if self.attempt > job.attempt:
                job.begin_attempt(self.attempt)
            self.present.add(param)
            self.delivered = True
            if self.attempt == job.attempt:
                job.gradients[param][self.passes, self.rank] = values.clone().flatten()

    def flush_gradients(self, group):
        assert 0 <= group < len(self.job.group_names)

    def begin_pass(self):
        self._check()
        if self.rank in self.job.asked and self.attempt == self.job.attempt:
            raise refusal("E_STEP", f"rank {self.rank} has asked for a norm")
        self.passes += 1
        self.present.clear()

    def drop_gradients(self):
        self._begin_attempt(self.attempt + self.delivered)

    def _begin_attempt(self, number):
        self.attempt, self.passes, self.delivered = number, 0, False
        self.present.clear()

    def _lost(self):
        """Why the attempt of this rank is over."""
        fault = self.job.faults.get(self.attempt)
        return refusal("E_NONFINITE", fault) if fault else dropped()

    def _check_finite(self):
        """Ends the attempt for all ranks where a gradient is not finite."""
        job = self.job
        bad = job.bad_groups()
        if bad and self.attempt == job.attempt:
            job.faults[job.attempt] = f"gradient for group {bad[0]} ({job.group_names[bad[0]]})"
            job.begin_attempt(job.attempt + 1)

    def grad_norm(self, param, timeout):
        self._check("grad_norm")
        job = self.job
        with job.changed:
            if self.attempt > job.attempt:
                job.begin_attempt(self.attempt)
            self._check_finite()
            if self.attempt == job.attempt:
                job.asked.add(self.rank)
                job.changed.notify_all()
            if not job.changed.wait_for(
                lambda: (
                    len(job.asked | set(job.step_calls)) == job.world_size
                    or self.attempt < job.attempt
                    or not self.alive
                ),
                timeout,
            ):
                raise refusal("E_TIMEOUT", "a norm")
            if self.attempt < job.attempt:
                raise self._lost()
            sums = job.sums()
            return job.norm_of(sums if param is None else [sums[param]])

    def step(self, t, hyper, max_grad_norm, extra_state, timeout, *edit):
        self._check("step")
        job = self.job
        if len(extra_state) > self.extra_state_bytes:
            raise refusal(
                "E_EXTRA_STATE", f"{len(extra_state)} bytes, room for {self.extra_state_bytes}"
            )
        assert not self.leases, "a lease is open at step"
        assert all(
            any(p[3] == number for p in job.params) is False or number < len(hyper)
            for number in range(64)
        ), "a parameter group has no hyper-parameters"
        with job.changed:
            if t == job.committed_step:
                return t, 0.0, False, True
            if t != job.committed_step + 1:
                raise refusal("E_STEP", f"step {t} after {job.committed_step}")
            if self.attempt > job.attempt:
                job.begin_attempt(self.attempt)
            self._check_finite()
            if self.attempt < job.attempt:
                error = self._lost()
                self._begin_attempt(job.attempt)
                raise error
            job.step_calls[self.rank] = (hyper, max_grad_norm, extra_state)
            job.changed.notify_all()
            if len(job.step_calls) == job.world_size:
                job.norm = job.apply(hyper, max_grad_norm, *edit)
                job.extra_state = {rank: call[2] for rank, call in job.step_calls.items()}
                job.committed_step = t
                job.begin_attempt(0)
            elif not job.changed.wait_for(
                lambda: (
                    job.committed_step >= t or self.attempt < job.attempt or not self.alive
                ),
                timeout,
            ):
                raise refusal("E_TIMEOUT", f"step {t}")
            if job.committed_step < t and self.alive:
                error = self._lost()
                self._begin_attempt(job.attempt)
                raise error
        self._check()
        self.committed_step = t
        self._begin_attempt(0)  # at the next step; another rank may be further by now
        return t, *job.norm, False

    def read_state(self, param, state, first, elems, _timeout=0):
        job = self.job
        index = [name for name, *_ in job.params].index(param)
        group, begin = job.params[index][2], job.offsets[index] + first
        plane = job.masters[group]
        if state != "master":
            plane = job.moments[group][0 if state == "exp_avg" else 1]
        return plane[begin : begin + elems].clone(), job.updates[index]

    def write_state(self, group, first, state, values, _timeout):
        self._check()
        job = self.job
        span = slice(first, first + len(values))
        if state == "master":
            job.masters[group][span] = values
            job.weights[group][span] = values.to(job.dtype)
        else:
            job.moments[group][0 if state == "exp_avg" else 1][span] = values

    def write_updates(self, param, updates, _timeout):
        self._check()
        self.job.updates[param] = updates

    def exchange(self, own, timeout):
        self._check()
        job = self.job
        with job.changed:
            passed = job.exchanges.setdefault(self.exchanges, {})
            passed[self.rank] = own
            job.changed.notify_all()
            if not job.changed.wait_for(lambda: len(passed) == job.world_size, timeout):
                raise refusal("E_TIMEOUT", "exchange")
        self.exchanges += 1
        return [passed[rank] for rank in range(job.world_size)]

    def counters(self):
        return {"rpc_calls": 1, "wait_ns_total": 0, **self.calls}

    def detach(self):
        job = self.job
        if self.alive and (
            self.rank in job.step_calls or self.delivered
        ):
            self.kill()  # it was part of the step that is being gathered
        self.alive = False
        if job.sessions.get(self.rank) is self:
            del job.sessions[self.rank]

    def kill(self):
        """What the daemon does when this session's process dies: the gathering step is dropped,
        others are fenced."""
        job = self.job
        with job.changed:
            job.begin_attempt(0)
            for session in job.sessions.values():
                session.alive = False
            job.sessions.clear()
            job.changed.notify_all()


def attach(
    _socket,
    job_name,
    rank,
    world_size,
    dtype,
    optimizer,
    format_,
    _seed,
    params,
    group_names,
    _grad_arena_bytes,
    extra_state_bytes,
    timeout,
    run,
    resume,
    durability="",
    daemon_wait=None,
    accumulate=False,
):
    assert isinstance(accumulate, bool)
    assert optimizer == "adamw"
    if (dtype, format_) not in {("float32", "fp32"), ("bfloat16", "exact")}:
        raise refusal("E_OPTION", f"format {format_} does not support {dtype} parameters")
    if durability and not re.fullmatch("memory|step|epoch=[1-9][0-9]{0,5}", durability):
        raise refusal("E_OPTION", f'"{durability}" is no level of durability')
    assert [p[2] for p in params] == sorted(p[2] for p in params), "groups ascend"
    wanted = Job(world_size, dtype, format_, params, group_names)
    job = jobs.setdefault(job_name, wanted)
    if job.layout != wanted.layout:
        raise refusal("E_LAYOUT", "another layout")
    if job.ready and job.run != run and not resume:
        raise refusal("E_JOB_EXISTS", f"job {job_name} is another run's, at {job.committed_step}")
    job.run = run
    session = Attachment(job, rank, extra_state_bytes)
    with job.changed:
        if not job.ready and rank == 0:
            session.writes_initial = True
        elif not job.ready and not job.changed.wait_for(lambda: job.ready, timeout):
            raise refusal("E_TIMEOUT", "attach")
        job.sessions[rank] = session
    return session


def status(_socket, _timeout=0):
    memory = {"used_bytes": 0, "limit_bytes": 1 << 30, "arenas": []}
    swap = [{"read_bytes": 0, "written_bytes": 0, "used_bytes": 0}]
    return {"memory": memory, "swap": swap, "jobs": []}


def trace(_socket, _job):
    return []

# SPDX-License-Identifier: Apache-2.0
"""The reader that attach_reader() returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .._base import read_elements
from .._plan import part_of
from ..errors import ForebayTimeoutError, make_error, usage_error

if TYPE_CHECKING:
    from .._core import Attachment
    from .._plan import Parameter, Plan


class Reader:
    """Reads a job beside its ranks: its weights into a model of this process, and its states.

    It has no rank: step's barrier does not count it and it delivers nothing. A step waits for a
    copy of its weights that is under way, at most the daemon's reader.lease_max; then this session
    ends.

    Threads  One.
    Errors   See forebay.ForebayError.

    >>> opt = forebay.attach(model)
    >>> reader = forebay.attach_reader(torch.nn.Linear(4, 2))
    >>> reader.committed_step
    0
    """

    def __init__(self, plan: Plan, attachment: Attachment, timeout: float) -> None:
        self._plan, self._attachment, self._timeout = plan, attachment, timeout
        # members of each group
        self._members: list[list[Parameter]] = [[] for _ in plan.group_names]
        for parameter, offset in zip(plan.parameters, attachment.param_offsets):
            parameter.offset = offset
            self._members[parameter.group].append(parameter)

    @property
    def committed_step(self) -> int:
        """The newest step that this session knows of; load_weights() asks the daemon.

        >>> opt = forebay.attach(model)
        >>> forebay.attach_reader(torch.nn.Linear(4, 2)).committed_step
        0
        """
        return self._attachment.committed_step

    def load_weights(self) -> int:
        """Copies the weights of the newest committed step into the model and returns that step. All
        are of one step: they are copied again where one was committed meanwhile. Buffers stay as
        they are.

        Errors  E_TIMEOUT  each copy within the time limit met another step; the model has the
                           weights of several steps now.

        >>> opt = forebay.attach(model)
        >>> model(inputs).sum().backward()
        >>> opt.step()
        >>> other = torch.nn.Linear(4, 2)
        >>> forebay.attach_reader(other).load_weights()
        1
        >>> torch.equal(other.weight, model.weight)
        True
        """
        deadline = time.monotonic() + self._timeout
        while True:
            steps = {self._copy_group(number) for number in range(len(self._members))}
            if len(steps) == 1:
                return steps.pop()
            _check_time("copy of the weights", deadline, self._timeout)

    def _copy_group(self, number: int) -> int:
        # An update waits for the lease. Ctrl-C gives it back too, unless it comes between these two
        # lines: reader.lease_max then ends the session.
        lease = self._attachment.fetch(number, self._timeout)
        try:
            step = self._attachment.committed_step
            view = self._attachment.weights(number)
            weights = torch.from_dlpack(view)  # type: ignore[attr-defined]
            with torch.no_grad():
                for parameter in self._members[number]:
                    parameter.tensor.copy_(part_of(weights, parameter))
        finally:
            self._attachment.release(lease)
        return step

    def read_state(self, name: str) -> dict[str, torch.Tensor]:
        """The states of one parameter, as ForebayOptimizer.read_state() returns them. All are of
        one step: they are read again where one was committed meanwhile.

        Errors  E_OPTION   no such parameter.
                E_TIMEOUT  each read within the time limit met another step.

        >>> opt = forebay.attach(model)
        >>> sorted(forebay.attach_reader(torch.nn.Linear(4, 2)).read_state("bias"))
        ['exp_avg', 'exp_avg_sq', 'step']
        """
        return read_states(self._attachment, parameter_named(self._plan, name), self._timeout)

    def detach(self) -> None:
        """Ends the session; the model keeps its values.

        >>> opt = forebay.attach(model)
        >>> forebay.attach_reader(torch.nn.Linear(4, 2)).detach()
        """
        self._attachment.detach()


def parameter_named(plan: Plan, name: str) -> Parameter:
    """The parameter of this name. Errors: E_OPTION if the plan has none."""
    if name in plan.by_name:
        return plan.by_name[name]
    raise usage_error(
        "E_OPTION",
        f"no parameter {name} in the attached model",
        "model.named_parameters() names them",
    )


def state_names(attachment: Attachment, parameter: Parameter) -> list[str]:
    """Names of the states that are not the weights themselves."""
    if not parameter.trainable:
        return []
    wide = (parameter.weights or parameter.tensor.dtype) == torch.float32
    return [state for state in attachment.states if state != "master" or not wide]


def read_states(
    attachment: Attachment,
    parameter: Parameter,
    timeout: float,
    read: Callable[[str, range], tuple[torch.Tensor, int]] | None = None,
) -> dict[str, torch.Tensor]:
    """Every state of a parameter in its shape, and "step"; all of one step, which has changed them
    where the number of updates differs. Errors: E_TIMEOUT.

    read  Another way to read elements of a state than from this node's daemon alone.
    """

    def here(state: str, elements: range) -> tuple[torch.Tensor, int]:
        return read_elements(attachment, parameter.name, state, elements, timeout)

    names = state_names(attachment, parameter)
    if not names:
        return {}
    everything = range(parameter.tensor.numel())
    deadline = time.monotonic() + timeout
    while True:
        found = [(read or here)(name, everything) for name in names]
        updates = {count for _, count in found}
        if len(updates) == 1:
            break
        _check_time(f"read of the states of {parameter.name}", deadline, timeout)
    shape = parameter.tensor.shape
    states = {name: values.view(shape) for name, (values, _) in zip(names, found)}
    return {**states, "step": step_tensor(updates.pop())}


def step_tensor(updates: int) -> torch.Tensor:
    """A number of updates as torch's optimizers have it, also where the default dtype is another."""
    return torch.tensor(float(updates), dtype=torch.float32, device="cpu")


def _check_time(what: str, deadline: float, timeout: float) -> None:
    """Errors: E_TIMEOUT after the deadline, where each attempt met another step."""
    if time.monotonic() > deadline:
        raise make_error(
            ForebayTimeoutError,
            "E_TIMEOUT",
            f"no {what} ended before the next step in {timeout} s",
            "read between the steps of the ranks, or attach with a larger timeout",
        )

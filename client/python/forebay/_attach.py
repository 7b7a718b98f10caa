"""attach(): from a model to windows, hooks and an optimizer."""

import ctypes

import torch

from ._guards import Guards, refuse_attached
from ._hooks import Engine, Group, Member, install
from ._optimizer import ForebayOptimizer
from ._plan import DTYPE_NAMES, FORMATS, make_plan
from .errors import ForebayError, usage_error
from .optimizers import Optimizer

PARAM_GROUPS_MAX = 64  # of the wire


def attach(
    model,
    optimizer,
    *,
    job,
    rank,
    world_size,
    socket,
    param_groups,
    extra_state_bytes,
    grad_arena_bytes,
    timeout,
):
    """See forebay.attach."""
    from . import _core

    if not isinstance(optimizer, Optimizer):
        raise usage_error(
            "E_OPTION",
            f"the optimizer is {optimizer!r}, none of Forebay's",
            "forebay.attach(model, forebay.AdamW(lr=...)), or Adam, Adagrad, Lion, SGD, Lamb",
        )
    refuse_attached(model)
    plan = make_plan(model)
    defaults = {key: getattr(optimizer, key) for key in optimizer.hyper_parameters}
    wanted_groups = optimizer.params if param_groups is None else param_groups
    torch_groups = _torch_groups(plan, wanted_groups, optimizer.hyper_parameters)
    frozen_group = _assign_param_groups(plan, torch_groups)
    optimizer.rows([{**defaults, **group} for group in torch_groups])  # before there is a job
    attachment = _core.attach(
        socket,
        job,
        rank,
        world_size,
        DTYPE_NAMES[plan.dtype],
        optimizer.name,
        _format(optimizer, plan),
        optimizer.seed,
        [(p.name, list(p.tensor.shape), p.group, p.param_group) for p in plan.parameters],
        plan.group_names,
        grad_arena_bytes,
        extra_state_bytes,
        float(timeout),
    )
    bound = guards = None
    handles = []
    try:
        groups = _groups(plan, attachment)
        if attachment.writes_initial:
            _write_initial(plan, attachment, groups, timeout)
        windows = _windows(plan, attachment, groups)
        engine = Engine(attachment, groups, timeout)
        bound = _bind(plan, groups, windows)
        guards = Guards(model, plan)
        handles = install(engine, plan.hook_points)
        opt = ForebayOptimizer(
            torch_groups,
            defaults,
            plan=plan,
            engine=engine,
            handles=handles,
            guards=guards,
            rule=optimizer,
            frozen_group=frozen_group,
        )
    except BaseException:
        for handle in handles:
            handle.remove()
        if guards is not None:
            guards.remove()
        for parameter, own in bound or ():
            parameter.tensor.data = own
        _leave(attachment)
        raise
    bound.clear()  # the last reference to the private values
    _give_back_free_memory()
    return opt


def _format(optimizer, plan):
    formats = FORMATS[plan.dtype]
    if optimizer.format is not None and optimizer.format not in formats:
        known = sorted({name for names in FORMATS.values() for name in names})
        dtype = DTYPE_NAMES[plan.dtype]
        raise usage_error(
            "E_OPTION",
            (
                f"format {optimizer.format!r} does not serve {dtype} parameters"
                if optimizer.format in known
                else f"unknown format {optimizer.format!r}"
            ),
            f"{dtype} parameters take {', '.join(formats)}",
        )
    return optimizer.format or formats[0]


def _leave(attachment):
    try:
        attachment.detach()
    except ForebayError:
        pass  # the error that brought us here says more


def _torch_groups(plan, wanted, hyper_parameters):
    """param_groups in torch's form; a plain list of parameters is one group."""
    if wanted is None:
        return [{"params": [p.tensor for p in plan.named]}]
    wanted = list(wanted)
    if not wanted:
        raise usage_error(
            "E_OPTION", "param_groups is empty", "leave it out for one group of all parameters"
        )
    if not isinstance(wanted[0], dict):
        wanted = [{"params": wanted}]
    groups = []
    for group in wanted:
        if not isinstance(group, dict) or "params" not in group:
            raise usage_error(
                "E_OPTION",
                f'param_groups: group {len(groups)} is no dict with "params"',
                'param_groups=[{"params": [...], "lr": 1e-4}, ...], or a list of parameters',
            )
        params = group["params"]
        unknown = set(group) - {"params", "name", *hyper_parameters}
        if unknown:
            raise usage_error(
                "E_OPTION",
                f"param_groups: unknown option {min(unknown)}",
                f"known: {', '.join(hyper_parameters)}",
            )
        groups.append(
            {**group, "params": [params] if isinstance(params, torch.Tensor) else list(params)}
        )
    return groups


def _assign_param_groups(plan, torch_groups):
    """Numbers each parameter's hyper-parameters; True where frozen parameters need a group of their
    own."""
    numbers = {}
    names = {id(parameter.tensor): parameter.name for parameter in plan.parameters}
    for number, group in enumerate(torch_groups):
        for tensor in group["params"]:
            if id(tensor) not in names:
                is_tensor = isinstance(tensor, torch.Tensor)
                what = f"a tensor of shape {list(tensor.shape)}" if is_tensor else repr(tensor)
                raise usage_error(
                    "E_OPTION",
                    f"param_groups: {what} is no parameter of the model",
                    "list model.parameters() themselves, not copies or views",
                )
            if numbers.setdefault(id(tensor), number) != number:
                raise usage_error(
                    "E_OPTION",
                    f"parameter {names[id(tensor)]} is in param groups {numbers[id(tensor)]} "
                    f"and {number}",
                    "list it in one of them",
                )
    frozen = False
    for parameter in plan.parameters:
        if not parameter.trainable:
            parameter.param_group, frozen = len(torch_groups), True
        elif id(parameter.tensor) not in numbers:
            raise usage_error(
                "E_OPTION",
                f"parameter {parameter.name} is in no param group",
                "list it, or requires_grad_(False) before attach",
            )
        else:
            parameter.param_group = numbers[id(parameter.tensor)]
    if len(torch_groups) + frozen > PARAM_GROUPS_MAX:
        raise usage_error(
            "E_OPTION",
            f"{len(torch_groups)} param groups (at most {PARAM_GROUPS_MAX}, frozen parameters "
            "take one)",
            "join groups with the same hyper-parameters",
        )
    return frozen


def _groups(plan, attachment):
    groups = [
        Group(number, plan.group_names[number], elems, padded_elems)
        for number, (_, elems, padded_elems) in enumerate(attachment.groups)
    ]
    for parameter, offset in zip(plan.parameters, attachment.param_offsets):
        parameter.offset = offset
    return groups


def _write_initial(plan, attachment, groups, timeout):
    """The values of this process become the job's."""
    for group in groups:
        flat = torch.zeros(group.padded_elems, dtype=plan.dtype)
        for parameter in plan.parameters:
            if parameter.group != group.number:
                continue
            values = parameter.tensor.detach()
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                those = "value that is" if bad == 1 else "values that are"
                raise usage_error(
                    "E_NONFINITE",
                    f"parameter {parameter.name} has {bad} {those} NaN or infinite at attach",
                    "check the initialization or the loaded checkpoint",
                )
            flat[parameter.offset : parameter.offset + values.numel()].view(values.shape).copy_(
                values
            )
        attachment.write_initial(group.number, flat, timeout)
    attachment.initial_done(timeout)


def _windows(plan, attachment, groups):
    """One tensor per parameter, each with a storage of its own that starts and ends with it: saving
    one parameter saves no more than it."""
    windows = []
    weights = [torch.from_dlpack(attachment.weights(group.number)) for group in groups]
    for parameter in plan.parameters:
        view = weights[parameter.group][
            parameter.offset : parameter.offset + parameter.tensor.numel()
        ]
        windows.append(
            torch.from_dlpack(torch.utils.dlpack.to_dlpack(view)).view(parameter.tensor.shape)
        )
    return windows


def _bind(plan, groups, windows):
    """Returns (parameter, its private values) so that a failure can be undone."""
    bound = []
    for parameter, window in zip(plan.parameters, windows):
        bound.append((parameter, parameter.tensor.data))
        parameter.tensor.data = window
        group = groups[parameter.group]
        group.members.append(Member(parameter, group, window))
        group.expected += parameter.trainable
    return bound


def _give_back_free_memory():
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc: the allocator keeps it

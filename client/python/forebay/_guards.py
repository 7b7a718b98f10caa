"""What would silently do nothing, or move a parameter off its window, is an error on an attached
model."""

import functools
import types
import weakref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .errors import unsupported

_owners = {}  # id of an attached parameter: its name
_global_hook = None


class InertOnCopy:
    """A hook whose copies do nothing: deepcopy and pickle of an attached module give a module of
    its own."""

    def __deepcopy__(self, memo):
        return nothing

    def __reduce__(self):
        return (_make_nothing, ())


def nothing(*_args, **_kwargs):
    """The copy of a hook."""


def _make_nothing():
    return nothing


class GradientTaken(torch.Tensor):
    """Stands in p.grad for a gradient that the daemon has: whatever reads or changes it is refused
    by name.

    So clip_grad_norm_, another optimizer, a gradient scaler, a second backward before step() and
    logging of norms are errors, where a p.grad of None would make them do nothing.
    """

    @staticmethod
    def __new__(cls, name, parameter):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        tensor.__dict__["parameter_name"] = name
        return tensor

    def __repr__(self):
        return f"<gradient of {self.__dict__['parameter_name']}: taken by forebay>"

    @classmethod
    def __torch_function__(cls, function, types_, args=(), kwargs=None):
        if function in _HARMLESS:
            return super().__torch_function__(function, types_, args, kwargs or {})
        raise cls._refusal(function, args)

    @classmethod
    def __torch_dispatch__(cls, function, types_, args=(), kwargs=None):
        if "add" in str(
            function
        ):  # AccumulateGrad is the one caller that does not pass __torch_function__
            raise second_gradient(_first(cls, args).__dict__["parameter_name"])
        raise cls._refusal(function, args)

    @classmethod
    def _refusal(cls, function, args):
        name = _first(cls, args).__dict__["parameter_name"]
        return unsupported(
            f"{getattr(function, '__name__', function)}() on the gradient of parameter {name}: "
            "the daemon has it already",
            "clip with forebay.AdamW(max_grad_norm=...); what else needs p.grad can look at it "
            "in a hook: p.register_hook before attach",
        )


_HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "is_sparse",
        "requires_grad",
        "is_leaf",
        "ndim",
        "is_cpu",
    )
}


def _first(cls, values):
    for value in values:
        if isinstance(value, cls):
            return value
        if isinstance(value, (list, tuple)):
            found = _first(cls, value)
            if found is not None:
                return found
    return None


def second_gradient(name):
    """The error of gradient accumulation and of a second backward over a retained graph."""
    return unsupported(
        f"parameter {name} received a second gradient before step(): gradient accumulation and a "
        "second backward (retain_graph) are not supported",
        "call opt.step() after each backward; sum the losses first",
    )


class LoadGuard(InertOnCopy):
    """Refuses load_state_dict on a module that holds attached parameters."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *_args, **_kwargs):
        raise unsupported(
            f"load_state_dict on {self.name}: its parameters are attached",
            "load before forebay.attach (the first session of a job writes the values), or "
            "opt.detach() first",
        )


class ApplyGuard:
    """Stands in for module._apply, through which half(), to(), cuda() and share_memory() replace
    parameters."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, function, recurse=True):
        for tensor in self.module.parameters(recurse=recurse):
            if id(tensor) not in _owners:
                continue
            probe = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
            wanted = function(probe)
            if wanted is not probe or probe.is_shared():
                raise unsupported(
                    f"half(), to() or the like on {self.name}: parameter {_owners[id(tensor)]} is "
                    "attached and cannot change its type, device or memory (it is "
                    f"{_kind(tensor)}, wanted is {_kind(wanted)})",
                    "convert before forebay.attach, or opt.detach() first",
                )
        return type(self.module)._apply(self.module, function, recurse)

    def __deepcopy__(self, memo):
        copy = memo[id(self.module)]
        return types.MethodType(type(copy)._apply, copy)

    def __reduce__(self):
        return (functools.partial, (type(self.module)._apply, self.module))


def _kind(tensor):
    return f"{tensor.dtype} on {tensor.device}{', shared' * tensor.is_shared()}"


class Guards:
    """The guards of one attached model; remove() takes every one of them away. Holds nothing of it
    alive."""

    def __init__(self, model, plan):
        self._parameter_ids = [id(parameter.tensor) for parameter in plan.parameters]
        self._handles = []
        self._modules = []
        self._places = []  # (module, key in it, name and id of the parameter)
        try:
            for parameter in plan.parameters:
                _own(parameter)
            for name, module in model.named_modules():
                if any(id(tensor) in _owners for tensor in module.parameters()):
                    label = f"{type(module).__name__} {name}".rstrip()
                    self._handles.append(
                        module._register_load_state_dict_pre_hook(LoadGuard(label))
                    )
                    module.__dict__["_apply"] = ApplyGuard(module, label)
                    reference = weakref.ref(module)
                    self._modules.append(reference)
                    self._places += [
                        (reference, key, f"{name}.{key}".lstrip("."), id(tensor))
                        for key, tensor in module._parameters.items()
                        if id(tensor) in _owners
                    ]
        except BaseException:
            self.remove()
            raise

    def check_places(self):
        """Errors: E_UNSUPPORTED where a module has another parameter than was attached, which would
        train without the daemon, or not at all."""
        for reference, key, name, number in self._places:
            module = reference()
            if module is not None and id(module._parameters.get(key)) != number:
                raise unsupported(
                    f"parameter {name} was replaced or removed after attach",
                    "put it back, or opt.detach() first and attach again as another job",
                )

    def remove(self):
        for handle in self._handles:
            handle.remove()
        for reference in self._modules:
            module = reference()
            if module is not None:
                module.__dict__.pop("_apply", None)
        _disown(self._parameter_ids)
        self._handles, self._modules, self._parameter_ids, self._places = [], [], [], []


def refuse_attached(model):
    """Errors: E_UNSUPPORTED where a parameter is attached already."""
    for name, tensor in model.named_parameters():
        if id(tensor) in _owners:
            raise unsupported(f"parameter {name} is attached already", "opt.detach() first")


def _own(parameter):
    global _global_hook
    _owners[id(parameter.tensor)] = parameter.name
    if _global_hook is None:
        _global_hook = register_optimizer_step_pre_hook(_refuse_other_optimizers)


def _disown(parameter_ids):
    global _global_hook
    for number in parameter_ids:
        _owners.pop(number, None)
    if not _owners and _global_hook is not None:
        _global_hook.remove()
        _global_hook = None


def _refuse_other_optimizers(optimizer: Optimizer, _args, _kwargs):
    if getattr(optimizer, "is_forebay", False):
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) in _owners:
                raise unsupported(
                    f"{type(optimizer).__name__}.step() on parameter {_owners[id(tensor)]}: it is "
                    "attached, the daemon updates it",
                    "step the optimizer that forebay.attach returned",
                )

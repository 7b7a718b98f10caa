# SPDX-License-Identifier: Apache-2.0
"""An Accelerator whose prepare() attaches the model:

-    from accelerate import Accelerator
+    from forebay.integrations.accelerate import Accelerator
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import nn

from .. import _guards, api, optimizers
from .._optimizer import ForebayOptimizer
from ..errors import unsupported
from ..options import _regroup


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator on attached models. prepare() attaches the models of an optimizer as one
    job, without DDP (the daemon averages the gradients of all ranks), and splits the data as ever. An
    optimizer is one of torch's, one of forebay.optimizers, or what forebay.attach has returned.

    forebay  Further arguments of forebay.attach: {"durability": "step", "job": "bert"}.

    Errors  E_UNSUPPORTED  a second optimizer, or one that the daemon has no rule for.

    >>> from forebay.integrations.accelerate import Accelerator
    >>> accelerator = Accelerator(cpu=True, forebay={"durability": "memory"})
    >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    >>> accelerator.backward(model(inputs).square().mean())
    >>> optimizer.step()
    """

    forebay_options: Mapping[str, Any] = {}

    def __init__(self, *args: Any, forebay: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forebay_options = _regroup(forebay or {})

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate.Accelerator.prepare; an optimizer of a model that is not attached yet attaches it.

        >>> from forebay.integrations.accelerate import Accelerator
        >>> model, optimizer = Accelerator(cpu=True).prepare(model, forebay.Lion(lr=1e-4))
        >>> optimizer.optimizer.mode
        'shared'
        """
        self.refuse_other_wrappers()
        if self.is_fsdp2:
            return self._prepare_sharded(*args)
        return super().prepare(*(self._attach(one, args) for one in args), device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As accelerate.Accelerator.prepare_model; an attached model stays where it is and gets no DDP.

        >>> from forebay.integrations.accelerate import Accelerator
        >>> opt = forebay.attach(model)
        >>> Accelerator(cpu=True).prepare_model(model) is model
        True
        """
        if is_attached(model):
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As accelerate.Accelerator.prepare_optimizer; an attached one's state stays where it is.

        >>> from forebay.integrations.accelerate import Accelerator
        >>> opt = forebay.attach(model)
        >>> Accelerator(cpu=True).prepare_optimizer(opt).optimizer is opt
        True
        """
        if isinstance(optimizer, ForebayOptimizer):
            device_placement = False
        return super().prepare_optimizer(optimizer, device_placement)

    def refuse_other_wrappers(self) -> None:
        """Errors: E_UNSUPPORTED where a plugin holds weights or states itself.

        >>> from forebay.integrations.accelerate import Accelerator
        >>> Accelerator(cpu=True).refuse_other_wrappers()
        """
        kinds = accelerate.utils.DistributedType
        others = (kinds.DEEPSPEED, kinds.MEGATRON_LM, kinds.XLA, kinds.FSDP)
        if self.distributed_type in others and not self.is_fsdp2:
            raise unsupported(
                f"Accelerate's {self.distributed_type.value} plugin: it holds weights or states itself",
                "run without the plugin; Forebay takes its place",
            )

    def _attach(self, one: Any, prepared: tuple[Any, ...]) -> Any:
        """An optimizer whose model is not attached becomes the attached one; all else is itself."""
        if _is_forebay(one):
            return one
        if not isinstance(one, (torch.optim.Optimizer, optimizers.Optimizer)):
            return one
        rivals = [other for other in prepared if isinstance(other, (torch.optim.Optimizer, optimizers.Optimizer))]
        attached = any(_is_forebay(other) for other in (*prepared, *self._optimizers))
        if len(rivals) > 1 or attached:
            raise unsupported(
                f"prepare() of {type(one).__name__} beside another optimizer: this Accelerator attaches one",
                'forebay.attach(model, optimizer, job="...") for each, then prepare() with what it returns',
            )
        models = _trained_by(one, [model for model in (*prepared, *self._models) if isinstance(model, nn.Module)])
        if not models:
            raise unsupported(
                f"prepare() of {type(one).__name__} without a model that it trains",
                "prepare(model, optimizer): both in one call",
            )
        return attach(_joined(models), one, **self._options())

    def _options(self) -> dict[str, Any]:
        count = self.gradient_accumulation_steps
        return {**({"accumulate": count} if count > 1 else {}), **self.forebay_options}

    def _prepare_sharded(self, *args: Any) -> Any:
        """With the FSDP2 plugin, which shards within prepare(): attach is after it. accelerate has this plugin on GPUs alone."""
        prepared = super().prepare(*args)
        for one in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if isinstance(one, accelerate.optimizer.AcceleratedOptimizer) and not _is_forebay(one):
                (model,) = (other for other in prepared if isinstance(other, nn.Module))
                one.optimizer = api.attach(model, one.optimizer, **self._options())
        return prepared


def attach(model: nn.Module, optimizer: Any, **options: Any) -> ForebayOptimizer:
    """forebay.attach(), before which all ranks get rank 0's values, as DDP gives them."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            values = tensor.detach().contiguous()
            dist.broadcast(values.view(-1).view(torch.uint8), 0)
            tensor.detach().copy_(values)
    return api.attach(model, optimizer, **options)


def _trained_by(optimizer: Any, models: list[nn.Module]) -> list[nn.Module]:
    """Each model once that has a parameter of torch's optimizer; with one of Forebay's each that takes gradients."""
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    else:
        own = {id(tensor) for model in models for tensor in model.parameters() if tensor.requires_grad}
    found = {id(model): model for model in models if any(id(tensor) in own for tensor in model.parameters())}
    return list(found.values())


def _joined(models: list[nn.Module]) -> nn.Module:
    """Several models as one, whose parameters are called "0.weight", "1.weight"; it is not retained."""
    if len(models) == 1:
        return models[0]
    joined = nn.Module()
    for number, model in enumerate(models):
        joined.add_module(str(number), model)
    return joined


def is_attached(model: nn.Module) -> bool:
    """Whether a parameter of the model is the daemon's."""
    return any(id(tensor) in _guards._owners for tensor in model.parameters())


def _is_forebay(optimizer: Any) -> bool:
    return isinstance(getattr(optimizer, "optimizer", optimizer), ForebayOptimizer)

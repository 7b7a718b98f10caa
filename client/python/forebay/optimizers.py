"""The optimizers that the daemon applies, with the names and defaults of torch.optim. Names, ranges
and defaults of hyper-parameters are those of the daemon's table (protocol/optimizer.h)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._core import OPTIMIZERS, check_hyper_parameters
from .errors import usage_error

HyperRow = dict[str, float]  # of one parameter group: each hyper-parameter of the daemon


def _default(optimizer: str, name: str) -> float:
    return OPTIMIZERS[optimizer][name]


def _betas(optimizer: str) -> tuple[float, float]:
    return (OPTIMIZERS[optimizer]["beta1"], OPTIMIZERS[optimizer]["beta2"])


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What every optimizer has beside its own hyper-parameters.

    params         None: every parameter of the model. Or a list of parameters or of dicts as torch
                   takes it, each with "params" and hyper-parameters of its own; it must name every
                   parameter that takes gradients.
    max_grad_norm  Clips the norm of the whole gradient at each step, as
                   torch.nn.utils.clip_grad_norm_ would. None or 0: no clipping.
    format         How masters and moments are held (docs/formats.md). float32 and float16
                   parameters take "fp32"; bfloat16 ones "exact", "bf16" (moments of 16 bits), "int8"
                   (of 8 bits) or "fp32". None: "fp32", or "exact" for bfloat16.
    seed           Of the stochastic rounding of "bf16" and "int8" moments; the same on every rank.

    Errors  E_OPTION  a value is out of its range.
    """

    max_grad_norm: float | None = None
    format: str | None = None
    params: Sequence[Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        lr = getattr(self, "lr", 0.0)
        try:
            valid = not isinstance(lr, str) and float(lr) >= 0
        except (TypeError, ValueError, RuntimeError):  # of a tensor of several elements
            valid = False
        if not valid:
            raise usage_error(
                "E_OPTION",
                f"lr is {lr!r}, not a number from 0 on",
                f"forebay.attach(model, forebay.{type(self).__name__}(lr=...)): attach takes the "
                "model, the optimizer numbers",
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise usage_error(
                "E_OPTION",
                f"seed is {self.seed!r}, not a whole number from 0 to 2**64 - 1",
                "leave it out for 0",
            )
        try:
            valid = self.max_grad_norm is None or float(self.max_grad_norm) >= 0
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise usage_error(
                "E_OPTION",
                f"max_grad_norm is {self.max_grad_norm!r}, not a number from 0 on",
                "leave it out to train without clipping",
            )

    @property
    def name(self) -> str:
        """The daemon's name for it.

        >>> forebay.Adam(amsgrad=True).name
        'adam_amsgrad'
        """
        return type(self).__name__.lower()

    @property
    def hyper_parameters(self) -> tuple[str, ...]:
        """What a parameter group may set, as torch names it: "betas" is beta1 and beta2.

        >>> forebay.Lion().hyper_parameters
        ('lr', 'betas', 'weight_decay')
        """
        names = ["betas" if name == "beta1" else name for name in OPTIMIZERS[self.name]]
        return tuple(name for name in names if name != "beta2")

    def _row(self, group: Mapping[str, Any]) -> HyperRow:
        """{hyper-parameter: value} of the daemon, for one dict of torch's param_groups."""
        values = {name: group[name] for name in self.hyper_parameters}
        if "betas" in values:
            values["beta1"], values["beta2"] = values.pop("betas")
        return {name: float(value) for name, value in values.items()}

    def _rows(self, groups: Sequence[Mapping[str, Any]]) -> list[HyperRow]:
        """_row() of each group. Errors: E_OPTION where a value is no number or out of its range."""
        rows = []
        for number, group in enumerate(groups):
            try:
                rows.append(self._row(group))
            except (KeyError, TypeError, ValueError) as error:
                values = {key: group.get(key) for key in self.hyper_parameters}
                raise usage_error(
                    "E_OPTION",
                    f"parameter group {number}: {values} are not the numbers that "
                    f"{type(self).__name__} takes: {error}",
                    "give numbers; betas are two of them",
                ) from error
            check_hyper_parameters(self.name, number, rows[-1])
        return rows


@dataclass(frozen=True)
class Adam(Optimizer):
    """torch.optim.Adam, whose weight decay is added to the gradient. For the rest see Optimizer.

    >>> opt = forebay.attach(model, forebay.Adam(lr=3e-4, betas=(0.9, 0.95)))
    """

    lr: float = _default("adam", "lr")
    betas: tuple[float, float] = _betas("adam")
    eps: float = _default("adam", "eps")
    weight_decay: float = _default("adam", "weight_decay")
    amsgrad: bool = False

    @property
    def name(self) -> str:
        """The daemon's name for it.

        >>> forebay.AdamW().name
        'adamw'
        """
        return super().name + ("_amsgrad" if self.amsgrad else "")


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW, whose weight decay is decoupled from the gradient. For the rest see
    Optimizer.

    >>> opt = forebay.attach(model, forebay.AdamW(lr=3e-4, weight_decay=0.1, max_grad_norm=1.0))
    """

    weight_decay: float = _default("adamw", "weight_decay")


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """torch.optim.Adagrad. For the rest see Optimizer.

    >>> opt = forebay.attach(model, forebay.Adagrad(lr=1e-2))
    """

    lr: float = _default("adagrad", "lr")
    lr_decay: float = _default("adagrad", "lr_decay")
    weight_decay: float = _default("adagrad", "weight_decay")
    initial_accumulator_value: float = _default("adagrad", "initial_accumulator_value")
    eps: float = _default("adagrad", "eps")


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al., arXiv:2302.06675, algorithm 2). For the rest see Optimizer.

    >>> opt = forebay.attach(model, forebay.Lion(lr=1e-4, weight_decay=0.1))
    """

    lr: float = _default("lion", "lr")
    betas: tuple[float, float] = _betas("lion")
    weight_decay: float = _default("lion", "weight_decay")


@dataclass(frozen=True)
class SGD(Optimizer):
    """torch.optim.SGD. For the rest see Optimizer.

    The daemon keeps a momentum buffer also where momentum is 0: it holds the last gradient. A
    momentum that is raised from 0 between steps starts from it; torch's starts from none.

    >>> opt = forebay.attach(model, forebay.SGD(lr=0.1, momentum=0.9, nesterov=True))
    """

    lr: float = _default("sgd", "lr")
    momentum: float = _default("sgd", "momentum")
    dampening: float = _default("sgd", "dampening")
    weight_decay: float = _default("sgd", "weight_decay")
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise usage_error(
                "E_OPTION",
                f"SGD(nesterov=True) with momentum {self.momentum} and dampening {self.dampening}",
                "Nesterov's momentum needs a momentum above 0 and a dampening of 0",
            )

    @property
    def name(self) -> str:
        """The daemon's name for it.

        >>> forebay.SGD().name
        'sgd'
        """
        return "sgd_nesterov" if self.nesterov else "sgd"


@dataclass(frozen=True)
class Lamb(Optimizer):
    """LAMB (You et al., arXiv:1904.00962, algorithm 2, with bias correction): each parameter's step
    is scaled by the norm of the parameter over that of its update. For the rest see Optimizer.

    >>> opt = forebay.attach(model, forebay.Lamb(lr=5e-3))
    """

    lr: float = _default("lamb", "lr")
    betas: tuple[float, float] = _betas("lamb")
    eps: float = _default("lamb", "eps")
    weight_decay: float = _default("lamb", "weight_decay")

# SPDX-License-Identifier: Apache-2.0
"""The optimizers that the daemon applies, with the names, arguments and defaults of torch.optim. Names,
ranges and defaults of hyper-parameters are those of the daemon's table (protocol/optimizer.h)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ._core import OPTIMIZERS, check_hyper_parameters
from .errors import usage_error

HyperRow = dict[str, float]  # hyper-parameters of one parameter group, as the daemon names them

# Options that choose how torch computes. They do not change the result.
TORCH_IMPLEMENTATIONS = ("foreach", "fused")
# Options of torch's optimizers that Forebay's lack, and the text that says what to write instead.
TORCH_OPTIONS = {
    "maximize": "(-loss).backward()",
    "capturable": "leave it out: no kernel of the optimizer runs in the trainer",
    "differentiable": "leave it out: the step is the daemon's, and no graph leads through it",
}
# Options that choose the update rule: the same in all groups, and constant from attach on.
RULE_OPTIONS = ("amsgrad", "nesterov", "decoupled_weight_decay")


def _default(optimizer: str, name: str) -> float:
    return OPTIMIZERS[optimizer][name]


def _betas(optimizer: str) -> tuple[float, float]:
    return (OPTIMIZERS[optimizer]["beta1"], OPTIMIZERS[optimizer]["beta2"])


@dataclass(frozen=True)
class Optimizer:
    """What every optimizer has beside its own hyper-parameters. It describes one: forebay.attach makes it.

    params         None: every parameter of the model. Or what torch takes: parameters, (name,
                   parameter) pairs, or dicts, each with "params" and hyper-parameters of its own; all
                   that take gradients.
    max_grad_norm  Clips the norm of the whole gradient at each step, as
                   torch.nn.utils.clip_grad_norm_ would. None or 0: no clipping.
    format         How masters and moments are held (docs/reference/formats.md). float32 and float16
                   parameters take "fp32"; bfloat16 ones "exact", "bf16" (moments of 16 bits), "int8"
                   (of 8 bits) or "fp32". None: "fp32", or "exact" for bfloat16.
    seed           Of the stochastic rounding of "bf16" and "int8" moments; the same on every rank.
    foreach, fused Of torch's, and without effect here.
    maximize,      Of torch's: False.
    capturable,
    differentiable

    Errors  E_OPTION       a value is out of its range.
            E_UNSUPPORTED  an option of torch's that is on.
            E_NOT_READY    of step() and what else torch's optimizers do: attach it first.
    """

    params: Iterable[Any] | None = None
    max_grad_norm: float | None = field(default=None, kw_only=True)
    format: str | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    foreach: bool | None = field(default=None, kw_only=True, repr=False)
    fused: bool | None = field(default=None, kw_only=True, repr=False)
    maximize: bool = field(default=False, kw_only=True, repr=False)
    capturable: bool = field(default=False, kw_only=True, repr=False)
    differentiable: bool = field(default=False, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.params is not None:
            object.__setattr__(self, "params", self._listed(self.params))
        self._check_torch_options(vars(self), "")
        lr = getattr(self, "lr", 0.0)
        try:
            valid = not isinstance(lr, str) and float(lr) >= 0
        except (TypeError, ValueError, RuntimeError):  # a tensor of several elements
            valid = False
        if not valid:
            raise usage_error(
                "E_OPTION",
                f"lr is {lr!r}, not a number from 0 on",
                f"forebay.attach(model, forebay.{type(self).__name__}(lr=...))",
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

    def _listed(self, params: Any) -> list[Any]:
        """Of a generator too, which can be read once."""
        if not isinstance(params, (str, bytes)):
            try:
                return list(params)
            except TypeError:
                pass
        raise usage_error(
            "E_OPTION",
            f"params is {params!r}, not the parameters of a model",
            f"forebay.attach(model, forebay.{type(self).__name__}(model.parameters(), lr=...)), or "
            "without params for all of the model's",
        )

    def _check_torch_options(self, values: Mapping[str, Any], where: str) -> None:
        for name, instead in TORCH_OPTIONS.items():
            if values.get(name):
                raise usage_error(
                    "E_UNSUPPORTED",
                    f"{where}{type(self).__name__}({name}=True): the daemon would compute without it",
                    instead,
                )

    def __getattr__(self, name: str) -> NoReturn:
        """Raises for an attribute that does not exist."""
        if name in ("step", "zero_grad", "param_groups", "state", "state_dict", "load_state_dict"):
            raise usage_error(
                "E_NOT_READY",
                f"{type(self).__name__}.{name} before forebay.attach: it describes an optimizer",
                f"opt = forebay.attach(model, forebay.{type(self).__name__}(...)); opt.{name}",
            )
        raise AttributeError(f"{type(self).__name__} has no {name}")

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
            self._check_rule(number, group)
            try:
                rows.append(self._row(group))
            except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
                values = {key: group.get(key) for key in self.hyper_parameters}
                raise usage_error(
                    "E_OPTION",
                    f"parameter group {number}: {values} are not the numbers that "
                    f"{type(self).__name__} takes: {error}",
                    "give numbers; betas are two of them",
                ) from error
            check_hyper_parameters(self.name, number, rows[-1])
        return rows

    def _check_rule(self, number: int, group: Mapping[str, Any]) -> None:
        """Errors: E_UNSUPPORTED where a group asks for another rule than the job's, or for what no rule
        has."""
        self._check_torch_options(group, f"parameter group {number}: ")
        for name in RULE_OPTIONS:
            own = getattr(self, name, None)
            if name in group and own is not None and bool(group[name]) != own:
                raise usage_error(
                    "E_UNSUPPORTED",
                    f"parameter group {number}: {name}={group[name]}, and {name}={own} in the optimizer: "
                    "a job has one rule",
                    f"{name}={own} in all groups, or attach the parts of the model as two jobs",
                )


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
    def decoupled_weight_decay(self) -> bool:
        """Whether the decay is AdamW's.

        >>> forebay.AdamW().decoupled_weight_decay
        True
        """
        return isinstance(self, AdamW)

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

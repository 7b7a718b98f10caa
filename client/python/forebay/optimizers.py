"""The optimizers that the daemon applies, named and preset as torch.optim's."""

from dataclasses import dataclass

from .errors import usage_error


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What every optimizer has beside its own hyper-parameters:

    params         None: every parameter of the model. Or a list of dicts as torch takes it, each
                   with "params" and hyper-parameters of its own; it must name every parameter that
                   takes gradients.
    max_grad_norm  Clips the norm of the whole gradient at each step, as
                   torch.nn.utils.clip_grad_norm_ would.
    format         How masters and moments are held (docs/formats.md). float32 and float16
                   parameters take "fp32"; bfloat16 ones "exact", "bf16" (moments of 16 bits), "int8"
                   (of 8 bits) or "fp32". None: "fp32", or "exact" for bfloat16.
    seed           Of the random rounding of "bf16" and "int8" moments; the same on every rank.
    """

    max_grad_norm: float | None = None
    format: str | None = None
    params: list | None = None
    seed: int = 0

    hyper_parameters = ("lr", "betas", "eps", "weight_decay")  # what a parameter group may set

    def __post_init__(self):
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise usage_error(
                "E_OPTION",
                f"seed is {self.seed!r}, not a whole number from 0 to 2**64 - 1",
                "leave it out for 0",
            )
        try:
            clips = self.max_grad_norm is None or float(self.max_grad_norm) >= 0
        except (TypeError, ValueError):
            clips = False
        if not clips:
            raise usage_error(
                "E_OPTION",
                f"max_grad_norm is {self.max_grad_norm!r}, not a number from 0 on",
                "leave it out where nothing is to be clipped",
            )

    @property
    def name(self):
        """As the daemon calls it."""
        return type(self).__name__.lower()

    def row(self, group):
        """lr, beta1, beta2, eps and weight_decay of the wire, or what stands in their places
        (protocol/wire.h), for one dict of torch's param_groups."""
        beta1, beta2 = group["betas"]
        return _floats(group["lr"], beta1, beta2, group.get("eps", 0.0), group["weight_decay"])

    def rows(self, groups):
        """row() of each group. Errors: E_OPTION where values are no numbers."""
        rows = []
        for number, group in enumerate(groups):
            try:
                rows.append(self.row(group))
            except (KeyError, TypeError, ValueError) as error:
                values = {key: group.get(key) for key in self.hyper_parameters}
                raise usage_error(
                    "E_OPTION",
                    f"parameter group {number}: {values} are not the numbers that "
                    f"{type(self).__name__} takes: {error}",
                    "give numbers; betas are two of them",
                ) from error
        return rows


def _floats(*values):
    return tuple(float(value) for value in values)


@dataclass(frozen=True)
class Adam(Optimizer):
    """torch.optim.Adam, whose weight decay is added to the gradient. For the rest see Optimizer."""

    lr: float = 1e-3
    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    @property
    def name(self):
        return super().name + ("_amsgrad" if self.amsgrad else "")


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW, whose weight decay is apart from the gradient. For the rest see
    Optimizer."""

    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """torch.optim.Adagrad. For the rest see Optimizer."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    hyper_parameters = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def row(self, group):
        return _floats(
            group["lr"],
            group["lr_decay"],
            group["initial_accumulator_value"],
            group["eps"],
            group["weight_decay"],
        )


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al., arXiv:2302.06675, algorithm 2). For the rest see Optimizer."""

    lr: float = 1e-4
    betas: tuple = (0.9, 0.99)
    weight_decay: float = 0.0

    hyper_parameters = ("lr", "betas", "weight_decay")


@dataclass(frozen=True)
class SGD(Optimizer):
    """torch.optim.SGD; the daemon keeps a momentum buffer also where momentum is 0, the last
    gradient: a momentum that is raised from 0 between steps begins with it, torch's with none. For
    the rest see Optimizer."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    hyper_parameters = ("lr", "momentum", "dampening", "weight_decay")

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise usage_error(
                "E_OPTION",
                f"SGD(nesterov=True) with momentum {self.momentum} and dampening {self.dampening}",
                "Nesterov's momentum needs a momentum above 0 and a dampening of 0",
            )

    @property
    def name(self):
        return "sgd_nesterov" if self.nesterov else "sgd"

    def row(self, group):
        return _floats(
            group["lr"], group["momentum"], group["dampening"], 0.0, group["weight_decay"]
        )


@dataclass(frozen=True)
class Lamb(Optimizer):
    """LAMB (You et al., arXiv:1904.00962, algorithm 2, with bias correction): each parameter's step
    is scaled by the norm of the parameter over that of its update. For the rest see Optimizer."""

    lr: float = 1e-3
    betas: tuple = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2

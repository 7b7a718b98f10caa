# SPDX-License-Identifier: Apache-2.0
"""The options of forebay.attach by topic: Sharding, Memory, Durability. A script that needs none of them passes none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._checks import seconds, size_bytes
from .errors import usage_error

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How mode="sharded" divides a model, and when the daemon updates its blocks.

    mesh, mp_policy,       Of a plain model: arguments of fully_shard().
    reshard_after_forward
    wrap                   Of a plain model: the modules to call fully_shard() on, before the model.
    name_prefix            In front of the parameters' names, where ranks hold different modules (pipeline
                           stages) with the same names.
    drain                  step() returns when the step is decided; the daemon updates the blocks during the next
                           forward, in the order in which it needs them. False: step() returns when all of them
                           are updated and, those on swap, written. Mode "shared" always waits, because its
                           parameters can be read at any time.
    early_updates          A block of states on swap is updated as soon as all its gradients have arrived, in the
                           last backward of a step (the `accumulate`-th), with the learning rates that the
                           optimizer has when that backward begins. step() decides: where it clips or has other
                           numbers, the block is updated again, with the same bits as without, and the next steps
                           wait until such guesses hold again. Its new weights take as much memory as the weights
                           of blocks on swap have in DRAM. False: blocks are updated after the decision, and that
                           memory is for states. After a second backward in one step that `accumulate` has not
                           announced, nothing is updated early any more.

    Errors  E_OPTION  at attach: an argument of fully_shard(), `wrap` or `name_prefix` without mode="sharded", or an
                      argument of fully_shard() for a model that it was called on already.

    >>> sharding = forebay.Sharding(drain=False)
    >>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3), sharding=sharding)
    """

    mesh: Any = None
    mp_policy: Any = None
    reshard_after_forward: bool | None = None
    wrap: Sequence[nn.Module] | None = None
    name_prefix: str = ""
    drain: bool = True
    early_updates: bool = True

    def _of_fully_shard(self) -> dict[str, Any]:
        """Arguments of shard_plan.shard(); None: not given."""
        names = ("mesh", "mp_policy", "reshard_after_forward", "wrap")
        return {name: getattr(self, name) for name in names}

    def _sent(self) -> dict[str, Any]:
        """Options of _core.attach of a sharded job."""
        return {"drain": bool(self.drain), "early_updates": bool(self.early_updates)}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one rank's session, in bytes.

    extra_state_bytes  Room for what step(extra_state=...) commits with a step and for the model's
                       buffers, at most 480 MiB less 16 bytes. None: what the buffers need, rounded
                       up to 64 KiB, and 64 KiB.
    grad_arena_bytes   Room for gradients on their way; 0: four pieces of at most 32 MiB, sharded two,
                       on GPUs also those of three layers.
    prefetch_bytes     Of mode="sharded": FSDP2 gathers layers ahead of the one that computes in
                       forward, as many as fit into this, in the order that the first step's forward
                       took; the same on every rank. Replaces what set_modules_to_forward_prefetch()
                       has set; 0 leaves it. On CPUs a gather ends before FSDP2 continues: prefetch costs
                       memory and gains nothing.
    activation_bytes   Of mode="sharded": room in the daemon's memory for what each rank's forwards keep for
                       their backwards; see opt.offload_activations().

    Errors  E_OPTION  a value is no whole number of bytes; at attach: one of mode="sharded" without it.

    >>> memory = forebay.Memory(extra_state_bytes=1 << 20)
    >>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3), memory=memory)
    """

    extra_state_bytes: int | None = None
    grad_arena_bytes: int = 0
    prefetch_bytes: int = 0
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None or name != "extra_state_bytes":
                object.__setattr__(self, name, size_bytes(name, value))

    def _sent(self) -> dict[str, Any]:
        """Options of _core.attach. The caller adds extra_state_bytes, which depends on the model."""
        return {"grad_arena_bytes": self.grad_arena_bytes, "activation_bytes": self.activation_bytes}


@dataclass(frozen=True, kw_only=True)
class Durability:
    """Faults that training survives. attach(durability="step") is short for Durability(level="step").

    level        What the death of the daemon, or a power cut, can undo of the training; that of a
                 trainer undoes nothing. "memory": all of it. "epoch=10": at most 10 steps; every
                 10 steps one is made durable while training continues. "step": no step that step()
                 has answered, which waits until it is on disk. The last two need swap that the
                 daemon keeps. The first rank of a new job decides, for the job's life. None: the
                 job's, of a new one the daemon's default ("memory", unless its settings say more).
    daemon_wait  Seconds that a call waits for a daemon that is being restarted or has died (`systemctl restart
                 forebayd`), within `timeout` of attach; training then continues as if nothing had happened.
                 After that E_DAEMON_GONE. None: FOREBAY_DAEMON_WAIT, else 60.

    Errors  E_OPTION  no level, or no number of seconds; at attach: the job has another level; names both.

    >>> durability = forebay.Durability(level="memory", daemon_wait=120)
    >>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3), durability=durability)
    """

    level: str | None = None
    daemon_wait: float | None = None

    def __post_init__(self) -> None:
        if self.level is not None and not (isinstance(self.level, str) and self.level):
            raise usage_error(
                "E_OPTION",
                f"durability is {self.level!r}, no level",
                'durability="memory", "epoch=10", "step", or leave it out',
            )
        if self.daemon_wait is not None:
            object.__setattr__(self, "daemon_wait", seconds("daemon_wait", self.daemon_wait))

    def _sent(self) -> dict[str, Any]:
        """Options of _core.attach, which knows the levels and the defaults."""
        given = {"durability": self.level, "daemon_wait": self.daemon_wait}
        return {name: value for name, value in given.items() if value is not None}


TOPICS = {"sharding": Sharding, "memory": Memory, "durability": Durability}
# Keywords of attach() in 0.2.0, and the option that each is a part of now. 0.3 takes them with a warning, 0.4 does not.
MOVED = {
    **dict.fromkeys(("mesh", "mp_policy", "reshard_after_forward", "wrap", "name_prefix"), "sharding"),
    **dict.fromkeys(("drain", "early_updates"), "sharding"),
    **dict.fromkeys(("extra_state_bytes", "grad_arena_bytes", "prefetch_bytes", "activation_bytes"), "memory"),
    "daemon_wait": "durability",
}


def _written(name: str) -> str:
    """A keyword argument of attach() as a script writes it: "memory=forebay.Memory(prefetch_bytes=...)", "initial=..."."""
    topic = MOVED.get(name)
    return f"{topic}=forebay.{TOPICS[topic].__name__}({name}=...)" if topic else f"{name}=..."


def _regroup(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of attach() with those of 0.2.0 as parts of their options. Warns for each, at the caller's caller.

    Errors  E_OPTION  a keyword of 0.2.0 beside its option.
    """
    regrouped = {name: value for name, value in given.items() if name not in MOVED}
    for topic, kind in TOPICS.items():
        parts = {name: value for name, value in given.items() if MOVED.get(name) == topic}
        if not parts:
            continue
        for name in parts:
            warnings.warn(
                f"{name}= of attach() ends with 0.4: write {_written(name)}",
                FutureWarning,
                stacklevel=3,
            )
        beside = regrouped.get(topic)
        if isinstance(beside, str):
            parts["level"] = beside
        elif beside is not None:
            name = next(iter(parts))
            raise usage_error(
                "E_OPTION",
                f"{name}= beside {topic}=, which has a {name} too",
                f"leave {name}= out: {_written(name)}",
            )
        regrouped[topic] = kind(**parts)
    return regrouped


def _option(topic: str, value: Any) -> Any:
    """The option `topic` of attach(), of its class. None: the defaults.

    Errors  E_OPTION  it is something else.
    """
    kind = TOPICS[topic]
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    if topic == "durability":
        return Durability(level=value)
    name = f"forebay.{kind.__name__}"
    raise usage_error("E_OPTION", f"{topic} is {value!r}, no {name}", f"{topic}={name}(...)")

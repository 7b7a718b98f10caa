# SPDX-License-Identifier: Apache-2.0
"""The options of forebay.attach by topic: Sharding, Memory, Durability. A script passes only the options that it needs."""

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

    mesh, mp_policy,       Arguments of fully_shard() for a plain model.
    reshard_after_forward
    wrap                   The modules of a plain model to call fully_shard() on, before the model itself.
    name_prefix            Prefix of the parameters' names, if ranks hold different modules (pipeline stages) with
                           the same names.
    drain                  True: step() returns when the step is decided. The daemon updates the blocks during the
                           next forward, in the order in which the forward needs them. False: step() returns when
                           all blocks are updated, and blocks on swap are written. Mode "shared" always waits,
                           because its parameters can be read at any time.
    early_updates          True: a block of states on swap is updated as soon as all its gradients have arrived, in
                           the last backward of a step (the `accumulate`-th). The update uses the learning rates
                           that the optimizer has when that backward begins. If step() clips, or has other
                           numbers, the block is updated again, with the same bits as without early updates. No
                           block is then updated early until a step is decided with the announced numbers. New
                           weights take as much memory as the weights of blocks on swap have in DRAM. False:
                           blocks are updated after the decision, and that memory is for states. After a second
                           backward in one step that `accumulate` has not announced, nothing is updated early.

    Errors  E_OPTION  at attach: an argument of fully_shard(), `wrap` or `name_prefix` without mode="sharded", or an
                      argument of fully_shard() for a model on which fully_shard() was called before.

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
        """Returns the arguments of shard_plan.shard(). None: the caller has not set the argument."""
        names = ("mesh", "mp_policy", "reshard_after_forward", "wrap")
        return {name: getattr(self, name) for name in names}

    def _sent(self) -> dict[str, Any]:
        """Returns the options of _core.attach of a sharded job."""
        return {"drain": bool(self.drain), "early_updates": bool(self.early_updates)}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one rank's session, in bytes.

    extra_state_bytes  Room for what step(extra_state=...) commits with a step and for the model's
                       buffers, at most 480 MiB less 16 bytes. None: what the buffers need, rounded
                       up to 64 KiB, and 64 KiB more.
    grad_arena_bytes   Room for gradients in flight. 0: four pieces of at most 32 MiB each, with
                       mode="sharded" two. On a GPU mode="sharded" takes the gradients of three layers
                       instead if these have more than 64 MiB.
    prefetch_bytes     For mode="sharded": in forward FSDP2 gathers layers ahead of the one that
                       computes, as many as fit into these bytes. The order is that of the first step's
                       forward. The same on every rank. Replaces what set_modules_to_forward_prefetch()
                       has set; 0 does not change that setting. On CPUs prefetch costs memory and gains
                       nothing, because a gather ends before FSDP2 continues.
    activation_bytes   For mode="sharded": room in the daemon's memory for activations that each rank's
                       forwards save for their backwards; see opt.offload_activations().

    Errors  E_OPTION  a value is no whole number of bytes; at attach: an option for mode="sharded" in mode "shared".

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
        """Returns options of _core.attach. The caller adds extra_state_bytes, which depends on the model."""
        return {"grad_arena_bytes": self.grad_arena_bytes, "activation_bytes": self.activation_bytes}


@dataclass(frozen=True, kw_only=True)
class Durability:
    """Faults that training survives. attach(durability="step") is short for Durability(level="step").

    level        What the death of the daemon, or a power cut, can undo of the training. The death of a
                 trainer undoes nothing. "memory": the whole training. "epoch=10": at most 10 steps,
                 because every 10th step becomes durable while training continues. "step": no step for
                 which step() has returned, because step() returns once the step is on disk. "epoch=N"
                 and "step" need swap that outlives the daemon. The first rank of a new job sets the
                 level for the job's life. None: the level of the job; for a new job the daemon's
                 default ("memory", unless the daemon's configuration has another level).
    daemon_wait  Seconds that a call waits for a daemon that is being restarted or has died (`systemctl restart
                 forebayd`), within `timeout` of attach. Training then continues as if nothing had happened.
                 After that time the call raises E_DAEMON_GONE. None: FOREBAY_DAEMON_WAIT, else 60.

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
        """Returns the options of _core.attach, which checks the level and has the defaults."""
        given = {"durability": self.level, "daemon_wait": self.daemon_wait}
        return {name: value for name, value in given.items() if value is not None}


TOPICS = {"sharding": Sharding, "memory": Memory, "durability": Durability}
# Keywords of attach() in 0.2.0, and the option that each is a part of now. 0.3 accepts each with a warning, 0.4 does not.
MOVED = {
    **dict.fromkeys(("mesh", "mp_policy", "reshard_after_forward", "wrap", "name_prefix"), "sharding"),
    **dict.fromkeys(("drain", "early_updates"), "sharding"),
    **dict.fromkeys(("extra_state_bytes", "grad_arena_bytes", "prefetch_bytes", "activation_bytes"), "memory"),
    "daemon_wait": "durability",
}


def _written(name: str) -> str:
    """Returns a keyword argument of attach() as a script writes it: "memory=forebay.Memory(prefetch_bytes=...)", "initial=..."."""
    topic = MOVED.get(name)
    return f"{topic}=forebay.{TOPICS[topic].__name__}({name}=...)" if topic else f"{name}=..."


def _regroup(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of attach() with keywords of 0.2.0 moved into their options. Warns for each, at the caller's caller.

    Errors  E_OPTION  a keyword of 0.2.0 together with its option.
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
    """Returns the option `topic` of attach() as an object of its class. None: the defaults.

    Errors  E_OPTION  the value is of another class.
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

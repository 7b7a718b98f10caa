# SPDX-License-Identifier: Apache-2.0
"""Functions for training scripts. The module can be imported without torch and without a daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import options
from ._checks import seconds
from ._launcher import environment_of, whole_number
from .errors import unsupported, usage_error
from .optimizers import AdamW, Optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ._optimizer import ForebayOptimizer
    from .options import Durability, Memory, Sharding
    from .states.reader import Reader

# Variables with the number of ranks that the launcher started on this node: torchrun (or srun, by environment_of()), Open MPI,
# MPICH.
LOCAL_WORLD_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def attach(
    model: nn.Module,
    optimizer: Optimizer | torch.optim.Optimizer | None = None,
    *,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    socket: str | None = None,
    param_groups: Iterable[Any] | None = None,
    timeout: float = 300.0,
    run: str | None = None,
    resume: bool = False,
    mode: str | None = None,
    accumulate: int = 1,
    initial: str | os.PathLike[str] | Callable[[nn.Module], object] | None = None,
    durability: str | Durability | None = None,
    memory: Memory | None = None,
    sharding: Sharding | None = None,
    **old: Any,
) -> ForebayOptimizer:
    """Hands a model's parameters to the daemon and returns the optimizer that steps them.

    model              Any nn.Module on the CPU whose trained parameters have one type: float32, bfloat16
                       or float16; frozen ones may have another (sharded: the same). From now on they are
                       read-only views of memory that the daemon owns; where fully_shard() (FSDP2) was
                       called on it, its shards are fetched from that memory when FSDP2 gathers them. On
                       the meta device: sharded; see `initial`.
    optimizer          AdamW(...) or another of forebay.optimizers; or one of torch.optim's AdamW, Adam,
                       Adagrad and SGD, whose groups it takes over, and whose states, where it has
                       stepped and the job has not; None: AdamW(). Parameters in it that the model does not
                       have (a loss's) train too, as "optimizer[GROUP][INDEX]"; mode="sharded" refuses them.
    job, rank,         Which rank of which job this process is. Default: FOREBAY_JOB or "default"; the
    world_size         numbers of the process group, else RANK and WORLD_SIZE, else what srun or mpirun
                       say, else 0 and 1. Beside a process group: those that it, another group of this
                       process (torch.distributed.new_group) or its node has.
    socket             The daemon's. Default: FOREBAY_SOCKET, else /run/forebay/forebay.sock.
    param_groups       As the optimizer's params.
    timeout            Seconds that this call and each later one may wait; float("inf"): no limit.
    run                The run that this process belongs to: its processes replace each other and
                       continue its job. At most 200 printable ASCII characters without spaces.
                       Default: FOREBAY_RUN, else the run of torchrun, srun or mpirun, else that of the
                       process group, else this process alone. All ranks of a job need the same: set
                       FOREBAY_RUN if there is none of these.
    resume             Continues a job of another run.
    mode               "shared": every rank reads one copy of the weights. "sharded": ZeRO-3, over the
                       process group, whose ranks may be on several nodes. None: sharded where fully_shard() was called on the model or it
                       is on the meta device or a GPU, else shared; opt.mode says which. A plain
                       model is sharded by fully_shard() on the elements of its outermost ModuleList
                       or Sequential, and on the model.
    accumulate         How many backward passes a step has, at most: their gradients are added, in
                       float32, announced or not. Above 1 the sums of gradients take 4 bytes a
                       parameter; with float32 gradients, and in mode "shared" with several ranks,
                       they do anyway. Where gradients (mode "sharded": as they are reduced) have 16
                       bits and it is 1, sums take 2, and 4 more from the first step on that has a
                       second pass: E_DRAM_LIMIT where the node has no room for them then.
    initial            Of a model on the meta device: where the values of a new job come from; of one
                       that exists it sets no parameter. None: reset_parameters() of each module that
                       has one. A function of a module, such as a model's _init_weights. Both are
                       called as model.apply() does after to_empty(), and set the buffers too that the
                       job does not have. Or the path of a safetensors file, or of a folder of them
                       (with an index.json or without), with the names of model.state_dict(): each
                       rank reads its shards. Their types are the parameters' or narrower ones.
    durability         What the death of the daemon, or a power cut, can undo of the training: "memory",
                       "epoch=N" or "step", or a forebay.Durability, which explains them.
    memory             A forebay.Memory: memory that each rank's session takes, in bytes.
    sharding           A forebay.Sharding: how mode="sharded" divides the model and when blocks are updated.
    old                Keywords of 0.2.0 that are now parts of `durability`, `memory` and `sharding`
                       (forebay.options.MOVED). Each causes a FutureWarning. 0.4 does not accept them.

    On the meta device no rank ever holds a model: the shards of a group of FSDP2 have memory from the
    first module that may set them to the last. A function may set all of them until it was called with
    the model; reset_parameters() those of its module.

    Waits until other jobs have freed enough memory and the job's memory is created. Then waits until
    the initial parameters are written, a step in progress has ended, and an older session of the rank
    is closed.

    A new job begins with rank 0's parameters, and the other ranks wait for these. With sharded
    attachment it begins with each rank's shards. Every later session takes the values of the job's last
    committed step. It also takes the buffers that its rank has committed with that step, or rank 0's
    if its rank has committed none.

    Errors  forebay.ForebayError with .code, .hint and .retryable; the model is then as it was, but
            for a plain one that attach was to shard: fully_shard() stays.
            E_JOB_EXISTS  another run has created the job (its initial parameters are written):
                          resume=True, another name, or `forebay jobs --delete`.
            E_RANK        arguments, process group and RANK and WORLD_SIZE contradict each other, or
                          do not say which rank this is; or another process of the same launch trains
                          this rank.
            E_OPTION      an argument makes no sense, is passed together with the option that it is a
                          part of, or the job has another durability; names both.
            E_BUSY        processes of another run are attached, or the job is being deleted:
                          attach again once that is over.

    >>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3), durability="memory")
    >>> for _ in range(3):
    ...     model(inputs).square().mean().backward()
    ...     opt.step()
    >>> opt.committed_step
    3
    """
    from . import _adopt, _attach, _world

    for name in old:
        if name not in options.MOVED:
            raise TypeError(f"attach() got an unexpected keyword argument {name!r}")
    topics = {"durability": durability, "memory": memory, "sharding": sharding}
    given = options._regroup({**old, **{name: value for name, value in topics.items() if value is not None}})
    _attach.refuse_inference_mode()
    rule, param_groups, states = _adopt.adopt(optimizer, param_groups)
    parts = {topic: options._option(topic, given.get(topic)) for topic in topics}
    passes = _passes(accumulate)
    is_sharded = _attach.mode_of(model, mode, parts["sharding"], parts["memory"], initial) == "sharded"
    if is_sharded:
        from .sharded import shard_plan

        world = _world.World(*shard_plan.world(rank, world_size), is_given=False)
    else:
        world = _world.find(rank, world_size)
        _refuse_several_nodes(world.world_size, _socket_path(socket))
    request = _attach.Request(
        job=_job_name(job),
        world=world,
        socket=_socket_path(socket),
        param_groups=param_groups,
        timeout=seconds("timeout", timeout),
        run=run or _world.run_of_process(),
        resume=resume,
        passes=passes,
        initial=initial,
        **parts,
    )
    rule = rule or AdamW()
    if is_sharded:
        opt = _attach.attach_sharded(model, rule, _attach.shard(model, rule, request))
    else:
        opt = _attach.attach(model, rule, request)
    _attach.say_what_goes_on(request, opt)
    return _adopt.take_over(opt, optimizer, states)


def attach_reader(
    model: nn.Module,
    optimizer: Optimizer | torch.optim.Optimizer | None = None,
    *,
    job: str | None = None,
    socket: str | None = None,
    param_groups: Iterable[Any] | None = None,
    timeout: float = 300.0,
) -> Reader:
    """Attaches to a job that ranks train, without a rank: to evaluate or watch it beside them.

    model         Built and typed as the ranks' model. Its parameters stay private to this process;
                  reader.load_weights() copies the job's into them.
    optimizer     As the ranks gave to attach().
    job, socket,  As of attach().
    param_groups,
    timeout

    Errors  E_JOB_NAME  no job has this name yet.
            E_LAYOUT    the job has another model, optimizer or format; names the difference.

    >>> opt = forebay.attach(model, forebay.AdamW(lr=1e-3))
    >>> reader = forebay.attach_reader(torch.nn.Linear(4, 2))
    >>> reader.load_weights()
    0
    """
    from . import _adopt, _attach

    rule, param_groups, _ = _adopt.adopt(optimizer, param_groups)
    return _attach.attach_reader(
        model,
        rule or AdamW(),
        job=_job_name(job),
        socket=_socket_path(socket),
        param_groups=param_groups,
        timeout=seconds("timeout", timeout),
    )


def _refuse_several_nodes(world_size: int, socket: str) -> None:
    """Refuses a shared job over several nodes.

    Errors  E_UNSUPPORTED  the launcher started fewer ranks on this node than the job has: the daemon would wait for
                           the others at every step.

    A daemon behind a gateway may have the ranks of all nodes. In a launch with fewer ranks than the job, the script
    has started ranks itself, and the launcher's numbers do not count these ranks.
    """
    launched = _launched_with("WORLD_SIZE", "")
    if socket.startswith("ucx://") or (launched.isdigit() and int(launched) < world_size):
        return
    for variable in LOCAL_WORLD_SIZES:
        local = _launched_with(variable, "")
        if local.isdigit() and int(local) < world_size:
            raise unsupported(
                f"a shared job over several nodes: world size {world_size}, of which {local} ranks are "
                f"on this node ({variable})",
                'mode="sharded", one daemon for all of them (ucx://HOST:PORT, docs/guide/multi-node.md), or pass rank= and '
                "world_size= for a job per node",
            )


def _launched_with(variable: str, default: str) -> str:
    """Returns the variable of the environment, or the number that srun or mpirun have set."""
    return {**environment_of(), **os.environ}.get(variable, default)


def _passes(accumulate: Any) -> int:
    number = whole_number(accumulate)
    if number is None or number < 1:
        raise usage_error(
            "E_OPTION",
            f"accumulate is {accumulate!r}, not a number of backward passes",
            "accumulate=8 for steps of at most 8 backward passes",
        )
    return number


def _job_name(job: str | None) -> str:
    return job or os.environ.get("FOREBAY_JOB") or "default"


def _socket_path(socket: str | None) -> str:
    return socket or os.environ.get("FOREBAY_SOCKET", "")


def status(socket: str | None = None) -> dict[str, Any]:
    """Returns what `forebay status --json` prints, as a dict.

    socket  The daemon's. Default: FOREBAY_SOCKET, else /run/forebay/forebay.sock.

    Errors  E_NO_DAEMON  nobody listens there.

    >>> memory = forebay.status()["memory"]
    >>> memory["used_bytes"] <= memory["limit_bytes"]
    True
    """
    from . import _core

    return _core.status(_socket_path(socket))


def trace(job: str | None = None, socket: str | None = None) -> list[dict[str, Any]]:
    """The timed events of the job's newest step, as `forebay trace` shows them: dicts with process
    ("forebayd", "rank 0"), lane, name, start_ns, end_ns (CLOCK_MONOTONIC) and bytes. Of the ranks that
    are attached. `forebay trace JOB --perfetto` writes them for https://ui.perfetto.dev.

    job     Default: FOREBAY_JOB or "default".
    socket  The daemon's. Default: FOREBAY_SOCKET, else /run/forebay/forebay.sock.

    Errors  E_NO_DAEMON  nobody listens there.

    >>> opt = forebay.attach(model)
    >>> model(inputs).sum().backward()
    >>> opt.step()
    >>> "update" in {event["lane"] for event in forebay.trace()}
    True
    """
    from . import _core

    return _core.trace(_socket_path(socket), _job_name(job))

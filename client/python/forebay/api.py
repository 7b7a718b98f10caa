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
                       or float16. Frozen parameters may have another type (sharded: the same). After attach
                       the parameters are read-only views of memory that the daemon owns. If fully_shard()
                       (FSDP2) was called on the model, its shards are fetched from that memory when FSDP2
                       gathers them. A model on the meta device is sharded; see `initial`.
    optimizer          AdamW(...) or another of forebay.optimizers; or AdamW, Adam, Adagrad or SGD of
                       torch.optim. Attach takes over the groups of a torch optimizer, and its states if it
                       has stepped and the job has not. None: AdamW(). Parameters of the optimizer that the
                       model does not have (a loss's) train too, as "optimizer[GROUP][INDEX]";
                       mode="sharded" refuses them.
    job, rank,         The job, and the rank of this process in the job. Default: FOREBAY_JOB or "default";
    world_size         the numbers of the process group, else RANK and WORLD_SIZE, else the numbers of srun
                       or mpirun, else 0 and 1. If a process group exists, the numbers must be those of the
                       process group, of another group of this process (torch.distributed.new_group), or of
                       its node.
    socket             Path of the daemon's socket. Default: FOREBAY_SOCKET, else /run/forebay/forebay.sock.
    param_groups       Parameter groups, as the params of an optimizer of torch.optim.
    timeout            Seconds that this call and each later one may wait; float("inf"): no limit.
    run                The run that this process belongs to: its processes replace each other and
                       continue its job. At most 200 printable ASCII characters without spaces.
                       Default: FOREBAY_RUN, else the run of torchrun, srun or mpirun, else that of the
                       process group, else this process alone. All ranks of a job need the same run: set
                       FOREBAY_RUN if none of these is available.
    resume             Continues a job of another run.
    mode               "shared": every rank reads one copy of the weights. "sharded": ZeRO-3, over the
                       process group, whose ranks may be on several nodes. None: sharded if
                       fully_shard() was called on the model, or if the model is on the meta device or
                       on a GPU, else shared. opt.mode has the mode. A plain model is sharded by
                       fully_shard() on the elements of its outermost ModuleList or Sequential, and on
                       the model.
    accumulate         Largest number of backward passes of a step. Gradients of several passes are added in
                       float32, announced or not. With accumulate > 1 the sums of gradients take 4 bytes a
                       parameter. They also do with float32 gradients, and in mode "shared" with several
                       ranks. If gradients (mode "sharded": reduced gradients) have 16 bits and accumulate
                       is 1, sums take 2 bytes, and 4 bytes more from the first step with a second pass
                       on. That step raises E_DRAM_LIMIT if the node has no room for them.
    initial            For a model on the meta device: the source of the values of a new job. It sets no
                       parameter of an existing job. None: reset_parameters() of each module that has one.
                       A function of a module, such as a model's _init_weights. Both are called as
                       model.apply() does after to_empty(). They also set the buffers that the job does not
                       have. Or the path of a safetensors file, or of a folder of such files (with or
                       without an index.json), with the names of model.state_dict(): each rank reads its
                       shards. The values have the parameters' types or narrower ones.
    durability         What the death of the daemon, or a power cut, can undo of the training: "memory",
                       "epoch=N" or "step", or a forebay.Durability, which explains them.
    memory             A forebay.Memory: memory that each rank's session takes, in bytes.
    sharding           A forebay.Sharding: how mode="sharded" divides the model and when blocks are updated.
    old                Keywords of 0.2.0 that are now parts of `durability`, `memory` and `sharding`
                       (forebay.options.MOVED). Each causes a FutureWarning. 0.4 does not accept them.

    If the model is on the meta device, no rank ever holds the whole model. The shards of a group of FSDP2
    have memory from the first module that may set them to the last. A function may set any shard until
    its call with the model. reset_parameters() may set the shards of its own module.

    Waits until other jobs have freed enough memory and the job's memory is created. Then waits until
    the initial parameters are written, a step in progress has ended, and an older session of the rank
    is closed.

    A new job begins with rank 0's parameters, and the other ranks wait for these. With sharded
    attachment it begins with each rank's shards. Every later session takes the values of the job's last
    committed step. It also takes the buffers that its rank has committed with that step, or rank 0's
    if its rank has committed none.

    Errors  forebay.ForebayError with .code, .hint and .retryable. The model is then as it was before, but
            a plain model that attach was to shard may stay sharded by fully_shard().
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
    """Attaches to a job without a rank, to evaluate or watch the job while its ranks train.

    model         Built and typed as the ranks' model. Its parameters stay private to this process;
                  reader.load_weights() copies the job's into them.
    optimizer     The optimizer that the ranks passed to attach().
    job, socket,  As in attach().
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

    socket  Path of the daemon's socket. Default: FOREBAY_SOCKET, else /run/forebay/forebay.sock.

    Errors  E_NO_DAEMON  no daemon listens on the socket.

    >>> memory = forebay.status()["memory"]
    >>> memory["used_bytes"] <= memory["limit_bytes"]
    True
    """
    from . import _core

    return _core.status(_socket_path(socket))


def trace(job: str | None = None, socket: str | None = None) -> list[dict[str, Any]]:
    """The timed events of the job's newest step, as `forebay trace` shows them: dicts with process
    ("forebayd", "rank 0"), lane, name, start_ns, end_ns (CLOCK_MONOTONIC) and bytes. The events are
    those of the daemon and of attached ranks. `forebay trace JOB --perfetto` writes the events for
    https://ui.perfetto.dev.

    job     Default: FOREBAY_JOB or "default".
    socket  Path of the daemon's socket. Default: FOREBAY_SOCKET, else /run/forebay/forebay.sock.

    Errors  E_NO_DAEMON  no daemon listens on the socket.

    >>> opt = forebay.attach(model)
    >>> model(inputs).sum().backward()
    >>> opt.step()
    >>> "update" in {event["lane"] for event in forebay.trace()}
    True
    """
    from . import _core

    return _core.trace(_socket_path(socket), _job_name(job))

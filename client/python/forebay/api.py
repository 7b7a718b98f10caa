"""What a caller writes down before torch, the daemon or the extension are needed."""

import os

from .errors import unsupported, usage_error
from .optimizers import AdamW

# How many ranks the launcher started on this node: torchrun, Open MPI, MPICH.
LOCAL_WORLD_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def attach(
    model,
    optimizer=None,
    *,
    job=None,
    rank=None,
    world_size=None,
    socket=None,
    param_groups=None,
    extra_state_bytes=64 * 1024,
    grad_arena_bytes=0,
    timeout=300.0,
):
    """Hands a model's parameters to the daemon and returns the optimizer that steps them.

    model              Any nn.Module on the CPU, all parameters float32 or all bfloat16. From now on
                       its parameters are read-only views of memory that the daemon owns.
    optimizer          AdamW(...) or another of forebay.optimizers; None: AdamW().
    job, rank,         Which rank of which job this process is. Default: FOREBAY_JOB or "default",
    world_size         RANK or 0, WORLD_SIZE or 1.
    socket             The daemon's. Default: FOREBAY_SOCKET, else /run/forebay/forebay.sock.
    param_groups       As the optimizer's params.
    extra_state_bytes  Room for what step(extra_state=...) commits with a step, at most 16 MiB.
    grad_arena_bytes   Room for gradients on their way; 0: three times the largest group.
    timeout            Seconds that this call and each later one may wait.

    The first session of a new job writes the model's values; every other one takes the values of
    the job's last committed step. Errors: forebay.ForebayError with .code, .hint and .retryable;
    the model is then as it was.
    """
    from . import _attach

    world_size = _whole(
        "world_size (WORLD_SIZE)",
        os.environ.get("WORLD_SIZE", 1) if world_size is None else world_size,
        1,
    )
    _refuse_several_nodes(world_size)
    return _attach.attach(
        model,
        optimizer or AdamW(),
        job=job or os.environ.get("FOREBAY_JOB") or "default",
        rank=_whole("rank (RANK)", os.environ.get("RANK", 0) if rank is None else rank, 0),
        world_size=world_size,
        socket=socket or os.environ.get("FOREBAY_SOCKET", ""),
        param_groups=param_groups,
        extra_state_bytes=extra_state_bytes,
        grad_arena_bytes=grad_arena_bytes,
        timeout=timeout,
    )


def _refuse_several_nodes(world_size):
    """Errors: E_UNSUPPORTED where the launcher started fewer of the job's ranks on this node: the
    daemon would wait for the others at every step."""
    for variable in LOCAL_WORLD_SIZES:
        local = os.environ.get(variable, "")
        if local.isdigit() and int(local) < world_size:
            raise unsupported(
                f"a job over several nodes: world size {world_size}, of which {local} ranks are on "
                f"this node ({variable})",
                "start all ranks on one node, or pass rank= and world_size= for a job per node",
            )


def _whole(what, value, least):
    """The value as a whole number that the wire has room for."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if not least <= number < 1 << 32:
        raise usage_error(
            "E_RANK",
            f"{what} is {value!r}, not a whole number from {least} on",
            "torchrun sets RANK and WORLD_SIZE; alone leave them out",
        )
    return number


def status(socket=None):
    """What `forebay status` shows, as a dict."""
    from . import _core

    return _core.status(socket or os.environ.get("FOREBAY_SOCKET", ""))


def trace(job=None, socket=None):
    """The timed events of the job's newest step, as `forebay trace` shows them: dicts with lane,
    name, start_ns, end_ns (CLOCK_MONOTONIC) and bytes."""
    from . import _core

    return _core.trace(
        socket or os.environ.get("FOREBAY_SOCKET", ""),
        job or os.environ.get("FOREBAY_JOB") or "default",
    )

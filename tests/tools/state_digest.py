#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of what small fixed trainings leave behind, so that two builds can be compared.

usage: state_digest.py FOREBAYD [CASE ...]

FOREBAYD is the daemon to start; the Python package is the one that this interpreter has. Each line of
the output is `digest case`. The digest covers, for every parameter in the order of its names: the
name, the weights, the master and every moment, decoded to float32 in element order. It reads a
package whose read_state() returns raw planes ("remainder", no "step") as well as one whose
read_state() returns decoded states, so builds of both kinds give the same digest for the same state.

Gradients are constants: a case depends neither on torch's kernels nor on its number of threads. A
case is OPTIMIZER-DTYPE-FORMAT-RANKS[-clip]; without arguments all of them run. Some of each job's
blocks live on swap; stderr says how many.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

STEPS = 5
PAGE_BYTES = 4096
LIMIT_BYTES_MAX = 64 << 20  # largest dram.limit that is tried
DRAM_FOR_STATES = 160 << 10  # about half of the states; the other blocks are on swap
SHAPES = [  # parameters of each layer
    [("weight", (67, 131)), ("bias", (131,))],
    [("weight", (129, 127)), ("scale", (1,)), ("table", (3, 5, 7, 11))],
    [("weight", (20011,)), ("bias", ())],
]
CASES = [
    f"{optimizer}-{dtype}-{form}-{ranks}{clip}"
    for optimizer in ("adamw", "sgd", "adagrad", "lion", "lamb")
    for dtype, form in (("float32", "fp32"), ("bfloat16", "exact"), ("bfloat16", "fp32"))
    for ranks in (1, 2)
    for clip in ("", "-clip")
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS_AS = "weights"  # how the digest calls the parameter itself


def constants(seed, shape, dtype):
    """Multiples of 1/8 below 4: exact in bfloat16, and so are the sums of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype) / 8


class Layer(nn.Module):
    def __init__(self, number, dtype):
        super().__init__()
        for index, (name, shape) in enumerate(SHAPES[number]):
            values = constants(1000 + 10 * number + index, shape, dtype)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, total, seed):
        for index, parameter in enumerate(self.parameters()):
            factor = constants(seed + index, tuple(parameter.shape), parameter.dtype)
            total = total + (parameter * factor).sum()
        return total


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, dtype) for number in range(len(SHAPES)))

    def forward(self, seed):
        total = 0
        for number, layer in enumerate(self.layers):
            total = layer(total, seed + 100 * number)
        return total


def optimizer_of(case):
    import forebay

    name, _, form, _, *rest = case.split("-")
    make = {
        "adamw": lambda **more: forebay.AdamW(lr=1e-2, **more),
        "sgd": lambda **more: forebay.SGD(lr=1e-2, momentum=0.9, weight_decay=1e-2, **more),
        "adagrad": lambda **more: forebay.Adagrad(lr=1e-2, weight_decay=1e-2, **more),
        "lion": lambda **more: forebay.Lion(lr=1e-3, weight_decay=1e-2, **more),
        "lamb": lambda **more: forebay.Lamb(lr=1e-2, weight_decay=1e-2, **more),
    }[name]
    return make(format=form, **({"max_grad_norm": 1.0} if "clip" in rest else {}))


def add(digest, what, values):
    flat = values.detach().contiguous().flatten().to(torch.float32)
    digest.update(what.encode() + b"\0")
    digest.update(bytes(flat.view(torch.uint8).tolist()))


def master_of(tensor, state):
    """The float32 master of an element, from a raw remainder too."""
    if "remainder" in state:
        high = tensor.detach().view(torch.int16).to(torch.int32) << 16
        return (high + state["remainder"].to(torch.int32)).view(torch.float32)
    return state.get("master", tensor)


def digest_of(model, opt):
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        state = opt.read_state(name)
        add(digest, f"{name} {WEIGHTS_AS}", tensor)
        add(digest, f"{name} master", master_of(tensor, state))
        for moment in sorted(set(state) - {"remainder", "master", "step"}):
            add(digest, f"{name} {moment}", state[moment])
    return digest.hexdigest()


def train(case, rank, socket):
    import forebay

    _, dtype, _, ranks, *_ = case.split("-")
    model = Model(DTYPES[dtype])
    opt = forebay.attach(
        model, optimizer_of(case), job=case, rank=rank, world_size=int(ranks), socket=socket
    )
    for step in range(1, STEPS + 1):
        model(100_000 * step + 10_000 * rank).backward()
        opt.step()
    if rank == 0:
        job = forebay.status(socket)["jobs"][0]
        resident = f"{job['resident_blocks']} of {job['blocks']} blocks in DRAM"
        print(f"{case}: {resident}", file=sys.stderr)
        print(digest_of(model, opt), case, flush=True)
    opt.detach()


def start_daemon(program, folder, limit_bytes, errors=None):
    """A job's blocks are many and small. None where the daemon has ended."""
    socket = os.path.join(folder, "forebay.sock")
    settings = [
        f"socket.path={socket}",
        f"dram.limit={limit_bytes}",
        f"swap.paths={folder}",
        "swap.capacity=64MiB",
        "swap.staging=1MiB",
        "update.workers=2",
        "update.block_elems=4096",
        "memlock=best_effort",
        "log.level=warning",
    ]
    arguments = [part for setting in settings for part in ("--set", setting)]
    daemon = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=errors)
    while not os.path.exists(socket):
        if daemon.poll() is not None:
            return None
        time.sleep(0.02)  # house: allow sleep: a poll that ends with the daemon
    return daemon, socket


def least_limit(program):
    """The smallest limit in bytes, to the page, with which the daemon starts."""
    too_small, enough = 0, LIMIT_BYTES_MAX
    while enough - too_small > PAGE_BYTES:
        limit_bytes = (too_small + enough) // 2 // PAGE_BYTES * PAGE_BYTES
        with tempfile.TemporaryDirectory(prefix="state_digest") as folder:
            started = start_daemon(program, folder, limit_bytes, subprocess.DEVNULL)
            if started is None:
                too_small = limit_bytes
            else:
                stop_daemon(started[0])
                enough = limit_bytes
    if enough == LIMIT_BYTES_MAX:
        sys.exit(f"state_digest: {program} does not start")
    return enough


def least_memory(program, case, limit_bytes):
    """Bytes without which the job is refused: none of its states would be in DRAM."""
    import forebay

    _, dtype, _, ranks, *_ = case.split("-")
    with tempfile.TemporaryDirectory(prefix="state_digest") as folder:
        daemon, socket = start_daemon(program, folder, limit_bytes)
        try:
            forebay.attach(
                Model(DTYPES[dtype]),
                optimizer_of(case),
                job=case,
                rank=0,
                world_size=int(ranks),
                socket=socket,
            )
            sys.exit("state_digest: the job fits into the least memory")
        except forebay.ForebayError as error:
            found = re.search(r"at least (\d+) bytes", error.hint)
            if found is None:
                raise
            return int(found.group(1))
        finally:
            stop_daemon(daemon)


def stop_daemon(daemon):
    daemon.send_signal(signal.SIGTERM)
    daemon.wait(timeout=30)


def run_case(program, case, least_bytes):
    limit_bytes = least_memory(program, case, least_bytes) + DRAM_FOR_STATES
    with tempfile.TemporaryDirectory(prefix="state_digest") as folder:
        daemon, socket = start_daemon(program, folder, limit_bytes)
        try:
            ranks = int(case.split("-")[3])
            command = [sys.executable, __file__, "--rank"]
            run = {**os.environ, "FOREBAY_RUN": "digest"}  # all ranks belong to one run
            children = [
                subprocess.Popen([*command, case, str(rank), socket], env=run)
                for rank in range(ranks)
            ]
            return all([child.wait(timeout=120) == 0 for child in children])
        finally:
            stop_daemon(daemon)


def main(arguments):
    if arguments[:1] == ["--rank"]:
        train(arguments[1], int(arguments[2]), arguments[3])
        return 0
    if not arguments or arguments[0].startswith("-"):
        print(__doc__.strip())
        return 2
    program, cases = arguments[0], arguments[1:] or CASES
    least_bytes = least_limit(program)
    return 0 if all([run_case(program, case, least_bytes) for case in cases]) else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))

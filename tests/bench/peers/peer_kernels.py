# SPDX-License-Identifier: Apache-2.0
"""The update alone: every side in alternation, in this one process; the peers and the limit loops on
the same buffers, ours on blocks as the daemon has them.

Runs in the environment of the peers, started by `run`, which sets the number of threads and their
places. Prints one JSON object: the samples in seconds, and what they were taken on.
"""

import argparse
import ctypes
import json
import os
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

import ours
import quiet

try:
    import prime_rl_cpu_adam  # built by hand: docs/reports/benchmarks.md
except ModuleNotFoundError:
    prime_rl_cpu_adam = None

SHAPES = {"flat": 1, "1000": 1000}  # tensors
PRIME_RL_CHUNK = 1 << 24  # elements
PARK_S = 0.02  # an OpenMP thread spins for some milliseconds before it sleeps


class Arrays:
    """What the peers and the limit loops share: the planes of a state, gradients in both widths, the 16-bit weights."""

    def __init__(self, n):
        self.n = n
        self.buffers = {}
        self.tensors = {}
        for name, dtype in {
            "master": torch.float32,
            "m": torch.float32,
            "v": torch.float32,
            "grad32": torch.float32,
            "grad16": torch.bfloat16,
            "weights": torch.bfloat16,
            "remainder": torch.int16,
        }.items():
            buffer = ours.Buffer(n * dtype.itemsize, stagger=len(self.buffers) * ours.STAGGER)
            self.buffers[name] = buffer
            self.tensors[name] = torch.frombuffer(
                buffer.memory, dtype=dtype, count=n, offset=buffer.offset
            )
        pattern = torch.randn(1 << 20, generator=torch.Generator().manual_seed(4))
        self._fill("master", 0.02 * pattern)
        self._fill("m", 1e-4 * pattern)
        self._fill("v", (1e-3 * pattern).square() + 1e-8)  # avoids denormal numbers on all sides
        self._fill("grad32", 1e-3 * pattern)
        self._fill("grad16", 1e-3 * pattern)
        self._fill("weights", 0.02 * pattern)

    def _fill(self, name, pattern):
        for part in self.tensors[name].split(pattern.numel()):
            part.copy_(pattern[: part.numel()])

    def cut(self, count):
        """[{plane: tensor}] of `count` tensors of equal size."""
        parts = {
            name: tensor[: self.n // count * count].view(count, -1).unbind(0)
            for name, tensor in self.tensors.items()
        }
        return [{name: parts[name][i] for name in parts} for i in range(count)]


def planes_of(work, part):
    at = {name: tensor.data_ptr() for name, tensor in part.items()}
    return ours.Planes(
        n=part["m"].numel(),
        weights=at["master"] if work == "fp32" else at["weights"],
        master=None if work == "exact" else at["master"],
        remainder=at["remainder"] if work == "exact" else None,
        m=at["m"],
        v=at["v"],
        grad=at["grad32"] if work == "fp32" else at["grad16"],
    )


def peer_optimizer(make, parts):
    """An optimizer of a peer whose parameters and moments are the shared arrays."""
    params = []
    for part in parts:
        param = torch.nn.Parameter(part["master"])
        param.grad = part["grad32"]
        params.append(param)
    optimizer, step_zero = make(params)
    for param, part in zip(params, parts):
        optimizer.state[param] = {
            "step": step_zero(),
            "exp_avg": part["m"],
            "exp_avg_sq": part["v"],
        }
    return optimizer


def torch_fused(params):
    optimizer = torch.optim.AdamW(params, lr=ours.LR, weight_decay=ours.WEIGHT_DECAY, fused=True)
    return optimizer, lambda: torch.tensor(0.0)


def deepspeed_adam(params):
    optimizer = DeepSpeedCPUAdam(params, lr=ours.LR, weight_decay=ours.WEIGHT_DECAY)
    return optimizer, int


def three_passes(optimizer, parts):
    """What ZeRO does around the update: gradients widened, update, parameters narrowed."""

    def run():
        for part in parts:
            part["grad32"].copy_(part["grad16"])
        optimizer.step()
        for part in parts:
            part["weights"].copy_(part["master"])

    return run


def prime_rl(arrays, parts):
    """One rank's bf16 gradients widened into float32 sums and then the update with its bf16 weights, chunk by chunk: what
    prime-rl does with a chunk when its last gradient has arrived. Its chunks are tensors of up to 2^24 elements together.
    """
    if len(parts) == 1:
        parts = [
            dict(zip(arrays.tensors, tensors))
            for tensors in zip(*(tensor.split(PRIME_RL_CHUNK) for tensor in arrays.tensors.values()))
        ]
    chunks, room = [], 0
    for part in parts:
        elems = part["m"].numel()
        if elems > room:
            chunks.append([])
            room = PRIME_RL_CHUNK
        room -= elems
        chunks[-1].append(part | {"step": torch.tensor(0.0)})

    def run():
        for chunk in chunks:
            names = ("master", "grad32", "grad16", "m", "v", "step", "weights")
            master, sums, delivered, m, v, steps, weights = ([one[name] for one in chunk] for name in names)
            prime_rl_cpu_adam.copy_or_add_bfloat16_multi_(sums, delivered, [False] * len(chunk))
            prime_rl_cpu_adam.adamw_step(
                master,
                sums,
                m,
                v,
                steps,
                weights,
                lr=ours.LR,
                beta1=0.9,
                beta2=0.999,
                weight_decay=ours.WEIGHT_DECAY,
                eps=1e-8,
                gradient_scale=1.0,
            )

    return run


def make_sides(library, arrays, tensors, cpus):
    """{side: function}; limits touch all arrays in one run whatever the shape."""
    parts, (whole,) = arrays.cut(tensors), arrays.cut(1)
    deepspeed = peer_optimizer(deepspeed_adam, parts)
    fused = peer_optimizer(torch_fused, parts)
    sides = {
        "torch-fused": fused.step,
        "deepspeed": deepspeed.step,
        "deepspeed-3-passes": three_passes(deepspeed, parts),
    }
    if prime_rl_cpu_adam:
        sides["prime-rl"] = prime_rl(arrays, parts)
    for work in ours.WORKS:
        pool = ours.Ours(library, cpus)
        pool.make_blocks(work, arrays.n, tensors)
        sides[f"ours-{work}"] = pool.step
        if work == "exact":
            sides["ours-exact-from-delivery"] = pool.step_from_delivery
    for work in ours.WORKS:
        planes = planes_of(work, whole)
        sides[f"limit-{work}"] = lambda work=work, planes=planes: pool.touch(work, planes)
    return sides


def measure(sides, taken, hold):
    """Samples of every side, in seconds; each round begins with another side."""
    names = list(sides)

    def take(number, watch):
        shift = number % len(names)
        samples = {}
        for name in names[shift:] + names[:shift]:
            quiet.pause(PARK_S)
            with hold, watch.running():
                began = time.perf_counter()
                sides[name]()
                samples[name] = time.perf_counter() - began
        return samples

    for run in sides.values():
        run()
    taken.collect(take)
    return {
        "samples": {name: [samples[name] for samples in taken.kept] for name in names},
        "rejected": taken.rejected,
        "noise": taken.noise,
    }


def openmp_libraries():
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sorted({line.split()[-1] for line in maps if "omp" in os.path.basename(line)})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--cpus", required=True, help="one thread on each, comma-separated")
    parser.add_argument("--everywhere", required=True, help="all that this process may use")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--noise", type=float, required=True)
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    cpus = [int(cpu) for cpu in args.cpus.split(",")]
    everywhere = [int(cpu) for cpu in args.everywhere.split(",")]
    torch.set_num_threads(len(cpus))
    library = ours.Library(args.ours)
    arrays = Arrays(args.n)
    with torch.no_grad():
        sides = make_sides(library, arrays, SHAPES[args.shape], cpus)
        others = sorted(set(everywhere) - set(cpus)) if args.ahead else []
        hold = ours.Hold(library, others)
        result = measure(
            sides, quiet.Rounds(args.rounds, args.patience, args.noise, args.ahead), hold
        )
    assert ctypes.sizeof(ours.Planes) == 56
    for name in ("master", "m", "v"):
        assert torch.isfinite(arrays.tensors[name]).all(), f"{name} is not finite any more"
    result |= {
        "threads": len(cpus),
        "shape": args.shape,
        "n": args.n,
        "target": library.target(),
        "huge_pages": ours.huge_page_share(arrays.buffers.values()),
        "openmp": openmp_libraries(),
    }
    with open(args.out, "w", encoding="utf-8") as out:
        json.dump(result, out)


if __name__ == "__main__":
    main()

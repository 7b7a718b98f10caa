# SPDX-License-Identifier: Apache-2.0
"""One side of the phase bench: trains the model, a step for each message, and sleeps in between.

Runs in the environment of the peers, started by `run`; the Forebay side under `forebay run`. Each
message is a step's number; the answer has the seconds of forward, backward and step, and the loss.
"""

import argparse
import gc
import multiprocessing.connection
import os
import time

import torch

import deepspeed_side
import forebay_side
import gpt

MAX_GRAD_NORM = 1.0


class DeepSpeed(deepspeed_side.DeepSpeed):
    """With the optimizer's states and arithmetic on the CPU, one rank."""

    def __init__(self, model, args):
        zero = {
            "sub_group_size": args.sub_group,
            "offload_optimizer": {"device": "cpu", "pin_memory": args.pin},
        }
        super().__init__(model, zero, MAX_GRAD_NORM)
        inner = self.engine.optimizer
        self.facts = {
            "sub_group_size": args.sub_group,
            "pin_memory": args.pin,
            "optimizer": f"{type(inner).__name__} over {type(inner.optimizer).__name__}",
        }


class Forebay(forebay_side.Forebay):
    """This process is the daemon's one rank."""

    def __init__(self, model, _args):
        super().__init__(model, MAX_GRAD_NORM)
        self.facts = {"format": "exact", "max_grad_norm": MAX_GRAD_NORM}


def one_step(side, tokens):
    marks = [time.perf_counter()]
    loss = side.forward(tokens)
    marks.append(time.perf_counter())
    side.backward(loss)
    marks.append(time.perf_counter())
    side.step()
    marks.append(time.perf_counter())
    names = ("forward", "backward", "step")
    seconds = {name: after - before for name, before, after in zip(names, marks, marks[1:])}
    return seconds | {"loss": loss.item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=["deepspeed", "forebay"], required=True)
    parser.add_argument("--connect", required=True, help="path of the socket of `run`")
    parser.add_argument("--size", choices=gpt.SIZES, required=True)
    parser.add_argument("--sub-group", type=int)
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    size = gpt.SIZES[args.size]
    torch.manual_seed(0)
    model = gpt.Gpt(size)
    params = sum(param.numel() for param in model.parameters())
    side = (DeepSpeed if args.by == "deepspeed" else Forebay)(model, args)
    generator = torch.Generator().manual_seed(1)
    gc.collect()
    with multiprocessing.connection.Client(args.connect, "AF_UNIX") as conductor:
        conductor.send({"params": params, "fp32_products": gpt.Linear.widened} | side.facts)
        while conductor.recv() == "step":
            tokens = torch.randint(0, size.vocab, (1, size.length), generator=generator)
            conductor.send(one_step(side, tokens))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Forebay itself takes of a gather: the time of FSDP2's calls for the shards of a group, on a model of
eight small layers. The first gather after a step (in forward) asks the daemon where all weights are; the
others (in backward, of further passes) ask nothing.

Run it under a daemon: forebay run --dram 256MiB -- python3 tests/bench/peers/group_cost.py
Prints microseconds a group, with the GIL, mean of a pass over the layers: median and quartiles of passes.
"""

import tempfile
import time

import figures
import forebay
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gpt

GOAL_US = 30
ROUNDS = 200
SIZE = gpt.Size(layers=8, width=8, heads=1, vocab=16, length=4)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="forebay-peers-") as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = gpt.Gpt(SIZE)
        for layer in model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        opt = forebay.attach(model, forebay.AdamW())
        engine = opt._engine
        layers = [group for group in engine.shard_groups if group.name.startswith("layers")]
        samples = {"forward": [], "backward": []}
        for number in range(ROUNDS):
            engine.release_all()
            for direction, values in samples.items():
                began = time.perf_counter()
                for group in layers:
                    for member in group.shard_members:
                        member.shard.local.fsdp_pre_all_gather(None, None, None, None, None)
                if number > 0:
                    values.append(1e6 * (time.perf_counter() - began) / len(layers))
        for direction, values in samples.items():
            row = figures.spread(values)
            print(
                f"{direction}, {len(layers[0].shard_members)} parameters a group: {row['value']:.1f} us "
                f"(quartiles {row['q1']:.1f} to {row['q3']:.1f}; goal {GOAL_US})"
            )
        opt.detach()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Two nodes, predicted and measured: `forebay-bench cluster` beside FSDP2 over gloo in two network namespaces, a daemon in
each, whose disks and link are limited to a rate and whose compute is timers. Needs root.

usage: python3 tests/bench/cluster_two_nodes.py [--swap DIRECTORY] [--steps N]

What the trainer takes by itself, and what gloo sends, are inputs: of a run with as much compute, all in DRAM and no limit. The
rest is predicted. Prints a row a case: the median of the measured steps, the prediction, what it is off by, and the bytes that the
link had in a step, measured and as ZeRO-3 counts them. Nothing is a test: a busy machine measures longer steps.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / folder) for folder in ("support", "bench", "client/python_torch", "tools")]
from cluster_step import GROUPS, PARAMS, predicted  # noqa: E402
from network_nodes import ADDRESSES, LINK, limit_link, two_nodes  # noqa: E402
from test_daemon_restart import Service  # noqa: E402

DRAM_MIB, PORT = 224, 29611
# Measured cases: Mbit/s of the link, MiB/s of each disk, ms of compute in a step.
CASES = ((800, 500, 1000), (800, 100, 1000), (400, 200, 2000), (1600, 100, 2000))
UNLIMITED_MBIT = 100_000
DEADLINE_S = 600


def start(node, service, number, compute_ms, steps):
    place = [ADDRESSES[0], PORT, number, len(ADDRESSES), LINK, PARAMS, GROUPS, compute_ms, steps]
    command = node.command(sys.executable, ROOT / "tests/bench/two_nodes_ranks.py", *place, folder=ROOT)
    environment = {**os.environ, "FOREBAY_SOCKET": f"{service.folder}/s", "GLOO_SOCKET_IFNAME": LINK}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(network, services, compute_ms, steps):
    """What the first rank says."""
    ranks = [start(*pair, number, compute_ms, steps) for number, pair in enumerate(zip(network, services))]
    said = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    for rank, (_, error) in zip(ranks, said):
        if rank.returncode != 0:
            raise RuntimeError(error)
    return json.loads(said[0][0])


def measured(network, folder, compute_ms, steps, *settings):
    settings = ["swap.capacity=1GiB", "swap.staging=64MiB", "update.block_elems=1048576", *settings]
    with contextlib.ExitStack() as stack:
        services = []
        for number in range(len(network)):
            own = pathlib.Path(tempfile.mkdtemp(dir=folder))
            services.append(Service(own, *settings))
            stack.enter_context(services[-1].manager)
            services[-1].manager.start()
        return run(network, services, compute_ms, steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap", default=ROOT / "build")
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    print("| link | disk | timers | trainer alone | measured | predicted | off by | sent a step | ZeRO-3 counts |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    counted = 3 * 4 * PARAMS / 2
    alone = {}  # the trainer alone, by ms of compute
    with tempfile.TemporaryDirectory(prefix="fb", dir=arguments.swap) as folder, two_nodes(folder) as network:
        for link_mbit, disk_mib, compute_ms in CASES:
            if compute_ms not in alone:
                limit_link(network, UNLIMITED_MBIT)
                alone[compute_ms] = measured(network, folder, compute_ms, arguments.steps, "dram.limit=2GiB")
            own = alone[compute_ms]
            limit_link(network, link_mbit)
            limits = (f"dram.limit={DRAM_MIB}MiB", f"swap.limit_rate={disk_mib}MiB")
            found = measured(network, folder, compute_ms, arguments.steps, *limits)
            unlimited_s = own["sent"] * 8e-6 / UNLIMITED_MBIT
            own_s = own["median"] - unlimited_s
            link = ("--in-turn", "--link-rate", link_mbit * counted / own["sent"] / 8000)
            resident = found["resident"]
            seconds = predicted(2, disk_mib, round(1e3 * own_s), *link, resident_blocks=resident)
            spread = f"{min(found['steps']):.2f} to {max(found['steps']):.2f}"
            row = [f"{link_mbit} Mbit/s", f"{disk_mib} MiB/s", f"{compute_ms / 1000} s", f"{own_s:.2f} s"]
            row += [f"{found['median']:.2f} s ({spread})", f"{seconds:.2f} s", f"{seconds / found['median'] - 1:+.1%}"]
            row += [f"{found['sent'] / 2**20:.0f} MiB", f"{counted / 2**20:.0f} MiB"]
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Two nodes, predicted and measured: `forebay bench cluster` beside FSDP2 over gloo in two network namespaces, a daemon in
each, whose disks and link are limited to a rate and whose compute is timers. Needs root.

usage: python3 tests/bench/cluster_two_nodes.py [--swap DIRECTORY] [--steps N]

Prints a row a case: the median of the measured steps, the prediction, what it is off by, and the bytes that the link had in a
step, measured and counted. Nothing is a test: a busy machine measures longer steps.
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
from cluster_step import lines  # noqa: E402
from network_nodes import ADDRESSES, LINK, two_nodes  # noqa: E402
from test_daemon_restart import Service, settings_without_states  # noqa: E402

PARAMS, LAYERS, PORT = 1 << 25, 32, 29611
# Mbit/s of the link, MiB/s of a disk, ms of compute.
CASES = ((800, 500, 1000), (800, 100, 1000), (400, 200, 2000), (1600, 100, 2000))
DEADLINE_S = 600


def start(node, service, number, compute_ms, steps):
    place = [ADDRESSES[0], PORT, number, len(ADDRESSES), LINK, PARAMS, LAYERS, compute_ms, steps]
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


def measured(network, folder, disk_mib, compute_ms, steps):
    """With all states on swap: with the least DRAM that the jobs need."""
    common = ["swap.capacity=1GiB", f"swap.limit_rate={disk_mib}MiB", "update.block_elems=1048576"]
    common += ["swap.staging=64MiB"]

    def refused(service):
        try:
            run(network, [service] * len(network), 0, 0)
        except RuntimeError as error:
            return str(error)
        raise AssertionError("a job fits in 7500 KiB")

    room = settings_without_states(folder, refused)
    with contextlib.ExitStack() as stack:
        services = []
        for number in range(len(network)):
            own = pathlib.Path(folder, f"{disk_mib}.{compute_ms}.{number}")
            own.mkdir()
            services.append(Service(own, *common, *room))
            stack.enter_context(services[-1].manager)
            services[-1].manager.start()
        return run(network, services, compute_ms, steps)


def predicted(link_mbit, disk_mib, compute_ms):
    disk = disk_mib * 2**20 / 1e9
    model = ("--nodes", 2, "--gpus", 1, "--params", PARAMS, "--layers", LAYERS, "--dtype", "float32", "--in-turn")
    rates = ("--link-rate", link_mbit / 8000, "--read-rate", disk, "--write-rate", disk, "--staging", "64MiB")
    for dram_mib in range(600, 100, -4):
        for found in lines("cluster", *model, *rates, "--compute-ms", compute_ms, "--dram", f"{dram_mib}MiB"):
            if found["resident_blocks"] == 0 and found["weights_on_swap"] == 0:
                return found["value"]
    raise AssertionError("no limit leaves all states on swap")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap", default=ROOT / "build")
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    print("| link | disk | compute | measured | predicted | off by | sent a step | counted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    counted = 3 * 4 * PARAMS / 2
    with tempfile.TemporaryDirectory(prefix="fb", dir=arguments.swap) as folder, two_nodes(folder) as network:
        for link_mbit, disk_mib, compute_ms in CASES:
            for node in network:
                limit = ("rate", f"{link_mbit}mbit", "burst", "256kb", "latency", "100ms")
                node.run("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *limit)
            found = measured(network, folder, disk_mib, compute_ms, arguments.steps)
            seconds = predicted(link_mbit, disk_mib, compute_ms)
            spread = f"{min(found['steps']):.2f} to {max(found['steps']):.2f}"
            row = [f"{link_mbit} Mbit/s", f"{disk_mib} MiB/s", f"{compute_ms / 1000} s"]
            row += [f"{found['median']:.2f} s ({spread})", f"{seconds:.2f} s", f"{seconds / found['median'] - 1:+.1%}"]
            row += [f"{found['sent'] / 2**20:.0f} MiB", f"{counted / 2**20:.0f} MiB"]
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

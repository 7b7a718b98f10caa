#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a fetch from a daemon on another node takes, beside UCX's own ucx_perftest and iperf3 over the same link: two
network namespaces of this machine, all in turns. One JSON line a case, as forebay bench prints them.

usage: remote_fetch.py [--rounds N] [--mib N] [--rma] [--link-mbit N]

Run it as root, with a built checkout (build/bin) and an installed forebay; apt install ucx-utils iperf3.
"""

import argparse
import encodings.ascii  # noqa: F401: before the trainer becomes a user who may not read Python's files
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
for folder in ("support", "client/python_torch"):
    sys.path.append(str(HERE.parent / folder))

import forebay  # noqa: E402
import network_nodes  # noqa: E402
import remote_gateway  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401: likewise
import torch.distributed as dist  # noqa: E402
from daemon_process import Daemon  # noqa: E402
from forebay import _attach, _optimizer  # noqa: E402, F401: likewise
from forebay.states import reader  # noqa: E402, F401: likewise
from network_nodes import ADDRESSES  # noqa: E402
from remote_gateway import PORT, PRINCIPAL, UID  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

JOB = "bench"
DEADLINE_S = 120
SMALL_GROUPS = 32
PAUSE_S = 0.01
PEERS = {  # arguments of ucx_perftest
    "ucx_perftest/ucp_am_bw": ["-t", "ucp_am_bw", "-s", "1048576", "-n", "1000"],
    "ucx_perftest/tag_bw": ["-t", "tag_bw", "-s", "1048576", "-n", "1000"],
}
# PEERS with one message as large as the partition. Like the weights, the message is not in a cache.
LARGE = {f"{name}/large": words for name, words in PEERS.items()}
LATENCY = ["-t", "ucp_am_lat", "-s", "64", "-n", "2000", "-E", "sleep"]  # sleeps like the gateway


class Model(nn.Module):
    """Layers, which are a group each: a large one of whole MiB in bfloat16, then small ones."""

    def __init__(self, mib):
        super().__init__()
        small = [nn.Linear(32, 32, bias=False) for _ in range(SMALL_GROUPS)]
        self.layers = nn.ModuleList([nn.Linear(1024, 512 * mib, bias=False), *small])


def make_model(mib):
    with torch.no_grad():
        return Model(mib).to(torch.bfloat16)


def trainer(socket, mib):
    """Beside the daemon: makes a step, without a gradient, for each line."""
    os.setgid(UID)
    os.setuid(UID)
    opt = forebay.attach(make_model(int(mib)), forebay.SGD(lr=0.1), job=JOB, socket=socket, run=JOB)
    print("ready", flush=True)
    while os.read(0, 1):
        opt.step()
        print("stepped", flush=True)
    opt.detach()


def seconds(attachment, partition):
    begin = time.perf_counter()
    lease = attachment.fetch(partition)
    took = time.perf_counter() - begin
    attachment.release(lease)
    return took


def fetched(attachment, large, small, pause_s=0):
    """The large one, then the small ones twice, of which the first bring bytes: seconds."""
    took = seconds(attachment, large)
    time.sleep(pause_s)  # house: allow sleep: compute
    few, none = ([seconds(attachment, one) for one in small] for _ in range(2))
    return {"large": took, "small": statistics.median(few), "none": statistics.median(none)}


def reader(mib):
    """On the other node: fetches, for each line, the weights that the trainer has updated."""
    attached = forebay.attach_reader(make_model(int(mib)), forebay.SGD(lr=0.1), job=JOB)
    large, *small = (attached._plan.group_names.index(f"layers.{number}") for number in range(1 + SMALL_GROUPS))
    print("ready", flush=True)
    while os.read(0, 1):
        print(json.dumps(fetched(attached._attachment, large, small)), flush=True)
    attached._attachment.detach()


def rank(mib):
    """On the other node, with sharded attachment: trains a step for each line, and fetches the new weights of its own
    partitions, which are sent before it asks; with a pause behind the large one, as a layer's compute has it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = make_model(int(mib))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = forebay.attach(model, forebay.SGD(lr=0.1), job="rank", run=JOB)
    attachment = opt._engine.attachment
    print("ready", flush=True)
    while os.read(0, 1):
        opt.step()
        print(json.dumps(fetched(attachment, 0, range(1, 1 + SMALL_GROUPS), PAUSE_S)), flush=True)
    opt.detach()


class Peer:
    """A forked function, asked by a line and answering with one."""

    def __init__(self, node, environment, function, *words):
        self.process = network_nodes.Forked(node, environment, function, *words)
        self.await_line("ready")

    def await_line(self, begin):
        said = ""
        for line in self.process.stdout:
            if line.startswith(begin):
                return line
            said += line
        raise RuntimeError(f"it has ended: {said}")

    def ask(self, answer):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.await_line(answer)


def perftest(nodes, arguments):
    environment = {**os.environ, "UCX_TLS": "tcp", "UCX_RNDV_THRESH": "64k"}
    pipe = subprocess.PIPE
    server = subprocess.Popen(nodes[0].command("ucx_perftest"), env=environment, stdout=pipe, stderr=pipe)
    time.sleep(0.5)  # house: allow sleep: it does not say when it listens
    words = nodes[1].command("ucx_perftest", ADDRESSES[0], *arguments)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    server.wait(DEADLINE_S)
    return done.stdout.splitlines()[-1].split()


def iperf3(nodes):
    pipe = subprocess.PIPE
    server = subprocess.Popen(nodes[0].command("iperf3", "-s", "-1"), stdout=pipe, stderr=pipe)
    time.sleep(0.5)  # house: allow sleep: it does not say when it listens
    # The bytes flow from the daemon's node to the other node, like weights.
    words = nodes[1].command("iperf3", "-c", ADDRESSES[0], "-t", "1", "-R", "-J")
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    server.wait(DEADLINE_S)
    return json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8


def show(name, unit, values, limit=None, limit_name="", size_bytes=0):
    value = statistics.median(values)
    line = {"name": name, "value": value, "unit": unit, "samples": len(values)}
    line["spread"] = [min(values), max(values)]
    if limit:
        line |= {"limit": limit, "limit_name": limit_name, "share": value / limit if unit == "B/s" else limit / value}
    print(json.dumps(line | {"bytes": size_bytes}), flush=True)
    return value


def measure(nodes, folder, arguments):
    folder.chmod(0o755)
    daemon = Daemon(folder, "socket.mode=0666", "dram.limit=6GiB", launcher=nodes[0].command())
    authority = remote_gateway.Authority(folder / "ca")
    own = authority.issue("gateway", [ADDRESSES[0]])
    client = remote_gateway.make_client_folder(folder / "client", authority, *authority.issue(PRINCIPAL))
    text = remote_gateway.settings_text(
        f"{ADDRESSES[0]}:{PORT}", daemon.socket, *own, authority, rma="on" if arguments.rma else "off"
    )
    gateway = remote_gateway.Gateway(folder, text, nodes[0].command())
    environment = {**os.environ, "FOREBAY_GATEWAY": str(remote_gateway.GATEWAY), "UCX_TLS": "tcp"}
    environment |= {"FOREBAY_SOCKET": f"ucx://{ADDRESSES[0]}:{PORT}", "FOREBAY_REMOTE": str(client)}
    trains = Peer(nodes[0], os.environ, trainer, daemon.socket, arguments.mib)
    reads = Peer(nodes[1], environment, reader, arguments.mib)
    owns = Peer(nodes[1], {**environment, "GLOO_SOCKET_IFNAME": "lo"}, rank, arguments.mib)
    size_bytes = arguments.mib << 20
    found, peers, round_trips = {"asked": [], "own": []}, {}, []
    for turn in range(arguments.rounds + 1):
        trains.ask("stepped")
        took = {"asked": json.loads(reads.ask("{")), "own": json.loads(owns.ask("{"))}
        lines = {name: float(perftest(nodes, words)[5]) * 2**20 for name, words in PEERS.items()}
        for name, words in LARGE.items():
            few = [*words[:3], str(size_bytes), "-n", "8", "-w", "2"]
            lines[name] = float(perftest(nodes, few)[5]) * 2**20
        lines["iperf3"] = iperf3(nodes)
        one_way_us = float(perftest(nodes, LATENCY)[2])
        if turn == 0:  # pages of the window are touched for the first time
            continue
        for whose, values in took.items():
            found[whose].append(values)
        round_trips.append(2 * one_way_us / 1e6)
        for name, value in lines.items():
            peers.setdefault(name, []).append(value)
    medians = {name: show(f"remote/peer={name}", "B/s", values) for name, values in peers.items()}
    best = max((name for name in medians if name not in PEERS), key=medians.get)
    way = "read" if arguments.rma else "messages"
    trip = show("remote/peer=ucx_perftest/ucp_am_lat/round_trip", "s", round_trips)
    for whose, each in found.items():
        name = f"remote/fetch={{}}/whose={whose}/way={way}"
        rates = [size_bytes / took["large"] for took in each]
        show(name.format("large"), "B/s", rates, medians[best], best, size_bytes)
        for which, few_bytes in (("small", 2048), ("none", 0)):
            values = [took[which] for took in each]
            show(name.format(which), "s", values, trip, "round trip of an active message", few_bytes)
    for peer in (owns, reads, trains):
        peer.process.stdin.close()
    gateway.kill()
    daemon.process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--link-mbit", type=int, help="of the link each way; else what the CPUs give")
    parser.add_argument("--rma", action="store_true", help="the agent reads; over TCP UCX does that in software")
    arguments = parser.parse_args()
    if reason := network_nodes.missing() or remote_gateway.missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="fb", dir="/var/tmp") as folder:
        with network_nodes.two_nodes(folder) as nodes:
            if arguments.link_mbit:
                network_nodes.limit_link(nodes, arguments.link_mbit)
            measure(nodes, pathlib.Path(folder), arguments)


if __name__ == "__main__":
    main()

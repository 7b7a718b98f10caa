# SPDX-License-Identifier: Apache-2.0
"""The built extension and a daemon for it; shared with the tests of the package on top of it."""

import importlib.util
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [
    str(ROOT / "client" / "python"),
    str(ROOT / "tests" / "client" / "python_torch"),
]

from daemon_process import CORE, Daemon, missing  # noqa: E402, F401

if CORE and "forebay._core" not in sys.modules:
    spec = importlib.util.spec_from_file_location("forebay._core", CORE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["forebay._core"] = module
    spec.loader.exec_module(module)

core = sys.modules.get("forebay._core")

HYPER = [{"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}]
PARAMS = [("embed", [10, 5], 0, 0, True), ("w", [7], 0, 0, True), ("head", [300], 1, 0, True)]
GROUPS = ["embed", "head"]


def attach(socket, job, rank=0, world_size=1, dtype="float32", format="fp32", timeout=30.0):
    return core.attach(
        {
            "socket": socket,
            "job": job,
            "rank": rank,
            "world_size": world_size,
            "dtype": dtype,
            "optimizer": "adamw",
            "format": format,
            "params": PARAMS,
            "group_names": GROUPS,
            "extra_state_bytes": 4096,
            "timeout": timeout,
        }
    )


def initial(session, group, dtype):
    import torch

    elems = session.groups[group][1]
    return torch.linspace(-1, 1, elems).to(dtype)


def write_all(session, dtype):
    for group in range(len(session.groups)):
        session.write_initial(group, initial(session, group, dtype))
    session.initial_done()

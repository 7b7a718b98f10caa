# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of the peers, and what they and we are started with."""

import glob
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
TORCH = ["torch", "numpy", "packaging", "psutil", "ninja", "setuptools", "wheel"]
OURS = ["scikit-build-core>=0.10", "nanobind>=2.4"]
OPS = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
AIO = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"  # wants libaio-dev


def cores(count):
    """One processor of each of `count` physical cores that this process may use."""
    chosen, seen = [], set()
    for cpu in sorted(os.sched_getaffinity(0)):
        path = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = path.read_text(encoding="ascii").strip() if path.exists() else str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            chosen.append(cpu)
    if len(chosen) < count:
        sys.exit(f"{count} threads asked for, {len(chosen)} cores here: use --threads")
    return chosen[:count]


class Environment:
    """Folder with the virtual environment and the extensions that DeepSpeed compiles for itself."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).absolute()
        self.python = self.folder / "venv" / "bin" / "python"

    def variables(self, cpus):
        """Of a process that computes on these CPUs: one OpenMP thread bound to each."""
        return os.environ | {
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
            "DS_BUILD_OPS": "0",
            "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
            "OMP_NUM_THREADS": str(len(cpus)),
            "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in cpus),
            "OMP_PROC_BIND": "close",
        }

    def run(self, *command, log):
        variables = self.variables(cores(1)) | {"MAX_JOBS": str(os.cpu_count())}
        for name in ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND"):
            variables.pop(name)
        with open(self.folder / log, "a", encoding="utf-8") as out:
            done = subprocess.run(
                [str(word) for word in command],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=False,
            )
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))} failed: see {self.folder / log}")

    def pip(self, *words):
        self.run(self.python, "-m", "pip", "install", *words, log="pip.log")

    def make(self, build, with_aio=False):
        """Everything that is missing: the peers from PyPI, our programs, our Python package."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            print(f"making {self.python.parents[1]}: torch and DeepSpeed, some GB", flush=True)
            self.run(sys.executable, "-m", "venv", self.python.parents[1], log="pip.log")
        have = self.versions()
        if not have["torch"]:
            self.pip(*TORCH)
        if not have["deepspeed"]:
            self.pip("--no-build-isolation", "deepspeed")
        print("building what DeepSpeed compiles for itself, and ours", flush=True)
        self.run(self.python, "-c", OPS, log="ops.log")
        if with_aio:
            self.run(self.python, "-c", AIO, log="ops.log")
        self.run("cmake", "--build", build, "--target", *TARGETS, log="build.log")
        self.pip(*OURS)
        build_folder = f"cmake.define.FOREBAY_BUILD={pathlib.Path(build).resolve()}"
        self.pip("--no-build-isolation", "--no-deps", "--config-settings", build_folder, "./client/python")

    def versions(self):
        """{package: version or None}, without importing them."""
        found = {}
        places = glob.glob(str(self.python.parents[1] / "lib" / "python3*" / "site-packages"))
        for name in ("torch", "deepspeed", "forebay"):
            hits = list(importlib.metadata.distributions(name=name, path=places))
            found[name] = hits[0].version if hits else None
        return found


TARGETS = ("forebay", "forebayd", "forebay_peers")


def machine():
    """What the figures were taken on."""
    fields = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())  # the first processor's value
    compiler = (
        shutil.which("g++")
        and subprocess.run(
            ["g++", "-dumpfullversion"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    return {
        "processor": f"{fields.get('model name')} (family {fields.get('cpu family')}, "
        f"model {fields.get('model')})",
        "CPUs": os.cpu_count(),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "g++": compiler or "none",
    }

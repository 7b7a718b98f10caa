#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs on a GPU all of Forebay that needs one, and says what it saw: a table, and JSON with --json.

It needs a Python with torch, NVIDIA's driver and nothing else: what it runs is in the archive that
it comes in (docs/reports/gpu.md). It ends within --minutes; what then has not run says so. Exit status 0:
nothing failed. --rehearse runs every item without a GPU: over the driver of the tests, and small
models on the processor.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
BIN, PYTHON, TESTS, EXAMPLES = (HERE / name for name in ("bin", "python", "tests", "examples"))
GIB = 1 << 30
# Model shapes, the largest first: layers, width, heads, hidden, vocabulary. From LLaMA (Touvron et al., table 2).
SHAPES = {
    "30B": (60, 6656, 52, 17920, 32000),
    "13B": (40, 5120, 40, 13824, 32000),
    "7B": (32, 4096, 32, 11008, 32000),
    "3B": (26, 3200, 32, 8640, 32000),
    "1B": (22, 2048, 32, 5632, 32000),
    "small": (2, 64, 4, 128, 256),
}
# Bytes of the node's memory for each parameter, by format: weights, states (docs/reference/formats.md) and gradient sums of
# 16 bits. The numbers are rounded up.
BYTES_PER_PARAM = {"exact": 14.2, "bf16": 10.2, "int8": 8.3}
# Bytes for each parameter with torch's CPU offload: float32 parameters, gradients and two moments. torch rounds pinned memory
# up to powers of two.
OFFLOAD_BYTES_PER_PARAM = 24
SHARE_OF_MEMORY = 0.85  # share of the available memory that a run may use
# Goal G9: the exposed share of a step of so many tokens. A shorter step takes at most this factor times the longest of its compute,
# its copies and the passes of the workers, and the tail of one group.
EXPOSED_MOST, EXPOSED_TOKENS = 0.08, 16384
STEP_FACTOR_MOST = 1.10
# Bytes of a parameter in format exact: copies to the GPU and from it, and passes of the workers: the update and one addition.
UP_BYTES, DOWN_BYTES, PASS_BYTES = 4, 2, 26 + 4
CALL_S = 0.010  # the call of step, and launches before the first copy
PEER_FACTOR_LEAST = 2.0
COPY_SHARE_LEAST = 0.95
DAEMON_START_S, DAEMON_END_S = 60, 60
SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # they end an item's daemon and remove its folder


@dataclasses.dataclass
class Item:
    """What one check saw. result: PASS, FAIL, INFO (nothing was asked) or SKIP."""

    name: str
    result: str
    seen: str
    figures: object = None


class Failure(Exception):
    """A command that failed; its text is the end of what it printed."""


def layer_params(shape):
    _, width, _, hidden, _ = shape
    return 4 * width**2 + 3 * width * hidden + 2 * width


def params_of(shape):
    layers, width, _, _, vocab = shape
    return layers * layer_params(shape) + 2 * vocab * width + width


def largest_group(shape):
    """Parameters of the largest group of train.py."""
    _, width, _, _, vocab = shape
    return max(layer_params(shape), vocab * width)


def most_step_s(shape, tokens, compute_s, rates):
    """Seconds that a step may take: goal G9. `rates`: GB/s of copies "to_device" and "from_device", and of "passes"."""
    if tokens >= EXPOSED_TOKENS:
        return (1 + EXPOSED_MOST) * compute_s
    up_s, down_s, passes_s = (
        width / rates[name] / 1e9
        for width, name in ((UP_BYTES, "to_device"), (DOWN_BYTES, "from_device"), (PASS_BYTES, "passes"))
    )  # of a parameter
    longest_s = max(compute_s, params_of(shape) * max(up_s, down_s, passes_s))
    # The last gradient is copied, added up and updated. The first weights are copied to the GPU.
    tail_s = largest_group(shape) * (down_s + passes_s + up_s / 2) + CALL_S
    return STEP_FACTOR_MOST * longest_s + tail_s


def exposed_share(step_s, compute_s):
    """The time that a step takes beyond its compute alone, as a share of the compute."""
    return (step_s - compute_s) / compute_s


def millions(figures):
    return f"{figures['params'] / 1e6:,.4g} M parameters"


def available_bytes():
    text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
    return int(re.search(r"^MemAvailable: +(\d+) kB", text, re.M)[1]) * 1024


def largest_shape(bytes_per_param, room_bytes):
    """The name of the largest model that fits; the smallest where none does."""
    fitting = [name for name, s in SHAPES.items() if params_of(s) * bytes_per_param <= room_bytes]
    return fitting[0] if fitting else "small"


class Checks:
    """All items, in order. Each `check_` method yields the items it has seen."""

    def __init__(self, args):
        self.args = args
        self.end = time.monotonic() + 60 * args.minutes
        self.items = []
        self.measured, self.benches = {}, {}
        self.environment = {
            **os.environ,
            "PYTHONPATH": before_others("PYTHONPATH", PYTHON, backend(), TESTS),
            "FOREBAY_BIN_DIR": str(BIN),
            "PATH": before_others("PATH", BIN),
            "PYTHONDONTWRITEBYTECODE": "1",
            # NCCL comes with torch and is opened by dlopen(3). The archive's own libraries do not need this variable.
            "LD_LIBRARY_PATH": before_others("LD_LIBRARY_PATH", *nccl_folders()),
        }

    # ------------------------------------------------------------------------------------- commands

    def left_s(self):
        return self.end - time.monotonic()

    def run(self, command, *, ok=(0,), limit_s=600, cwd=None, **environment):
        """Its standard output."""
        limit_s = min(limit_s, self.left_s())
        if limit_s < 1:
            raise TimeoutError
        command = [str(word) for word in command]
        try:
            done = subprocess.run(
                command,
                env={**self.environment, **environment},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as late:
            raise TimeoutError(f"not done after {limit_s:.0f} s") from late
        except OSError as error:
            raise Failure(f"{command[0]}: {error}") from error
        if done.returncode not in ok:
            lines = (done.stdout + done.stderr).strip().splitlines()
            tail = " | ".join(lines[-12:])
            raise Failure(f"exit status {done.returncode}: {tail[-1500:]}")
        return done.stdout

    def with_daemon(self, dram_bytes, *command, **options):
        """As run(), beside a forebayd of its own. `forebay run` is not used: it needs pidfds."""
        with tempfile.TemporaryDirectory() as folder:
            socket, log = pathlib.Path(folder) / "s", pathlib.Path(folder) / "log"
            settings = {
                "socket.path": socket,
                "socket.mode": '"0600"',
                "dram.limit": dram_bytes,
                "memlock": "best_effort",
                "pidfd": "best_effort",
            }
            flags = [f"--set={key}={value}" for key, value in settings.items()]
            with log.open("wb") as errors:
                daemon = subprocess.Popen([BIN / "forebayd", *flags], stderr=errors)
            try:
                self.await_ready(daemon, log)
                return self.run(command, FOREBAY_SOCKET=str(socket), FOREBAY_RUN=folder, **options)
            finally:
                daemon.terminate()
                try:
                    daemon.wait(DAEMON_END_S)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def await_ready(self, daemon, log):
        end = time.monotonic() + min(DAEMON_START_S, self.left_s())
        while b"forebayd ready" not in log.read_bytes():
            if daemon.poll() is not None or time.monotonic() > end:
                raise Failure(f"forebayd: {log.read_text(encoding='utf-8', errors='replace')}")
            time.sleep(0.02)

    # ----------------------------------------------------------------------------------------- items

    def check_machine(self):
        import torch

        gpu = "none"
        if torch.cuda.is_available():
            gpu = f"{torch.cuda.get_device_name(0)}, {torch.cuda.mem_get_info(0)[1] / GIB:.0f} GiB"
        figures = {
            "gpu": gpu,
            "gpus": torch.cuda.device_count(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "available_gib": round(available_bytes() / GIB, 1),
        }
        seen = ", ".join(f"{key} {value}" for key, value in figures.items())
        yield Item("machine", "INFO", seen, figures)
        if not torch.cuda.is_available() and not self.args.rehearse:
            yield Item("gpu", "FAIL", "torch sees no GPU: --rehearse runs the items without one")

    def check_kernel(self):
        """What the kernel gives: none of it is needed here, the service wants it."""
        findings = json.loads(self.run([BIN / "forebay", "doctor", "--json", "."], ok=(0, 1)))
        for finding in findings:
            fix = f" ({finding['fix']})" if finding["fix"] else ""
            yield Item(f"kernel: {finding['what']}", "INFO", finding["seen"] + fix, finding)

    def check_binding(self):
        program = "import forebay, forebay._core as core; print(core.__file__)"
        path = pathlib.Path(self.run([sys.executable, "-c", program]).strip())
        seen = f"{path.name} with {backend().name} of nanobind's run time"
        yield Item("binding", "PASS", seen)

    def check_contracts(self):
        """The contract tests of the repository, of the real device alone if the machine has one."""
        where = "*" if self.args.rehearse else "*/Cuda:*/Nccl:*EveryDevice"
        for program, what in (
            ("gpu_device_contract_test", "device contract"),
            ("gpu_communicator_contract_test", "collectives' contract"),
            ("client_perceptron_test", "C++ loop"),
        ):
            with tempfile.TemporaryDirectory() as folder:
                out = pathlib.Path(folder) / "out.json"
                flags = [f"--gtest_filter={where}", f"--gtest_output=json:{out}"]
                text = self.run([BIN / program, *flags], ok=(0, 1))
                if not out.exists():
                    raise Failure(f"{program}: {text[-300:]}")
                result = json.loads(out.read_text(encoding="utf-8"))
            cases = [case for suite in result["testsuites"] for case in suite["testsuite"]]
            bad = [case["name"] for case in cases if case.get("failures")]
            why = [one["failure"] for case in cases for one in case.get("failures", ())]
            skipped = sum(case["result"] == "SKIPPED" for case in cases)
            seen = f"{len(cases) - len(bad) - skipped} passed, {skipped} skipped"
            if bad:
                seen += f", failed: {', '.join(bad)}: {' | '.join(' '.join(why).splitlines())[:900]}"
            if not cases:
                seen = "no case ran: the driver was not found"
            yield Item(what, "PASS" if cases and not bad else "FAIL", seen, len(cases))

    def bench(self, name, *flags):
        """The lines of a bench; measured once."""
        if name not in self.benches:
            text = self.run([BIN / "forebay", "bench", name, "--json", *flags])
            self.benches[name] = [json.loads(line) for line in text.splitlines()]
        return self.benches[name]

    def copies(self):
        flags = ["--driver", TESTS / "libfake_cuda.so"] if self.args.rehearse else []
        return self.bench("copies", *flags, "--params", (1 << 20) if self.args.rehearse else 1 << 29)

    def rates(self):
        """GB/s of copies one way, and of the workers' update on all cores."""
        found = {
            name: max(line["value"] for line in self.copies() if f"dir={name}/" in line["case"])
            for name in ("to_device", "from_device")
        }
        flags = ["--case", "adam/opt=adamw/format=exact/"]
        flags += ["--params", 1 << 22, "--samples", 1] if self.args.rehearse else []
        lines = [line for line in self.bench("adam", *flags) if line["case"].endswith("/shape=flat")]
        return {**found, "passes": max(lines, key=lambda line: line["threads"])["value"]}

    def check_copies(self):
        """Registration and copies, beside memory of the process's own."""
        for line in self.copies():
            seen = (
                f"{line['value']:.3g} {line['unit']}, {line['limit_what']}: {line['limit']:.3g}"
                f" (share {line['share']:.2f}, spread {line['spread']:.0%},"
                f" huge pages {line['huge_page_share']:.0%})"
            )
            asked = "dir=" in line["case"] and not self.args.rehearse
            holds = line["share"] >= COPY_SHARE_LEAST
            result = ("PASS" if holds else "FAIL") if asked else "INFO"
            yield Item(line["case"], result, seen, line)

    def check_python_cases(self):
        """The cases of the repository's test of sharded attachment, with one rank on the GPU."""
        launch = "device1" if self.args.rehearse else "cuda1"
        program = [sys.executable, TESTS / "sharded_ranks.py", f"{launch}:1:run"]
        text = self.with_daemon(2 * GIB, *program, limit_s=240)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
        bad = {name: error for _, name, _, error in lines if error}
        seen = f"{len(lines) - len(bad)} cases passed"
        if bad:
            seen += f", failed: {', '.join(bad)}"
        yield Item("sharded cases", "PASS" if lines and not bad else "FAIL", seen, bad)

    def train(self, who, shape, *, tokens, steps, format="exact", initial=None):
        """Figures of train.py, one for each number of tokens."""
        seq = min(2048, *tokens)
        flags = [f"--who={who}", f"--shape={','.join(map(str, SHAPES[shape]))}", f"--seq={seq}"]
        flags += [f"--sequences={','.join(str(count // seq) for count in tokens)}"]
        flags += [f"--steps={steps}", f"--format={format}"]
        flags += ["--device=cpu"] if self.args.rehearse else []
        flags += [f"--initial={initial}"] if initial else []
        program = [sys.executable, HERE / "train.py", *flags]
        if who == "forebay":
            dram_bytes = 2 * GIB
            if shape != "small":
                dram_bytes += int(params_of(SHAPES[shape]) * BYTES_PER_PARAM[format])
            text = self.with_daemon(dram_bytes, *program)
        else:
            text = self.run(program)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def check_losses(self):
        """A small model: the losses of FSDP2's offload, whose parameters are float32 and which
        rounds them to bfloat16 for compute."""
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = (
                self.train(who, "small", tokens=[256], steps=20, initial=f"{folder}/initial.safetensors")[0]
                for who in ("offload", "forebay")
            )
        pairs = list(zip(ours["losses"], theirs["losses"]))
        apart = max(abs(a - b) / b for a, b in pairs)
        # Weights and activations are bfloat16, whose neighbours are 2^-8 apart. One different rounding changes a loss by about
        # that much.
        holds = apart <= 2**-7 and ours["losses"][-1] < ours["losses"][0]
        seen = f"{ours['losses'][0]:.3f} to {ours['losses'][-1]:.3f}, at most {apart:.1e} from FSDP2's"
        yield Item("losses as FSDP2's", "PASS" if holds else "FAIL", seen, pairs)

    def check_accelerate(self):
        """A loop for Accelerate with its FSDP2 plugin: the losses of torch's AdamW on the same shards."""
        missing = [name for name in ("accelerate", "transformers") if not importlib.util.find_spec(name)]
        if missing:
            yield Item("accelerate", "SKIP", f"not installed: {', '.join(missing)}")
            return
        program = [sys.executable, HERE / "accelerate_loop.py"]
        device = "cpu" if self.args.rehearse else "cuda"
        theirs = last_json(self.run([*program, "plain", device], **launch()))
        ours = last_json(self.with_daemon(GIB, *program, "forebay", device, **launch()))
        apart = max(abs(a - b) / b for a, b in zip(ours["losses"], theirs["losses"]))
        # Forebay and plain torch compute in float32, in another order: losses differ by roundings.
        holds = apart <= 1e-4 and ours["committed"] == len(ours["losses"]) and ours["mode"] == "sharded"
        seen = f"{ours['losses'][0]:.3f} to {ours['losses'][-1]:.3f}, at most {apart:.1e} from its own"
        yield Item("FSDP2 through Accelerate", "PASS" if holds else "FAIL", seen, [ours, theirs])

    def check_page(self):
        """The script of docs/guide/one-gpu.md before and after its diff: both in bfloat16, Forebay's with 8-bit moments."""
        with tempfile.TemporaryDirectory() as folder:
            options = {"cwd": folder, "PYTHONPATH": before_others("PYTHONPATH", PYTHON, backend(), EXAMPLES)}
            plain = self.run([sys.executable, EXAMPLES / "one_gpu_loop.py"], **options)
            changed = [sys.executable, EXAMPLES / "one_gpu_loop_changed.py"]
            ours = self.with_daemon(GIB, *changed, **options, **launch())
        pairs = [list(map(float, re.findall(r"^step \d+ loss ([\d.]+)$", text, re.M))) for text in (ours, plain)]
        first, last = pairs[0][0], pairs[0][-1]
        # The initial values of the two models differ, because the changed script materializes the model from meta. Both learn
        # the same sequences.
        holds = len(pairs[0]) == len(pairs[1]) and last < 0.5 * first
        seen = f"{first:.3f} to {last:.3f}; the plain script {pairs[1][0]:.3f} to {pairs[1][-1]:.3f}"
        yield Item("script of docs/guide/one-gpu.md", "PASS" if holds else "FAIL", seen, pairs)

    def sizes(self):
        """(model, model that the peer holds, tokens) of the items about speed."""
        room_bytes = available_bytes() * SHARE_OF_MEMORY
        if self.args.rehearse:
            return "small", "small", (256,)
        ours = largest_shape(BYTES_PER_PARAM["exact"], min(room_bytes, 105 * GIB))
        theirs = largest_shape(OFFLOAD_BYTES_PER_PARAM, room_bytes)
        return min(ours, "7B", key=lambda name: params_of(SHAPES[name])), theirs, (16384, 4096)

    def ours(self, shape, tokens):
        """Of Forebay, by the number of tokens; measured once."""
        if shape not in self.measured:
            self.measured[shape] = self.train("forebay", shape, tokens=tokens, steps=4)
        return self.measured[shape]

    def check_exposed(self):
        """Goal G9: a step's time above that of forward and backward with all on the device."""
        large, small, sizes = self.sizes()
        rates = self.rates()
        for shape in dict.fromkeys((small, large)):
            bares = self.train("compute", shape, tokens=sizes, steps=4)
            for bare, ours in zip(bares, self.ours(shape, sizes)):
                exposed = exposed_share(ours["median_s"], bare["median_s"])
                most_s = most_step_s(SHAPES[shape], ours["tokens"], bare["median_s"], rates)
                seen = (
                    f"a step of {ours['median_s']:.2f} s takes {exposed:.0%} more than compute alone "
                    f"({bare['median_s']:.2f} s), and at most {most_s:.2f} s is asked; {millions(ours)}, "
                    f"{ours['tokens_per_s']:.0f} tokens/s"
                )
                result = "PASS" if ours["median_s"] <= most_s else "FAIL"
                result = "INFO" if self.args.rehearse else result
                figures = [bare, ours, {"most_s": most_s, **rates}]
                yield Item(f"exposed time, {shape}, {ours['tokens']} tokens", result, seen, figures)

    def check_peer(self):
        """Tokens a second beside FSDP2 with CPUOffloadPolicy, at the largest size that it holds."""
        _, shape, sizes = self.sizes()
        ours = self.ours(shape, sizes)[0]
        (theirs,) = self.train("offload", shape, tokens=sizes[:1], steps=4)
        factor = ours["tokens_per_s"] / theirs["tokens_per_s"]
        seen = (
            f"{factor:.2f} times its tokens/s: {ours['tokens_per_s']:.0f} and "
            f"{theirs['tokens_per_s']:.0f}, {millions(ours)}"
        )
        result = "PASS" if factor >= PEER_FACTOR_LEAST else "FAIL"
        result = "INFO" if self.args.rehearse else result
        yield Item(f"beside FSDP2's offload, {ours['tokens']} tokens", result, seen, [ours, theirs])
        yield self.beside_deepspeed(shape, ours["tokens"], ours)

    def beside_deepspeed(self, shape, tokens, ours):
        """Its optimizer on the CPU, where it is installed and can be built."""
        name = f"beside DeepSpeed, {tokens} tokens"
        if importlib.util.find_spec("deepspeed") is None:
            return Item(name, "SKIP", "it is not installed")
        try:
            (theirs,) = self.train("deepspeed", shape, tokens=[tokens], steps=4)
        except Failure as failure:  # DeepSpeed compiles its optimizer, which can fail
            return Item(name, "SKIP", f"it does not run here: {failure}")
        factor = ours["tokens_per_s"] / theirs["tokens_per_s"]
        seen = f"{factor:.2f} times its tokens/s: {theirs['tokens_per_s']:.0f}, {millions(theirs)}"
        result = "PASS" if factor >= PEER_FACTOR_LEAST else "FAIL"
        return Item(name, "INFO" if self.args.rehearse else result, seen, [ours, theirs])

    def check_largest(self):
        """The largest model that trains a step without swap, the format with the fewest bytes."""
        room_bytes = available_bytes() * SHARE_OF_MEMORY
        shape = largest_shape(BYTES_PER_PARAM["int8"], room_bytes)
        if self.args.rehearse:
            shape = "small"
        (figures,) = self.train("forebay", shape, tokens=[256], steps=1, format="int8")
        seen = f"{millions(figures)}, int8 moments, of {room_bytes / GIB:.0f} GiB"
        yield Item("largest model", "INFO", seen, figures)

    # -------------------------------------------------------------------------------------- the whole

    CHECKS = (
        check_machine,
        check_kernel,
        check_binding,
        check_contracts,
        check_copies,
        check_losses,
        check_accelerate,
        check_page,
        check_python_cases,
        check_peer,
        check_exposed,
        check_largest,
    )

    def add(self, item):
        self.items.append(item)
        self.save()  # a killed run retains the results so far
        print(f"{item.result:4}  {item.name}: {item.seen}", flush=True)

    def counts(self):
        results = [item.result for item in self.items]
        return {result: results.count(result) for result in ("PASS", "FAIL", "INFO", "SKIP")}

    def save(self):
        if not self.args.json:
            return
        document = {
            "rehearsed": self.args.rehearse,
            "counts": self.counts(),
            "items": [dataclasses.asdict(item) for item in self.items],
        }
        text = json.dumps(document, indent=1) + "\n"
        pathlib.Path(self.args.json).write_text(text, encoding="utf-8")

    def all(self):
        for check in self.CHECKS:
            name = check.__name__.removeprefix("check_")
            if self.args.only and name not in self.args.only:
                continue
            began = time.monotonic()
            try:
                for item in check(self):
                    self.add(item)
            except TimeoutError as late:
                self.add(Item(name, "SKIP", f"no time left: {late}"))
            except Failure as failure:
                self.add(Item(name, "FAIL", str(failure)))
            except (LookupError, ValueError) as error:  # a command printed unexpected output
                self.add(Item(name, "FAIL", f"{type(error).__name__}: {error}"))
            print(f"      {name}: {time.monotonic() - began:.0f} s", flush=True)
            if any(item.name == "gpu" for item in self.items):
                break


def last_json(text):
    """Of the last line of that kind in what a command printed."""
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def launch():
    """The environment of one rank, as torchrun makes it; its store listens on a port that the kernel chooses."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def before_others(variable, *folders):
    """The folders, and behind them those that the variable has: torch or the driver may be in them."""
    others = os.environ.get(variable, "").split(os.pathsep)
    return os.pathsep.join([*map(str, folders), *filter(None, others)])


def nccl_folders():
    """Where torch's packages have NCCL."""
    import torch

    return sorted(pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/lib"))


def backend():
    """The folder of nanobind's run time for this interpreter."""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    folder = PYTHON / "backends" / version
    if folder.is_dir():
        return folder
    have = ", ".join(sorted(path.name for path in (PYTHON / "backends").iterdir()))
    sys.exit(f"error[E_UNSUPPORTED]: no binding for {version} in this archive\nhint: one of {have}")


def parse_args():
    names = [check.__name__.removeprefix("check_") for check in Checks.CHECKS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="every item with its figures")
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything")
    parser.add_argument("--only", metavar="ITEM", nargs="+", choices=names, help=", ".join(names))
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    args = parser.parse_args()
    if not (math.isfinite(args.minutes) and args.minutes >= 0):
        sys.exit(f"error[E_OPTION]: --minutes is {args.minutes:g}\nhint: a finite number from 0 on")
    return args


def exit_once(*_):
    """On a signal: once, so that a second one does not stop the end of an item's daemon."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def main():
    try:
        try:
            return check_all()
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # the reader of stdout has ended; Python would flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def check_all():
    args = parse_args()
    try:
        import torch  # noqa: F401
    except ImportError as error:
        sys.exit(f"error[E_SETUP]: {error}\nhint: start it with a Python that has torch")
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, exit_once)
    checks = Checks(args)
    try:
        checks.save()
    except OSError as error:
        sys.exit(f"error[E_OPTION]: --json: {error}\nhint: name a file in a folder that exists")
    checks.all()
    counts = checks.counts()
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())

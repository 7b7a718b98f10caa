# SPDX-License-Identifier: Apache-2.0
"""The claims of quickstart, and how each claim is seen to hold. Evidence is read once; a check that
cannot run because a run ended early is a claim that does not hold.
"""

import json
import pathlib
import re
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
RUNS = (
    *("plain", "forebay", "killed", "exact"),
    *("fsdp2", "sharded", "sharded_killed"),
    *("roomy", "infinity", "infinity_killed"),
)
SMOKE_RUNS = RUNS[:4]
USUAL_RUNS = ("plain", "forebay", "killed", "roomy", "infinity")
PARAMS_LEAST = 60_000_000
STEADY_FROM = 3  # first step that a trace of the job can steer
SWAP_SHARE_LEAST = 0.60
DRAM_SLACK_BYTES = 64 * MIB
LOSS_STEPS, LOSS_RELATIVE = 20, 1e-3
MOMENT_BYTES = 8  # both moments of a parameter in fp32: docs/internals/memory.md, Bytes
# Bytes of a parameter of the deep model: bf16 weights, float32 gradients, states in format `exact`.
DEEP_WEIGHTS, DEEP_GRADIENT, DEEP_STATES = 2, 4, 10
DEEP_BYTES = DEEP_WEIGHTS + DEEP_GRADIENT + DEEP_STATES
MOMENTS = {
    "adamw": 2,
    "adam": 2,
    "adamw_amsgrad": 3,
    "adam_amsgrad": 3,
    "adagrad": 1,
    "lion": 1,
    "sgd": 1,
    "sgd_nesterov": 1,
    "lamb": 2,
}
NARROW = {"exact": 4, "bf16": 2, "int8": 1 + 4 / 128}  # bytes of a moment, without the remainder
SUMMARY_KEYS = (
    "steps ranks params format seed loss_first loss_last heldout_loss_first heldout_loss_last plain_loss_first "
    "plain_loss_last loss_max_rel_diff state_bytes swap_state_share dram_limit_bytes dram_peak_bytes grad_arena_bytes "
    "rank_private_peak_bytes plain_rank_private_peak_bytes swap_read_bytes_per_param_step "
    "swap_write_bytes_per_param_step daemon_read_bytes daemon_written_bytes exposed_wait_s_per_step step_s plain_step_s "
    "tokens_per_s prefetch_hit_share rpc_calls_per_step io_engine adam_target huge_page_share killed_at_step "
    "killed_after_groups resumed_at_step daemon_killed_at_step daemon_resumed_at_step "
    "params_sha256 uninterrupted_params_sha256"
).split()
PROGRESS = re.compile(
    r"^step +\d+/\d+ +loss [\d.]+ +[\d.]+ tokens/s .*exposed wait [\d.]+ ms .*DRAM \d+ MiB"
    r".*swap read \d+ MB/s +write \d+ MB/s",
    re.M,
)
LOADS_IN_PLAIN_TORCH = """
import sys, types
sys.modules["forebay"] = types.ModuleType("forebay")  # empty: nothing of it can be used
sys.path.insert(0, sys.argv[2])
import torch, train_gpt
settings = __import__("json").loads(sys.argv[3])
model = train_gpt.Gpt(settings["width"], settings["layers"], settings["heads"], settings["seq"])
model = model.to(torch.bfloat16) if settings["dtype"] == "bf16" else model
model.load_state_dict(torch.load(sys.argv[1], weights_only=True), strict=True)
support = train_gpt.support
batches = support.Batches(support.load_text(settings["text"]), batch=settings["batch"], seq=settings["seq"], rank=0,
                          world=int(sys.argv[4]), seed=settings["seed"])
print(train_gpt.heldout_loss(model, batches.heldout(settings["heldout"])))
"""


@dataclass
class Claim:
    name: str
    holds: bool
    seen: str


class Claims:
    """In the order in which they were checked."""

    def __init__(self):
        self.all = []

    def check(self, name, holds, seen):
        self.all.append(Claim(name, bool(holds), seen))

    def attempt(self, name, check):
        """`check` returns (holds, seen); what it raises is what was seen."""
        try:
            holds, seen = check()
        except Exception as error:  # noqa: BLE001: any error means missing evidence
            holds, seen = False, f"cannot be checked: {type(error).__name__}: {error}"
        self.check(name, holds, seen)

    def as_json(self):
        """The text of claims.json."""
        return json.dumps([asdict(claim) for claim in self.all], indent=2) + "\n"

    def text(self):
        width = max(len(claim.name) for claim in self.all)
        return "\n".join(
            f"{'PASS' if claim.holds else 'FAIL'}  {claim.name:{width}}  {claim.seen}"
            for claim in self.all
        )


def read_log(path):
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def group_count(out):
    """Groups of the job of this run; 0 if the run wrote no node.json."""
    path = out / "node.json"
    if not path.exists():
        return 0
    jobs = json.loads(path.read_text(encoding="utf-8"))["status"]["jobs"]
    return len(jobs[0]["groups"]) if jobs else 0


def first_start(out):
    """The counts that rank 0 of this run logged at its start; 0 if it logged nothing.

    `params` of the model; `gradients`, parameters that get one in each step."""
    rows = [row for row in read_log(out / "rank0.jsonl") if row["event"] == "start"]
    return rows[0] if rows else {"params": 0, "gradients": 0}


class Ranks:
    """The logs of all ranks of one run."""

    def __init__(self, out, ranks):
        self.logs = [read_log(out / f"rank{rank}.jsonl") for rank in range(ranks)]
        node = out / "node.json"
        self.node = json.loads(node.read_text(encoding="utf-8")) if node.exists() else None
        sha = out / "sha.json"
        self.sha = json.loads(sha.read_text(encoding="utf-8"))["sha256"] if sha.exists() else None

    def events(self, event, rank=0):
        return [row for row in self.logs[rank] if row["event"] == event]

    def event(self, event, rank=0):
        rows = self.events(event, rank)
        if not rows:
            raise LookupError(f"rank {rank} logged no {event}")
        return rows[-1]

    def losses(self):
        """Loss of each step, averaged over ranks; a step that was repeated after a restart counts as it ended."""
        by_rank = [
            {row["step"]: row["loss"] for row in self.events("step", rank)}
            for rank in range(len(self.logs))
        ]
        steps = sorted(set.intersection(*(set(rows) for rows in by_rank)))
        return {step: statistics.fmean(rows[step] for rows in by_rank) for step in steps}

    def heldout(self):
        """Held-out loss before and after."""
        per_rank = [self.events("heldout", rank) for rank in range(len(self.logs))]
        return tuple(statistics.fmean(rows[at]["loss"] for rows in per_rank) for at in (0, -1))

    def steady(self, key):
        """The value of every step from STEADY_FROM on, of every rank."""
        return [
            row[key]
            for rank in range(len(self.logs))
            for row in self.events("step", rank)
            if row["step"] >= STEADY_FROM
        ]

    def swap_totals(self):
        """Bytes that the daemon read from and wrote to its swap paths."""
        swap = self.node["status"]["swap"]
        return sum(path["read_bytes"] for path in swap), sum(path["written_bytes"] for path in swap)

    def private_peaks(self):
        return [self.event("end", rank)["rss_anon_peak"] for rank in range(len(self.logs))]


class Evidence:
    """Everything the claims and the report read."""

    def __init__(self, args, runs, model):
        self.args, self.runs, self.model = args, runs, model
        self.ranks = 2
        for name, run in runs.items():
            setattr(self, name, Ranks(run.out, self.ranks))
        samples = self.forebay.events("sample")
        self.sample = samples[-1]["text"] if samples else ""
        self.kill, self.daemon_kill = runs["killed"].kill, runs["killed"].daemon_kill

    @property
    def job(self):
        return self.forebay.node["status"]["jobs"][0]

    @property
    def memory(self):
        return self.forebay.node["status"]["memory"]

    def swap_share(self):
        """Share of the moments on swap: the first blocks are resident and whole, only the last of all is short."""
        # With more than two moments blocks have fewer elements, because a staging slot holds two moments of a full block.
        if MOMENTS[self.args.optimizer] > 2:
            return 1 - self.job["resident_blocks"] / self.job["blocks"]
        return 1 - self.job["resident_blocks"] * self.args.block_elems / self.job["params"]

    def disk_under(self, span):
        """Milliseconds of the infinity run's stored trace in which its blocks were read or written during rank 0's
        `span` ("forward_ns", "backward_ns") of some step."""
        spans = [row[span] for row in self.infinity.events("step")]
        return sum(
            max(0, min(event["end_ns"], ended) - max(event["start_ns"], began))
            for event in self.infinity.node["kept_trace"]
            for began, ended in spans
            if event["lane"] in ("swap read", "swap write")
            and event["name"].startswith(("block", "gradients"))
        ) / 1e6

    def since_steady(self):
        """(first, last) sample of the daemon's counters with the steps from STEADY_FROM on between them."""
        steady = [
            sample
            for sample in self.forebay.node["samples"]
            if sample["step"] >= STEADY_FROM - 1 and sample["sessions"] == self.ranks
        ]
        if len(steady) < 2:
            raise LookupError("too few samples of the daemon's counters")
        return steady[0], steady[-1]

    def loss_difference(self):
        return largest_difference(self.plain, self.forebay, min(LOSS_STEPS, self.args.steps))

    def resumed_at(self, kill=0):
        """The step each rank resumed at after that kill: 0 of the rank, 1 of the daemon."""
        return [self.killed.events("resume", rank)[kill]["step"] for rank in range(self.ranks)]

    def answered_before_daemon_kill(self):
        """The newest step that any rank had an answer to when the daemon was killed."""
        newest = 0
        for log in self.killed.logs:
            resumes = [at for at, row in enumerate(log) if row["event"] == "resume"]
            newest = max(
                newest, *(row["step"] for row in log[: resumes[1]] if row["event"] == "step")
            )
        return newest


def largest_difference(plain, ours, count):
    """The largest relative difference of the losses of the first LOSS_STEPS steps, of which there are at least `count`."""
    plain, ours = plain.losses(), ours.losses()
    steps = [step for step in plain if step <= LOSS_STEPS]
    if len(steps) < count:
        raise LookupError(f"plain has only {len(steps)} steps")
    return max(abs(ours[step] - plain[step]) / abs(plain[step]) for step in steps)


def weights_width(format):
    """Bytes of a served parameter."""
    return 4 if format == "fp32" else 2


def state_width(args):
    """Bytes of one parameter's state: docs/reference/formats.md."""
    moments = MOMENTS[args.optimizer]
    return 4 * moments if args.format == "fp32" else 2 + NARROW[args.format] * moments


def swap_width(args):
    """Bytes of one parameter that a step reads from swap if none of its state is in DRAM."""
    return state_width(args) * (2 if args.optimizer == "lamb" else 1)  # LAMB reads it in two passes


def is_plains(args):
    """The runs do what torch's own does."""
    return (args.optimizer, args.format) == ("adamw", "fp32")


def summarize(e):
    """The figures of summary.json; None for a figure that a run did not record."""
    job, memory = e.job, e.memory
    losses, plain = e.forebay.losses(), e.plain.losses()
    heldout = e.forebay.heldout()
    read_bytes, written_bytes = e.forebay.swap_totals()
    first, last = e.since_steady()
    steps = job["committed_step"]
    step_s = statistics.median(e.forebay.steady("step_s"))
    tokens = e.forebay.event("step")["tokens"]
    arenas = memory["arenas"]
    return {
        "steps": steps,
        "ranks": e.ranks,
        "params": job["params"],
        "format": job["format"],
        "seed": e.args.seed,
        "loss_first": losses[min(losses)],
        "loss_last": losses[max(losses)],
        "heldout_loss_first": heldout[0],
        "heldout_loss_last": heldout[1],
        "plain_loss_first": plain[min(plain)],
        "plain_loss_last": plain[max(plain)],
        "loss_max_rel_diff": e.loss_difference(),
        "state_bytes": job["state_bytes"],
        "swap_state_share": e.swap_share(),
        "dram_limit_bytes": memory["limit_bytes"],
        "dram_peak_bytes": e.forebay.node["dram_peak_bytes"],
        "grad_arena_bytes": e.forebay.node["grad_arena_bytes"],
        "rank_private_peak_bytes": max(e.forebay.private_peaks()),
        "plain_rank_private_peak_bytes": max(e.plain.private_peaks()),
        "swap_read_bytes_per_param_step": job["state_read_bytes"] / steps / job["params"],
        "swap_write_bytes_per_param_step": job["state_written_bytes"] / steps / job["params"],
        "daemon_read_bytes": read_bytes,
        "daemon_written_bytes": written_bytes,
        "exposed_wait_s_per_step": statistics.fmean(e.forebay.steady("exposed_wait_s")),
        "step_s": step_s,
        "plain_step_s": statistics.median(e.plain.steady("step_s")),
        "tokens_per_s": e.ranks * tokens / step_s,
        "prefetch_hit_share": (last["early"] - first["early"])
        / max(1, last["updates"] - first["updates"]),
        "rpc_calls_per_step": (statistics.fmean(e.forebay.steady("rpc_calls"))),
        "io_engine": e.forebay.node["status"]["io_engine"],
        "adam_target": e.forebay.node["status"]["adam_target"],
        "huge_page_share": memory["huge_bytes"]
        / max(1, sum(arena["allocated_bytes"] for arena in arenas)),
        "killed_at_step": e.kill["step"],
        "killed_after_groups": e.kill["groups"],
        "resumed_at_step": e.resumed_at()[0] + 1,
        "daemon_killed_at_step": e.daemon_kill["step"],
        "daemon_resumed_at_step": e.resumed_at(kill=1)[0] + 1,
        "params_sha256": e.killed.sha,
        "uninterrupted_params_sha256": e.forebay.sha,
    }


def check_all(claims, e):
    """Every claim of the main job, in the order in which it is made. Returns the summary."""
    for name, run in e.runs.items():
        claims.check(
            f"run {name}", run.status == 0, f"exit status {run.status}, {run.seconds:.0f} s"
        )
    summary = {}

    def summary_is_whole():
        summary.update(summarize(e))
        return (
            list(summary) == SUMMARY_KEYS,
            f"summary.json has {len(summary)} of {len(SUMMARY_KEYS)} keys",
        )

    claims.attempt("summary", summary_is_whole)
    for key in SUMMARY_KEYS:
        summary.setdefault(key, None)
    _check_size_and_memory(claims, e, summary)
    _check_swap(claims, e, summary)
    _check_results(claims, e, summary)
    _check_kill(claims, e, summary)
    if "exact" in e.runs:
        _check_exact(claims, e)
    if "sharded" in e.runs:
        _check_sharded(claims, e)
    if "infinity" in e.runs:
        _check_infinity(claims, e)
    _check_model(claims, e)
    return summary


def _dram_is_within_limit(node):
    peak, limit = node["dram_peak_bytes"], node["status"]["memory"]["limit_bytes"]
    return (
        peak <= limit + DRAM_SLACK_BYTES,
        f"the kernel saw at most {peak / MIB:.0f} MiB, the limit is {limit / MIB:.0f} MiB and "
        f"{DRAM_SLACK_BYTES // MIB} for code and heap",
    )


def _bytes_are_as_the_kernels(run):
    ours = run.swap_totals()
    kernel = run.node["io"]["read_bytes"], run.node["io"]["write_bytes"]
    return (
        all(abs(a - b) <= 0.01 * b for a, b in zip(ours, kernel)),
        f"read {ours[0]} (kernel {kernel[0]}), written {ours[1]} (kernel {kernel[1]})",
    )


def _all_ranks_resumed(e, killed, uninterrupted):
    """Of the run in which all ranks died in the midst of a step's gradients."""
    kill, logs = e.runs[killed].kill, getattr(e, killed)
    row = logs.event("kill", kill["rank"])
    resumed = [logs.event("resume", rank)["step"] for rank in range(e.ranks)]
    return (
        row["step"] == kill["step"]
        and 0 < kill["gradients"] < first_start(e.runs[uninterrupted].out)["gradients"]
        and all(step == kill["step"] - 1 for step in resumed),
        f"both ranks died in step {row['step']} after {row['gradients']} gradients of rank "
        f"{row['rank']}, and went on from committed step {resumed[0]}",
    )


def _check_size_and_memory(claims, e, s):
    claims.attempt("size", lambda: (s["params"] >= PARAMS_LEAST, f"{s['params']} parameters"))
    claims.attempt(
        "dram below states",
        lambda: (
            (
                s["dram_limit_bytes"] < s["state_bytes"] == 12 * s["params"]
                if is_plains(e.args)
                else abs(
                    s["state_bytes"] / s["params"]
                    - weights_width(e.args.format)
                    - state_width(e.args)
                )
                < 0.001
            ),
            f"--dram is {s['dram_limit_bytes']} bytes, parameters and moments are {s['state_bytes']}",
        ),
    )
    claims.attempt(
        "moments on swap",
        lambda: (
            s["swap_state_share"] >= SWAP_SHARE_LEAST,
            f"{s['swap_state_share']:.1%} of the moments are on swap",
        ),
    )
    claims.attempt(
        "dram within limit",
        lambda: _dram_is_within_limit(e.forebay.node),
    )
    claims.attempt(
        "rank's memory",
        lambda: (
            all(
                plain - ours >= 12 * s["params"]
                for plain, ours in zip(e.plain.private_peaks(), e.forebay.private_peaks())
            ),
            f"private peaks {[round(peak / MIB) for peak in e.forebay.private_peaks()]} MiB, plain "
            f"{[round(peak / MIB) for peak in e.plain.private_peaks()]} MiB: 12 bytes a parameter are "
            f"{12 * s['params'] / MIB:.0f} MiB",
        ),
    )


def _check_swap(claims, e, s):
    claims.attempt(
        "O_DIRECT",
        lambda: (
            e.forebay.node["direct"]
            and all(e.forebay.node["direct"])
            and all(path["direct"] for path in e.forebay.node["status"]["swap"]),
            f"flags of {len(e.forebay.node['direct'])} swap descriptors of the daemon",
        ),
    )

    claims.attempt("bytes as the kernel's", lambda: _bytes_are_as_the_kernels(e.forebay))

    def bytes_of_table():
        width = swap_width(e.args)
        want = width * e.swap_share()
        read, written = s["swap_read_bytes_per_param_step"], s["swap_write_bytes_per_param_step"]
        return (
            abs(read - want) <= 0.02 * want and abs(written - want) <= 0.02 * want,
            f"{read:.3f} read and {written:.3f} written a parameter and step; {width:.4g} (1 - f) is {want:.3f}",
        )

    claims.attempt("bytes as the table says", bytes_of_table)
    claims.attempt(
        "prefetch",
        lambda: (
            s["prefetch_hit_share"] >= 0.9,
            f"{s['prefetch_hit_share']:.1%} of swap reads were asked for before they were needed",
        ),
    )

    def no_rpc():
        first, last = e.since_steady()
        calls = last["rpc_calls"] - first["rpc_calls"]
        return (
            s["rpc_calls_per_step"] == 0 and calls == 0,
            f"{s['rpc_calls_per_step']} calls a step counted by clients, {calls} in all by the daemon",
        )

    claims.attempt("no RPC", no_rpc)
    claims.attempt(
        "progress line",
        lambda: (
            PROGRESS.search("".join(e.runs["forebay"].lines)) is not None,
            "step, loss, tokens/s, exposed wait, DRAM, swap read and write rate",
        ),
    )


def _check_results(claims, e, s):
    if is_plains(e.args):
        claims.attempt(
            "loss as plain's",
            lambda: (
                s["loss_max_rel_diff"] <= LOSS_RELATIVE,
                f"differs by at most {s['loss_max_rel_diff']:.1e} in the first {LOSS_STEPS} steps",
            ),
        )
    claims.attempt(
        "loss falls",
        lambda: (
            s["loss_first"] - s["loss_last"] >= 1.0,
            f"{s['loss_first']:.3f} to {s['loss_last']:.3f}",
        ),
    )
    claims.attempt(
        "held-out loss falls",
        lambda: (
            s["heldout_loss_last"] < s["heldout_loss_first"],
            f"{s['heldout_loss_first']:.3f} to {s['heldout_loss_last']:.3f}",
        ),
    )


def _check_kill(claims, e, s):
    def killed():
        row = e.killed.event("kill", e.kill["rank"])
        groups = len(e.job["groups"])
        resumed = e.resumed_at()
        return (
            0 < e.kill["groups"] < groups
            and row["step"] == e.kill["step"]
            and all(step == e.kill["step"] - 1 for step in resumed),
            f"rank {row['rank']} died in step {row['step']} after {row['groups']} of {groups} groups (seed "
            f"{e.args.kill_seed}); both ranks went on from committed step {resumed[0]}",
        )

    claims.attempt("kill and resume", killed)

    def daemon_killed():
        answered, resumed = e.answered_before_daemon_kill(), e.resumed_at(kill=1)
        return (
            e.daemon_kill["ranks_status"] != 0
            and e.daemon_kill["step"] - 1 <= answered
            # The ranks resume one step later if the daemon was killed after the step was durable and before its answer.
            and all(answered <= step <= answered + 1 for step in resumed)
            and len(set(resumed)) == 1,
            f"the daemon died in step {answered + 1}, the ranks with it; both went on from durable step {resumed[0]}",
        )

    claims.attempt("daemon's kill and resume", daemon_killed)
    claims.attempt(
        "same bits after both kills",
        lambda: (
            s["params_sha256"] is not None
            and s["params_sha256"] == s["uninterrupted_params_sha256"],
            f"SHA-256 of parameters and states {str(s['params_sha256'])[:16]}, uninterrupted "
            f"{str(s['uninterrupted_params_sha256'])[:16]}",
        ),
    )


def _check_exact(claims, e):
    def exact():
        job = e.exact.node["status"]["jobs"][0]
        rows = [e.exact.event("reference", rank) for rank in range(e.ranks)]
        elements, mismatches = (sum(row[key] for row in rows) for key in ("elements", "mismatches"))
        return (
            job["format"] == "exact"
            and job["dtype"] == "bfloat16"
            and elements > 0
            and mismatches == 0,
            f"{elements} state elements of a {job['dtype']} model, {mismatches} differ from the scalar reference",
        )

    claims.attempt("bf16 exact", exact)


def _check_sharded(claims, e):
    """The model that FSDP2 shards."""

    def losses():
        difference = largest_difference(e.fsdp2, e.sharded, LOSS_STEPS)
        job = e.sharded.node["status"]["jobs"][0]
        on_swap = job["blocks"] - job["resident_blocks"]
        return (
            difference <= LOSS_RELATIVE,
            f"differs by at most {difference:.1e} in the first {LOSS_STEPS} steps; {on_swap} of "
            f"{job['blocks']} blocks of states are on swap",
        )

    claims.attempt("sharded loss as FSDP2's", losses)

    claims.attempt(
        "sharded kill and resume", lambda: _all_ranks_resumed(e, "sharded_killed", "sharded")
    )
    claims.attempt(
        "sharded same bits after the kill",
        lambda: (
            e.sharded.sha is not None and e.sharded.sha == e.sharded_killed.sha,
            f"SHA-256 of parameters and states {str(e.sharded_killed.sha)[:16]}, uninterrupted "
            f"{str(e.sharded.sha)[:16]}",
        ),
    )


def _check_infinity(claims, e):
    """The model that is larger than DRAM."""

    def job():
        return e.infinity.node["status"]["jobs"][0]

    def larger():
        found, limit = job(), e.infinity.node["status"]["memory"]["limit_bytes"]
        all_bytes = found["state_bytes"] + DEEP_GRADIENT * found["params"]
        return (
            all_bytes >= 8 * limit,
            f"weights, gradients and states are {all_bytes / MIB:.0f} MiB, {all_bytes / limit:.2f} times the limit of "
            f"{limit / MIB:.0f} MiB",
        )

    claims.attempt("larger than DRAM", larger)

    claims.attempt("infinity within limit", lambda: _dram_is_within_limit(e.infinity.node))

    def of_table():
        found = job()
        per = lambda key: found[key] / found["committed_step"] / found["params"]  # noqa: E731
        read, written = per("state_read_bytes"), per("state_written_bytes")
        a_block = (DEEP_WEIGHTS + DEEP_STATES) / found["blocks"] / found["committed_step"]
        want = DEEP_WEIGHTS + DEEP_STATES + found["dropped_updates"] * a_block
        again = found["reclaimed_reads"] * a_block  # the more, the busier the machine is
        sums_read, sums_written = per("gradient_read_bytes"), per("gradient_written_bytes")
        return (
            abs(read - again - want) <= 0.02 * want
            and abs(written - want) <= 0.02 * want
            and 0 <= sums_read <= sums_written
            and 0 < sums_written <= 1.05 * DEEP_GRADIENT,
            f"{read:.3f} read ({again:.3f} of it again) and {written:.3f} written a parameter and step for updates "
            f"({want:.4g}), "
            f"{sums_read:.2f} and {sums_written:.2f} for gradients (at most {DEEP_GRADIENT})",
        )

    claims.attempt("infinity bytes as the table says", of_table)

    claims.attempt(
        "infinity bytes as the kernel's", lambda: _bytes_are_as_the_kernels(e.infinity)
    )

    def busy():
        forward, backward = e.disk_under("forward_ns"), e.disk_under("backward_ns")
        return (
            forward > 0 and backward > 0,
            f"blocks and gradients moved for {forward:.0f} ms under forward and {backward:.0f} ms under "
            "backward of the steps shown (transfers at once add up)",
        )

    claims.attempt("the disk works under compute", busy)
    claims.attempt(
        "infinity same bits as in DRAM",
        lambda: (
            e.roomy.sha is not None and e.roomy.sha == e.infinity.sha,
            f"SHA-256 of parameters and states {str(e.infinity.sha)[:16]}, in DRAM "
            f"{str(e.roomy.sha)[:16]}",
        ),
    )

    def killed():
        have_resumed, words = _all_ranks_resumed(e, "infinity_killed", "infinity")
        return (
            have_resumed
            and e.infinity_killed.sha is not None
            and e.infinity_killed.sha == e.infinity.sha,
            f"{words}; SHA-256 {str(e.infinity_killed.sha)[:16]}",
        )

    if "infinity_killed" in e.runs:
        claims.attempt("infinity same bits after the kill", killed)


def _check_model(claims, e):
    claims.attempt("sample", lambda: (len(e.sample) >= 200, f"{len(e.sample)} characters"))

    def loads():
        settings = json.dumps(e.forebay.event("start")["args"])
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                LOADS_IN_PLAIN_TORCH,
                str(e.model),
                str(ROOT / "tools"),
                settings,
                str(e.ranks),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return False, done.stderr.strip().splitlines()[-1]
        loss, trained = float(done.stdout.split()[-1]), e.forebay.events("heldout")[-1]["loss"]
        return (
            abs(loss - trained) <= LOSS_RELATIVE * trained,
            f"model.pt in plain torch has held-out loss {loss:.4f}, the trained model had {trained:.4f}",
        )

    claims.attempt("model.pt without Forebay", loads)


def durations(runs, seconds):
    """How long the runs took, to be read; no claim, for the machine decides it."""
    each = ", ".join(f"{name} {run.seconds:.0f} s" for name, run in runs.items())
    return f"time: {seconds:.0f} s ({each})"


def is_self_contained(page):
    return (
        re.search(
            r"""(src|href)\s*=\s*["']?(https?:|//|[\w./-]+\.(css|js|png))|@import|url\(""", page
        )
        is None
    )


def table(summary):
    width = max(map(len, summary))
    rows = []
    for key, value in summary.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        rows.append(f"  {key:{width}}  {shown}")
    return "\n".join(rows)

# SPDX-License-Identifier: Apache-2.0
"""From samples to JSON lines, a Markdown table, and whether the run counts."""

import json
import statistics

import ours

# A run is void if a peer's median share of the limit is lower than its best share in the same case by more than this share.
SLACK = 0.10
SAMPLES_MIN = 5  # a run with fewer quiet rounds is void

# Name of each side's case, limit loop with the memory accesses of its update, and bytes that all its passes read and write.
SIDES = {
    "torch-fused": ("by=torch-fused/format=fp32/grad=fp32/param=fp32", "fp32", 28),
    "deepspeed": ("by=deepspeed/format=fp32/grad=fp32/param=fp32", "fp32", 28),
    "deepspeed-3-passes": ("by=deepspeed/format=fp32/grad=bf16/param=bf16", "fp32", 40),
    # 2 + 4: gradient widened; 4 + 12 + 12 + 2: update
    "prime-rl": ("by=prime-rl/format=fp32/grad=bf16/param=bf16/from=delivery", "fp32", 36),
    "ours-fp32": ("by=forebay/format=fp32/grad=fp32/param=fp32", "fp32", 28),
    "ours-exact": ("by=forebay/format=exact/grad=bf16/param=bf16", "exact", 26),
    # 2 + 2: gradient checked, its squares summed; 26: update
    "ours-exact-from-delivery": (
        "by=forebay/format=exact/grad=bf16/param=bf16/from=delivery",
        "exact",
        30,
    ),
    "ours-master": ("by=forebay/format=fp32/grad=bf16/param=bf16", "master", 28),
}
GOALS = {  # (peer, Forebay's side): {shape: least speedup over the peer}
    ("torch-fused", "ours-fp32"): {"flat": 0.97, "1000": 1.35},
    ("deepspeed", "ours-fp32"): {},
    ("deepspeed-3-passes", "ours-exact"): {"flat": 1.8, "1000": 2.8},
    ("deepspeed-3-passes", "ours-master"): {"flat": 1.8, "1000": 2.8},
    ("prime-rl", "ours-exact-from-delivery"): {"flat": 1.25, "1000": 1.25},
}
PHASE_GOAL = 2.5
SHAPE_NAMES = {"flat": "flat", "1000": "1000x{}"}
PARTS = {  # parts of a training step, by the name in the rows
    "step": ("step",),
    "backward+step": ("backward", "step"),
    "all": ("forward", "backward", "step"),
}


def spread(values):
    """Median and quartiles."""
    if len(values) < 2:
        return {"value": values[0], "q1": values[0], "q3": values[0], "samples": len(values)}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"value": middle, "q1": low, "q3": high, "samples": len(values)}


def write_lines(path, facts, rows):
    """JSON lines, the facts first."""
    with open(path, "w", encoding="utf-8") as lines:
        for row in [facts, *rows]:
            lines.write(json.dumps({"bench": "peers"} | row) + "\n")


def shares(loop, seconds):
    """Of the limit: the median, and the least that it must be. That is a peer's own best, the upper
    eighth of the same rounds, less SLACK: the rounds below it show that something held it back."""
    ratios = [limit / own for limit, own in zip(loop, seconds)]
    best = statistics.quantiles(ratios, n=8, method="inclusive")[-1] if len(ratios) > 1 else ratios[0]
    return statistics.median(ratios), (1 - SLACK) * best


def kernel_rows(result):
    """One run of peer_kernels.py: a row a side, a row a limit, a row a comparison."""
    samples, shape, threads = result["samples"], result["shape"], result["threads"]
    if not samples["limit-fp32"]:
        return []
    elems = result["n"] // (1 if shape == "flat" else int(shape))
    tail = f"threads={threads}/shape={SHAPE_NAMES[shape].format(elems)}"
    kept = {"unit": "ms", "rejected": result["rejected"], "huge_pages": result["huge_pages"]}
    rows = []
    for side, (name, work, moved) in SIDES.items():
        if side not in samples:
            continue
        loop, seconds = samples[f"limit-{work}"], samples[side]
        share, needed = shares(loop, seconds)
        if side.startswith("ours"):
            needed = None
        rows.append(
            {"case": f"peers/adam/{name}/{tail}", "kind": "side"}
            | spread([1e3 * own for own in seconds])
            | kept
            | {
                "limit": 1e3 * statistics.median(loop),
                "limit_what": f"loop that touches {ours.BYTES_PER_ELEM[work]} bytes an element",
                "share": share,
                "share_needed": needed,
                "void": needed is not None and share < needed,
                "bytes_per_elem": moved,
            }
        )
    for work in ours.WORKS:
        seconds = samples[f"limit-{work}"]
        rate = ours.BYTES_PER_ELEM[work] * result["n"] / 1e9
        rows.append(
            {"case": f"peers/adam/by=limit/like={work}/{tail}", "kind": "limit"}
            | spread([1e3 * own for own in seconds])
            | kept
            | {"gb_per_s": rate / statistics.median(seconds)}
        )
    for (peer, own), goals in GOALS.items():
        if peer in samples and own in samples:
            pairs = zip(samples[peer], samples[own])
            rows.append(
                {"case": f"peers/adam/{peer}-over-{own}/{tail}", "kind": "ratio", "unit": "times"}
                | spread([theirs / mine for theirs, mine in pairs])
                | {"goal": goals.get(shape), "rejected": result["rejected"]}
            )
    return rows


def phase_rows(result):
    """The run of phase.py: rows for the parts of each side's step, and comparisons."""
    samples = result["samples"]
    if not samples["limit"]:
        return []
    tail = f"params={result['params'] / 1e6:.1f}M/threads={result['threads']}"
    loop = [one["touch_fp32"] for one in samples["limit"]]
    rows, totals = [], {}
    for side, taken in samples.items():
        if side == "limit":
            continue
        for part, names in PARTS.items():
            seconds = [sum(one[name] for name in names) for one in taken]
            totals[side, part] = seconds
            row = {"case": f"peers/phase/by={side}/part={part}/{tail}", "kind": "side"}
            row |= spread([1e3 * one for one in seconds])
            row |= {"unit": "ms", "rejected": result["rejected"]}
            if part == "step":
                share, needed = shares(loop, seconds)
                needed = needed if side.startswith("deepspeed") else None
                row |= {"share": share, "share_needed": needed, "void": False}
            rows.append(row)
    for like in ("fp32", "exact"):
        seconds = [1e3 * one[f"touch_{like}"] for one in samples["limit"]]
        row = {"case": f"peers/phase/by=limit/like={like}/{tail}", "kind": "limit", "unit": "ms"}
        rows.append(row | spread(seconds) | {"rejected": result["rejected"]})
    peers = [side for side in samples if side.startswith("deepspeed")]
    best = min(peers, key=lambda side: statistics.median(totals[side, "step"]))
    for row in rows:  # only the peer's best settings can make a run void
        if row["case"].startswith(f"peers/phase/by={best}/part=step/"):
            row["void"] = row["share"] < row["share_needed"]
    for part in PARTS:
        pairs = zip(totals[best, part], totals["forebay", part])
        row = {"case": f"peers/phase/deepspeed-over-forebay/part={part}/{tail}", "kind": "ratio"}
        row |= spread([theirs / mine for theirs, mine in pairs])
        row |= {"unit": "times", "peer": best, "goal": PHASE_GOAL if part == "step" else None}
        rows.append(row | {"rejected": result["rejected"]})
    return rows


def void_reasons(rows):
    """Why the run does not count; empty where it does."""
    reasons = []
    for row in rows:
        if row.get("void"):
            reasons.append(
                f"{row['case']} reached {row['share']:.2f} of the limit, "
                f"{row['share_needed']:.2f} (its own best less {SLACK:.0%}) is needed"
            )
    few = min((row["samples"] for row in rows), default=0)
    if few < SAMPLES_MIN:
        reasons.append(f"{few} quiet rounds, {SAMPLES_MIN} are needed: others used the machine")
    return reasons


def digits(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def side_line(row):
    share = f"{row['share']:.2f}" if "share" in row else ""
    needed = row.get("share_needed")
    floor = f"{needed:.2f}" if needed else ""
    return (
        f"| `{row['case'].removeprefix('peers/')}` | {digits(row['value'])} | "
        f"{digits(row['q1'])} to {digits(row['q3'])} | {row['samples']} | "
        f"{row.get('bytes_per_elem', '')} | {share} | {floor}{' **void**' if row.get('void') else ''} |"
    )


def ratio_line(row):
    goal = "" if row["goal"] is None else f"{row['goal']}"
    return (
        f"| `{row['case'].removeprefix('peers/')}` | {row['value']:.2f} | "
        f"{row['q1']:.2f} to {row['q3']:.2f} | {row['samples']} | {goal} |"
    )


def markdown(rows, facts, reasons):
    """The tables that docs/reports/benchmarks.md quotes."""
    lines = [
        f"{facts['date']}; {facts['processor']}, {facts['CPUs']} CPUs; "
        f"Linux {facts['kernel']}, Python {facts['python']}, g++ {facts['g++']}, "
        f"torch {facts['torch']}, DeepSpeed {facts['deepspeed']}; our kernels on "
        f"{facts['target']}. Rounds thrown away because others computed: "
        + "; ".join(f"{part}: {had['rejected']}" for part, had in facts["rounds"].items())
        + ".",
        "",
        "| case | median ms | quartiles | samples | bytes an element | share of the limit | needed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [side_line(row) for row in rows if row["kind"] != "ratio"]
    lines += [
        "",
        "| peer's time over ours | median | quartiles | samples | goal |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [ratio_line(row) for row in rows if row["kind"] == "ratio"]
    if reasons:
        lines += ["", *(f"VOID: {reason}." for reason in reasons)]
    return "\n".join(lines) + "\n"

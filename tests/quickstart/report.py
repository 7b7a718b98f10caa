# SPDX-License-Identifier: Apache-2.0
"""The page of quickstart-report/: one self-contained HTML file with its figures as inline SVG."""

import html
import statistics

MIB = 1 << 20
STYLE = """
:root { --ink: #1b2733; --soft: #5b6b7a; --line: #d9e0e6; --paper: #fff; --plain: #d9822b; --ours: #1f6fb2;
        --killed: #2a9d6f; --bad: #c23b3b; --back: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 8px 0 0; } h2 { font-size: 18px; margin: 0 0 10px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 18px 20px;
          margin-top: 18px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.figure b { display: block; font-size: 22px; font-weight: 600; } .figure span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
td, th { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.pass { color: var(--killed); font-weight: 600; } .fail { color: var(--bad); font-weight: 600; }
blockquote { margin: 0; padding: 8px 14px; border-left: 3px solid var(--line); white-space: pre-wrap;
             font: 14px/1.5 ui-monospace, monospace; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
"""
LANES = (  # lane, color, what it shows
    ("compute", "#1f6fb2", "forward and backward of rank 0, our calls left out"),
    ("fetch wait", "#c23b3b", "rank 0 waits for a lease"),
    ("gradients", "#b07aa1", "rank 0 hands gradients over; the daemon adds them"),
    ("swap read", "#76b7b2", "blocks from swap to staging"),
    ("update", "#59a14f", "AdamW on workers"),
    ("swap write", "#edc948", "blocks back to swap"),
    ("step wait", "#d9822b", "rank 0 waits for the commit"),
)


def escape(value):
    return html.escape(str(value))


def ticks(low, high, count=5):
    """Round numbers between the two."""
    span = max(high - low, 1e-12)
    step = 10 ** len(str(int(span))) / 1000
    while span / step > count:
        step *= (
            2
            if str(step).lstrip("0.").startswith("1")
            else 2.5 if str(step).lstrip("0.").startswith("2") else 2
        )
    first = -(-low // step) * step + 0.0
    marks = []
    while first <= high + 1e-9:
        marks.append(round(first, 10) + 0.0)
        first += step
    return marks


def loss_chart(series, held_out):
    """`series`: (name, color, dashes, {step: loss}); `held_out`: (name, color, first, last)."""
    width, height, left, top, bottom = 920, 330, 46, 12, 34
    steps = [step for _, _, _, points in series for step in points]
    losses = [loss for _, _, _, points in series for loss in points.values()]
    losses += [loss for _, _, first, last in held_out for loss in (first, last)]
    if not steps:
        return "<p>No run left a loss.</p>"
    low, high, last_step = min(losses), max(losses), max(max(steps), 2)
    x = lambda step: left + (width - left - 16) * step / last_step  # noqa: E731
    y = lambda loss: top + (height - top - bottom) * (high - loss) / max(
        high - low, 1e-9
    )  # noqa: E731
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss by step">']
    for mark in ticks(low, high):
        parts.append(
            f'<line x1="{left}" x2="{width - 16}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#e8edf1"/>'
            f'<text x="{left - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>'
        )
    for mark in ticks(0, last_step, 10):
        parts.append(
            f'<text x="{x(mark):.1f}" y="{height - 14}" text-anchor="middle">{mark:g}</text>'
        )
    for name, color, dashes, points in series:
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(points.items()))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8" '
            f'stroke-dasharray="{dashes}"><title>{escape(name)}</title></polyline>'
        )
    for name, color, first, last in held_out:
        for step, loss in ((0, first), (last_step, last)):
            parts.append(
                f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="#fff" stroke="{color}" '
                f'stroke-width="2"><title>{escape(name)} {loss:.4f}</title></circle>'
            )
    at = left + 330
    for name, color, dashes, _ in series:
        parts.append(
            f'<line x1="{at}" x2="{at + 26}" y1="22" y2="22" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/><text x="{at + 32}" y="26">{escape(name)}</text>'
        )
        at += 60 + 7 * len(name)
    parts.append(
        f'<circle cx="{at + 6}" cy="22" r="4" fill="#fff" stroke="#5b6b7a" stroke-width="2"/>'
        f'<text x="{at + 16}" y="26">held out</text></svg>'
    )
    return "".join(parts)


def without(span, holes):
    """The remaining parts of (began, ended) without the sorted holes."""
    began, ended = span
    for hole_began, hole_ended in holes:
        if hole_ended <= began or hole_began >= ended:
            continue
        if hole_began > began:
            yield began, hole_began
        began = max(began, hole_ended)
    if began < ended:
        yield began, ended


def add_daemons_events(lanes, trace):
    for event in trace:
        lane = {"gradient": "gradients"}.get(event["lane"], event["lane"])
        if lane in lanes and event["process"] == "forebayd":
            lanes[lane].append((event["start_ns"], event["end_ns"], event["name"]))


def lanes_of(evidence):
    """{lane: [(began_ns, ended_ns, title)]} of one step, and the step's own span; CLOCK_MONOTONIC throughout."""
    timeline = evidence.forebay.event("timeline")
    row = next(row for row in evidence.forebay.events("step") if row["step"] == timeline["step"])
    lanes = {name: [] for name, _, _ in LANES}
    mine = sorted(
        (began, ended, kind, group)
        for kind, group, began, ended in timeline["intervals"]
        if ended > row["began_ns"] and began < row["ended_ns"]
    )
    for began, ended, kind, group in mine:
        lane = {"fetch": "fetch wait", "grad": "gradients", "step": "step wait"}.get(kind)
        if lane:
            lanes[lane].append((began, ended, f"{kind} {group}"))
    holes = [(began, ended) for began, ended, _, _ in mine]
    for name, began, ended in (
        ("forward", row["began_ns"], row["forward_done_ns"]),
        ("backward", row["forward_done_ns"], row["backward_done_ns"]),
    ):
        lanes["compute"] += [(a, b, name) for a, b in without((began, ended), holes)]
    add_daemons_events(lanes, evidence.forebay.node["trace"])
    return lanes, (row["began_ns"], row["ended_ns"]), timeline["step"]


def infinity_lanes_of(evidence):
    """The same of the run that is larger than DRAM: from the first event of a step to its publication, with forward and
    backward of rank 0 in that time."""
    lanes = {name: [] for name, _, _ in LANES}
    add_daemons_events(lanes, evidence.infinity.node["kept_trace"])
    times = [time for items in lanes.values() for began, ended, _ in items for time in (began, ended)]
    span = (min(times), max(times))
    for row in evidence.infinity.events("step"):
        for name in ("forward", "backward"):
            began, ended = row[f"{name}_ns"]
            if began < span[1] and ended > span[0]:
                lanes["compute"].append((max(began, span[0]), min(ended, span[1]), f"{name} of step {row['step']}"))
    return lanes, span


def busy_ns(intervals):
    """Length of the union of intervals."""
    total, reached = 0, 0
    for began, ended, _ in sorted(intervals):
        total += max(0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def timeline_chart(lanes, span):
    width, left, row_height, top = 920, 96, 34, 8
    began = min([span[0]] + [item[0] for items in lanes.values() for item in items])
    ended = max([span[1]] + [item[1] for items in lanes.values() for item in items])
    height = top + row_height * len(LANES) + 30
    x = lambda ns: left + (width - left - 12) * (ns - began) / max(1, ended - began)  # noqa: E731
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="timeline of one step">']
    for mark in ticks(0, (ended - began) / 1e6, 8):
        at = x(began + mark * 1e6)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - 24}" stroke="#e8edf1"/>'
            f'<text x="{at:.1f}" y="{height - 8}" text-anchor="middle">{mark:g} ms</text>'
        )
    for number, (name, color, _) in enumerate(LANES):
        y = top + number * row_height
        parts.append(
            f'<text x="{left - 10}" y="{y + 20}" text-anchor="end">{name}</text>'
            f'<line x1="{left}" x2="{width - 12}" y1="{y + row_height}" y2="{y + row_height}" '
            'stroke="#eef2f5"/>'
        )
        for a, b, title in lanes[name]:
            parts.append(
                f'<rect x="{x(a):.2f}" y="{y + 6}" width="{max(0.6, x(b) - x(a)):.2f}" height="22" '
                f'fill="{color}" fill-opacity="0.85"><title>{escape(title)}: {(b - a) / 1e6:.2f} ms</title>'
                "</rect>"
            )
    for at in span:
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top}" y2="{height - 24}" stroke="#1b2733" '
            'stroke-dasharray="3 3"/>'
        )
    return "".join(parts) + "</svg>"


def kill_cost(evidence):
    """Seconds from the SIGKILL to the commit of the step it hit, and how long that step takes undisturbed."""
    row = evidence.killed.event("kill", evidence.kill["rank"])
    after = [step for step in evidence.killed.events("step") if step["step"] == row["step"]]
    usual = statistics.median(evidence.killed.steady("step_s"))
    return row, after[-1]["time"] - row["time"], usual


def kill_section(evidence):
    row, lost_s, usual_s = kill_cost(evidence)
    resumed = evidence.resumed_at()[0]
    summary = (
        f"<p>Rank {row['rank']} got SIGKILL in step {row['step']}, after it had delivered {row['groups']} of "
        f"{len(evidence.job['groups'])} groups (drawn from seed {evidence.args.kill_seed}). The step was dropped; "
        f"the daemon kept everything up to step {resumed}. torchrun started both ranks again, they attached and went on "
        f"with step {resumed + 1}.</p><p>From the kill to the commit of step {row['step']}: <b>{lost_s:.1f} s</b>, where "
        f"that step usually takes {usual_s:.2f} s. Steps lost: 0. No checkpoint was read.</p>"
    )
    durable = evidence.resumed_at(kill=1)[0]
    summary += (
        f"<p>In step {evidence.answered_before_daemon_kill() + 1} the daemon got SIGKILL, and the ranks ended. Each step "
        "of this run was durable (<code>jobs.durability = step</code>): a new daemon on the same swap had the job at step "
        f"{durable}, and both ranks, started again, went on with step {durable + 1}. Steps lost: 0.</p>"
    )
    width, height = 920, 74
    steps = evidence.killed.events("step")
    first, last = steps[0]["time"], max(steps[-1]["time"], steps[0]["time"] + 1)
    x = lambda at: 20 + (width - 40) * (at - first) / (last - first)  # noqa: E731
    marks = "".join(
        f'<line x1="{x(step["time"]):.1f}" x2="{x(step["time"]):.1f}" y1="22" y2="44" stroke="#2a9d6f">'
        f'<title>step {step["step"]}</title></line>'
        for step in steps
    )
    return (
        summary
        + f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="commits around the kill">{marks}'
        f'<rect x="{x(row["time"]):.1f}" y="22" width="{x(row["time"] + lost_s) - x(row["time"]):.1f}" height="22" '
        f'fill="#c23b3b" fill-opacity="0.25"/><line x1="{x(row["time"]):.1f}" x2="{x(row["time"]):.1f}" y1="14" '
        f'y2="52" stroke="#c23b3b" stroke-width="2"/><text x="{x(row["time"]):.1f}" y="68" text-anchor="middle">'
        f'SIGKILL in step {row["step"]}</text><text x="20" y="12">one mark a committed step</text></svg>'
    )


def step_words(summary, lanes, span):
    """Where the time of the step went; said in full where it took over twice plain's."""
    whole = max(1, span[1] - span[0])
    shares = ", ".join(
        f"{name} {busy_ns(items) / 1e6:.0f} ms" for name, items in lanes.items() if items
    )
    ratio = summary["step_s"] / summary["plain_step_s"]
    text = (
        f"<p>A step takes {summary['step_s']:.2f} s (median), plain torch's {summary['plain_step_s']:.2f} s: "
        f"{ratio:.2f} times. Of the {whole / 1e6:.0f} ms shown, lanes are busy: {shares}.</p>"
    )
    if ratio > 2:
        slow = max(
            ("swap read", "swap write", "update", "gradients", "fetch wait"),
            key=lambda name: busy_ns(lanes[name]),
        )
        wait = busy_ns(lanes["step wait"]) + busy_ns(lanes["fetch wait"])
        text += (
            f"<p><b>Over twice plain's time.</b> Rank 0 waits {wait / 1e6:.0f} ms of the step for the daemon; the "
            f"busiest lane beside compute is <i>{slow}</i>. {summary['swap_state_share']:.0%} of the moments cross "
            "the disk twice in each step, and with so few tokens a step there is little compute to hide them "
            "behind.</p>"
        )
    return text


def figures(summary):
    """The numbers a reader looks for first."""

    def figure(value, text):
        return f'<div class="figure"><b>{escape(value)}</b><span>{escape(text)}</span></div>'

    return (
        '<div class="figures">'
        + "".join(
            (
                figure(
                    f"{summary['params'] / 1e6:.1f} M",
                    f"parameters, {summary['ranks']} ranks, {summary['format']}",
                ),
                figure(f"{summary['swap_state_share']:.0%}", "of the moments on swap"),
                figure(
                    f"{summary['dram_peak_bytes'] / MIB:.0f} MiB",
                    f"DRAM at most; limit {summary['dram_limit_bytes'] / MIB:.0f} "
                    f"MiB, states {summary['state_bytes'] / MIB:.0f} MiB",
                ),
                figure(
                    f"{summary['loss_first']:.2f} to {summary['loss_last']:.2f}",
                    f"loss in {summary['steps']} steps",
                ),
                figure(f"{summary['exposed_wait_s_per_step'] * 1e3:.0f} ms", "exposed wait a step"),
                figure(f"{summary['prefetch_hit_share']:.0%}", "of swap reads asked for in time"),
                figure(f"{summary['tokens_per_s']:.0f}", "tokens a second"),
                figure(
                    f"{summary['rank_private_peak_bytes'] / MIB:.0f} MiB",
                    "private memory of a rank; plain "
                    f"{summary['plain_rank_private_peak_bytes'] / MIB:.0f} MiB",
                ),
            )
        )
        + "</div>"
    )


def section(title, make):
    """A section whose evidence is missing says so instead of breaking the page."""
    try:
        body = make()
    except Exception as error:  # noqa: BLE001: a run may lack any evidence
        body = f'<p class="fail">Not shown: {escape(type(error).__name__)}: {escape(error)}</p>'
    return f"<section><h2>{title}</h2>{body}</section>"


def page(summary, claims, evidence):
    def losses():
        runs = (
            ("plain torch", "var(--plain)", "none", evidence.plain),
            ("Forebay", "var(--ours)", "none", evidence.forebay),
            ("Forebay, killed", "var(--killed)", "5 4", evidence.killed),
        )
        return loss_chart(
            [(name, color, dashes, run.losses()) for name, color, dashes, run in runs],
            [(name, color, *run.heldout()) for name, color, _, run in runs[:2]],
        )

    def step():
        lanes, span, number = lanes_of(evidence)
        keys = "".join(
            f'<tr><td><b style="color:{color}">{name}</b></td><td>{what}</td></tr>'
            for name, color, what in LANES
        )
        return (
            f'<p class="soft">Step {number} of the uninterrupted run, from that run\'s own events; dashed: begin and '
            f"end of the step as rank 0 saw it.</p>{timeline_chart(lanes, span)}"
            f"{step_words(summary, lanes, span)}<table>{keys}</table>"
        )

    def infinity():
        lanes, span = infinity_lanes_of(evidence)
        job = evidence.infinity.node["status"]["jobs"][0]
        limit = evidence.infinity.node["status"]["memory"]["limit_bytes"]
        shares = ", ".join(
            f"{name} {busy_ns(items) / 1e6:.0f} ms" for name, items in lanes.items() if items
        )
        return (
            f"<p>{job['params'] / 1e6:.1f} M parameters, FSDP2 on two ranks, with {limit / MIB:.0f} MiB of DRAM. "
            "One step of the daemon's, from its first gradient to its publication: blocks are updated under backward, the rest "
            f"under the next forward. Of {(span[1] - span[0]) / 1e6:.0f} ms, lanes are busy: {shares}.</p>"
            f"{timeline_chart(lanes, span)}"
        )

    def claim_rows():
        rows = "".join(
            f'<tr><td class="{"pass" if claim.holds else "fail"}">{"holds" if claim.holds else "FAILS"}</td>'
            f"<td>{escape(claim.name)}</td><td>{escape(claim.seen)}</td></tr>"
            for claim in claims.all
        )
        return f"<table>{rows}</table>"

    def numbers():
        rows = "".join(
            f'<tr><td>{key}</td><td class="number">'
            f"{escape(f'{value:.6g}' if isinstance(value, float) else value)}</td></tr>"
            for key, value in summary.items()
        )
        return f"<table>{rows}</table>"

    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Forebay: the main job</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>'
        "<h1>Forebay: the main job</h1>"
        '<p class="soft">A GPT trained on the King James Bible by two processes whose parameters, gradients and optimizer '
        "states live in forebayd, beside the same training with torch alone.</p>"
        + section("At a glance", lambda: figures(summary))
        + section("Loss", losses)
        + section("One step", step)
        + section("The kill and what it cost", lambda: kill_section(evidence))
        + (section("Larger than DRAM", infinity) if "infinity" in evidence.runs else "")
        + section("What was claimed", claim_rows)
        + section("200 characters", lambda: f"<blockquote>{escape(evidence.sample)}</blockquote>")
        + section("summary.json", numbers)
        + "</main></body></html>\n"
    )

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/reports/report.svg of the main job: losses, memory beside its limit, bytes on swap beside the table's, claims.

Loss curves come from the logs of the ranks in WORK, all other figures from summary.json and claims.json in REPORT;
tools/quickstart leaves both folders. Each figure stands in the SVG twice: as text or geometry, and exactly in data-value.
--check writes nothing: it compares what SVG shows with summary.json and claims.json, and exits with 1 if they differ.
"""

import argparse
import json
import math
import pathlib
import re
import sys
import types
import xml.etree.ElementTree as tree
from xml.sax.saxutils import escape

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import claims as claims_of

ROOT = claims_of.ROOT
MIB = claims_of.MIB
WIDTH = 800  # width of the SVG in its units; a page shows the SVG about that wide
COLUMNS = 3  # columns of the list of claims
ROW = 20  # height of a row in the list of claims
# Class: what it colors, its color on a light page and on a dark one. The contrast is at least 4.5 for text, 3 for the rest.
COLORS = {
    "ink": ("fill", "#1f2328", "#e6edf3"),
    "soft": ("fill", "#57606a", "#9da7b3"),
    "frame": ("stroke", "#818b98", "#6e7681"),
    "plain": ("stroke", "#c4741a", "#c98a3c"),
    "forebay": ("stroke", "#0550ae", "#79c0ff"),
    "killed": ("stroke", "#bf3989", "#ff9bce"),
    "plain-bar": ("fill", "#c4741a", "#c98a3c"),
    "forebay-bar": ("fill", "#0969da", "#58a6ff"),
    "states-bar": ("fill", "#818b98", "#6e7681"),
    "limit": ("stroke", "#cf222e", "#ff7b72"),
    "kill": ("stroke", "#57606a", "#9da7b3"),
    "holds": ("stroke", "#1a7f37", "#3fb950"),
    "fails": ("stroke", "#cf222e", "#ff7b72"),
}
SHAPES = """
    text { font: 13px system-ui, sans-serif } .small { font-size: 12px }
    .head { font-weight: 600 } .title { font-size: 17px }
    polyline, path { fill: none } .frame { stroke-width: 1 } .grid { stroke-opacity: 0.35 }
    .plain { stroke-width: 7; stroke-opacity: 0.75 } .forebay { stroke-width: 2 }
    .killed { stroke-width: 4; stroke-linecap: round; stroke-dasharray: 0 9 }
    .limit { stroke-width: 2.5 } .kill { stroke-width: 1.5; stroke-dasharray: 3 3 } .holds, .fails { stroke-width: 2 }"""
RUNS = {"plain": "plain torch", "forebay": "Forebay", "killed": "Forebay, a rank and the daemon killed"}
UNITS = {"MiB": MIB, "M": 1e6, "%": 0.01, "": 1}  # factors of the units of shown numbers
LOSS_KEYS = {"plain": "plain_loss", "forebay": "loss", "killed": None}  # summary.json ends them with _first and _last


class FigureError(Exception):
    """What is missing, and what to do."""


def style():
    def rules(at):
        return " ".join(f".{name} {{ {color[0]}: {color[at]} }}" for name, color in COLORS.items())

    return f"<style>{SHAPES}\n    {rules(1)}\n    @media (prefers-color-scheme: dark) {{ {rules(2)} }}\n  </style>"


def text(x, y, words, classes="ink", anchor="start"):
    """`words` are escaped already: they may hold figures."""
    return f'<text class="{classes}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def line(x1, y1, x2, y2, classes, data=""):
    return f'<line class="{classes}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"{data}/>'


def figure(summary, key, form, unit="", factor=1):
    """The number of `key`, times `factor`, as text; `form` is a format of the number in `unit`."""
    value = summary[key] * factor if factor != 1 else summary[key]
    shown = f"{value / UNITS[unit]:{form}}" if isinstance(value, (int, float)) else format(value, form)
    factors = f' data-factor="{float(factor)}"' if factor != 1 else ""
    data = f'data-key="{key}" data-value="{escape(str(value))}" data-unit="{unit}"{factors}'
    return f"<tspan {data}>{escape(shown)}</tspan>" + (f" {unit}" if unit else "")


def axis_end(high, parts=4):
    """(step, end) of an axis from 0: round numbers, the end at least `high`."""
    raw = max(high, 1e-9) / parts
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    return step, step * math.ceil(high / step - 1e-9)


class Scale:
    """Places the numbers from `low` to `high` between two coordinates."""

    def __init__(self, low, high, start, end):
        self.low, self.high, self.start, self.end = low, high, start, end

    def at(self, value):
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def data(self, axis):
        return f' data-{axis}="{self.low:g} {self.high:g} {self.start:g} {self.end:g}"'


def legend(x, y, entries):
    """`entries`: (series, how its line or bar is shown, words, width)."""
    parts = []
    for series, kind, words, width in entries:
        if kind == "bar":
            mark = f'<rect class="{series}-bar" x="{x}" y="{y - 10}" width="18" height="10"/>'
        else:
            mark = line(x, y - 4, x + 26, y - 4, series)
        after = 24 if kind == "bar" else 32
        parts.append(f'<g data-legend="{series}">{mark}{text(x + after, y, words, "ink small")}</g>')
        x += width
    return parts


def loss_panel(summary, runs, top):
    left, right, bottom = 48, WIDTH - 12, top + 250
    losses = {name: run.losses() for name, run in runs.items()}
    for name, points in losses.items():
        if not points:
            raise FigureError(f"the run {name} left no loss: see its stdout.log")
    low = math.floor(min(min(points.values()) for points in losses.values()))
    high = math.ceil(max(max(points.values()) for points in losses.values()))
    x = Scale(0, max(max(points) for points in losses.values()), left, right)
    y = Scale(low, high, bottom, top + 58)
    parts = [text(0, top, "Loss in training, nats a byte", "ink head")]
    widths = {"plain": 130, "forebay": 110, "killed": 0}
    parts += legend(left, top + 24, [(name, "line", words, widths[name]) for name, words in RUNS.items()])
    for mark in range(low, high + 1):
        parts.append(line(left, y.at(mark), right, y.at(mark), "frame grid"))
        parts.append(text(left - 8, y.at(mark) + 4, f"{mark}", "soft small", "end"))
    step, _ = axis_end(x.high, 5)
    for number in range(int(x.high / step) + 1):
        at = x.at(number * step)
        parts.append(line(at, bottom, at, bottom + 4, "frame"))
        parts.append(text(at, bottom + 18, f"{number * step:g}", "soft small", "middle"))
    parts.append(text((left + right) / 2, bottom + 34, "step", "soft small", "middle"))
    for name, points in losses.items():
        path = " ".join(f"{x.at(at):.2f},{y.at(loss):.2f}" for at, loss in points.items())
        values = " ".join(f"{at}:{loss:.6f}" for at, loss in points.items())
        parts.append(
            f'<polyline class="{name}" data-series="{name}" data-values="{values}"{x.data("x")}{y.data("y")} '
            f'points="{path}"><title>{escape(RUNS[name])}</title></polyline>'
        )
    # The rank is killed before the daemon. If the space suffices, the rank's label ends at the rank's line, and the daemon's
    # label begins at the daemon's line.
    for key, words, before in (
        ("killed_at_step", "SIGKILL of a rank in step ", x.at(summary["killed_at_step"]) > left + 190),
        ("daemon_killed_at_step", "SIGKILL of the daemon in step ", x.at(summary["daemon_killed_at_step"]) > right - 210),
    ):
        at, anchor = x.at(summary[key]), "end" if before else "start"
        words += figure(summary, key, ".0f")
        parts.append(line(at, top + 38, at, bottom, "kill"))
        parts.append(text(at - 6 if before else at + 6, top + 48, words, "soft small", anchor))
    ends = ", ".join(
        f"{name} {figure(summary, f'{key}_first', '.3f')} to {figure(summary, f'{key}_last', '.3f')}"
        for name, key in (("plain torch", "plain_loss"), ("Forebay", "loss"))
    )
    largest = figure(summary, "loss_max_rel_diff", ".1e")
    after, undisturbed = (figure(summary, key, ".16") for key in ("params_sha256", "uninterrupted_params_sha256"))
    words = f"{ends}; in the first {claims_of.LOSS_STEPS} steps they differ by at most {largest} of the loss"
    parts.append(text(0, bottom + 58, words, "ink small"))
    words = f"SHA-256 of parameters and states: {after} after both kills, {undisturbed} undisturbed"
    parts.append(text(0, bottom + 78, words, "ink small"))
    return parts


def bars(left, top, right, name_width, axis, rows, marks):
    """`rows`: (class, name, key, value, shown); `marks`: (key, value, factor, first row, last row)."""
    step, end = axis_end(max([row[3] for row in rows] + [mark[1] for mark in marks]))
    x = Scale(0, end, left + name_width, right)
    bottom = top + 30 * len(rows)
    parts = []
    for number in range(round(end / step) + 1):
        at = x.at(number * step)
        parts.append(line(at, top, at, bottom, "frame grid"))
        parts.append(text(at, bottom + 16, f"{number * step:g}", "soft small", "middle"))
    parts.append(text((x.start + x.end) / 2, bottom + 33, axis, "soft small", "middle"))
    for number, (series, name, key, value, shown) in enumerate(rows):
        y = top + 30 * number
        parts += [
            text(left + name_width - 8, y + 13, name, "ink small", "end"),
            text(left + name_width - 8, y + 26, shown, "soft small", "end"),
            f'<rect class="{series}-bar" data-bar="{key}" data-shown="{value:.6f}"{x.data("x")} '
            f'x="{x.start:g}" y="{y + 5}" width="{x.at(value) - x.start:.2f}" height="20"/>',
        ]
    for key, value, factor, first, last in marks:
        data = f' data-mark="{key}" data-shown="{value:.6f}" data-factor="{float(factor)}"{x.data("x")}'
        parts.append(line(x.at(value), top + 30 * first + 1, x.at(value), top + 30 * last + 29, "limit", data))
    return parts


def memory_panel(summary, left, right, top):
    rows = [
        (series, name, key, summary[key] / MIB, figure(summary, key, ",.0f", "MiB"))
        for series, name, key in (
            ("states", "the states", "state_bytes"),
            ("forebay", "the daemon, DRAM", "dram_peak_bytes"),
            ("forebay", "a rank, Forebay", "rank_private_peak_bytes"),
            ("plain", "a rank, plain torch", "plain_rank_private_peak_bytes"),
        )
    ]
    limit = "limit of the daemon, " + figure(summary, "dram_limit_bytes", ",.0f", "MiB")
    parts = [text(left, top, "Peak of host memory", "ink head")]
    entries = (("states", "parameters, moments", 178), ("forebay", "Forebay", 90), ("plain", "plain torch", 0))
    parts += legend(left, top + 22, [(series, "bar", words, width) for series, words, width in entries])
    parts += legend(left, top + 42, [("limit", "line", limit, 0)])
    marks = [("dram_limit_bytes", summary["dram_limit_bytes"] / MIB, 1, 0, 1)]
    return parts + bars(left, top + 54, right, 128, "MiB", rows, marks)


def swap_panel(summary, width, left, right, top):
    rows = [
        ("forebay", name, key, summary[key], figure(summary, key, ".3f") + " bytes")
        for name, key in (("read", "swap_read_bytes_per_param_step"), ("written", "swap_write_bytes_per_param_step"))
    ]
    share = "swap_state_share"
    table = f"the table says {width:g} (1 - f) = {figure(summary, share, '.3f', factor=width)}"
    parts = [text(left, top, "Swap, bytes a parameter and step", "ink head")]
    parts += legend(left, top + 22, [("forebay", "bar", "measured", 0)])
    parts += legend(left, top + 42, [("limit", "line", table, 0)])
    marks = [(share, summary[share] * width, width, 0, 1)]
    parts += bars(left, top + 54, right, 90, "bytes", rows, marks)
    words = f"f: share of the states in DRAM; {figure(summary, share, '.1f', '%')} are on swap"
    return parts + [text(left, top + 54 + 60 + 58, words, "ink small")]


def check_mark(x, y, holds):
    path = f"M{x} {y - 5} l3.5 4 l6 -9" if holds else f"M{x} {y - 9} l8 9 m0 -9 l-8 9"
    return f'<path class="{"holds" if holds else "fails"}" d="{path}"/>'


def claims_panel(claims, top):
    passed = sum(claim["holds"] for claim in claims)
    failed = f'<tspan data-claims="failed">{len(claims) - passed}</tspan> do not'
    count = f'<tspan data-claims="passed">{passed}</tspan> hold, {failed}'
    parts = [text(0, top, f"Claims that the run checked: {count}", "ink head")]
    for series, words, x in (("holds", "holds", WIDTH - 190), ("fails", "does not hold", WIDTH - 115)):
        mark = check_mark(x, top, series == "holds")
        parts.append(f'<g data-legend="{series}">{mark}{text(x + 16, top, words, "ink small")}</g>')
    rows = -(-len(claims) // COLUMNS)
    for number, claim in enumerate(claims):
        x, y = WIDTH / COLUMNS * (number // rows), top + 24 + ROW * (number % rows)
        name, holds = escape(claim["name"]), claim["holds"]
        parts.append(
            f'<g data-claim="{name}" data-holds="{str(holds).lower()}">{check_mark(x, y, holds)}'
            f'{text(x + 16, y, name, "ink small")}</g>'
        )
    return parts, top + 24 + ROW * rows


def svg_of(summary, claims, work):
    missing = [key for key, value in summary.items() if value is None]
    if missing:
        raise FigureError(f"summary.json has no {', '.join(missing)}: a run failed, see its stdout.log")
    runs = {name: claims_of.Ranks(work / name, summary["ranks"]) for name in RUNS}
    options = types.SimpleNamespace(**runs["forebay"].event("start")["args"])
    facts = (
        f"{figure(summary, 'params', '.1f', 'M')} parameters, {figure(summary, 'ranks', '.0f')} ranks, "
        f"{figure(summary, 'steps', '.0f')} steps, {escape(options.optimizer)}, states {figure(summary, 'format', '')}, "
        f"seed {figure(summary, 'seed', '.0f')}"
    )
    parts = [text(0, 20, "The main job: a GPT with Forebay and with plain torch", "ink head title")]
    parts.append(text(0, 41, facts, "soft small"))
    parts += loss_panel(summary, runs, 74)
    parts += memory_panel(summary, 0, 400, 446)
    parts += swap_panel(summary, claims_of.swap_width(options), 440, WIDTH - 12, 446)
    listed, height = claims_panel(claims, 704)
    return "\n  ".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {WIDTH + 16} {height}" role="img">',
            "<title>The main job: loss, memory, bytes on swap and claims</title>",
            style(),
            *parts,
            *listed,
        ]
    ) + "\n</svg>\n"


def read_report(folder):
    """summary.json and claims.json."""
    try:
        return tuple(json.loads((folder / name).read_text(encoding="utf-8")) for name in ("summary.json", "claims.json"))
    except FileNotFoundError as error:
        words = f"there is no {error.filename}: run tools/quickstart, or name its folder with --report"
        raise FigureError(words) from error


# Names of the numbers that --check requires in the figure.
SHOWN = {
    *("params", "ranks", "steps", "format", "seed", "loss_first", "loss_last", "plain_loss_first", "plain_loss_last"),
    *("loss_max_rel_diff", "killed_at_step", "daemon_killed_at_step", "params_sha256", "uninterrupted_params_sha256"),
    *("state_bytes", "dram_limit_bytes", "dram_peak_bytes", "rank_private_peak_bytes", "plain_rank_private_peak_bytes"),
    *("swap_read_bytes_per_param_step", "swap_write_bytes_per_param_step", "swap_state_share"),
}
BARS = {
    *("state_bytes", "dram_peak_bytes", "rank_private_peak_bytes", "plain_rank_private_peak_bytes"),
    *("swap_read_bytes_per_param_step", "swap_write_bytes_per_param_step"),
}
MARKS = {"dram_limit_bytes", "swap_state_share"}
HALF_PLACE = 0.0051  # coordinates have two decimal places


def shows(shown, value, unit):
    """Whether the text is the value, rounded to its last digit."""
    if not isinstance(value, (int, float)):
        return shown != "" and str(value).startswith(shown)
    if not re.fullmatch(r"[\d,]+(\.\d+)?(e[+-]\d+)?", shown):
        return False
    mantissa, _, exponent = shown.replace(",", "").partition("e")
    half = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown.replace(",", "")) - value / UNITS[unit]) <= half * (1 + 1e-9)


def scale_of(element, axis):
    return Scale(*map(float, element.get(f"data-{axis}").split()))


def texts_that_differ(svg, summary):
    seen = set()
    for element in svg.iterfind(".//*[@data-key]"):
        key = element.get("data-key")
        seen.add(key)
        value = summary.get(key)
        if value is not None and "data-factor" in element.keys():
            value *= float(element.get("data-factor"))
        exact = element.get("data-value")
        if value is None or not shows(element.text or "", value, element.get("data-unit")):
            yield f"{key}: the text is {element.text} {element.get('data-unit')}, summary.json has {value}"
        elif exact != str(value):
            yield f"{key}: data-value is {exact}, summary.json has {value}"
    yield from (f"{key}: no text shows it" for key in sorted(SHOWN - seen))


def bars_that_differ(svg, summary):
    for attribute, wanted in (("data-bar", BARS), ("data-mark", MARKS)):
        seen = set()
        for element in svg.iterfind(f".//*[@{attribute}]"):
            key = element.get(attribute)
            seen.add(key)
            value = summary[key] * float(element.get("data-factor", 1)) / (MIB if key.endswith("_bytes") else 1)
            if element.get("data-shown") != f"{value:.6f}":
                yield f"{key}: data-shown is {element.get('data-shown')}, summary.json has {value:.6f}"
            scale = scale_of(element, "x")
            is_bar = attribute == "data-bar"
            end = float(element.get("x")) + float(element.get("width")) if is_bar else float(element.get("x1"))
            if abs(end - scale.at(value)) > HALF_PLACE or (is_bar and float(element.get("x")) != scale.start):
                yield f"{key}: ends at {end}, {value:.6g} is at {scale.at(value):.2f}"
        yield from (f"{key}: no bar or mark shows it" for key in sorted(wanted - seen))


def curves_that_differ(svg, summary):
    seen = set()
    for element in svg.iterfind(".//*[@data-series]"):
        name = element.get("data-series")
        seen.add(name)
        values = [tuple(map(float, value.split(":"))) for value in element.get("data-values").split()]
        points = [tuple(map(float, point.split(","))) for point in element.get("points").split()]
        x, y = scale_of(element, "x"), scale_of(element, "y")
        if len(values) != len(points) or any(
            abs(x.at(step) - point[0]) > HALF_PLACE or abs(y.at(loss) - point[1]) > HALF_PLACE
            for (step, loss), point in zip(values, points)
        ):
            yield f"{name}: the curve is not that of its data-values"
        if values[-1][0] != summary["steps"]:
            yield f"{name}: the curve ends at step {values[-1][0]:g}, the run at {summary['steps']}"
        for end, at in (("first", 0), ("last", -1)):
            key = LOSS_KEYS[name] and f"{LOSS_KEYS[name]}_{end}"
            if key and abs(values[at][1] - summary[key]) > 0.51e-6:
                yield f"{key}: the curve has {values[at][1]}, summary.json has {summary[key]}"
    yield from (f"{name}: no curve shows it" for name in RUNS if name not in seen)


def claims_that_differ(svg, claims):
    listed = svg.iterfind(".//*[@data-claim]")
    shown = [(element.get("data-claim"), element.get("data-holds") == "true") for element in listed]
    wanted = [(claim["name"], claim["holds"]) for claim in claims]
    if shown != wanted:
        yield f"claims: {sorted(set(shown) ^ set(wanted))} differ from claims.json"
    passed = sum(holds for _, holds in wanted)
    for word, count in (("passed", passed), ("failed", len(wanted) - passed)):
        if [element.text for element in svg.iterfind(f".//*[@data-claims='{word}']")] != [str(count)]:
            yield f"claims: the text does not say that {count} {word}"


def differences(svg_text, summary, claims):
    """What the SVG shows otherwise than summary.json and claims.json, one sentence each."""
    svg = tree.fromstring(svg_text)
    return [
        *texts_that_differ(svg, summary),
        *bars_that_differ(svg, summary),
        *curves_that_differ(svg, summary),
        *claims_that_differ(svg, claims),
    ]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = {"type": pathlib.Path, "metavar": "FOLDER"}
    parser.add_argument("--work", default=ROOT / "build/quickstart", **folder, help="the quickstart's logs")
    parser.add_argument("--report", default=ROOT / "quickstart-report", **folder, help="its results")
    parser.add_argument("--check", action="store_true", help="compare the SVG instead of writing it")
    parser.add_argument("svg", type=pathlib.Path)
    return parser.parse_args()


def main():
    args = parse_args()
    try:
        summary, claims = read_report(args.report)
        if not args.check:
            args.svg.write_text(svg_of(summary, claims, args.work), encoding="utf-8")
            return 0
        found = differences(args.svg.read_text(encoding="utf-8"), summary, claims)
    except (FigureError, LookupError, OSError) as error:
        print(f"figure.py: {error}", file=sys.stderr)
        return 1
    for sentence in found:
        print(f"{args.svg}: {sentence}")
    print(f"figure: {len(found)} differences from {args.report}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

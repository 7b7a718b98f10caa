#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/reports/step_time.svg from what tests/daemon/step_time_test.cc prints: a step's time against its compute, and
against the share of the states in DRAM, in each of the ways, with the bound. Runs two suites of that test with all cases, which
takes a minute.
"""

import argparse
import os
import pathlib
import subprocess

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 440, 300, 52, 34, 12, 44  # pixels of a panel and its axes
WAYS = {  # class of each curve, its text in the legend
    ("yes", "yes"): ("both", "early updates and drain"),
    ("no", "yes"): ("drain", "drain alone"),
    ("yes", "no"): ("early", "early updates alone"),
    ("no", "no"): ("neither", "neither"),
}
BOUND = "bound"
SUITES = "*StepTime.*/states:StepTimeOfResidentStates.*"
SHARE_WAYS = (("yes", "yes"), ("no", "no"))  # the ways that the second suite measures
COLORS = {  # class: its color on a light page and on a dark one
    "both": ("#1b6ca8", "#58a6ff"),
    "drain": ("#4a8230", "#6fbf4b"),
    "early": ("#97700a", "#d8a72f"),
    "neither": ("#a33b3b", "#ff7b72"),
    BOUND: ("#1f2328", "#e6edf3"),
    "grid": ("#d0d7de", "#30363d"),
}
TEXT_COLORS = ("#1f2328", "#e6edf3")


class Panel:
    def __init__(self, left, title, axis, x_max, y_max):
        self.left, self.x_max, self.y_max = left, x_max, y_max
        self.parts = [
            text(left + WIDTH / 2, 18, title, "middle", 13),
            text(left + WIDTH / 2, HEIGHT - 8, axis, "middle"),
        ]
        for i in range(5):
            x, y = x_max * i / 4, y_max * i / 4
            at_x, at_y = self.place(x, 0), self.place(0, y)
            self.parts.append(line([(at_x[0], TOP), (at_x[0], HEIGHT - BOTTOM)], "grid"))
            self.parts.append(line([(left + LEFT, at_y[1]), (left + WIDTH - RIGHT, at_y[1])], "grid"))
            self.parts.append(text(at_x[0], HEIGHT - BOTTOM + 15, f"{x:g}", "middle"))
            self.parts.append(text(left + LEFT - 6, at_y[1] + 4, f"{y:g}", "end"))

    def place(self, x, y):
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return self.left + LEFT + across * x / self.x_max, HEIGHT - BOTTOM - up * y / self.y_max

    def plot(self, points, curve):
        if not points:
            raise SystemExit(f"step_figures.py: the test printed no row of {curve}: does it have the suites {SUITES}?")
        self.parts.append(line([self.place(*point) for point in points], curve))


def text(x, y, words, anchor="start", size=11):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def line(points, curve):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{curve}" points="{path}"/>'


def style():
    def rules(at):
        curves = " ".join(f".{name} {{ stroke: {colors[at]} }}" for name, colors in COLORS.items())
        return f"text {{ fill: {TEXT_COLORS[at]} }} {curves}"

    shapes = f"polyline {{ fill: none; stroke-width: 2 }} .grid {{ stroke-width: 1 }} .{BOUND} {{ stroke-dasharray: 4 3 }}"
    return f"<style>{shapes} {rules(0)}\n@media (prefers-color-scheme: dark) {{ {rules(1)} }}</style>"


def rows_of(test):
    """The words of each line of a table."""
    environment = {**os.environ, "FOREBAY_ALL_CASES": "1"}
    command = [test, f"--gtest_filter={SUITES}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [row.split() for row in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 7 and row[1] in ("yes", "no")]


def svg_of(rows):
    compute = Panel(0, "a step, seconds (transfers: 1 s)", "compute, seconds", 2, 3)
    share = Panel(WIDTH, "a step, seconds (compute: 0.5 s)", "share of the states in DRAM", 1, 2)
    for way, (curve, _) in WAYS.items():
        points = [(float(r[3]), float(r[4])) for r in rows if r[0] == "states" and (r[1], r[2]) == way]
        compute.plot([point for point in points if point[0] <= 2], curve)
        if way in SHARE_WAYS:
            points = [(float(r[0]), float(r[4])) for r in rows if r[0][0].isdigit() and (r[1], r[2]) == way]
            share.plot(points, curve)
    compute.plot([(0.25, 1), (1, 1), (2, 2)], BOUND)
    share.plot([(0, 1), (0.5, 0.5), (1, 0.5)], BOUND)
    for i, (curve, words) in enumerate([*WAYS.values(), (BOUND, "the longer of both")]):
        x, y = 20 + 175 * i, HEIGHT + 16
        share.parts.append(line([(x, y - 4), (x + 22, y - 4)], curve))
        share.parts.append(text(x + 27, y, words))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 26}" '
        f'font-family="system-ui, sans-serif" role="img">\n<title>The time of a step</title>\n{style()}'
    )
    return "\n".join([head, *compute.parts, *share.parts, "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("core_test", help="the test program, build/tests/core_test")
    parser.add_argument("svg", type=pathlib.Path)
    args = parser.parse_args()
    args.svg.write_text(svg_of(rows_of(args.core_test)), encoding="utf-8")


if __name__ == "__main__":
    main()

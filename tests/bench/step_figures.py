#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots docs/reports/step_time.svg from what tests/daemon/step_time_test.cc prints: a step's time against its compute, and
against the share of the states in DRAM, in each of the ways, with the bound.

usage: step_figures.py CORE_TEST SVG
"""

import os
import pathlib
import subprocess
import sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 440, 300, 52, 34, 12, 44  # of a panel and its axes, pixels
WAYS = {
    ("yes", "yes"): ("#1b6ca8", "early updates and drain"),
    ("no", "yes"): ("#5b9a3c", "drain alone"),
    ("yes", "no"): ("#b8860b", "early updates alone"),
    ("no", "no"): ("#a33b3b", "neither"),
}


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
            self.parts.append(line([(at_x[0], TOP), (at_x[0], HEIGHT - BOTTOM)], "#dddddd", 1))
            self.parts.append(line([(left + LEFT, at_y[1]), (left + WIDTH - RIGHT, at_y[1])], "#dddddd", 1))
            self.parts.append(text(at_x[0], HEIGHT - BOTTOM + 15, f"{x:g}", "middle"))
            self.parts.append(text(left + LEFT - 6, at_y[1] + 4, f"{y:g}", "end"))

    def place(self, x, y):
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return self.left + LEFT + across * x / self.x_max, HEIGHT - BOTTOM - up * y / self.y_max

    def plot(self, points, color, dash=""):
        self.parts.append(line([self.place(*point) for point in points], color, 2, dash))


def text(x, y, words, anchor="start", size=11):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def line(points, color, width, dash=""):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-dasharray="{dash}"/>'
    )


def rows_of(test):
    """Of each line of a table: its words."""
    done = subprocess.run(
        [test, "--gtest_filter=*StepTime.*"], env={**os.environ, "FOREBAY_ALL_CASES": "1"}, capture_output=True, text=True, check=True
    )
    rows = [row.split() for row in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 7 and row[1] in ("yes", "no")]


def main():
    test, svg = sys.argv[1:]
    rows = rows_of(test)
    compute = Panel(0, "a step, seconds (transfers: 1 s)", "compute, seconds", 2, 3)
    share = Panel(WIDTH, "a step, seconds (compute: 0.5 s)", "share of the states in DRAM", 1, 2)
    for way, (color, _) in WAYS.items():
        points = [(float(r[3]), float(r[4])) for r in rows if r[0] == "states" and (r[1], r[2]) == way]
        compute.plot([point for point in points if point[0] <= 2], color)
        points = [(float(r[0]), float(r[4])) for r in rows if r[0][0].isdigit() and (r[1], r[2]) == way]
        if points:
            share.plot(points, color)
    compute.plot([(0.25, 1), (1, 1), (2, 2)], "black", "4 3")
    share.plot([(0, 1), (0.5, 0.5), (1, 0.5)], "black", "4 3")
    key = [(color, name, "") for color, name in WAYS.values()] + [("black", "the longer of both", "4 3")]
    for i, (color, name, dash) in enumerate(key):
        x, y = 20 + 175 * i, HEIGHT + 16
        share.parts.append(line([(x, y - 4), (x + 22, y - 4)], color, 2, dash))
        share.parts.append(text(x + 27, y, name))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 26}" '
        'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
    )
    pathlib.Path(svg).write_text("\n".join([head, *compute.parts, *share.parts, "</svg>\n"]))


if __name__ == "__main__":
    main()

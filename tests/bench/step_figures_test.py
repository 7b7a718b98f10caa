# SPDX-License-Identifier: Apache-2.0
"""Goal    The figure of a step's time has every curve that its legend names, on light and on dark pages.
Method  A script in the place of the test program prints the rows of both suites, or of one. The suites' names are looked
        up in the test's source; the figure in docs/ is parsed.
"""

import pathlib
import re
import xml.etree.ElementTree as tree

import pytest
import step_figures

ROOT = pathlib.Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
YES_NO = ("yes", "no")


def program(folder, resident):
    """Prints the rows of the first suite and, if `resident`, of the second; both as the test has them."""
    ways = [(early, drain) for early in YES_NO for drain in YES_NO]
    rows = [f"   states {early} {drain} {c} {c + 1} 1.000 0.000" for early, drain in ways for c in (0.25, 2.0, 4.0)]
    if resident:
        rows += [f"    {share:.2f} {both} {both} 0.500 1.005 1.005 0.000" for both in YES_NO for share in (0, 1)]
    path = folder / "core_test"
    path.write_text("#!/bin/sh\ncat <<END\n[ RUN      ] x\n" + "\n".join(rows) + "\nEND\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def curves(svg):
    """{class: number of curves}, the lines of the legend left out."""
    found = {}
    for element in svg.iter(f"{SVG}polyline"):
        if len(element.get("points").split()) > 2 or element.get("points").split()[0].split(",")[1] != "312.0":
            found[element.get("class")] = found.get(element.get("class"), 0) + 1
    return {name: count for name, count in found.items() if name != "grid"}


WHOLE = {"both": 2, "drain": 1, "early": 1, "neither": 2, "bound": 2}


def test_every_curve_is_there(tmp_path):
    svg = tree.fromstring(step_figures.svg_of(step_figures.rows_of(program(tmp_path, True))))
    assert curves(svg) == WHOLE
    legend = [element.text for element in svg.iter(f"{SVG}text") if element.get("y") == "316.0"]
    assert legend == [*(words for _, words in step_figures.WAYS.values()), "the longer of both"]


def test_a_suite_that_printed_nothing_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="printed no row of both"):
        step_figures.svg_of(step_figures.rows_of(program(tmp_path, False)))


def test_the_suites_exist():
    source = (ROOT / "tests/daemon/step_time_test.cc").read_text(encoding="utf-8")
    suites = re.findall(r"^TEST(?:_P)?\((\w+),", source, re.M)
    for suite in step_figures.SUITES.split(":"):
        assert suite.strip("*").split(".")[0] in suites


def test_the_figure_in_docs_has_every_curve():
    assert curves(tree.parse(ROOT / "docs/reports/step_time.svg").getroot()) == WHOLE

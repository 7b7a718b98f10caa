# SPDX-License-Identifier: Apache-2.0
"""Goal    The figure of the main job shows what summary.json and claims.json have, on light and on dark pages.
Method  The figure of a recorded run is parsed and each figure compared; then single figures are changed, on either side,
        and figure.py must notice. The figure in docs/ is compared with itself: the output of its run is not in the tree.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as tree

import claims as claims_of
import figure
import pytest

RUN = pathlib.Path(__file__).parent / "recorded_run"
COMMITTED = claims_of.ROOT / "docs/reports/report.svg"
SVG = "{http://www.w3.org/2000/svg}"
PAGES = ("#ffffff", "#0d1117")  # background of a light page and of a dark one
TEXT_CONTRAST_MIN, CONTRAST_MIN = 4.5, 3  # WCAG 2.1, 1.4.3 and 1.4.11
FONT_PIXELS_MIN = 12


def command(*words):
    program = pathlib.Path(figure.__file__)
    return subprocess.run([sys.executable, program, *words], capture_output=True, text=True, check=False)


def recorded():
    return figure.read_report(RUN)


@pytest.fixture(scope="module", name="made")
def fixture_made(tmp_path_factory):
    path = tmp_path_factory.mktemp("figure") / "report.svg"
    done = command("--report", RUN, "--work", RUN, path)
    assert done.returncode == 0, done.stderr
    return path.read_text(encoding="utf-8")


@pytest.fixture(params=["recorded", "committed"], name="svg")
def fixture_svg(request, made):
    return tree.fromstring(made if request.param == "recorded" else COMMITTED.read_text(encoding="utf-8"))


def number_of(element):
    return float(element.text.replace(",", "")) * figure.UNITS[element.get("data-unit")]


def shown_as(svg, key):
    return [element for element in svg.iter() if element.get("data-key") == key]


def rules_of(css):
    """{class: {property: value}}."""
    rules = {}
    for names, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css):
        for name in re.findall(r"\.([\w-]+)", names):
            rules.setdefault(name, {}).update(re.findall(r"([\w-]+):\s*([^;}]+?)\s*(?:;|$)", body))
    return rules


def colors_of(svg):
    """Classes and their colors on a light page, and on a dark one."""
    css = svg.find(f"{SVG}style").text
    light, dark = re.fullmatch(r"(.*)@media \(prefers-color-scheme: dark\) \{(.*)\}\s*", css, re.S).groups()
    return [
        {name: rules for name, found in rules_of(part).items() if (rules := {k: v for k, v in found.items() if v[0] == "#"})}
        for part in (light, dark)
    ]


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_each_number_of_the_recorded_run_is_that_of_its_summary(made):
    summary, _ = recorded()
    svg = tree.fromstring(made)
    shown = {element.get("data-key"): element for element in svg.iter() if element.get("data-key")}
    assert shown.keys() == figure.SHOWN
    assert number_of(shown["params"]) == pytest.approx(summary["params"], abs=0.05e6)
    for key in ("ranks", "steps", "seed", "killed_at_step", "daemon_killed_at_step"):
        assert number_of(shown[key]) == summary[key]
    for key in (key for key in figure.SHOWN if key.endswith("_bytes")):
        assert number_of(shown[key]) == pytest.approx(summary[key], abs=claims_of.MIB / 2)
    for key in ("loss_first", "loss_last", "plain_loss_first", "plain_loss_last"):
        assert number_of(shown[key]) == pytest.approx(summary[key], abs=0.5e-3)
    for key in ("swap_read_bytes_per_param_step", "swap_write_bytes_per_param_step"):
        assert number_of(shown[key]) == pytest.approx(summary[key], abs=0.5e-3)
    table, share = shown_as(svg, "swap_state_share")
    assert number_of(table) == pytest.approx(8 * summary["swap_state_share"], abs=0.5e-3)
    assert number_of(share) == pytest.approx(summary["swap_state_share"], abs=0.5e-3)
    for key in ("params_sha256", "uninterrupted_params_sha256"):
        assert len(shown[key].text) == 16 and summary[key].startswith(shown[key].text)
    assert figure.differences(made, *recorded()) == []


def test_curves_are_the_losses_that_the_ranks_logged(made):
    svg = tree.fromstring(made)
    for name in figure.RUNS:
        losses = claims_of.Ranks(RUN / name, 2).losses()
        curve = next(element for element in svg.iter() if element.get("data-series") == name)
        assert curve.get("data-values") == " ".join(f"{step}:{loss:.6f}" for step, loss in losses.items())
        assert len(curve.get("points").split()) == len(losses) == 25


@pytest.mark.parametrize("key", sorted(figure.SHOWN))
def test_another_summary_is_noticed(made, key):
    summary, claims = recorded()
    value = summary[key]
    summary[key] = value[::-1] if isinstance(value, str) else value * 1.01 + 1e-9
    assert any(sentence.startswith(f"{key}:") for sentence in figure.differences(made, summary, claims))


@pytest.mark.parametrize("key", sorted(figure.SHOWN))
def test_another_text_is_noticed(made, key):
    changed, count = re.subn(rf'(data-key="{key}"[^>]*>)[^<]+', r"\g<1>9", made)
    assert count > 0
    assert any(sentence.startswith(f"{key}: the text is 9") for sentence in figure.differences(changed, *recorded()))
    changed = re.sub(rf'(data-key="{key}" data-value=")', r"\g<1>1", made)
    assert any(sentence.startswith(f"{key}: data-value is 1") for sentence in figure.differences(changed, *recorded()))
    without = re.sub(rf'data-key="{key}"', "", made)
    assert f"{key}: no text shows it" in figure.differences(without, *recorded())


@pytest.mark.parametrize("key", sorted(figure.BARS))
def test_a_bar_of_another_length_is_noticed(made, key):
    changed, count = re.subn(rf'(data-bar="{key}".* width=")[\d.]+', r"\g<1>50", made)
    assert count == 1
    assert any(sentence.startswith(f"{key}: ends at") for sentence in figure.differences(changed, *recorded()))
    changed, count = re.subn(rf'(data-bar="{key}" data-shown=")', r"\g<1>1", made)
    assert count == 1
    assert any(sentence.startswith(f"{key}: data-shown is 1") for sentence in figure.differences(changed, *recorded()))


@pytest.mark.parametrize("key", sorted(figure.MARKS))
def test_a_mark_in_another_place_is_noticed(made, key):
    changed, count = re.subn(rf'x1="[\d.]+"(.* data-mark="{key}")', r'x1="1"\1', made)
    assert count == 1
    assert any(sentence.startswith(f"{key}: ends at 1") for sentence in figure.differences(changed, *recorded()))


@pytest.mark.parametrize("name", figure.RUNS)
def test_another_curve_is_noticed(made, name):
    changed, count = re.subn(rf'(data-series="{name}".*points="[\d.]+,)[\d.]+', r"\g<1>7", made)
    assert count == 1
    assert figure.differences(changed, *recorded()) == [f"{name}: the curve is not that of its data-values"]


def test_a_claim_that_does_not_hold_is_shown_and_noticed(made):
    summary, claims = recorded()
    claims[3]["holds"] = False
    assert len(figure.differences(made, summary, claims)) == 3  # the claim and both counts
    svg = tree.fromstring(figure.svg_of(summary, claims, RUN))
    marks = {
        group.get("data-claim"): group.find(f"{SVG}path").get("class") for group in svg.iter() if group.get("data-claim")
    }
    assert marks == {claim["name"]: "holds" if claim["holds"] else "fails" for claim in claims}
    assert "25 hold, 1 do not" in "".join(svg.itertext())


def test_the_command_fails_on_a_difference(made, tmp_path):
    path = tmp_path / "report.svg"
    path.write_text(made, encoding="utf-8")
    assert command("--check", "--report", RUN, path).stdout == f"figure: 0 differences from {RUN}\n"
    path.write_text(made.replace(">695</tspan>", ">702</tspan>"), encoding="utf-8")
    done = command("--check", "--report", RUN, path)
    assert done.returncode == 1
    assert "dram_peak_bytes: the text is 702 MiB" in done.stdout


def test_what_is_missing_is_named(tmp_path):
    done = command("--report", tmp_path, tmp_path / "report.svg")
    assert done.returncode == 1 and "summary.json: run tools/quickstart" in done.stderr
    shutil.copytree(RUN, tmp_path / "run")
    summary, _ = recorded()
    summary["params_sha256"] = None
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    done = command("--report", tmp_path / "run", "--work", RUN, tmp_path / "report.svg")
    assert done.returncode == 1 and "summary.json has no params_sha256: a run failed" in done.stderr
    done = command("--report", RUN, "--work", tmp_path, tmp_path / "report.svg")
    assert done.returncode == 1 and "rank 0 logged no start" in done.stderr
    assert not (tmp_path / "report.svg").exists()


def test_every_color_is_defined_for_light_and_dark_and_can_be_read(svg):
    light, dark = colors_of(svg)
    assert {name: set(rules) for name, rules in light.items()} == {name: set(rules) for name, rules in dark.items()}
    used = {name for element in svg.iter() for name in element.get("class", "").split()}
    assert set(light) == set(figure.COLORS) and set(light) - used <= {"fails"}
    for page, colors in zip(PAGES, (light, dark)):
        for name, rules in colors.items():
            least = TEXT_CONTRAST_MIN if name in ("ink", "soft") else CONTRAST_MIN
            for color in rules.values():
                assert contrast(color, page) >= least, f"{name} on {page}"


def test_every_element_takes_its_color_from_a_class(svg):
    colored = set(figure.COLORS)
    for element in svg.iter():
        tag = element.tag.removeprefix(SVG)
        assert not {"fill", "stroke", "style"} & set(element.keys()), f"<{tag}> has a color of its own"
        if tag in ("text", "line", "rect", "polyline", "path"):
            assert colored & set(element.get("class", "").split()), f"<{tag}> has no color"
    sizes = [int(size) for size in re.findall(r"(\d+)px", svg.find(f"{SVG}style").text)]
    assert min(sizes) >= FONT_PIXELS_MIN
    left, top, width, height = map(float, svg.get("viewBox").split())
    assert width <= 820
    for element in svg.iter(f"{SVG}text"):
        assert left <= float(element.get("x")) <= left + width and top <= float(element.get("y")) <= top + height


def test_every_series_has_a_legend_and_every_axis_its_unit(svg):
    legends = {element.get("data-legend") for element in svg.iter() if element.get("data-legend")}
    shown = {element.get("data-series") for element in svg.iter() if element.get("data-series")}
    shown |= {
        element.get("class").removesuffix("-bar")
        for element in svg.iter()
        if element.get("data-bar") or element.get("data-mark")
    }
    assert shown == {"plain", "forebay", "killed", "states", "limit"}
    assert legends == shown | {"holds", "fails"}
    words = ["".join(element.itertext()) for element in svg.iter(f"{SVG}text")]
    for axis in ("Loss in training, nats a byte", "step", "MiB", "bytes"):
        assert axis in words


def test_the_figure_in_docs_agrees_with_itself():
    text = COMMITTED.read_text(encoding="utf-8")
    svg = tree.fromstring(text)
    summary = {}
    for element in svg.iter():
        if key := element.get("data-key"):
            exact = element.get("data-value")
            is_text = key.endswith("sha256") or key == "format"
            value = exact if is_text else json.loads(exact)
            if "data-factor" in element.keys():
                value /= float(element.get("data-factor"))
            assert summary.setdefault(key, value) == pytest.approx(value), f"{key} is shown with two values"
            summary[key] = value
    claims = [
        {"name": element.get("data-claim"), "holds": element.get("data-holds") == "true"}
        for element in svg.iter()
        if element.get("data-claim")
    ]
    assert figure.differences(text, summary, claims) == []
    assert len(claims) >= 26 and all(claim["holds"] for claim in claims)
    dram, limit = (number_of(shown_as(svg, key)[0]) for key in ("dram_peak_bytes", "dram_limit_bytes"))
    assert 0 < dram <= limit < number_of(shown_as(svg, "state_bytes")[0])
    assert summary["params_sha256"] == summary["uninterrupted_params_sha256"]
    assert summary["killed_at_step"] < summary["daemon_killed_at_step"] <= summary["steps"]

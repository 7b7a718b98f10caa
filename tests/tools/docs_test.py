# SPDX-License-Identifier: Apache-2.0
"""Goal    What README.md and docs/ show is true: every code block runs, the diff of the two training paths is the one
        in the script, the files they name exist, and the table of actions is complete.
Method  Code blocks are taken out of the pages by their language: `sh` runs in bash from the root of the checkout,
        `toml` is checked by forebayd, `python` runs under a private daemon as a rank that torchrun starts alone, `sh by-ci`
        must be a command of .ci/run, `sh on-nodes` is run on two nodes by launch_network_test.py, `sh on-daemon-node`,
        `toml gateway` and `sh on-trainer-node` by test_remote_docs.py, `diff` is generated from a training script, `diff guide`
        is applied to a script and run by test_guides.py or test_huggingface_docs.py. `text` is a drawing or what a terminal shows, nothing else is allowed.
        `docs_test.py --write` puts the diffs into README.md.
"""

import difflib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build" / "bin"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROOMS_WITH_MESSAGES = ("protocol", "pinned_mem", "nvme", "cpu_adam", "daemon", "client", "tools/forebay")
NODES_PAGE = pathlib.Path("docs/guide/multi-node.md")
DEADLINE_S = 120
# Lines that a user changes, by script.
LINES_MAX = {"tools/train_gpt.py": 5, "tools/train_sharded.py": 3}
GUIDE_MARK = (
    r"<!-- applied to (\S+), and run, by tests/client/python_torch/(test_guides|test_huggingface_docs).py -->"
)
DIFF_MARK = "<!-- diff: {}, made by tests/tools/docs_test.py -->"


def blocks():
    """(page, line, language, text) of every fenced block."""
    found = []
    for page in PAGES:
        open_at, language, body = None, "", []
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```") and open_at is None:
                open_at, language, body = number, line[3:].strip(), []
            elif line.startswith("```"):
                found.append(
                    (
                        page.relative_to(ROOT),
                        open_at,
                        language,
                        "\n".join(body) + "\n" if body else "",
                    )
                )
                open_at = None
            elif open_at is not None:
                body.append(line)
        assert open_at is None, f"{page}: the block of line {open_at} has no end"
    return found


def one_path(source, plain):
    """The script as it would be with one path only: the other branch of each `plain` choice is cut."""
    lines, kept = source.splitlines(), []
    i = 0
    while i < len(lines):
        match = re.fullmatch(r"( *)if (not )?(args|arguments)\.plain:", lines[i])
        if not match:
            kept.append(lines[i])
            i += 1
            continue
        indent, wanted = match[1], plain != bool(match[2])
        i += 1
        while i < len(lines):
            if lines[i].startswith(indent + "    "):
                if wanted:
                    kept.append(lines[i].replace("    ", "", 1))
                i += 1
            elif lines[i] == indent + "else:":
                wanted = not wanted
                i += 1
            else:
                break
    return kept


def path_diff(script):
    source = (ROOT / script).read_text(encoding="utf-8")
    lines = difflib.unified_diff(one_path(source, True), one_path(source, False), n=1, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++"))]


def changed_lines(diff):
    """A line that replaces another one counts once."""
    total = removed = added = 0
    for line in [*diff, " "]:
        if line.startswith("-"):
            removed += 1
        elif line.startswith("+"):
            added += 1
        else:
            total += max(removed, added)
            removed = added = 0
    return total


def shown_diff(script):
    return "\n".join(line for line in path_diff(script) if not line.startswith("@@")) + "\n"


def run(command, **kwargs):
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def torchruns_environment():
    """Of the only rank of a launch: its store listens on a port that the kernel chooses."""
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**os.environ, **launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("script", LINES_MAX)
def test_the_two_training_paths_differ_by_few_lines(script):
    diff = path_diff(script)
    assert 0 < changed_lines(diff) <= LINES_MAX[script], "\n".join(diff)
    assert f"{DIFF_MARK.format(script)}\n```diff\n{shown_diff(script)}```" in (
        ROOT / "README.md"
    ).read_text(encoding="utf-8"), "run python3 tests/tools/docs_test.py --write"


@pytest.mark.parametrize(
    "page,line,language,text", blocks(), ids=lambda value: str(value).split("\n")[0][:40]
)
def test_block_holds(page, line, language, text, tmp_path):
    where = f"{page}:{line}"
    if language == "text":
        assert text
    elif language == "diff guide":
        before = (ROOT / page).read_text(encoding="utf-8").splitlines()[line - 2]
        assert re.fullmatch(GUIDE_MARK, before), f"{where}: applied by no test: {before}"
    elif language == "diff":
        shown = [shown_diff(script) for script in LINES_MAX]
        assert text in shown, f"{where}: run python3 tests/tools/docs_test.py --write"
    elif language == "sh by-ci":
        ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
        for command in re.findall(r"^(\./\S+)", text, re.M):
            assert re.search(
                rf"^run {re.escape(command)}\b", ci, re.M
            ), f"{where}: .ci/run does not run {command}"
    elif language == "sh on-nodes":
        assert page == NODES_PAGE, f"{where}: launch_network_test.py runs those of {NODES_PAGE} alone"
    elif language in ("sh on-daemon-node", "toml gateway", "sh on-trainer-node"):
        assert page == NODES_PAGE, f"{where}: test_remote_docs.py runs those of {NODES_PAGE} alone"
    elif language == "sh":
        built = (ROOT / "build/tests/programs.txt").read_text(encoding="utf-8").split()
        for program in re.findall(r"(?<!/)\btests/(\w+_test)\b(?!\.)", text):
            assert program in built, f"{where}: no test program {program}; build/tests may hold an old one"
        run(["bash", "-euo", "pipefail", "-c", text])
    elif language == "toml":
        config = tmp_path / "forebay.toml"
        config.write_text(text, encoding="utf-8")
        run([BIN / "forebayd", "--config", config, "--check"])
    elif language == "python":
        script = tmp_path / "block.py"
        script.write_text(text, encoding="utf-8")
        command = [BIN / "forebay", "run", "--dram", "256MiB", "--", sys.executable, script]
        run(command, env=torchruns_environment())
    else:
        pytest.fail(f'{where}: a block of language "{language}" is run by nothing')


def test_files_that_the_pages_name_exist():
    rooms = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "build")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(rf"`((?:{rooms})/[\w./-]*)`", text):
            assert (ROOT / name).exists(), f"{page}: there is no {name}"


def test_settings_that_messages_and_pages_name_exist():
    sections, keys = "", set()
    for line in (ROOT / "daemon" / "forebay.toml").read_text(encoding="utf-8").splitlines():
        if section := re.fullmatch(r"\[(\w+)\]", line):
            sections = section[1] + "."
        elif key := re.match(r"#?(\w+) = ", line):
            keys.add(sections + key[1])
    families = "|".join({key.split(".")[0] for key in keys if "." in key})
    setting = re.compile(rf"(?<![\w./-])((?:{families})\.[a-z_]+)(?![\w(/])")
    for path in [*PAGES, *(p for room in ROOMS_WITH_MESSAGES for p in (ROOT / room).rglob("*.cc"))]:
        text = path.read_text(encoding="utf-8")
        for literal in re.findall(r'"[^"\n]*"|`[^`\n]*`', text):
            for name in setting.findall(literal):
                assert name in keys, f"{path}: there is no setting {name} ({literal})"


def test_error_ids_that_are_named_exist_and_each_is_raised():
    table = ROOT / "protocol" / "error.cc"
    ids = dict(re.findall(r'ErrorId::(k\w+), "(E_\w+)"', table.read_text(encoding="utf-8")))
    suffixes = {".cc", ".h", ".py", ".capnp"}
    sources = [p for room in ROOMS_WITH_MESSAGES for p in (ROOT / room).rglob("*")]
    raised = set()
    for path in [*PAGES, *(p for p in sources if p.suffix in suffixes and p != table)]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\bE_[A-Z_]*[A-Z]\b", text):
            assert name in ids.values(), f"{path}: there is no {name}"
        raised |= set(re.findall(r"ErrorId::(k\w+)", text))
    assert ids.keys() <= raised, f"nothing raises {ids.keys() - raised}"


def test_tests_that_the_pages_name_exist():
    folder = ROOT / "tests" / "client" / "python_torch"
    for page in PAGES:
        for file, name in re.findall(r"`(\w+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
            source = (folder / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.M), f"{page}: {file} has no {name}"


def figures():
    return sorted(path for suffix in ("svg", "png", "jpg") for path in (ROOT / "docs").rglob(f"*.{suffix}"))


@pytest.mark.parametrize("path", figures(), ids=lambda path: path.name)
def test_a_figure_is_shown_beside_the_command_that_makes_it(path):
    """A figure drawn by hand says so in its own text."""
    pages = {}
    for page in PAGES:
        for alternative, target in re.findall(r"!\[([^]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if (page.parent / target).resolve() == path:
                pages[page] = alternative
    assert pages, "no page shows it"
    assert all(len(words) >= 20 for words in pages.values()), "the page says what it shows, for those who cannot see it"
    assert path.suffix == ".svg", "a figure is an SVG, for light and dark pages"
    source = path.read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme: dark)" in source and not re.search(r'="(white|#fff(fff)?)"', source)
    if "Drawn by hand" in source:
        return
    name = path.relative_to(ROOT)
    for page in pages:
        command = re.search(rf"`(tests/[\w/]+\.py)( [\w/.]+)* {re.escape(str(name))}`", page.read_text(encoding="utf-8"))
        assert command, f"{page} has no command that makes {name}"
        assert str(name) in run([ROOT / command[1], "--help"]), f"{command[1]} --help does not name {name}"


def test_the_table_of_actions_has_all_of_them():
    events = (ROOT / "daemon" / "core" / "base" / "events.h").read_text(encoding="utf-8")
    table = (ROOT / "docs" / "internals" / "actions.md").read_text(encoding="utf-8")
    actions = re.search(r"struct Action\s+: std::variant<([^>]*)>", events)[1]
    for action in re.findall(r"\w+", actions):
        assert f"`{action}`" in table, f"docs/internals/actions.md leaves out {action}"


def test_the_table_of_exclusions_is_that_of_the_code():
    code = (ROOT / "daemon" / "core" / "base" / "activity.cc").read_text(encoding="utf-8")
    header = (ROOT / "daemon" / "core" / "base" / "activity.h").read_text(encoding="utf-8")
    lasting = re.findall(r"Activity::(k\w+)", re.search(r"kLastingActivities[^;]*;", header)[0])
    excluded = {
        wanted: set(re.findall(r"k\w+", listed))
        for wanted, listed in re.findall(r"\{(k\w+),\s*\{([^{}]*)\},\s*(?:k\w+Allows|\{\})\}", code)
    }
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    shown = {}
    for wanted, cells in re.findall(r"^\| [^|]*\(`(k\w+)`\) \|(.*)\|$", page, re.M):
        dots = [cell.strip() for cell in cells.split("|")]
        assert len(dots) == len(lasting), wanted
        shown[wanted] = {activity for activity, dot in zip(lasting, dots) if dot == "●"}
    assert len(shown) == 9
    assert shown == excluded


def write():
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    for script in LINES_MAX:
        mark, diff = DIFF_MARK.format(script), shown_diff(script)
        pattern = re.compile(re.escape(mark) + r"\n```diff\n.*?```", re.S)
        assert pattern.search(text), f"README.md has lost the diff of {script}"
        text = pattern.sub(lambda _: f"{mark}\n```diff\n{diff}```", text)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()

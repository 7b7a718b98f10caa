# SPDX-License-Identifier: Apache-2.0
"""Goal    Setup refuses in plain words, with the command that is missing, and notices what changed:
        a package that was deleted, a source that was edited, an environment without its packages.
Method  tools/setup.sh in bash, in an empty folder; the programs it asks are shell functions that
        answer as a machine without root, network, room or packages would. The compiler cache is real.
"""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 60

NOT_ROOT = "id() { echo 1000; }"
NO_NETWORK = "apt-get() { return 100; }"
ALL_BUT_LIBURING = """dpkg-query() {
  listed_debian_packages | grep -v '^liburing-dev$' | sed 's/^/installed /'
}"""
EVERYTHING = "dpkg-query() { listed_debian_packages | sed 's/^/installed /'; }"
ONE_GIB_FREE = 'df() { printf "head\\n/dev/disk 9 9 1048576 9%% /\\n"; }'


@pytest.fixture
def folder(tmp_path):
    """A checkout's root with the two lists and nothing else."""
    (tmp_path / "tools").mkdir()
    for name in ("debian-packages.txt", "python-requirements.txt"):
        (tmp_path / "tools" / name).write_bytes((ROOT / "tools" / name).read_bytes())
    return tmp_path


def setup(folder, *lines):
    """Runs lines after setup.sh was sourced."""
    script = "\n".join(["set -uo pipefail", f"source '{ROOT}/tools/setup.sh'", *lines])
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def stand_in_python(folder, answers):
    """A .venv whose Python is this one, save for what `answers` (bash) takes for itself."""
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\n{answers}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (NOT_ROOT, ["not root", "hint: sudo apt-get install -y", "liburing-dev"]),
        ("id() { echo 0; }\n" + NO_NETWORK, ["no network", "hint: apt-get update && apt-get"]),
    ],
    ids=["not-root", "no-network"],
)
def test_a_missing_package_names_the_command(folder, machine, words):
    done = setup(folder, ALL_BUT_LIBURING, machine, "install_debian_packages; echo went on")
    assert done.returncode == 1
    assert "error[E_SETUP]" in done.stderr
    assert "went on" not in done.stdout
    for word in words:
        assert word in done.stderr


def test_a_deleted_package_is_noticed_and_the_others_are_left_alone(folder):
    assert setup(folder, ALL_BUT_LIBURING, "missing_debian_packages").stdout == "liburing-dev\n"
    assert setup(folder, EVERYTHING, "missing_debian_packages").stdout == ""


def test_python_packages_without_network_name_the_command(folder):
    stand_in_python(folder, '[[ $1 == -m ]] && exit 1\n[[ $1 == -c ]] && exit 0')
    (folder / "tools" / "python-requirements.txt").write_text("no-such-package-anywhere>=1.0\n")
    done = setup(folder, "make_venv; echo went on")
    assert done.returncode == 1
    assert "pip could not install: no-such-package-anywhere>=1.0 (no network" in done.stderr
    assert "hint: .venv/bin/python -m pip install -r tools/python-requirements.txt" in done.stderr
    assert "went on" not in done.stdout


def test_too_little_disk_names_need_and_free(folder):
    stand_in_python(folder, "")
    done = setup(folder, EVERYTHING, ONE_GIB_FREE, 'need_disk 6 "the main job"')
    assert done.returncode == 1
    assert "too little free disk" in done.stderr
    assert "need 9 GiB (the main job, build trees), free 1 GiB" in done.stderr
    assert "hint:" in done.stderr


def test_an_edited_source_is_another_wheel(folder):
    stand_in_python(folder, "")
    for name in ("client", "cpu_adam", "daemon", "gpu", "nvme", "pinned_mem", "protocol"):
        (folder / name).mkdir()
    for name in ("forebay", "package"):
        (folder / "tools" / name).mkdir()
    for name in ("CMakeLists.txt", "setup.sh"):
        (folder / "tools" / name).touch()
    source = folder / "client" / "session.cc"
    (folder / "CMakeLists.txt").write_text("project(x)\n")
    source.write_text("int x;\n")
    digests = [setup(folder, "wheel_digest").stdout]
    digests.append(setup(folder, "wheel_digest").stdout)
    source.write_text("int y;\n")
    digests.append(setup(folder, "wheel_digest").stdout)
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 65


def test_a_precompiled_header_of_another_comment_is_not_taken_from_the_cache(tmp_path):
    """Its preprocessed text is the same, but g++ would read the header again beside it: each type is defined twice."""
    rules = (ROOT / "build/CMakeFiles/rules.ninja").read_text()
    launcher = re.search(r"\S+ -E env CCACHE_NAMESPACE=\S+ .*?ccache(?= )", rules)[0]
    (tmp_path / "all.hxx").write_text('#include "one.h"\n')
    lines = [
        "export CCACHE_DIR=$PWD/cache",
        "CCACHE_SLOPPINESS+=,include_file_ctime,include_file_mtime",  # the header has just been written
        f"{launcher} g++ -fpch-preprocess -MD -x c++-header -c all.hxx -o all.hxx.gch",
        f"{launcher} g++ -fpch-preprocess -MD -Winvalid-pch -include all.hxx -c use.cc -o use.o",
    ]
    for comment in ("short", "rather longer"):
        (tmp_path / "one.h").write_text(f"#pragma once\n// {comment}\nstruct One {{}};\n")
        (tmp_path / "use.cc").write_text(f'#include "one.h"\nOne {comment[:4]};\n')
        (tmp_path / "all.hxx.gch").unlink(missing_ok=True)
        done = setup(tmp_path, *lines)
        assert done.returncode == 0, done.stderr


NINJA = """cmake() {
  [[ $1 == --preset ]] && return 0
  [[ $NINJA_STATUS == '[%f/%t, %e s] ' ]] || return 9
  for ((i = 1; i <= 200; ++i)); do
    printf '[%d/200, %d.5 s] Building CXX object %d.cc.o\\n' "$i" "$i" "$i"
    ((i != 57)) || printf 'FAILED: 57.cc.o\\n57.cc:3: error: it is wrong\\n'
  done
  return "$status"
}"""


@pytest.mark.parametrize("status", [0, 1])
def test_a_compilation_that_no_terminal_shows_prints_a_line_a_tenth_and_all_errors(folder, status):
    done = setup(folder, f"status={status}", NINJA, "build_preset default forebay")
    assert done.returncode == status
    begin, *lines = done.stdout.splitlines()
    assert begin == "== building preset default"
    failed = lines.index("FAILED: 57.cc.o")
    assert lines[failed + 1] == "57.cc:3: error: it is wrong"
    progress = lines[:failed] + lines[failed + 2 :]
    assert progress == [f"[{i}/200, {i}.5 s] Building CXX object {i}.cc.o" for i in range(20, 201, 20)]


def test_each_long_part_says_what_comes_and_how_long_it_takes(folder):
    quiet = "id() { echo 0; }\napt-get() { return 0; }"
    done = setup(folder, ALL_BUT_LIBURING, quiet, "install_debian_packages")
    assert done.stdout == "== installing Debian packages (liburing-dev): about 3 minutes on two cores\n", done.stderr
    stand_in_python(folder, '[[ $1 == -m || $1 == -c ]] && exit 0')
    requirements = folder / "tools" / "python-requirements.txt"
    for package, about in (("torch>=99", "5 minutes"), ("no-such-package", "1 minute")):
        requirements.write_text(f"{package}\n")
        done = setup(folder, "make_venv")
        assert done.stdout == f"== installing Python packages ({package}): about {about} on two cores\n", done.stderr


def test_help_of_quickstart_installs_nothing(folder):
    (folder / "tools" / "quickstart").write_bytes((ROOT / "tools" / "quickstart").read_bytes())
    shutil.copytree(ROOT / "tests" / "quickstart", folder / "tests" / "quickstart")
    (folder / "tools" / "setup.sh").write_bytes((ROOT / "tools" / "setup.sh").read_bytes())
    done = subprocess.run(
        ["bash", "tools/quickstart", "--help"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0 and "--smoke" in done.stdout, done.stderr
    assert not (folder / ".venv").exists() and not (folder / "build").exists()

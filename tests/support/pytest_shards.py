# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: --shards N runs the collected tests in N processes, forked from the one that has imported torch.

Usage   pytest -p pytest_shards --shards 3 --junitxml FILE PATH..., with tests/support on PYTHONPATH.

Each process claims one file of tests at a time, the longest files first, so that fixtures of a module are created once and
those of a session once a process. FILE counts the tests of all processes; what they print stands below it, in FILE.N.log,
and is printed when all have ended.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
import sys
from collections.abc import Iterator
from typing import IO
from xml.etree import ElementTree

import pytest
from _pytest.junitxml import xml_key

ENTRY = struct.Struct("H")  # number of an unclaimed test file, in the pipe of such files
SECONDS = "shards-seconds.json"  # next to the report: seconds of each test file in the previous run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shards", type=int, default=1, help="processes that the tests are split over, by file")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    shards = session.config.getoption("--shards")
    if shards < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    report = pathlib.Path(session.config.stash[xml_key].logfile)
    files = _files(session.items, report.with_name(SECONDS))
    unclaimed = _pipe_of(len(files))
    processes = {}
    for number in range(shards):
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            _run_shard(session, report.with_name(f"{report.name}.{number}"), files, unclaimed)
            return True
        processes[process] = report.with_name(f"{report.name}.{number}")
    os.close(unclaimed)
    for process, own in processes.items():
        _, status = os.waitpid(process, 0)
        session.testsfailed += status != 0
        sys.stdout.write(_log_of(own).read_text(encoding="utf-8", errors="replace"))
    session.config.stash[xml_key].logfile = os.devnull
    # The terminal reporter of this process would say that no test ran.
    session.config.pluginmanager.unregister(name="terminalreporter")
    _merge(list(processes.values()), report)
    return True


def _files(items: list[pytest.Item], seconds: pathlib.Path) -> list[list[pytest.Item]]:
    """The tests by file; first the files that took longest, or are new."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    took = json.loads(seconds.read_text()) if seconds.exists() else {}
    longest_first = sorted(by_file, key=lambda file: took.get(file, len(by_file[file]) + 1e6), reverse=True)
    return [by_file[file] for file in longest_first]


def _pipe_of(count: int) -> int:
    reader, writer = os.pipe()
    os.write(writer, b"".join(map(ENTRY.pack, range(count))))
    os.close(writer)
    return reader


def _claimed(files: list[list[pytest.Item]], unclaimed: int) -> Iterator[pytest.Item]:
    while entry := os.read(unclaimed, ENTRY.size):
        yield from files[ENTRY.unpack(entry)[0]]


def _log_of(report: pathlib.Path) -> pathlib.Path:
    return report.with_name(report.name + ".log")


def _run_shard(
    session: pytest.Session, report: pathlib.Path, files: list[list[pytest.Item]], unclaimed: int
) -> None:
    """In the forked process, which then ends as pytest does and writes its own report."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # other processes share its files
    log: IO[bytes] = open(_log_of(report), "wb")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    session.config.stash[xml_key].logfile = str(report)
    tests = _claimed(files, unclaimed)
    test = next(tests, None)
    while test is not None:
        following = next(tests, None)  # decides which fixtures stay
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        test = following


def _merge(parts: list[pathlib.Path], report: pathlib.Path) -> None:
    whole = ElementTree.Element("testsuites")
    seconds: dict[str, float] = {}
    for part in parts:
        if not part.exists():  # a killed process: its status counts as a failure
            continue
        for suite in ElementTree.parse(part).getroot():
            whole.append(suite)
            for case in suite.iter("testcase"):
                file = case.get("classname", "").replace(".", "/") + ".py"
                seconds[file] = seconds.get(file, 0) + float(case.get("time", 0))
        part.unlink()
    ElementTree.ElementTree(whole).write(report)
    report.with_name(SECONDS).write_text(json.dumps(seconds))

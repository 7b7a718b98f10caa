# SPDX-License-Identifier: Apache-2.0
"""Goal    forebay scrub says what durable jobs have on swap and what of it is damaged, of a stopped daemon and of one that
        works, with its exit status.
Method  Real processes of build/bin: a job trains a step, its daemon is killed, its swap file overwritten.
"""

import json
import os
import subprocess
import time

import pytest
from forebay_command import DEADLINE_S, FOREBAY, forebay, make_folders


@pytest.fixture
def folders(tmp_path):
    """(environment, runtime folder, swap folder)."""
    environment, runtime, swap = make_folders(tmp_path, "scrub")
    yield environment, runtime, swap
    for path in swap.iterdir():
        path.unlink()
    swap.rmdir()


def kept_daemon(environment, runtime, swap):
    """A forebayd on a path whose files persist, with jobs that are durable at each step; ready."""
    settings = {
        "socket.path": f'"{runtime}/s"',
        "memlock": "best_effort",
        "dram.limit": '"256MiB"',
        "swap.paths": f'["{swap}"]',
        "swap.capacity": '"64MiB"',
        "swap.probe": "never",
        "jobs.durability": "step",
        "update.block_elems": "4096",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    daemon = subprocess.Popen(
        [FOREBAY.parent / "forebayd", *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    for line in daemon.stderr:
        if line.startswith("forebayd ready"):
            return daemon
    raise AssertionError("forebayd ended before it was ready")


def damage_slots(file):
    """Changes each page that is not zero between the ledgers at both ends."""
    page = 4096
    with open(file, "r+b") as volume:
        ledger = int.from_bytes(volume.read(48)[40:], "little")  # ledger_bytes_max of the label
        begin = 3 * page + 2 * ledger
        volume.seek(0, os.SEEK_END)
        for at in range(begin, volume.tell() - begin, page):
            volume.seek(at)
            if any(volume.read(page)):
                volume.seek(at + 100)
                volume.write(b"damage")


def test_scrub_names_what_is_damaged_by_parameter(folders):
    environment, runtime, swap = folders
    scrub = ["scrub", "--swap", swap]
    daemon = kept_daemon(environment, runtime, swap)
    try:
        trainer = [FOREBAY.parent.parent / "tests/held_client", f"{runtime}/s", "0", "1", "step"]
        subprocess.run(trainer, check=True, timeout=DEADLINE_S, capture_output=True)
        busy = forebay(*scrub)
        assert busy.returncode == 1 and "E_BUSY" in busy.stderr and busy.stdout == ""
    finally:
        daemon.kill()
        daemon.communicate()
    clean = forebay(*scrub, "--json", "--rate", "64MiB")
    report = json.loads(clean.stdout)
    assert clean.returncode == 0 and report["clean"] is True and report["sequence"] >= 1
    (job,) = report["jobs"]
    assert (job["name"], job["durability"], job["durable_step"]) == ("job", "step", 1)
    assert job["slots"] > 1 and job["damaged"] == [] and job["seconds"] > 0
    table = forebay(*scrub)
    assert table.returncode == 0 and f"{os.getuid()}:job" in table.stdout

    damage_slots(swap / "forebay.swap")
    config = runtime / "forebay.toml"
    config.write_text(f'[swap]\npaths = ["{swap}"]\ncapacity = "64MiB"\n', encoding="utf-8")
    damaged = forebay("scrub", "--config", config, "--json")
    report = json.loads(damaged.stdout)
    assert damaged.returncode == 1 and report["clean"] is False and report["fell_back"] is False
    assert damaged.stderr == "", "the report says all"
    (job,) = report["jobs"]
    assert len(job["damaged"]) == job["slots"]
    for slot in job["damaged"]:
        assert slot["path"] == str(swap / "forebay.swap") and slot["offset_bytes"] % 4096 == 0
        assert slot["params"] and "does not hold what was written" in slot["error"]
    table = forebay(*scrub)
    assert table.returncode == 1 and job["damaged"][0]["params"][0] in table.stdout
    os.truncate(swap / "forebay.swap", 60 << 20)
    cut = forebay(*scrub)
    assert cut.returncode == 1 and "E_SWAP_PATH" in cut.stderr and cut.stdout == ""


def test_a_daemon_scrubs_its_jobs_while_it_works(folders):
    environment, runtime, swap = folders
    scrub = ["scrub", "--socket", runtime / "s"]
    assert forebay(*scrub).returncode == 3, "no daemon"
    daemon = kept_daemon(environment, runtime, swap)
    try:
        nothing = forebay(*scrub, "--json")
        report = json.loads(nothing.stdout)
        assert nothing.returncode == 0 and report["jobs"] == [] and report["sequence"] == 0
        trainer = [FOREBAY.parent.parent / "tests/held_client", f"{runtime}/s", "0", "1", "step"]
        subprocess.run(trainer, check=True, timeout=DEADLINE_S, capture_output=True)
        clean = forebay(*scrub, "--json")
        report = json.loads(clean.stdout)
        assert clean.returncode == 0 and report["clean"] is True, clean.stdout + clean.stderr
        (job,) = report["jobs"]
        assert job["slots"] > 1 and job["bytes"] > 0 and job["damaged_slots"] == 0

        slow = subprocess.Popen([FOREBAY, *scrub, "--rate", "1KiB"], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while "verified" not in forebay("status", "--socket", runtime / "s").stdout:
                assert time.monotonic() < deadline and slow.poll() is None
            assert "E_BUSY" in forebay(*scrub).stderr
        finally:
            slow.kill()
            slow.wait()
        while "verified" in forebay("status", "--socket", runtime / "s").stdout:
            assert time.monotonic() < deadline, "who asked is gone"

        damage_slots(swap / "forebay.swap")
        damaged = forebay(*scrub, "--json")
        report = json.loads(damaged.stdout)
        assert damaged.returncode == 1 and report["clean"] is False
        (job,) = report["jobs"]
        assert job["damaged_slots"] == job["slots"] == len(job["damaged"])
        assert job["damaged"][0]["params"] and "does not hold" in job["damaged"][0]["error"]
    finally:
        daemon.kill()
        daemon.communicate()

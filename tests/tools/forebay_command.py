"""The forebay command of build/bin, for tests of it."""

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOREBAY = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build/bin")) / "forebay"
DEADLINE_S = 60


def forebay(*words, deadline_s=DEADLINE_S, **options):
    return subprocess.run(
        [FOREBAY, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        stdin=subprocess.DEVNULL,
        check=False,
        **options,
    )


def make_folders(tmp_path, name):
    """(environment, runtime folder, swap folder); the caller empties and removes the last one."""
    runtime, swap = tmp_path / "runtime", ROOT / "build" / f"test-{name}-{os.getpid()}"
    runtime.mkdir()
    swap.mkdir(parents=True)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    environment.pop("FOREBAY_SOCKET", None)
    return environment, runtime, swap

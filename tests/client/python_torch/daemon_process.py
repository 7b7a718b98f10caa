# SPDX-License-Identifier: Apache-2.0
"""A forebayd of the tests' own, and where its program and the built extension are.

FOREBAY_BIN_DIR  folder of forebayd (default: build/bin of this checkout)
FOREBAY_CORE     the built extension, a file _core*.so (default: that of an installed forebay)
"""

import glob
import os
import pathlib
import subprocess
import sysconfig
import time


ROOT = pathlib.Path(__file__).resolve().parents[3]
START_DEADLINE_S = 30


def _find_core():
    places = [os.environ.get("FOREBAY_CORE", "")]
    places += glob.glob(sysconfig.get_paths()["platlib"] + "/forebay/_core*.so")
    places += glob.glob(str(ROOT / "build" / "**" / "_core*.so"), recursive=True)
    return next((place for place in places if place and os.path.exists(place)), None)


CORE = _find_core()
FOREBAYD = pathlib.Path(os.environ.get("FOREBAY_BIN_DIR", ROOT / "build" / "bin")) / "forebayd"


def missing():
    """Why no daemon can be started here; None where one can."""
    if not CORE:
        return "the extension forebay._core is not built"
    return None if FOREBAYD.exists() else f"{FOREBAYD} is not built"


class Daemon:
    """A forebayd of our own on a socket in a folder of its own."""

    def __init__(self, folder, *settings, launcher=()):
        self.folder = pathlib.Path(folder)
        self.socket = str(self.folder / "s")
        values = [f"socket.path={self.socket}", "memlock=best_effort", "update.workers=2"]
        values += ["dram.limit=1GiB", "swap.probe=never", *settings]
        command = [*launcher, str(FOREBAYD)]
        for value in values:
            command += ["--set", value]
        self.log = self.folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        end = time.monotonic() + START_DEADLINE_S
        while b"forebayd ready" not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"forebayd did not start: {self.log.read_text()}")
            time.sleep(0.01)  # house: allow sleep: a poll with a deadline

    def stop(self):
        self.process.terminate()
        assert self.process.wait(START_DEADLINE_S) == 0, self.log.read_text()

# SPDX-License-Identifier: Apache-2.0
"""For all Python tests."""

import pathlib
import signal
import sys

sys.path.append(str(pathlib.Path(__file__).parent / "support"))  # what several rooms' tests use

# A shell that starts the tests in the background has SIGINT ignored: then nothing here, nor a process that
# a test starts, would notice Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# SPDX-License-Identifier: Apache-2.0
"""For all Python tests."""

import pathlib
import signal
import sys

sys.path.append(str(pathlib.Path(__file__).parent / "support"))  # helpers that tests of several folders share

# Restores SIGINT, which a shell ignores for tests in the background: otherwise neither pytest nor the processes that tests
# start would react to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

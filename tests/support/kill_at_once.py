# SPDX-License-Identifier: Apache-2.0
"""Kills related processes so that none of them sees another one die."""

import os
import signal


def kill_at_once(*pids):
    """Stops all, then kills them. Parents come before their children in `pids`.

    The last is killed first: a child may die with its parent, and its process id is gone once another process has
    waited for it; a stopped parent does not wait for its child.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)

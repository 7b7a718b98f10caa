# SPDX-License-Identifier: Apache-2.0
"""Kills related processes so that none of them sees another one die.

Processes that a test stops have a session of their own. Else a command of `forebay run` that ends meanwhile, in the process
group of the tests, may leave that group orphaned. If a member of an orphaned group is stopped, the kernel sends SIGHUP to
all its members: the tests and the program that runs them end. Source: setpgid(2).
"""

import os
import signal


def kill_at_once(*pids):
    """Stops all, then kills them. Parents come before their children in `pids`.

    The last is killed first: a child may die with its parent, and its process id is invalid once another process has
    waited for it; a stopped parent does not wait for its child.
    """
    assert all(os.getsid(pid) != os.getsid(0) for pid in pids), "start them with start_new_session"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)

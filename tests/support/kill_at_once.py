# SPDX-License-Identifier: Apache-2.0
"""Kills related processes so that none of them sees another one die.

The processes are stopped meanwhile, and the kernel continues stopped processes of a group that becomes orphaned: it sends SIGHUP
and SIGCONT to all members. A group is orphaned if no member has a parent in another group of the same session (setpgid(2)). So
the first process of a test has a process group of its own, in the session of the tests: the tests are the parent that counts.
In a session of its own, `forebay run` would continue and clean up when its command dies. In the group of the tests, the tests
themselves would get SIGHUP.
"""

import os
import signal


def kill_at_once(*pids):
    """Stops all, then kills them. Parents come before their children in `pids`.

    The last is killed first: a child may die with its parent, and its process id is invalid once another process has
    waited for it; a stopped parent does not wait for its child.
    """
    assert all(os.getpgid(pid) != os.getpgid(0) for pid in pids), "start the first with preexec_fn=os.setpgrp"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGKILL)

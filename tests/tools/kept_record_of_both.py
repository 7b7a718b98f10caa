# SPDX-License-Identifier: Apache-2.0
"""The records of jobs in a service manager's store, as the tests of the previous release read them during an upgrade
(release_before.sh). kept_record_before is that release's own module, kept_record_now is this tree's.
"""

import kept_record_before as before
import kept_record_now as now

VERSION_BEFORE = 7


def await_gradients(manager, step, job=1):
    """Returns when the daemon has taken gradients of this step: from now on a kill loses them."""
    before._await(manager, lambda: _attempt(now.record(manager, job)) == step)


def await_decision(manager, step, job=1):
    """Returns when this step is decided: its update is under way or has ended."""
    before._await(manager, lambda: _decided(now.record(manager, job)) == step)


def _is_before(fd):
    return before.words(fd)[before.VERSION] == VERSION_BEFORE


def _attempt(fd):
    return before.words(fd)[before.ATTEMPT] >> before.ATTEMPT_BITS if _is_before(fd) else now.steps(fd).get(now.ATTEMPT)


def _decided(fd):
    return before.words(fd)[before.DECIDED] if _is_before(fd) else now.steps(fd).get(now.DECISION)

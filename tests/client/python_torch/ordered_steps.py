# SPDX-License-Identifier: Apache-2.0
"""Steps that a test orders from ranks one by one, so that it can do something at a known place of a step.

The test makes an Orders, a FIFO for each rank, and starts a script with its variables. Each rank of the script makes an
Ordered, takes a step when an order comes, and prints a JSON line at each place that it passes: ["at", rank, place, step].
An order is a line:

step          take the next step
step PLACE    take it, and wait at this place for the next order
on            continue from this place
end           there are no more steps
"""

import json
import os
import pathlib
import threading
import time

RANKS = 2
DEADLINE_S = 180
FOLDER = "FOREBAY_TEST_ORDERS"

# Places where ranks wait for an order.
IN_BACKWARD = "in backward"  # the gradients of some layers are delivered, and those of others are not computed
BEHIND_BACKWARD = "behind backward"
BEFORE_STEP = "before step()"
# More places where a test finds the ranks.
BETWEEN_STEPS = "between steps"  # the previous step's update may run
IN_STEP = "in step()"  # the last rank waits in step() for the others, which are behind backward
UNDER_WAY = "under way"  # nothing waits for the test
HELD_PLACES = [IN_BACKWARD, BEHIND_BACKWARD, IN_STEP]  # a step waits in them for the test
PLACES = [BETWEEN_STEPS, *HELD_PLACES, UNDER_WAY]


# ---------------------------------------------------------------- in a rank


def say(*values):
    """A line at once, whole between those of other ranks."""
    os.write(1, (json.dumps(values) + "\n").encode())


class Ordered:
    """The orders of one rank."""

    def __init__(self, rank):
        self._rank, self._step, self._place = rank, None, None
        self._file = open(pathlib.Path(os.environ[FOLDER]) / str(rank))

    def await_step(self, step):
        """Returns False if there are no more steps."""
        self._step = step
        what, _, self._place = self._read().partition(" ")
        return what == "step"

    def at(self, place):
        say("at", self._rank, place, self._step)
        if place == self._place:
            self._place = None
            assert self._read() == "on"

    def hold_in_backward(self, layer):
        """IN_BACKWARD is where the gradients of the output of this layer are known."""

        def on_forward(_module, _inputs, output):
            if output.requires_grad:
                output.register_hook(lambda _: self.at(IN_BACKWARD))

        layer.register_forward_hook(on_forward)

    def _read(self):
        order = self._file.readline()
        if not order:
            raise EOFError("the test has ended")
        return order.rstrip("\n")


# ---------------------------------------------------------------- in a test


class Orders:
    """The orders of a test to its ranks. close() ends ranks that wait for one."""

    def __init__(self, folder, ranks=RANKS):
        self._folder = pathlib.Path(folder) / f"orders.{time.monotonic_ns()}"
        self._folder.mkdir()
        self._fifos = []
        for rank in range(ranks):
            os.mkfifo(self._folder / str(rank))
            self._fifos.append(os.open(self._folder / str(rank), os.O_RDWR))

    @property
    def variables(self):
        return {FOLDER: str(self._folder)}

    def close(self):
        while self._fifos:
            os.close(self._fifos.pop())

    def give(self, order, ranks=None):
        for fifo in self._fifos if ranks is None else [self._fifos[rank] for rank in ranks]:
            os.write(fifo, f"{order}\n".encode())

    def give_step(self, place):
        """Orders the step up to this place; returns (rank, place) for each line that the ranks say by then."""
        *others, last = everyone = range(len(self._fifos))
        if place == BETWEEN_STEPS:
            return []
        if place == UNDER_WAY:
            self.give("step")
            return [(0, IN_BACKWARD)]
        if place == IN_STEP:
            self.give(f"step {BEHIND_BACKWARD}", others)
            self.give("step", [last])
            return [*((rank, BEHIND_BACKWARD) for rank in others), (last, BEFORE_STEP)]
        self.give(f"step {place}")
        return [(rank, place) for rank in everyone]

    def give_rest(self, place):
        """Orders the rest of the step."""
        if place == BETWEEN_STEPS:
            self.give("step")
        elif place == IN_STEP:
            self.give("on", range(len(self._fifos) - 1))
        elif place != UNDER_WAY:
            self.give("on")


def await_sleep(pid):
    """Waits until a rank that is BEFORE_STEP sleeps: its main thread can then wait in step() alone."""
    end = time.monotonic() + DEADLINE_S
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < end
        time.sleep(0.001)  # house: allow sleep: a poll with a deadline


class Ranks:
    """Ranks under a test, and what they say. A context: its end ends those that wait for an order.

    start  Called for their process with what they find in their environment.
    """

    def __init__(self, folder, start, **variables):
        self.orders = Orders(folder)
        self.process = start(**self.orders.variables, **variables)
        self.watchdog = threading.Timer(DEADLINE_S, self.process.kill)
        self.watchdog.start()
        self.lines = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.orders.close()
        self.watchdog.cancel()

    def until(self, is_last):
        """Reads lines until one is the last; None: there are no more."""
        for text in self.process.stdout:
            self.lines.append(json.loads(text))
            if is_last(self.lines[-1]):
                return self.lines[-1]
        return None

    def hear(self, *lines):
        """Reads until each of these has come."""
        left = [line for line in lines if line not in self.lines]
        while left:
            line = self.until(left.__contains__)
            assert line is not None, f"they have not said {left}: {self.error()}"
            left.remove(line)

    def of(self, what):
        return [line for line in self.lines if line[0] == what]

    def pids(self):
        """Returns the process ids of the ranks."""
        while len(self.of("pid")) < RANKS:
            assert self.until(lambda line: line[0] == "pid") is not None, self.error()
        return [pid for _, _, pid in sorted(self.of("pid"))]

    # ---------------------------------------------------------------- steps

    def go_to(self, place, step):
        """Returns when the ranks have reached this place in this step."""
        self.hear(*(["at", rank, where, step] for rank, where in self.orders.give_step(place)))
        if place == IN_STEP:
            await_sleep(self.pids()[-1])

    def go_on(self, place):
        self.orders.give_rest(place)

    def hear_answers(self, step):
        self.hear(*(["answered", rank, step] for rank in range(RANKS)))

    def take(self, *steps):
        """Orders these steps one after the other, with nothing in their way."""
        for step in steps:
            self.orders.give("step")
            self.hear_answers(step)

    # ---------------------------------------------------------------- their end

    def assert_answered(self, last):
        """Asserts that each step was answered once to each rank."""
        for rank in range(RANKS):
            answered = [line[2] for line in self.of("answered") if line[1] == rank]
            assert answered == list(range(1, last + 1)), f"rank {rank}"

    def assert_digests(self, last):
        """Asserts that the digests of durable_ranks.py are those of a training that nothing has disturbed."""
        digests = self.of("digests")
        assert len(digests) == RANKS
        for _, rank, step, digest, undisturbed in digests:
            assert step == last and digest == undisturbed, f"rank {rank}"

    def error(self):
        stream = self.process.stderr
        return "" if stream is None else stream.read()

    def end(self):
        """(status, what they say on standard error) when they have ended, without another step."""
        self.orders.give("end")
        self.until(lambda _: False)
        status = self.process.wait(DEADLINE_S)
        self.watchdog.cancel()
        return status, self.error()

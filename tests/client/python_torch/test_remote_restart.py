# SPDX-License-Identifier: Apache-2.0
"""Goal    Ranks whose daemon is on another node continue by themselves if the gateway, their agents or the daemon are killed
        or started again, and if the link is down for longer than the keepalive: no error, each step once, the bits
        of a run that saw nothing of the kind.
Method  As test_remote.py, with a keepalive of half a second and a daemon whose service manager keeps what it has in
        memory. Two ranks take each step from the test, which removes one part of the system at a known place of it.
"""

import contextlib
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

import durable_ranks
import forebay
import pytest
import torch.distributed as dist
from network_nodes import LINK, await_link
from ordered_steps import IN_STEP, PLACES, Orders, await_sleep
from remote_gateway import GATEWAY, PORT
from test_daemon_restart import NOT_AT_REST, SEED, Service, room_without_states
from test_remote import DEADLINE_S, Place
from test_remote_faults import await_end

KEEPALIVE_MS = 500
AWAY_S = 1.2 * KEEPALIVE_MS / 1000
CASES = [("shared", "dram"), ("shared+loads", "dram"), ("sharded", "dram"), ("sharded", "swap")]


def agents_of(place):
    """The processes between its ranks and the gateway."""
    own = [os.fsencode(word) for word in ("connect", place.client)]
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # the process has ended meanwhile
            continue
        if all(word in words for word in own):
            found.append(int(process.name))
    return sorted(found)


class KeptPlace(Place):
    """One whose daemon is a service: its memory is retained if it is killed."""

    def start_daemon(self, *settings):
        self.service = Service(self.folder, *settings)
        self.service.manager.__enter__()
        self.service.manager.start()
        self.service.socket = f"{self.folder}/s"
        return self.service

    def close(self):
        self.gateway.kill()
        self.service.manager.__exit__(None, None, None)

    # ---------------------------------------------------------------- faults

    def kill_gateway(self):
        self.gateway.kill()
        self.gateway.start()

    def restart_gateway(self):
        self.gateway.stop()
        self.gateway.start()

    def hold_gateway(self):
        self.gateway.process.send_signal(signal.SIGSTOP)
        time.sleep(AWAY_S)  # house: allow sleep: longer than the keepalive
        self.gateway.process.send_signal(signal.SIGCONT)

    def kill_agent(self):
        os.kill(agents_of(self)[0], signal.SIGKILL)

    def hold_agent(self):
        agent = agents_of(self)[-1]
        os.kill(agent, signal.SIGSTOP)
        time.sleep(AWAY_S)  # house: allow sleep: longer than the keepalive
        os.kill(agent, signal.SIGCONT)

    def cut_link(self):
        self.nodes[0].run("ip", "link", "set", LINK, "down")
        time.sleep(AWAY_S)  # house: allow sleep: longer than the keepalive
        self.nodes[0].run("ip", "link", "set", LINK, "up")
        for node in self.nodes:  # an attach right after the last step needs the link
            await_link(node)

    def kill_daemon(self):
        self.service.manager.kill()

    def kill_both(self):
        self.gateway.kill()
        self.service.manager.kill()
        self.gateway.start()


WHAT = [name for name in vars(KeptPlace) if name.partition("_")[0] in ("kill", "restart", "hold", "cut")]
WHAT.append("restart_daemon")
STEPS = 1 + len(WHAT) + 1  # one step before the first fault, one after the last


def train(*words):
    durable_ranks.main(list(words))


@pytest.mark.parametrize(("mode", "where"), CASES)
def test_ranks_go_on(gateway_network, folder, mode, where):
    # The model has more weights than a cache has room for.
    variables = {"GLOO_SOCKET_IFNAME": "lo", **({"FOREBAY_WIDTH": "128"} if where == "swap" else {})}
    room = room_without_states(folder, mode, "memory", **variables) if where == "swap" else ["dram.limit=1GiB"]
    place = KeptPlace(gateway_network, f"{folder}/place", *room, port=PORT + 8, keepalive=KEEPALIVE_MS)
    with contextlib.closing(place):
        lines, log = run_under_faults(place, random.Random(f"{SEED} {mode}"), mode, variables)
    for rank in range(durable_ranks.RANKS):
        assert [line[2] for line in lines if line[:2] == ["answered", rank]] == list(range(1, STEPS + 1)), log
    digests = [line[2:] for line in lines if line[0] == "digests"]
    assert len(digests) == durable_ranks.RANKS
    for step, digest, undisturbed in digests:
        assert step == STEPS and digest == undisturbed, f"seed {SEED}"
    assert NOT_AT_REST not in log, log
    # Each fault that leaves the daemon running has disconnected a rank. The -1 is kill_both, which kills the daemon too.
    assert log.count("of job durable: its rank is back") >= sum("daemon" not in what for what in WHAT) - 1


def run_under_faults(place, chance, mode, variables):
    """What the ranks say, and what the daemons have logged."""
    with contextlib.closing(Orders(place.folder)) as orders:
        output = place.start(train, mode, "memory", "ordered", **orders.variables, **variables)

        def hear_answers(step):
            for rank in range(durable_ranks.RANKS):
                output.until(["answered", rank, step], 1, DEADLINE_S)

        orders.give("step")
        hear_answers(1)
        for step, what in enumerate(chance.sample(WHAT, len(WHAT)), 2):
            where = chance.choice(PLACES)
            for rank, passed in orders.give_step(where):
                output.until(["at", rank, passed, step], 1, DEADLINE_S)
            if where == IN_STEP:
                await_sleep(max(line for line in output.said if line[0] == "pid")[2])
            take_away(place, what, lambda where=where: orders.give_rest(where))
            hear_answers(step)
        orders.give("step")
        hear_answers(STEPS)
        orders.give("end")
        return output.wait(DEADLINE_S), place.service.log()


def take_away(place, what, go_on):
    if what != "restart_daemon":
        getattr(place, what)()
        go_on()
        return
    place.service.manager.begin_restart()
    go_on()
    place.service.manager.end_restart()


# ---------------------------------------------- one rank, between its calls


def asked(mode, job, rank, ranks):
    """A rank that does what its input says, and says what came of it."""
    rank, durable_ranks.RANKS = int(rank), int(ranks)
    if mode == "sharded":
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=int(ranks))
    try:
        model, opt = durable_ranks.attached(mode, job, rank, "memory")
        durable_ranks.say("attached", opt.committed_step)
        for line in sys.stdin:
            what = line.strip()
            if what == "step":
                [step] = durable_ranks.train(mode, model, opt, rank, opt.committed_step + 1)
                durable_ranks.say("step", step)
            else:
                getattr(opt, what)()
                durable_ranks.say(what)
    except forebay.ForebayError as error:
        durable_ranks.say("error", error.code, str(error))


class Asked:
    said = 0

    def __init__(self, place, mode, job, rank=0, ranks=1, **variables):
        environment = {"GLOO_SOCKET_IFNAME": "lo", "FOREBAY_DAEMON_WAIT": str(DEADLINE_S), **variables}
        self.output = place.start(asked, mode, job, rank, ranks, **environment)

    def ask(self, what):
        self.output.process.stdin.write(f"{what}\n")
        self.output.process.stdin.flush()

    def answer(self, *expected):
        self.output.until([], self.said + 1, DEADLINE_S)
        assert self.output.said[self.said][: len(expected)] == list(expected), self.output.text
        self.said += 1

    def kill(self):
        self.output.process.kill()
        self.output.process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def kept_place(gateway_network):
    with tempfile.TemporaryDirectory(prefix="fb", dir="/var/tmp") as folder:
        place = KeptPlace(gateway_network, f"{folder}/place", "dram.limit=1GiB", keepalive=KEEPALIVE_MS)
        with contextlib.closing(place):
            yield place


@pytest.mark.parametrize("mode", ["shared", "sharded"])
def test_an_attach_waits_for_its_gateway(kept_place, mode):
    kept_place.gateway.kill()
    rank = Asked(kept_place, mode, f"late.{mode}")
    time.sleep(0.5)  # house: allow sleep: it has asked meanwhile, as a rule
    kept_place.gateway.start()
    rank.answer("attached", 0)
    rank.kill()


# The time in which a process did not run itself is not its peer's silence. Both stand still for longer than the keepalive, as on
# a machine that is suspended or overloaded.
def test_a_gateway_and_an_agent_that_stood_still_lose_no_link(kept_place):
    rank = Asked(kept_place, "shared", "stood.still")
    rank.answer("attached", 0)
    stopped = [kept_place.gateway.process.pid, *agents_of(kept_place)]
    before = kept_place.service.log().count("the connection is lost")
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    time.sleep(3 * AWAY_S)  # house: allow sleep: longer than the keepalive
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    rank.ask("step")
    rank.answer("step", 1)
    assert kept_place.service.log().count("the connection is lost") == before
    rank.kill()


@pytest.mark.parametrize("what", ["kill_agent", "kill_gateway"])
def test_a_detach_right_behind_a_lost_connection_is_heard(kept_place, what):
    rank = Asked(kept_place, "shared", f"detached.{what}")
    rank.answer("attached", 0)
    getattr(kept_place, what)()
    rank.ask("detach")
    rank.answer("detach")
    await_end(kept_place, f"detached.{what}")
    rank.kill()


def test_a_detach_is_heard_however_long_its_agent_takes_to_start(kept_place, folder):
    agent = pathlib.Path(folder) / "agent"
    agent.write_text(f"#!/bin/sh\nsleep 1.5\nexec {GATEWAY} \"$@\"\n")  # house: allow sleep: a busy machine
    agent.chmod(0o755)
    rank = Asked(kept_place, "shared", "detached.late", FOREBAY_GATEWAY=str(agent))
    rank.answer("attached", 0)
    kept_place.kill_agent()
    rank.ask("detach")
    rank.answer("detach")
    await_end(kept_place, "detached.late")
    rank.kill()


@pytest.mark.parametrize("turn", range(5))  # repeated, because one kill may miss the moment
def test_a_trainer_that_is_killed_when_it_is_back_is_not_waited_for(kept_place, turn):
    rank = Asked(kept_place, "shared", f"killed.{turn}")
    rank.answer("attached", 0)
    kept_place.kill_agent()
    rank.ask("step")
    rank.answer("step", 1)
    rank.kill()
    await_end(kept_place, f"killed.{turn}")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_ends_while_the_daemon_is_away_is_lost_to_the_others(gateway_network, folder, end):
    place = KeptPlace(
        gateway_network,
        f"{folder}/place",
        "dram.limit=1GiB",
        port=PORT + 9,
        keepalive=KEEPALIVE_MS,
        session_wait=1000,
    )
    with contextlib.closing(place):
        first, second = (Asked(place, "shared", "job", rank, 2) for rank in range(2))
        for rank in (first, second):
            rank.answer("attached", 0)
            rank.ask("step")
        for rank in (first, second):
            rank.answer("step", 1)
        manager = place.service.manager
        manager.end(end)
        second.kill()
        manager.start()
        first.ask("step")
        first.answer("error", "E_RANK_LOST")

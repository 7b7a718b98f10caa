# SPDX-License-Identifier: Apache-2.0
# Goal    Ranks know of each other however they were started, or are refused. Their numbers are those of the process group, of
#         arguments or of variables, which must not contradict each other. If two processes of one launch are taken for the same
#         rank, the second is refused while the first trains. A process that hangs is replaced.
# Method  Ranks that are spawned or forked train on the real daemon, and their results are compared with torch's own steps. A
#         test stops, continues and replaces single processes. Other tests set the variables of launchers.

import os
import pathlib
import signal
import subprocess
import sys

import forebay
import pytest
from daemon_process import missing
from forebay import _world
from test_processes import HERE, environment

DEADLINE_S = 300

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")

LAUNCHED = ("FOREBAY_RUN", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def variables(daemon, **more):
    plain = {name: text for name, text in environment().items() if name not in LAUNCHED}
    return {**plain, "FOREBAY_SOCKET": daemon.socket, **more}


@pytest.mark.parametrize("case", ["by_file", "by_tcp", "contradictions", "subgroups", "group_after_attach"])
def test_ranks(daemon, tmp_path, case):
    done = subprocess.run(
        [sys.executable, str(HERE / "world_ranks.py"), case, str(tmp_path)],
        env=variables(daemon),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Trainer:
    """world_trainer.py; a context. `prefix`: a program that starts it.

    In a session of its own: the kernel continues the stopped processes of a group that it takes for orphaned, as it does
    when the command of a `forebay run` ends in the group of these tests."""

    def __init__(self, daemon, job, *prefix, **options):
        command = [*prefix, sys.executable, str(HERE / "world_trainer.py"), job]
        more = options.pop("variables", {})
        self.process = subprocess.Popen(
            command,
            env=variables(daemon, FOREBAY_RUN="one", **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.ends()

    def ends(self):
        """Once its input ends it does, and a program that has started it."""
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        return self.process.wait(DEADLINE_S)

    def hears(self):
        return self.process.stdout.readline().rstrip()

    def trains(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hears()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def state(self):
        """As proc(5) has it, with signals that wait."""
        lines = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("State", "Pid", "SigPnd", "ShdPnd"))]


def test_a_second_process_of_a_launch_is_refused_until_the_first_hangs(daemon):
    with Trainer(daemon, "twice") as first:
        assert first.hears() == "attached 0"
        assert first.trains() == "trained 1"
        with Trainer(daemon, "twice") as second:
            refusal = second.hears()
        assert refusal.startswith("E_RANK "), refusal
        for word in (f"process {first.process.pid}", "rank 0 of job twice", "rank 0 of 1", "init_process_group()"):
            assert word in refusal
        assert first.trains() == "trained 2"  # it has noticed nothing

        first.stop()
        with Trainer(daemon, "twice") as restarted:
            assert restarted.hears() == "attached 2", first.state()
            assert restarted.trains() == "trained 3"
            os.kill(first.process.pid, signal.SIGCONT)
            assert first.trains().startswith("E_FENCED ")
            assert restarted.trains() == "trained 4"


def test_processes_of_different_launches_and_dead_ones_are_replaced(daemon):
    with Trainer(daemon, "again") as first:
        assert first.hears() == "attached 0"
        assert first.trains() == "trained 1"
        # Another launcher, in a separate process group, runs the trainer as its child.
        launcher = (sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)")
        with Trainer(daemon, "again", *launcher) as other:
            assert other.hears() == "attached 1"
            assert first.trains().startswith("E_FENCED ")
            assert other.trains() == "trained 2"
            assert other.ends() == 0
    with Trainer(daemon, "again") as killed:
        assert killed.hears() == "attached 2"
        killed.process.kill()  # the killed process is not reaped yet
        with Trainer(daemon, "again") as restarted:
            assert restarted.hears() == "attached 2"
            assert restarted.trains() == "trained 3"


def test_a_launcher_that_does_not_say_the_rank(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)

    def found(rank=None, world_size=None, **variables):
        with monkeypatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            world = _world.find(rank, world_size)
            return world.rank, world.world_size

    assert found() == (0, 1)
    assert found(RANK="1", WORLD_SIZE="2") == (1, 2)
    assert found(WORLD_SIZE="1", LOCAL_RANK="0") == (0, 1)
    assert found(LOCAL_RANK="-1") == (0, 1)  # scripts older than torchrun pass -1 without ranks
    # All ranks are on this node.
    assert found(WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") == (1, 2)
    assert found(rank=1, WORLD_SIZE="2", LOCAL_RANK="1") == (1, 2)
    assert found(rank=0, world_size=1, WORLD_SIZE="2", LOCAL_RANK="1") == (0, 1)
    assert found(world_size=1, LOCAL_RANK="1") == (0, 1)
    unknown = [
        ({}, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}),
        ({}, {"WORLD_SIZE": "2"}),
        ({}, {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
        ({}, {"LOCAL_RANK": "1"}),
        ({}, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
        ({"world_size": 2}, {}),
    ]
    for given, launched in unknown:
        with pytest.raises(forebay.UsageError, match="RANK is not set, and there is no process group") as raised:
            found(**given, **launched)
        assert raised.value.code == "E_RANK"
        assert "init_process_group() before attach()" in raised.value.hint and "set RANK" in raised.value.hint
        for name, text in {**given, **launched}.items():
            assert f"{name}={text}" in str(raised.value)

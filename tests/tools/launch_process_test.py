# SPDX-License-Identifier: Apache-2.0
"""Goal    `forebay launch` runs a command on every selected host with what torchrun reads, shows its output by host,
        passes on signals and the first failure, and leaves nothing running; `forebay status --all` shows what each
        host's daemon says, and which host says nothing.
Method  Real processes of build/bin. A script stands for ssh and runs its command on this machine; for host
        "down" it ends as ssh does that cannot connect, for "silent" it waits. launch_network_test.py has the real ssh.
"""

import json
import os
import pathlib
import signal
import subprocess

import pytest
from forebay_command import DEADLINE_S, FOREBAY, await_end, folders_of_run, forebay, run_flags

SSH = """#!/bin/sh
for last; do host=$command command=$last; done
case $host in
  down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255 ;;
  silent) exec sleep 600 ;;
  noisy) echo "Welcome to this host" ;;
esac
[ "$host" = -G ] && exit 1  # this ssh has no settings
# A process of its own, which only learns by its stdin that this one has ended.
env -i PATH=/usr/bin:/bin FOREBAY_SOCKET="$FOREBAY_SOCKET" sh -c "$command"
exit $?
"""

# A command that prints the environment variables that each host's launcher reads.
SHOW = (
    "sh",
    "-c",
    'echo "$PET_NODE_RANK/$PET_NNODES $PET_NPROC_PER_NODE $PET_MASTER_ADDR:$PET_MASTER_PORT '
    'devices=${CUDA_VISIBLE_DEVICES-all} run=$FOREBAY_RUN"',
)


@pytest.fixture
def hosts(tmp_path):
    """(flags of launch and status for the script that stands for ssh, environment)."""
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH, encoding="utf-8")
    ssh.chmod(0o755)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FOREBAY_")}

    def flags(*lines):
        hostfile = tmp_path / "hosts"
        hostfile.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["--hostfile", hostfile, "--ssh", ssh]

    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return flags, environment


def launch(hosts, lines, *words, options=(), **variables):
    flags, environment = hosts
    return forebay("launch", *flags(*lines), *options, "--", *words, env={**environment, **variables})


def lines_of(done):
    return sorted(done.stdout.splitlines())


def test_every_host_gets_what_torchrun_reads_and_one_run(hosts):
    done = launch(hosts, ["a slots=2", "user@b slots=3"], *SHOW, FOREBAY_RUN="r1")
    assert done.returncode == 0, done.stderr
    assert lines_of(done) == [
        "a: 0/2 2 a:29500 devices=all run=r1",
        "user@b: 1/2 3 a:29500 devices=all run=r1",
    ]
    runs = {line.rpartition("run=")[2] for line in lines_of(launch(hosts, ["a slots=1", "b slots=1"], *SHOW))}
    assert len(runs) == 1 and runs.pop().startswith("pid-")


def test_a_selection_numbers_hosts_anew_and_names_the_devices(hosts):
    lines = ["a slots=2", "b slots=4", "c slots=1"]
    port = ("--master-addr", "10.0.0.9", "--master-port", 1234)
    done = launch(hosts, lines, *SHOW, options=("--include", "c@b:1,3", *port), FOREBAY_RUN="r")
    assert lines_of(done) == [
        "b: 0/2 2 10.0.0.9:1234 devices=1,3 run=r",
        "c: 1/2 1 10.0.0.9:1234 devices=all run=r",
    ]
    done = launch(hosts, lines, *SHOW, options=("--exclude", "a@b:0"), FOREBAY_RUN="r")
    assert lines_of(done) == [
        "b: 0/2 3 b:29500 devices=1,2,3 run=r",
        "c: 1/2 1 b:29500 devices=all run=r",
    ]


def test_arguments_folder_and_named_variables_arrive_as_they_are(hosts, tmp_path):
    odd = tmp_path / "a folder; it's $HOME"
    odd.mkdir()
    words = ["", "it's", 'two  "words"', "$HOME; exit 3", "a\nb", "é"]
    options = ("--chdir", odd, "--env", "MINE=a 'b' $c", "--env", "YOURS")
    done = launch(
        hosts, ["a slots=1"], "sh", "-c", 'pwd; echo "$MINE|$YOURS|$PYTHONX|$OTHER"; printf "<%s>" "$@"', "sh",
        *words, options=options, YOURS="y z", PYTHONX="p", OTHER="o",
    )  # fmt: skip
    shown = done.stdout.replace("\na: ", "\n").removeprefix("a: ")
    assert shown == f"{odd}\na 'b' $c|y z|p|\n" + "".join(f"<{word}>" for word in words) + "\n"


def test_a_script_is_torchruns(hosts, tmp_path):
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text('#!/bin/sh\necho "torchrun $*"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    path = f"{torchrun.parent}:{os.environ['PATH']}"
    done = launch(hosts, ["a slots=1"], "train.py", "--lr", "1", PATH=path)
    assert done.stdout == "a: torchrun train.py --lr 1\n", done.stderr


def test_output_is_by_line_and_host(hosts):
    script = r"printf 'one\n\ntwo\r50 %%\r100 %%\r\nno end'; echo e >&2"
    done = launch(hosts, ["noisy slots=1"], "sh", "-c", script)
    assert done.stdout == "".join(f"noisy: {text}\n" for text in ("one", "", "two", "50 %", "100 %", "no end"))
    assert sorted(done.stderr.splitlines()) == ["noisy: Welcome to this host", "noisy: e"]


def test_the_first_failure_ends_the_other_hosts_and_is_passed_on(hosts):
    script = 'if [ $PET_NODE_RANK = 1 ]; then exit 7; fi; trap "echo ended; exit 0" TERM; echo ready; sleep 600 & wait'
    done = launch(hosts, ["a slots=1", "b slots=1", "c slots=1"], "sh", "-c", script)
    assert done.returncode == 7
    assert "error[E_RANK_LOST]: host b: the command ended with exit status 7; those of the other hosts are ended" in (
        done.stderr
    )
    assert launch(hosts, ["a slots=1"], "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_a_host_where_nothing_starts_is_named(hosts, tmp_path):
    done = launch(hosts, ["a slots=1", "down slots=1"], "sleep", 600)
    assert done.returncode == 255
    assert "down: ssh: connect to host down port 22: Connection refused" in done.stderr
    assert "error[E_OPTION]: host down: nothing was started there: ssh ended with exit status 255" in done.stderr
    missing = launch(hosts, ["a slots=1"], "true", options=("--forebay", tmp_path / "none"))
    assert missing.returncode == 127 and "host a: nothing was started there" in missing.stderr
    no_program = launch(hosts, ["a slots=1"], "/does/not/exist")
    assert no_program.returncode == 127 and "a: error[E_OPTION]: execute /does/not/exist" in no_program.stderr
    no_folder = launch(hosts, ["a slots=1"], "true", options=("--chdir", "/does/not/exist"))
    assert no_folder.returncode == 1 and "a: error[E_OPTION]: folder /does/not/exist: No such" in no_folder.stderr


class Launched:
    """A launch on two hosts, whose commands have begun. Each has a child in a session of its own, as torchrun's ranks
    are. What a signal ends waits until all have got it: the first end is the end of the others."""

    SCRIPT = """
        got() { echo got; touch "$0/$PET_NODE_RANK"; until [ -e "$0/0" ] && [ -e "$0/1" ]; do sleep 0.02; done; exit 5; }
        trap got INT USR1; setsid sleep 600 & echo $$ $!; while :; do wait; done
    """

    def __init__(self, hosts, folder):
        flags, environment = hosts
        self.process = subprocess.Popen(
            [FOREBAY, "launch", *flags("a slots=1", "b slots=1"), "--", "sh", "-c", self.SCRIPT, folder],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        lines = [self.process.stdout.readline() for _ in range(2)]
        self.pids = [int(pid) for line in lines for pid in line.split(": ")[1].split()]

    def wait(self):
        out, err = self.process.communicate(timeout=DEADLINE_S)
        for pid in self.pids:
            await_end(pid)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_every_command(hosts, tmp_path, number):
    launched = Launched(hosts, tmp_path)
    launched.process.send_signal(number)
    status, out, err = launched.wait()
    assert status == 5 and sorted(out.splitlines()) == ["a: got", "b: got"] and "E_RANK_LOST" not in err


def test_nothing_is_left_on_any_host_after_a_kill_of_launch(hosts, tmp_path):
    launched = Launched(hosts, tmp_path)
    launched.process.kill()
    assert launched.wait()[0] == -signal.SIGKILL


def test_what_cannot_be_launched_is_refused_before_any_host(hosts, tmp_path):
    flags, _ = hosts
    wrong = launch(hosts, ["a slots=1", "b"], "true")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith(f"error[E_CONFIG]: {tmp_path}/hosts:2: host b has no slots\nhint: ")
    unknown = launch(hosts, ["a slots=1"], "true", options=("--include", "b"))
    assert unknown.returncode == 1 and '--include: host "b" is not in the hostfile' in unknown.stderr
    both = launch(hosts, ["a slots=1"], "true", options=("--include", "a", "--exclude", "a"))
    assert both.returncode == 2 and "--include excludes --exclude" in both.stderr
    unset = launch(hosts, ["a slots=1"], "true", options=("--env", "NOT_SET"))
    assert unset.returncode == 1 and "error[E_OPTION]: --env NOT_SET: it is not set here" in unset.stderr
    long = launch(hosts, ["a slots=1"], "true", *["x" * 100000] * 6)
    assert long.returncode == 1 and "error[E_LIMIT]: the command and its environment take" in long.stderr
    assert forebay("launch", *flags("a slots=1")).returncode == 2  # no command
    assert forebay("launch", "--", "true").returncode == 2  # no hostfile


def test_launch_node_refuses_what_no_launch_sends():
    for text in ("", "no json\n", '{"folder": "/"}\n', '{"folder": "/", "environment": [], "command": []}\n'):
        done = subprocess.run(
            [FOREBAY, "launch-node"], input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 1 and "error[E_PROTOCOL]: launch-node: stdin holds no message" in done.stderr


def test_status_of_all_hosts_is_a_table_and_a_line_for_who_does_not_answer(hosts, tmp_path):
    flags, _ = hosts
    of_two = flags("a slots=1", "noisy slots=1")
    with folders_of_run(tmp_path, "all") as (environment, _, swap):
        words = [*run_flags(swap), FOREBAY, "status", "--all"]
        good = forebay(*words, *of_two, env=environment)
        assert good.returncode == 0, good.stderr
        header, *rows = good.stdout.splitlines()
        assert header.split() == ["HOST", "VERSION", "UP", "DRAM", "SWAP", "JOBS", "HEALTH"]
        assert [row.split()[0] for row in rows] == ["a", "noisy"] and all("of 256.0 MiB" in row for row in rows)
        bad = forebay(*words, *flags("silent slots=1", "down slots=1"), "--timeout", 1, env=environment)
        assert bad.returncode == 3
        assert bad.stdout == (
            "silent does not answer: no answer within 2 s\n"
            "down does not answer: ssh: connect to host down port 22: Connection refused\n"
        )
        of_both = flags("a slots=1", "down slots=1")
        as_json = json.loads(forebay(*words, *of_both, "--json", env=environment).stdout)["nodes"]
        assert [node["host"] for node in as_json] == ["a", "down"]
        assert as_json[0]["status"]["memory"]["limit_bytes"] == 256 << 20 and as_json[0]["error"] == ""
        assert as_json[1]["status"] is None and "Connection refused" in as_json[1]["error"]


def test_status_of_a_host_without_a_daemon_says_what_it_said(hosts, tmp_path):
    flags, environment = hosts
    nobody = pathlib.Path(tmp_path, "none.sock")
    done = forebay("status", "--all", *flags("a slots=1"), "--socket", nobody, env=environment)
    assert done.returncode == 3
    assert f"a does not answer: error[E_NO_DAEMON]: no daemon answers: connect to {nobody}" in done.stdout
    assert forebay("status", "--all").returncode == 2  # no hosts are named

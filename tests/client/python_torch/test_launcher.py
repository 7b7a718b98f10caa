# SPDX-License-Identifier: Apache-2.0
# Goal    Ranks that srun or mpirun has started find out their rank: attach() does by itself, a process group by one call.
#         Variables that are set already, as by torchrun, are not changed.
# Method  The variables that Slurm 23's srun, Open MPI 4.1, MPICH's hydra and Cray PALS set; two processes with
#         those of srun train on the real daemon and meet in a group.

import subprocess
import sys
import textwrap

import forebay
import pytest
from forebay._launcher import environment_of, first_host, set_launcher_environment, tasks_per_node
from forebay._run import run_token
from test_processes import environment

DEADLINE_S = 120


def srun(rank=0, **others):
    """Two nodes with two ranks and one with one."""
    return {
        **{"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "5"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)},
        **{"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[07-08],login"},
        **{"SLURM_NTASKS": "64", "SLURM_JOB_NODELIST": "cpu[1-64]", "SLURM_TASKS_PER_NODE": "1(x64)"},
        **others,
    }


def open_mpi(rank=1, local_size=4):
    return {
        **{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4"},
        **{"OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size)},
        **{"OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size), "PMIX_NAMESPACE": "1583611905"},
    }


def mpich(local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS")):
    return {"PMI_RANK": "3", "PMI_SIZE": "4", local[0]: "1", local[1]: "2"}


def ranks(found):
    return [int(found[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]


def test_a_rank_of_srun_has_what_its_step_says():
    assert [ranks(environment_of(srun(rank))) for rank in (0, 3, 4)] == [
        [0, 5, 0, 2],
        [3, 5, 1, 2],
        [4, 5, 0, 1],
    ]
    assert environment_of(srun())["MASTER_ADDR"] == "gpu07"
    ports = {environment_of(srun(rank))["MASTER_PORT"] for rank in range(5)}
    assert len(ports) == 1 and 15000 <= int(*ports) < 30000
    assert {environment_of(srun(SLURM_STEP_ID="3"))["MASTER_PORT"]} != ports


def test_a_batch_script_is_no_rank():
    batch = {name: text for name, text in srun().items() if "STEP" not in name}
    assert environment_of(batch) == {}


def test_a_rank_of_mpirun_has_what_it_says():
    found = environment_of(open_mpi())
    assert ranks(found) == [1, 4, 1, 4] and found["MASTER_ADDR"] == "127.0.0.1"
    assert ranks(environment_of(mpich())) == [3, 4, 1, 2]
    assert ranks(environment_of(mpich(("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")))) == [3, 4, 1, 2]
    # Within an allocation the ranks inherit the variables of the srun that started mpirun's own helper.
    assert ranks(environment_of({**srun(), **open_mpi()})) == [1, 4, 1, 4]


def test_lists_of_slurm():
    assert tasks_per_node("4") == [4] and tasks_per_node("16(x2),8,1(x3)") == [16, 16, 8, 1, 1, 1]
    assert tasks_per_node("") == tasks_per_node("4(y2)") == []
    for nodes, first in {
        **{"a": "a", "a,b": "a", "a[1-3]": "a1", "a[01,07]": "a01", "a[5]": "a5", "b,a[1-2]": "b"},
        **{"r[07-09,12]-n[1,3],x": "r07-n1", "a[1-2].site,b": "a1.site", "": ""},
    }.items():
        assert first_host(nodes) == first, nodes


def test_what_is_missing_is_set_and_what_is_there_stays():
    environ = srun(3, MASTER_PORT="1234", LOCAL_RANK="0")
    found = set_launcher_environment(environ)
    assert sorted(found) == ["LOCAL_WORLD_SIZE", "MASTER_ADDR", "RANK", "WORLD_SIZE"]
    assert environ["RANK"] == "3" and environ["MASTER_PORT"] == "1234" and environ["LOCAL_RANK"] == "0"
    assert set_launcher_environment(environ) == {} == set_launcher_environment({})


def test_mpirun_over_several_nodes_needs_the_first_ones_address():
    environ = open_mpi(local_size=2)
    with pytest.raises(forebay.UsageError, match="MASTER_ADDR is not set") as raised:
        set_launcher_environment(environ)
    assert raised.value.code == "E_OPTION" and "mpirun -x MASTER_ADDR=HOST" in raised.value.hint
    assert "RANK" not in environ
    assert "RANK" in set_launcher_environment({**environ, "MASTER_ADDR": "10.0.0.1"})


def test_a_launch_is_one_run_and_another_one_is_another():
    assert run_token(srun(0)) == run_token(srun(4)) == "slurm.4711.2"
    assert run_token(srun(SLURM_STEP_ID="3")) == "slurm.4711.3"
    assert run_token(open_mpi(0)) == run_token(open_mpi(3)) == "mpirun.1583611905"
    assert run_token(mpich()).startswith("mpirun.")
    assert run_token({**srun(), "TORCHELASTIC_RUN_ID": "none"}).startswith("launcher.")
    assert run_token({**srun(), "FOREBAY_RUN": "night"}) == "night"
    # A command that is typed twice into a shell started by srun is two runs.
    assert run_token(srun(SLURM_STEP_NUM_TASKS="1")).startswith("process.")


def test_attach_refuses_ranks_that_srun_has_started_on_other_nodes(monkeypatch):
    for name, text in srun(3).items():
        monkeypatch.setenv(name, text)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    import torch

    with pytest.raises(forebay.ForebayError, match="world size 5, of which 2 ranks are on this node"):
        forebay.attach(torch.nn.Linear(2, 2))


SCRIPT = """
    import forebay, torch
    forebay.set_launcher_environment()
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = torch.nn.Linear(4, 1, bias=False)
    opt = forebay.attach(model, forebay.SGD(lr=1.0))
    before = model.weight.sum().item()
    torch.distributed.barrier()
    model(torch.full((1, 4), float(rank))).sum().backward()
    opt.step()
    print(rank, opt.committed_step, round(before - model.weight.sum().item(), 4))
    torch.distributed.destroy_process_group()
"""


def test_two_ranks_of_srun_train_and_meet(daemon):
    plain = {name: text for name, text in environment().items() if name != "FOREBAY_RUN"}
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    own = {"FOREBAY_SOCKET": daemon.socket, "FOREBAY_JOB": "srun"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT)],
            env={**plain, **srun(rank, **two), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=DEADLINE_S) for process in started]
    # The mean gradient of the inputs 0 and 1 is 0.5 for each of four weights.
    assert [out.split() for out, _ in ended] == [["0", "1", "2.0"], ["1", "1", "2.0"]], ended

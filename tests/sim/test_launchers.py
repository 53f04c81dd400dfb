"""Ranks are found from the variables of launchers."""

from __future__ import annotations

import os
import socket

import pytest

from weft.comm import init_mesh
from weft.comm.launchers import environment_of
from weft.errors import CommunicationError

SRUN = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[007-009,12],login",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-here-77@1",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(("known", "due"), [
    (SRUN, ("3", "8", "1", "gpu007")), (OPEN_MPI, ("1", "2", "1", "127.0.0.1")),
    (MPICH, ("0", "4", "0", "127.0.0.1")),
], ids=["srun", "Open MPI", "MPICH"])
def test_ranks_are_found(known: dict[str, str], due: tuple[str, ...]) -> None:
    found = environment_of(known)
    port = int(found.pop("MASTER_PORT"))
    assert tuple(found.values()) == due and 61440 <= port < 65536
    rank = next(name for name in known if name.endswith(("PROCID", "_RANK")))
    assert environment_of(known | {rank: "2"})["MASTER_PORT"] == str(port)


def test_jobs_have_ports_of_their_own() -> None:
    ports = {environment_of(SRUN | {"SLURM_JOB_ID": str(job)})["MASTER_PORT"] for job in range(9)}
    assert len(ports) == 9


@pytest.mark.parametrize(("hosts", "first"), [
    ("a", "a"), ("a,b", "a"), ("n[3,5]", "n3"), ("n[03-05]-ib,m", "n03-ib"), ("r1n1,r1n2", "r1n1"),
])
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert environment_of(SRUN | {"SLURM_STEP_NODELIST": hosts})["MASTER_ADDR"] == first


def test_torchrun_comes_first_and_what_is_set_stays() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2", "MASTER_ADDR": "h",
                "MASTER_PORT": "1"}
    assert environment_of(SRUN | torchrun) == torchrun
    found = environment_of(MPICH | {"MASTER_ADDR": "h", "MASTER_PORT": "7"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("h", "7")


@pytest.mark.parametrize("known", [
    {}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    {"RANK": "0"}, MPICH | {"PMI_SIZE": "1"},
], ids=["none", "a batch script", "a step of one", "half", "one"])
def test_a_process_is_alone(known: dict[str, str]) -> None:
    assert environment_of(known) == {}


def test_several_machines_need_an_address() -> None:
    with pytest.raises(CommunicationError) as error:
        environment_of(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert str(error.value) == (
        "init_mesh(axes): Open MPI's mpirun has started 2 ranks, 1 of them on this machine.\n"
        "  Rule: ranks on several machines meet at the address of rank 0, which srun and torchrun "
        "tell, and other launchers do not.\n"
        "  Offenders: MASTER_ADDR is not set\n"
        "  Fix: mpirun -x MASTER_ADDR=$(hostname) ..., or mpiexec -genv MASTER_ADDR $(hostname) "
        "..., on the machine of rank 0"
    )


@pytest.mark.parametrize("taken", [True, False], ids=["the port is taken", "rank 1 does not come"])
def test_ranks_that_do_not_meet(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if taken:
            other.listen()
        else:
            other.close()
        known = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "WEFT_TIMEOUT": "1"}
        monkeypatch.setattr(os, "environ", os.environ | known)
        with pytest.raises(CommunicationError) as error:
            init_mesh({"dp": 2})
    first, rule, place, fix, also = str(error.value).splitlines()
    assert first.startswith(
        f"init_mesh(axes): rank 0 of 2 has not met the others at 127.0.0.1:{port}: ")
    assert rule == (
        "  Rule: all ranks that a launcher starts meet within 1 s (WEFT_TIMEOUT), at MASTER_ADDR "
        "and MASTER_PORT, where rank 0 listens."
    )
    assert place == f"  Offenders: 127.0.0.1:{port}"
    assert ("MASTER_PORT=29501" in also) is taken
    assert fix.startswith("  Fix: another program listens at this port" if taken else
                          "  Fix: start all 2 ranks")

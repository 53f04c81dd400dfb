"""Which launcher has started this process as a rank, and where the ranks meet.

torchrun's variables come first. Those of SLURM (srun), Open MPI and MPICH are translated to them.
Ranks on one machine meet at its loopback, at a port that follows from what the launcher calls the
job. On several machines SLURM lists the hosts; for the others MASTER_ADDR says where rank 0 runs.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import CommunicationError

__all__ = ["did_not_meet", "environment_of"]

_FIRST_PORT, _PORTS = 61440, 4096


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of a launcher; `jobs` are names of the job, `hosts` lists machines."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None
    jobs: tuple[str, ...]
    hosts: str | None = None


_LAUNCHERS = (
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None,
              ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_STEP_NODELIST"),
    _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
              "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
              ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    _Launcher("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
              ("PMI_JOBID",)),
)
"""SLURM sets PROCID and NTASKS for a batch script as well; STEP_NUM_TASKS only srun sets."""


def environment_of(known: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables of this rank, by the environment; empty for a process that is alone."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= known.keys():
        return {name: known[name] for name in
                ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in known}
    for launcher in _LAUNCHERS:
        if launcher.rank in known and int(known.get(launcher.size, "1")) > 1:
            return {
                "RANK": known[launcher.rank], "WORLD_SIZE": known[launcher.size],
                "LOCAL_RANK": known.get(launcher.local_rank, "0"),
                "MASTER_ADDR": known.get("MASTER_ADDR") or _address(launcher, known),
                "MASTER_PORT": known.get("MASTER_PORT") or str(_port(launcher, known)),
            }
    return {}


def did_not_meet(known: Mapping[str, str], reason: Exception, limit_s: float) -> CommunicationError:
    """The error of a rank that has not met the others.

    Args:
        known: torchrun's variables of this rank.
        reason: torch's error.
        limit_s: how long ranks wait for each other, in seconds.
    """
    size, told = known["WORLD_SIZE"], str(reason).strip().splitlines()[0].rstrip(". ")
    fix = (f"start all {size} ranks, with one MASTER_ADDR and MASTER_PORT: weft run -n {size} "
           "script.py, or torchrun\na program without others: unset RANK WORLD_SIZE MASTER_ADDR")
    if "EADDRINUSE" in told:
        fix = ("another program listens at this port, perhaps a run that has not ended: weft run, "
               "and torchrun --standalone, find a free one\nor choose: MASTER_PORT=29501, on all "
               "ranks")
    place = f"{known['MASTER_ADDR']}:{known.get('MASTER_PORT', '(no MASTER_PORT)')}"
    return CommunicationError(
        "init_mesh(axes)", f"rank {known['RANK']} of {size} has not met the others at "
        f"{place}: {told}", f"all ranks that a launcher starts meet within {limit_s:g} s "
        "(WEFT_TIMEOUT), at MASTER_ADDR and MASTER_PORT, where rank 0 listens", [place],
        fix)


def _address(launcher: _Launcher, known: Mapping[str, str]) -> str:
    """Where rank 0 runs."""
    if launcher.hosts is not None:
        return _first_host(known[launcher.hosts])
    if launcher.local_size is None or known.get(launcher.local_size) == known[launcher.size]:
        return "127.0.0.1"
    here = known.get(launcher.local_size)
    raise CommunicationError(
        "init_mesh(axes)", f"{launcher.name} has started {known[launcher.size]} ranks, "
        f"{here or 'an unknown number'} of them on this machine",
        "ranks on several machines meet at the address of rank 0, which srun and torchrun "
        "tell, and other launchers do not", ["MASTER_ADDR is not set"],
        "mpirun -x MASTER_ADDR=$(hostname) ..., or mpiexec -genv MASTER_ADDR $(hostname) "
        "..., on the machine of rank 0")


def _port(launcher: _Launcher, known: Mapping[str, str]) -> int:
    """The same on all ranks of a job, and seldom that of another job."""
    names = [known[name] for name in launcher.jobs if name in known]
    job = ".".join(names) or str(os.getppid())  # the launcher, or its part on this machine
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _first_host(hosts: str) -> str:
    """The first of SLURM's list: `gpu[007-009,12],login` begins with gpu007."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", hosts)
    assert match is not None, hosts
    return f"{match[1]}{match[2] or ''}{match[3]}"

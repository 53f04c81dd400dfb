"""`weft doctor`: what is installed, whether ranks run, and how to get what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from weft._version import __version__
from weft.cli import doctor_rank
from weft.cli.launch import RanksFailed, events

__all__ = ["Finding", "doctor"]

_OPTIONAL = {
    "rich": "weft demo, colours", "matplotlib": "weft demo, drawings as .png",
    "transformers": "models of Hugging Face", "safetensors": "files of weights",
    "ray": "weft.ray.run",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if that is too little."""

    what: str
    found: str
    good: bool = True
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'ok' if self.good else '--':4}{self.what:14}{self.found}"
        return f"{line}\n{'':18}{self.remedy}" if self.remedy else line


@click.command()
@click.option("-n", "--num-ranks", type=click.IntRange(min=1), default=2, show_default=True,
              help="How many ranks to start.")
def doctor(num_ranks: int) -> None:
    """Say what is installed, whether ranks start and communicate, and what is missing.

    Ends with status 1 when ranks do not run. Missing options are listed and do no harm.
    """
    for finding in _installed():
        click.echo(finding)
    ranks = _ranks(num_ranks)
    click.echo(ranks)
    sys.exit(0 if ranks.good else 1)


def _installed() -> Iterator[Finding]:
    yield Finding("weft", f"{__version__}, in {Path(__file__).parents[1]}")
    tried = sys.version_info[:2] == (3, 11)
    yield Finding("python", f"{platform.python_version()} on {platform.system()}, "
                            f"{platform.machine()}{'' if tried else ' (tested: 3.11)'}")
    torch = importlib.import_module("torch")
    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    distributed = importlib.import_module("torch.distributed")
    yield _backends(distributed)
    count = torch.cuda.device_count()
    yield Finding("devices", f"{count} of CUDA; weft has not been tested on several"
                             if count else "CPU alone")
    compiled = importlib.util.find_spec("weft.rng._lanes") is not None
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    yield Finding("random", "compiled" if compiled else "not compiled: slower, the same numbers",
                  compiled, "" if compiled else "pip install . again" if compiler else
                  "install a C compiler (apt install gcc), then pip install . again")
    for name, use in _OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        found = importlib.metadata.version(name) if there else f"not installed: for {use}"
        yield Finding(name, found, there, "" if there else f"pip install {name}")


def _backends(distributed: object) -> Finding:
    names = [name for name in ("gloo", "nccl", "mpi", "ucc")
             if getattr(distributed, f"is_{name}_available", lambda: False)()]
    good = "gloo" in names or "nccl" in names
    return Finding("backends", ", ".join(names) or "none", good,
                   "" if good else "install a torch that was built with gloo: pip install torch")


def _ranks(num_ranks: int) -> Finding:
    """Ranks that are started, sum a tensor, and say how fast."""
    try:
        (told,) = events(num_ranks, doctor_rank.__file__, doctor_rank.NBYTES)
    except (RanksFailed, ValueError) as error:
        return Finding("ranks", f"{num_ranks} do not run: {_last_line(error)}", False,
                       "if the name of this host has no address: GLOO_SOCKET_IFNAME=lo; "
                       "WEFT_DEBUG=1 shows more")
    right = told["sum"] == num_ranks * (num_ranks + 1) / 2
    speed = (f"{told['mb_per_second']:.0f} MB/s, {told['us']:.0f} us a collective"
             if num_ranks > 1 else "nothing to send")
    return Finding("ranks", f"{num_ranks} run, their sum is {'right' if right else 'wrong'}, "
                            f"{speed}", right)


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__

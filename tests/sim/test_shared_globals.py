"""What simulated ranks share: the globals of other packages, and torch's one profiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import P
from weft.errors import CommunicationError

SOURCE = """
STACK = []

class Context:
    def __enter__(self):
        STACK.append(self)

    def __exit__(self, *_):
        if STACK.pop() is not self:
            raise ValueError("another context is on top")

def total(x):
    is_first = not STACK
    STACK.append(x)
    return x.sum().item() if is_first else x.full_tensor()
"""


@pytest.fixture
def package(tmp_path: Path) -> Any:
    """A package that keeps a stack of contexts, as pyro does."""
    path = tmp_path / "site-packages" / "stacked.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("stacked", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_package_that_fails_in_a_rank_is_named(package: Any) -> None:
    def program(mesh: Any) -> None:
        with package.Context():
            for _ in range(2):  # so that the rank that comes first also leaves first
                weft.ones(4, mesh=mesh, spec=P("dp")).sum().item()

    with pytest.raises(ValueError, match="another context is on top") as error:
        weft.testing.run(program, 2, {"dp": 2})
    assert error.value.__notes__ == [
        "on simulated rank 0 of 2",
        "stacked raised it: simulated ranks are threads of one process and share what stacked "
        "keeps in module globals, which processes do not. If that is the cause, the program runs "
        "over processes: weft run -n 2 script.py",
    ]
    package.STACK.clear()
    weft.testing.run(program, 1, {"dp": 1})


def test_a_package_whose_ranks_disagree_is_named(package: Any) -> None:
    def program(mesh: Any) -> None:
        package.total(weft.ones(4, mesh=mesh, spec=P("dp")))

    with pytest.raises(CommunicationError, match="no rank can run on") as error:
        weft.testing.run(program, 2, {"dp": 2})
    assert error.value.__notes__[1].startswith("stacked called it: simulated ranks are threads")


def own_mistake(mesh: Any) -> None:
    raise ValueError("mine")


def torchs_mistake(mesh: Any) -> None:
    torch.ones(2) @ torch.ones(3)


def wefts_mistake(mesh: Any) -> None:
    weft.ones(4, mesh=mesh, spec=P("no such axis"))


@pytest.mark.parametrize("program", [own_mistake, torchs_mistake, wefts_mistake])
def test_others_are_not(program: Any) -> None:
    with pytest.raises((ValueError, RuntimeError)) as error:
        weft.testing.run(program, 2, {"dp": 2})
    assert error.value.__notes__ == ["on simulated rank 0 of 2"]


PROFILED = """
import torch, weft
from torch.autograd import profiler
from torch.profiler import profile, schedule

KINDS = {
    "profile": profile,
    "schedule": lambda: profile(schedule=schedule(wait=0, warmup=1, active=1)),
    "autograd": profiler.profile,
}

def program(mesh, kind):
    x = weft.ones(4, 3, mesh=mesh, spec=weft.P("dp"))
    with KINDS[kind]() as found:
        (x @ x.T).sum().item()
    return len(found.key_averages()) > 3

for kind in KINDS:
    assert weft.testing.run(lambda mesh: program(mesh, kind), 1, {"dp": 1}) == [kind != "schedule"]
    try:
        weft.testing.run(lambda mesh: program(mesh, kind), 2, {"dp": 2})
    except weft.UnsupportedOpError as error:
        print(error)
"""


def test_the_profiler_is_refused_in_several_ranks() -> None:
    """In a process of its own, which it would end."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROFILED], text=True,
                          capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.profiler.profile(): simulated rank 0 of 2 starts it.") == 3
    assert done.stdout.count("weft run -n 2") == 3

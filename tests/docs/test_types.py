"""Type checkers accept README's programs, and know that operators on ShardTensors give them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_readme import README, REPOSITORY, blocks

pytestmark = pytest.mark.timeout(600)  # a first run of mypy reads torch

TYPES = """
import torch
import weft
from typing import assert_type
from weft import P, ShardTensor

def typed(mesh: weft.Mesh, plain: torch.Tensor) -> None:
    x = weft.distribute_tensor(plain, mesh, P("dp"))
    for each in (x @ plain, 2 * x + 1, -x, x[1:], x.relu().sum(dim=0).mT, x.detach().cpu(),
                 x.redistribute(placements=P()), weft.zeros(3, mesh=mesh), weft.rand(2, mesh=mesh)):
        assert_type(each, ShardTensor)
    assert_type(x.split(2), tuple[ShardTensor, ...])
    assert_type(x.to_local().abs(), torch.Tensor)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("types")
    readme = "\n".join(block.program for block in blocks(README.read_text()))
    (folder / "readme.py").write_text(readme)
    (folder / "types_of_calls.py").write_text(TYPES)
    return folder


def test_pyright(programs: Path) -> None:
    pytest.importorskip("pyright")
    environment = Path(sys.prefix)
    config = {"typeCheckingMode": "basic", "extraPaths": [str(REPOSITORY / "src")],
              "venvPath": str(environment.parent), "venv": environment.name,
              "reportPrivateImportUsage": False, "reportPossiblyUnboundVariable": False}
    (programs / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run([sys.executable, "-m", "pyright", "-p", str(programs)],
                          capture_output=True, text=True)
    assert "0 errors" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif("WEFT_EFFORT" not in os.environ, reason="mypy reads torch for half a minute")
def test_mypy(programs: Path) -> None:
    pytest.importorskip("mypy")
    files = [str(programs / name) for name in ("readme.py", "types_of_calls.py")]
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--follow-imports=silent",
               "--cache-dir", str(REPOSITORY / "out" / "mypy"), *files]
    path = {"MYPYPATH": str(REPOSITORY / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    assert done.returncode == 0, done.stdout + done.stderr

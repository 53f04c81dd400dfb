"""The import ladder holds, and every kind of violation is found.

import-linter's contracts (.importlinter) say which room may import which. What they cannot say is
checked on the syntax trees here: imports inside functions, what comes from outside, parts of torch.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

PURE: frozenset[str] = frozenset()
TORCH = frozenset({"torch"})

OUTSIDE: dict[str, frozenset[str]] = {
    "errors": PURE, "core": PURE, "planner": PURE, "rules": PURE, "propagate": PURE,
    "drawing": PURE,
    "comm": TORCH | {"numpy"}, "rng": TORCH | {"numpy"}, "transport": TORCH, "ops": TORCH,
    "tensor": TORCH, "local": TORCH, "nn": TORCH, "own": TORCH, "spmd": TORCH | {"numpy"},
    "interop": TORCH, "testing": TORCH, "dry": TORCH,
    "cli": TORCH | {"click", "rich", "matplotlib"},
}
"""What each room may import besides the standard library and weft."""

DISTRIBUTED = ("comm/", "interop/", "cli/ranks.py")
"""Where torch.distributed may be used: `weft run` is torch's launcher."""


def violations(package: Path) -> list[str]:
    """What the rooms of `package` import that they must not, as "room/file.py:line: what"."""
    found = []
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package)
        if len(place.parts) == 1:
            continue  # the package's own __init__ gathers the public names
        for line, what in _of_file(place.as_posix(), file.read_text()):
            found.append(f"{place.as_posix()}:{line}: {what}")
    return found


@cache
def _of_file(place: str, text: str) -> list[tuple[int, str]]:
    return list(_in_tree(place, ast.parse(text)))


def _in_tree(place: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    room = place.split("/")[0]
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    yield node.lineno, "an import inside a function"
    for node in ast.walk(tree):
        for line, name in _names(node):
            top = name.split(".")[0]
            if name in ("weft", "importlib") and room != "cli":
                yield line, f"{name} goes around the ladder"
            if top not in sys.stdlib_module_names and top not in OUTSIDE[room] | {"weft"}:
                yield line, f"{room} may not use {top}"
            if f"{name}.".startswith("torch.distributed.") and not (
                place.startswith(DISTRIBUTED)
            ):
                yield line, f"{room} may not use torch.distributed"


def _names(node: ast.AST) -> list[tuple[int, str]]:
    """Lines and modules that a node names; a call of `__import__` counts as importlib."""
    if isinstance(node, (ast.stmt, ast.expr)):
        return [(node.lineno, name) for name in _modules(node)]
    return []


def _modules(node: ast.stmt | ast.expr) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=None):
            return []
        case ast.ImportFrom(module="torch", names=names):
            return [f"torch.{alias.name}" for alias in names]
        case ast.ImportFrom(module="weft", names=names):
            return [f"weft.{each.name}" if each.name in OUTSIDE else "weft" for each in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
            return ["torch.distributed"]
        case ast.Call(func=ast.Name(id="__import__")):
            return ["importlib"]
    return []


def contracts(repository: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict on the sources of a repository."""
    program = "from importlinter.cli import lint_imports_command as main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--config", ".importlinter"],
        cwd=repository, env={**os.environ, "PYTHONPATH": str(repository / "src")},
        capture_output=True, text=True, timeout=120, check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources and contracts, to plant violations in."""
    shutil.copytree(REPOSITORY / "src" / "weft", tmp_path / "src" / "weft",
                    ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / ".importlinter", tmp_path)
    return tmp_path


def plant(repository: Path, file: str, line: str) -> Path:
    """Add a line to the end of a source file; the package that holds it."""
    package = repository / "src" / "weft"
    path = package / file
    path.write_text(path.read_text() + f"\n{line}\n")
    return package


def test_the_contracts_hold() -> None:
    verdict = contracts(REPOSITORY)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_the_syntax_trees_hold() -> None:
    assert violations(REPOSITORY / "src" / "weft") == []


def test_every_room_stands_in_the_table() -> None:
    rooms = {path.name for path in (REPOSITORY / "src" / "weft").iterdir() if path.is_dir()}
    assert rooms - {"__pycache__"} <= OUTSIDE.keys()


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("core/mesh.py", "import weft.tensor", "weft.core is not allowed to import weft.tensor"),
        ("rules/book.py", "from weft.planner import plan",
         "weft.rules is not allowed to import weft.planner"),
        ("planner/plan.py", "import torch", "weft.planner is not allowed to import torch"),
    ],
    ids=["upward", "sibling", "torch"],
)
def test_the_contracts_find_a_planted_violation(
    copy: Path, file: str, line: str, found: str
) -> None:
    plant(copy, file, line)
    verdict = contracts(copy)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert found in verdict.stdout


def test_the_contracts_find_an_unknown_room(copy: Path) -> None:
    room = copy / "src" / "weft" / "attic"
    room.mkdir()
    (room / "__init__.py").touch()
    verdict = contracts(copy)
    assert verdict.returncode == 1, verdict.stdout + verdict.stderr
    assert "weft.attic" in verdict.stdout


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("tensor/call/recipe.py", "def late():\n    import weft.nn", "an import inside a function"),
        ("core/mesh.py", "import weft", "weft goes around the ladder"),
        ("core/mesh.py", "from weft import ShardTensor", "weft goes around the ladder"),
        ("core/mesh.py", "import importlib", "importlib goes around the ladder"),
        ("core/mesh.py", "late = __import__('weft.tensor')", "importlib goes around the ladder"),
        ("core/mesh.py", "import numpy", "core may not use numpy"),
        ("rules/book.py", "import torch.nn", "rules may not use torch"),
        ("transport/execute.py", "import torch.distributed as dist",
         "transport may not use torch.distributed"),
        ("transport/execute.py", "from torch import distributed",
         "transport may not use torch.distributed"),
        ("transport/execute.py", "size = torch.distributed.get_world_size",
         "transport may not use torch.distributed"),
        ("nn/distribute.py", "import rich", "nn may not use rich"),
    ],
)
def test_the_syntax_trees_show_a_planted_violation(
    copy: Path, file: str, line: str, found: str
) -> None:
    package = plant(copy, file, line)
    last = len((package / file).read_text().splitlines())
    assert violations(package) == [f"{file}:{last}: {found}"]

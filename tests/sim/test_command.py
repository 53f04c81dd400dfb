"""The `weft` command as it is installed: what it needs, and what it says where that is missing."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import weft
import weft.nn

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def said(*command: str, without: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Status, output and errors of the installed command where some modules cannot be imported."""
    place, _, name = PROJECT["scripts"]["weft"].partition(":")
    program = f"""
import sys
for name in {without!r}:
    sys.modules[name] = None
sys.argv = ["weft", *{command!r}]
from {place} import {name}
{name}()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_python_m_weft_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "weft", "show", "--mesh", "dp=2", "[4@dp]"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "[4@dp] on Mesh(dp=2): 2 ranks" in done.stdout, done.stderr


def test_the_command_needs_no_more_than_the_plain_install() -> None:
    needed = {each.partition(">=")[0] for each in PROJECT["dependencies"]}
    assert needed == {"torch", "numpy", "click"}
    without = ("rich", "matplotlib")
    assert "Usage: weft " in said("--help", without=without)[1]
    status, shown, errors = said("show", "--mesh", "dp=2", "[4@dp]", without=without)
    assert status == 0 and "2 ranks" in shown, errors


@pytest.mark.parametrize(
    "command, without, sentence",
    [(("--help",), ("click",), "The weft command needs click: pip install click"),
     (("demo",), ("rich",), "Error: weft demo needs rich: pip install rich"),
     (("demo", "--steps", "2"), ("rich", "matplotlib"),
      "Error: weft demo needs rich and matplotlib: pip install rich matplotlib")],
    ids=["click", "rich", "both"])
def test_what_is_missing_is_said_in_a_sentence(
    command: tuple[str, ...], without: tuple[str, ...], sentence: str
) -> None:
    status, shown, errors = said(*command, without=without)
    assert (status, shown, errors) == (1, "", sentence + "\n")


def test_help_needs_no_other_package() -> None:
    status, shown, _ = said("demo", "--steps", "2", "--help", without=("rich",))
    assert status == 0 and shown.startswith("Usage: weft demo ")
    assert "weft demo needs rich: pip install rich" in shown


def test_demo_and_bench_are_installed_with_weft(tmp_path: Path) -> None:
    for name in ("src", "bench", "examples"):
        shutil.copytree(REPOSITORY / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"]
    subprocess.run(build, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    program = """
from weft.cli.main import main
for name in ("demo", "bench"):
    main([name, "--help"], standalone_mode=False)
import bench, demo
print(bench.__path__, demo.__path__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=60, check=False, cwd=tmp_path / "built",
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "built")})
    assert done.returncode == 0, done.stderr
    assert "Train one transformer" in done.stdout and "bench [OPTIONS]" in done.stdout
    tools = tmp_path / "built" / "weft" / "tools"
    assert done.stdout.splitlines()[-1] == f"['{tools / 'bench'}'] ['{tools / 'demo'}']"


def test_the_example_says_what_it_needs() -> None:
    program = "import sys, runpy; sys.modules['sklearn'] = None; " \
              "runpy.run_path('examples/annotate.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=60, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (
        1, "examples/annotate.py needs sklearn: pip install rich scikit-learn\n")


def test_checkers_of_users_see_types() -> None:
    """`py.typed` is installed, and every public function and method has types."""
    packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in packages["package-data"]["weft"]
    assert (Path(str(weft.__file__)).parent / "py.typed").is_file()
    untyped = []
    for room in (weft, weft.spmd, weft.nn, weft.testing, weft.collectives):
        for name, function in _functions(room):
            signature = inspect.signature(function)
            open_ends = [one.name for one in signature.parameters.values()
                         if one.annotation is one.empty and one.name not in ("self", "cls")]
            if open_ends or signature.return_annotation is signature.empty:
                untyped.append(f"{room.__name__}.{name}({', '.join(open_ends)})")
    assert not untyped


def _functions(room: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    for name in room.__all__:
        value = getattr(room, name)
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for key, one in vars(value).items():
                one = getattr(one, "__func__", one)
                if inspect.isfunction(one) and not key.startswith("_"):
                    yield f"{name}.{key}", one

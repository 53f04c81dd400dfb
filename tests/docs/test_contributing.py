"""What CONTRIBUTING.md, the workflow and the hooks call exists; the version has one place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import weft

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()
TARGETS = set(re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def loaded(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / name).read_text())


def test_the_page_names_what_exists() -> None:
    assert set(re.findall(r"\bmake (\w+)", PAGE)) <= TARGETS
    files = re.findall(r"(?:tests|docs|src)/[\w/.*]*\w|\.\w+linter|CHANGELOG\.md", PAGE)
    assert len(set(files)) > 12
    for name in files:
        assert list(REPOSITORY.glob(name)), name


def test_the_workflow_and_the_hooks_run_the_checks() -> None:
    (job,) = loaded(".github/workflows/ci.yml")["jobs"].values()
    run = [step["run"].split()[1] for step in job["steps"] if "run" in step]
    assert run == ["setup", "check", "test", "docs"] and {*run} <= TARGETS
    (hooks,) = (each["hooks"] for each in loaded(".pre-commit-config.yaml")["repos"])
    check = re.search(r"^check:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.M)
    assert check is not None
    for line in check[1].splitlines():
        command = line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .")
        assert any(hook["entry"].startswith(command) for hook in hooks), line


def test_the_version_stands_in_one_place() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version", "readme"]
    version = settings["tool"]["setuptools"]["dynamic"]["version"]
    assert version == {"attr": "weft._version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", weft.__version__)

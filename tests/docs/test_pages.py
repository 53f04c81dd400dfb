"""The programs of all pages print what stands below them, and names of weft there exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from tests.docs import test_coverage as coverage
from tests.docs.fill import filled
from tests.docs.test_readme import blocks, outputs
from weft.cli.main import main
from weft.tensor.call.own.functions import OWN

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SILENT = {
    "adding_an_op": 7, "architecture": 1,
    **dict.fromkeys(("dtensor", "fsdp", "jax", "physicsnemo", "torch_xla"), 1),
}
"""Programs that print nothing: quoted (with a test of their own), or the set-up of a table."""
BESIDE_OTHERS = ("coverage", "museum", "comparison")
ALL = [*sorted(DOCS.rglob("*.md")), *sorted(REPOSITORY.glob("*.md"))]
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "```python\n" in path.read_text()]


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes back what a page registers, and the hook that init_process_group sets."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = dict(OWN)
    yield
    for op in [op for op in OWN if op not in before]:
        weft.unregister_rule(op)
        weft.unregister_handler(op)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_programs_print_what_is_shown(path: Path, as_before: None) -> None:
    page = path.read_text()
    found = blocks(page)
    assert page.count("```python\n") == len(found) + SILENT.get(path.stem, 0)
    assert outputs(found, path.name) == [block.shown for block in found]


def test_outputs_are_filled_in() -> None:
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    assert filled(page, "page") == page.replace("2", "1")


def test_the_names_of_weft_exist() -> None:
    """Beside names of others, on the pages that compare, only those that begin with `weft.`"""
    count, missing = 0, []
    for path in ALL:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
        compares = path.stem in BESIDE_OTHERS or path.parent.name == "migration"
        roots = "weft" if compares else "|".join(coverage.ROOTS)
        named = re.findall(rf"`((?:{roots})\.[\w.]*\w)", prose)
        missing += [f"{path.name}: {name}" for name in named if not coverage.exists(name)]
        count += len(named)
    assert missing == [] and count > 300


def test_the_commands_exist() -> None:
    named = {name for path in ALL
             for name in re.findall(r"(?:`|^    )weft (\w+)", path.read_text(), re.MULTILINE)}
    assert named == {*main.commands}

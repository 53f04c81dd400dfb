"""The programs of the pages for users print what stands below them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.fill import filled
from tests.docs.test_readme import blocks, outputs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted((DOCS / "tutorial").glob("*.md")),
         *(DOCS / f"{name}.md" for name in ("index", "cookbook", "comparison", "faq", "dry_run"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_programs_print_what_is_shown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group sets one
    page = path.read_text()
    found = blocks(page)
    shown = page.count("```text\n")
    assert len(found) == shown
    assert shown or (path.name == "index.md" and path.parent.name == "tutorial")
    assert outputs(found, path.name) == [block.shown for block in found]


def test_outputs_are_filled_in() -> None:
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    assert filled(page, "page") == page.replace("2", "1")

"""The programs of docs/fields.md give what the page shows."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_readme import blocks, outputs

PAGE = (Path(__file__).parents[2] / "docs" / "fields.md").read_text()


def test_the_programs_run() -> None:
    found = blocks(PAGE)
    assert len(found) == 4
    assert outputs(found, "fields.md") == [block.shown for block in found]

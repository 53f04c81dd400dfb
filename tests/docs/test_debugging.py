"""The program of docs/debugging.md runs and prints what stands below it."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_readme import blocks, outputs

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"


def test_the_error_is_the_one_shown() -> None:
    found = blocks(PAGE.read_text())
    assert len(found) == 1
    assert outputs(found, PAGE.name) == [block.shown for block in found]

"""docs/packages.md: its programs run, in order, and print what stands below them."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_readme import blocks, outputs

PAGE = Path(__file__).parents[2] / "docs" / "packages.md"


def test_programs_print_what_is_shown() -> None:
    page = PAGE.read_text()
    found = blocks(page)
    assert len(found) == page.count("```python\n") == page.count("```text\n") == 3
    assert outputs(found, PAGE.name) == [block.shown for block in found]

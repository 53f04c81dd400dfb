"""The programs of docs/training.md run."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_readme import blocks, outputs

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_programs_run() -> None:
    found = blocks(PAGE)
    assert len(found) == PAGE.count("```python\n") == PAGE.count("```text\n") == 7
    assert outputs(found, "training.md") == [block.shown for block in found]

"""The programs of docs/modules.md run, and the names of `weft.nn` that the page says exist."""

from __future__ import annotations

import re
from pathlib import Path

import weft
from tests.docs.test_readme import blocks, outputs

PAGE = (Path(__file__).parents[2] / "docs" / "modules.md").read_text()


def test_the_programs_run() -> None:
    found = blocks(PAGE)
    assert len(found) == PAGE.count("```python\n") == PAGE.count("```text\n") == 6
    assert outputs(found, "modules.md") == [block.shown for block in found]


def test_the_page_names_all_of_weft_nn() -> None:
    named = {name for name in re.findall(r"\w+", PAGE) if hasattr(weft.nn, name)}
    assert set(weft.nn.__all__) - {"Report"} <= named

"""docs/modules.md names all of `weft.nn`."""

from __future__ import annotations

import re
from pathlib import Path

import weft

PAGE = (Path(__file__).parents[2] / "docs" / "modules.md").read_text()


def test_the_page_names_all_of_weft_nn() -> None:
    named = {name for name in re.findall(r"\w+", PAGE) if hasattr(weft.nn, name)}
    assert set(weft.nn.__all__) - {"Report"} <= named

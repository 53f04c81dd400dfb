"""The table of docs/regions.md has every collective."""

from __future__ import annotations

import re
from pathlib import Path

from weft import collectives

PAGE = (Path(__file__).parents[2] / "docs" / "regions.md").read_text()


def test_the_table_has_every_collective() -> None:
    rows = PAGE.split("## Collectives")[1].split("\n\n")[1].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(collectives.__all__)

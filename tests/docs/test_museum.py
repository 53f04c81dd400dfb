"""docs/museum.md shows the exhibits as they are; a few of them are run again."""

from __future__ import annotations

import re
from pathlib import Path

from tests.museum.__main__ import code_of
from tests.museum.exhibits import EXHIBITS
from tests.museum.halls import RIGHT, Exhibit, judge

PAGE = (Path(__file__).parents[2] / "docs" / "museum.md").read_text()
SHOWN = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def row(exhibit: Exhibit, rows: int) -> tuple[str, ...]:
    line = re.search(rf"^\| {rows} \| (.*) \| (.*) \|$", SHOWN[exhibit.says], re.MULTILINE)
    assert line is not None
    return line.groups()


def test_every_exhibit_is_shown_with_its_program() -> None:
    assert len(EXHIBITS) >= 40
    assert sorted(SHOWN) == sorted(each.says for each in EXHIBITS)
    for each in EXHIBITS:
        assert f"```py\n{code_of(each)}\n```" in SHOWN[each.says]


def test_weft_is_right_in_every_exhibit() -> None:
    assert [(each.says, rows) for each in EXHIBITS for rows in each.rows
            if row(each, rows)[0] != RIGHT] == []


def test_the_page_is_what_weft_gives() -> None:
    runs = [(each, each.rows[1]) for each in EXHIBITS if each.mesh == (4,)][:30]
    assert [verdict for verdict in judge(runs, "weft") if verdict != RIGHT] == []

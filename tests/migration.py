"""The tables of docs/migration.md: their lines of weft, and what they are said to give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import Layout, ShardTensor

PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
CODE = re.compile(r"`([^`]+)`")
DTENSORS = "DTensors in and out"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of weft, its section, its line in the page, and what it gives; "" is not compared."""

    section: str
    number: int
    code: str
    gives: str


def rows(first: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of the table `first | weft`, with the lines that they stand in."""
    inside = False
    for number, line in enumerate(PAGE.splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif set(line) <= set("|-"):
            continue
        elif inside:
            yield number, cells
        elif cells == [first, "weft"]:
            inside = True


def lines() -> list[Line]:
    """The lines of all tables that end in `weft | gives`."""
    section, inside, found = "", False, []
    for number, line in enumerate(PAGE.splitlines(), 1):
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line[1:].strip().removesuffix("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[-2:] == ["weft", "gives"]:
            inside = True
        elif inside and not set(line) <= set("|-"):
            code, gives = (CODE.findall(cell) for cell in cells[-2:])
            assert len(code) == 1 and len(gives) <= 1, f"line {number}: {cells[-2:]}"
            found.append(Line(section, number, code[0], *gives or [""]))
    return found


def setup() -> str:
    """The program at the page's beginning."""
    found = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def run(chosen: list[Line], mesh: Any, **more: Any) -> list[str]:
    """What each line gives, as text, each with names of its own."""
    given = []
    for line in chosen:
        names: dict[str, Any] = {}
        exec(setup(), names)
        names |= {**names["names"](mesh), **more}
        ast.parse(line.code, mode="eval")
        try:
            given.append(_text(eval(line.code, names)))
        except Exception as error:
            error.add_note(f"docs/migration.md, line {line.number}: {line.code}")
            raise
    return given


def _text(value: Any) -> str:
    if isinstance(value, ShardTensor):
        return str(value.sharding)
    return str(value.text() if isinstance(value, Layout) else value)

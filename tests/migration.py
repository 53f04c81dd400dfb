"""The tables of docs/migration: their lines of weft, and what they are said to give."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import Layout, ShardTensor

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {path.stem: path.read_text() for path in
         (DOCS / "migration.md", *sorted((DOCS / "migration").glob("*.md")))}
CODE = re.compile(r"`([^`]+)`")
DTENSORS = "DTensors in and out"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of weft, its page and section, its line there, and what it gives ("": anything)."""

    page: str
    section: str
    number: int
    code: str
    gives: str


def _rows(page: str, *last: str) -> Iterator[tuple[str, int, list[str]]]:
    """Section, line and cells of the rows of the tables whose head ends so."""
    section, inside = "", False
    for number, line in enumerate(PAGES[page].splitlines(), 1):
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line[1:].strip().removesuffix("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[-len(last):] == [*last]:
            inside = True
        elif inside and not set(line) <= set("|-"):
            yield section, number, cells


def rows(page: str) -> list[tuple[int, list[str]]]:
    """The rows of the tables `... | weft`, with the lines that they stand in."""
    return [(number, cells) for _, number, cells in _rows(page, "weft")]


def lines() -> list[Line]:
    """The lines of all tables that end in `weft | gives`."""
    found = []
    for page in PAGES:
        for section, number, cells in _rows(page, "weft", "gives"):
            code, gives = (CODE.findall(cell) for cell in cells[-2:])
            assert code and len(gives) <= 1, f"{page}, line {number}: {cells[-2:]}"
            found.append(Line(page, section, number, code[-1], *gives or [""]))
    return found


def setup(page: str) -> str:
    """The program that the page's lines assume."""
    for found in re.findall(r"^```python\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL):
        if "def names(mesh)" in found:
            return found
    raise AssertionError(f"{page}: no program that defines names(mesh)")


def run(chosen: list[Line], mesh: Any, **more: Any) -> list[str]:
    """What each line gives, as text, each with names of its own."""
    given = []
    for line in chosen:
        names: dict[str, Any] = {}
        exec(setup(line.page), names)
        names |= {**names["names"](mesh), **more}
        is_block = line.code.startswith("with ")
        ast.parse(line.code, mode="exec" if is_block else "eval")
        try:
            given.append(_text((exec if is_block else eval)(line.code, names)))
        except Exception as error:
            error.add_note(f"docs/migration, {line.page}, line {line.number}: {line.code}")
            raise
    return given


def _text(value: Any) -> str:
    if isinstance(value, ShardTensor):
        return str(value.sharding)
    return str(value.text() if isinstance(value, Layout) else value)

"""docs/architecture.md names the rooms that exist, in the order that the linter enforces."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()
ROOMS = {path.parent.name for path in (REPOSITORY / "src" / "weft").glob("*/__init__.py")}
NAMED = re.compile(r"`((?:src|tests|docs|examples|bench|tensor|transport)/[\w/.]+)`")


def test_the_ladder_is_the_linter_s() -> None:
    config = ConfigParser()
    config.read(REPOSITORY / ".importlinter")
    layers = config["importlinter:contract:ladder"]["layers"].strip().splitlines()
    enforced = [
        {room.strip() for room in layer.split("|") if "(" not in room} | {
            room.strip(" ()") for room in layer.split("|") if room.strip(" ()") in ROOMS
        }
        for layer in reversed(layers)
    ]
    match = re.search(r"^errors < .*$", PAGE, re.MULTILINE)
    assert match is not None
    assert [set(layer.split(", ")) for layer in match[0].split(" < ")] == enforced


def test_the_table_has_every_room() -> None:
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"\w+", cell)} == ROOMS


def test_files_that_the_pages_name_exist() -> None:
    count = 0
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        named = NAMED.findall(page.read_text())
        count += len(named)
        for name in named:
            inside = name if (REPOSITORY / name.split("/")[0]).is_dir() else f"src/weft/{name}"
            assert (REPOSITORY / inside).exists(), f"{page.name}: {name}"
    assert count > 60

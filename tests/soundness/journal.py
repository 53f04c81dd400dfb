"""What the check of rules has found, a line of JSON for each entry, so that it can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Checked", "Journal"]


@dataclass(frozen=True, slots=True)
class Checked:
    """An entry of the database, how many of its calls and ways were tried, and per call the op,
    what it was called with, the number of ways, and its faults."""

    entry: str
    most: int
    every: int
    calls: list[Any]


class Journal:
    """A file that grows by the entries that were checked to their end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, checked: Checked) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(checked)) + "\n")

    def checked(self) -> list[Checked]:
        """The last check of each entry, with so many calls and ways."""
        last: dict[tuple[str, int, int], Checked] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                it = Checked(**json.loads(line))
                last[it.entry, it.most, it.every] = it
        return list(last.values())

"""What the sweep has found, a line of JSON for each call, so that it can go on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Done", "Found", "Journal"]


@dataclass(frozen=True, slots=True)
class Found:
    """One call: an entry of the database, a dtype, a variant, a sample, a way, and its verdict."""

    system: str
    op: str
    dtype: str
    variant: str
    sample: str
    way: str
    kind: str
    detail: str = ""
    nbytes: Sequence[int] | None = None
    most: Sequence[int] | None = None
    whole: bool = False


Done = tuple[str, str, str, str]
"""System, op, dtype and variant, all of whose samples have been run."""


class Journal:
    """A file that grows; the end of each op is written as well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, found: Found) -> None:
        self._write(asdict(found))

    def finish(self, done: Done) -> None:
        self._write({"done": done})

    def begin(self, code: str) -> None:
        """What is found from here on is of this state of the code."""
        self._write({"code": code})

    def leave_out(self, job: Done, why: str) -> None:
        self._write({"left_out": job, "why": why})

    def _write(self, line: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> Iterator[dict]:
        if self.path.exists():
            with self.path.open() as file:
                yield from map(json.loads, file)

    def done(self) -> set[Done]:
        """What need not be run again."""
        return {tuple(line["done"]) for line in self._lines() if "done" in line}  # type: ignore[misc]

    def found(self) -> list[Found]:
        """The calls of what was run to its end, the last run of each."""
        last: dict[tuple[str, ...], Found] = {}
        for line in self._lines():
            if "kind" in line:
                it = Found(**line)
                last[it.system, it.op, it.dtype, it.variant, it.sample, it.way] = it
        return list(last.values())

    def codes(self) -> dict[Done, str]:
        """The state of the code that each job was last run on, where it is known."""
        now, found = "", {}
        for line in self._lines():
            now = line.get("code", now)
            if "done" in line:
                job: Any = tuple(line["done"])
                found[job] = now
        return found

    def left_out(self) -> dict[Done, list[str]]:
        """Why samples were not run."""
        reasons: dict[Done, list[str]] = {}
        for line in self._lines():
            if "left_out" in line:
                job: Any = tuple(line["left_out"])
                reasons[job] = list(dict.fromkeys([*reasons.get(job, []), line["why"]]))
        return reasons

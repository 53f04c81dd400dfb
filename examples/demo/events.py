"""What the ranks of the demo tell to whom shows it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core import Layout

__all__ = ["Parameter", "Traffic"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where a parameter lives."""

    name: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind that one rank took part in during one step; bytes received."""

    axes: str
    op: str
    direction: str
    collective: str
    num_calls: int
    nbytes: int

"""What the ranks of the demo tell to whom shows it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Box", "Parameter", "Traffic"]

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where a parameter lives: its layout, and the block of every rank."""

    name: str
    layout: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind that one rank took part in during one step; bytes received."""

    axes: str
    op: str
    direction: str
    collective: str
    num_calls: int
    nbytes: int

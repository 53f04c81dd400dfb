"""XLA's view of a layout: its type, and which devices hold which tile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from weft.core import Layout

__all__ = ["OpSharding", "ShardingType"]


class ShardingType(IntEnum):
    """Kinds of shardings, with torch_xla's numbers. `PARTIAL` is tiled and replicated, as there:
    each tile lies on several devices. (weft's partial sums have no name in XLA's op-sharding.)"""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5


@dataclass(frozen=True)
class OpSharding:
    """An op-sharding. Its text is the HLO string.

    Attributes:
        type: the kind.
        tile_assignment: device ids in nested lists, one level per dim (and a last one for the
            replicas of a tile); empty where all is replicated.
        group_assignment: the number of each tile's group of replicas, nested like the tiles.
        replication_groups: the device ids of every group.
    """

    layout: Layout
    type: ShardingType
    tile_assignment: list[Any]
    group_assignment: list[Any]
    replication_groups: list[list[int]]

    @classmethod
    def of(cls, layout: Layout) -> OpSharding:
        """The op-sharding of a layout.

        Raises:
            PlacementError: partial axes, or cuts that are not flat.
        """
        found = layout.tile_assignment
        groups = [list(group) for group in found.replication_groups]
        if len(groups) == 1:
            return cls(layout, ShardingType.REPLICATED, [], [], groups)
        is_tiled = found.num_replicas == 1
        last = () if is_tiled else (found.num_replicas,)
        return cls(
            layout, ShardingType.TILED if is_tiled else ShardingType.PARTIAL,
            _nested(found.devices, (*found.tiles, *last)),
            _nested(range(len(groups)), found.tiles), groups,
        )

    def __str__(self) -> str:
        return self.text()

    def text(self, version: int = 2) -> str:
        """The HLO string of version 1 or 2 (1 where the device ids are no transposed iota)."""
        return self.layout.hlo_sharding(version)


def _nested(values: Any, shape: tuple[int, ...]) -> list[Any]:
    out: list[Any] = list(values)
    for length in reversed(shape[1:]):
        out = [out[at : at + length] for at in range(0, len(out), length)]
    return out

"""XLA's view of a layout: its type, and which devices hold which tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from weft.core import Layout
from weft.errors import PlacementError

__all__ = ["OpSharding", "ShardingType"]


class ShardingType(IntEnum):
    """Kinds of shardings, with torch_xla's numbers. `PARTIAL` is tiled and replicated, as there:
    each tile is on several devices. (weft's partial sums have no name in XLA's op-sharding.)
    `UNKNOWN`, which XLA uses for what is not decided yet, never occurs here."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@dataclass(frozen=True)
class OpSharding:
    """An op-sharding. Its text is the HLO string. Devices are listed only on request.

    Attributes:
        type: the kind.
    """

    layout: Layout
    type: ShardingType

    @classmethod
    def of(cls, layout: Layout) -> OpSharding:
        """The op-sharding of a layout.

        Raises:
            PlacementError: partial axes, or cuts that are not flat.
        """
        found = layout.tile_assignment
        if math.prod(found.tiles) == 1:
            return cls(layout, ShardingType.REPLICATED)
        return cls(
            layout, ShardingType.TILED if found.num_replicas == 1 else ShardingType.PARTIAL
        )

    @cached_property
    def tile_assignment(self) -> list[Any]:
        """Device ids in nested lists, one level per dim (and a last one for the replicas of a
        tile); empty if all is replicated."""
        found = self.layout.tile_assignment
        if self.type == ShardingType.REPLICATED:
            return []
        last = () if self.type == ShardingType.TILED else (found.num_replicas,)
        return _nested(found.devices, (*found.tiles, *last))

    @cached_property
    def group_assignment(self) -> list[Any]:
        """The number of each tile's group of replicas, nested like the tiles."""
        tiles = self.layout.tile_assignment.tiles
        if self.type == ShardingType.REPLICATED:
            return []
        return _nested(range(math.prod(tiles)), tiles)

    @cached_property
    def replication_groups(self) -> list[list[int]]:
        """The device ids of every group."""
        return [list(group) for group in self.layout.tile_assignment.replication_groups]

    def __str__(self) -> str:
        """Version 2; version 1 if the device ids are not a transposed iota, as XLA prints it."""
        try:
            return self.text(2)
        except PlacementError:
            return self.text(1)

    def text(self, version: int = 2) -> str:
        """The HLO string of version 1 or 2 (1 if the device ids are not a transposed iota).

        Args:
            version: 1 or 2.
        """
        return self.layout.hlo_sharding(version)


def _nested(values: Any, shape: tuple[int, ...]) -> list[Any]:
    out: list[Any] = list(values)
    for length in reversed(shape[1:]):
        out = [out[at : at + length] for at in range(0, len(out), length)]
    return out

"""Meshes, placements, specs and layouts as plain values. Standard library only."""

from weft.core.cover import Cover, Interval, Reads
from weft.core.cuts import (
    balanced_cuts,
    default_cuts,
    filled_cuts,
    finer_cuts,
    flat_cuts,
    on_multiples,
)
from weft.core.encoding import Sizes
from weft.core.layout import Box, Layout
from weft.core.mesh import AxisName, Mesh, as_mesh
from weft.core.partition_spec import P
from weft.core.placement import (
    KINDS,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    as_placement,
    is_placements,
)
from weft.core.stretched import StretchedLayout, as_boxes, in_stretches

__all__ = [
    "KINDS", "AxisName", "Box", "Cover", "Interval", "Layout", "Mesh", "P", "Partial", "Placement",
    "Reads", "Replicate", "Shard", "Sizes", "StretchedLayout", "StridedShard", "as_boxes",
    "as_mesh", "as_placement", "balanced_cuts", "default_cuts", "filled_cuts", "finer_cuts",
    "flat_cuts", "in_stretches", "is_placements", "on_multiples",
]

"""What public functions accept as a mesh, and as placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.partition_spec import P

__all__ = ["MeshLike", "Placements"]


class DeviceMesh(Protocol):
    """torch's DeviceMesh, by the attributes that distinguish it from weft's meshes."""

    @property
    def mesh_dim_names(self) -> Any: ...

    @property
    def mesh(self) -> Any: ...


class HasLayout(Protocol):
    """A ShardTensor, by the attributes that give its layout."""

    @property
    def sharding(self) -> Layout: ...


MeshLike = Mesh | DeviceMesh
"""A mesh of weft (a value, or bound to this rank) or torch's DeviceMesh."""

Placements = P | Layout | HasLayout | Sequence[Any]
"""A spec (`P("dp", None)`), one placement per mesh axis (weft's or torch's), a layout, or a
ShardTensor that has the wanted layout."""

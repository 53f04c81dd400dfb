"""The mesh of the innermost region of this thread, in which code runs on local tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import AxisName
from weft.core.arguments import MeshLike

__all__ = ["Axes", "axes_of", "mesh_of_region", "region"]

Axes = AxisName | int | tuple[AxisName | int, ...]
"""One mesh axis, by name or number, or several, major to minor."""


class _Regions(threading.local):
    def __init__(self) -> None:
        self.meshes: list[BoundMesh] = []


_REGIONS = _Regions()


@contextmanager
def region(mesh: BoundMesh) -> Iterator[None]:
    """Inside, collectives run over the axes of this mesh."""
    _REGIONS.meshes.append(mesh)
    try:
        yield
    finally:
        _REGIONS.meshes.pop()


def mesh_of_region(mesh: MeshLike | None, call: str) -> BoundMesh:
    """A given mesh, else that of the innermost region, else the current one; else MeshError."""
    if mesh is None and _REGIONS.meshes:
        return _REGIONS.meshes[-1]
    return as_bound_mesh(mesh, f"{call}(mesh=)")


def axes_of(mesh: BoundMesh, axes: Axes, call: str) -> tuple[int, ...]:
    """Axes by number, in the order given; MeshError for one that the mesh does not have, or one
    twice."""
    given = axes if isinstance(axes, tuple) else (axes,)
    return mesh.axes(given, call)

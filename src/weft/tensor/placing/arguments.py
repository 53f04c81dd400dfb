"""The layout of a tensor, as users pass it: by weft's names or torch's, in any position.

A mesh is `mesh=` or `device_mesh=`, a layout `spec=` or `placements=`. A misplaced argument is
recognized by its type, so that the error can show the call as it was meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, TypedDict

import torch

from weft.comm import BoundMesh, as_bound_mesh, current_mesh, get_global_mesh
from weft.core import Layout, Mesh, P, Placement, is_placements
from weft.core.arguments import MeshLike, Placements
from weft.core.names import ADVICE, PLACEMENTS, own_names
from weft.errors import LayoutError, ShardTypeError, UnsupportedOpError
from weft.tensor.placing.layouts import as_layout
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["Where", "mesh_and_placements", "mesh_for", "place", "shape_of"]


class Where(TypedDict, total=False):
    """What a factory takes beside its size and dtype.

    mesh or device_mesh: the mesh; None means the current one. spec or placements: a P, placements
    or a Layout; None replicates. layout: torch's, which is torch.strided.
    """

    mesh: MeshLike | None
    device_mesh: MeshLike | None
    spec: Placements | None
    placements: Placements | None
    layout: torch.layout


def place(call: str, shape: Sequence[int], where: Where) -> tuple[BoundMesh, Layout]:
    """The mesh and the layout passed to a factory.

    Raises:
        ShardTypeError: one thing given by two names, or an unknown name.
        UnsupportedOpError: a layout of torch that is not dense.
    """
    named = own_names(call, where, _OTHER_NAMES, _NAMES, _ADVICE)
    form = named.get("layout", torch.strided)
    if form is not torch.strided:
        kind = UnsupportedOpError if isinstance(form, torch.layout) else ShardTypeError
        raise kind(
            f"{call}(layout=)", f"layout={form} is of type {type(form).__name__}",
            "layout is torch's own, torch.strided, as a ShardTensor's blocks are dense; placements "
            "say where a tensor is", [str(form)], f"{call}(..., placements=...)")
    placements = named.get("placements")
    name = "device_mesh" if where.get("device_mesh") is not None else "mesh"
    bound = mesh_for(named.get("mesh"), placements, f"{call}({name}=)")
    return bound, as_layout(bound, shape, placements, f"{call}(placements)")


_OTHER_NAMES = {"device_mesh": "mesh", **PLACEMENTS}
_NAMES = ("dtype", "requires_grad", "mesh", "placements", "layout")
_ADVICE = {
    **ADVICE, "device": 'the mesh says where tensors live: weft.init_mesh(axes, "cuda")',
    **dict.fromkeys(("size", "shape"), "lengths come first, without a name: (8, 4, ...)"),
}


def mesh_for(mesh: Any, placements: Any, call: str) -> BoundMesh:
    """The mesh of a new tensor: the given one, the current one, or else that of its Layout."""
    if mesh is None and isinstance(placements, Layout) and (
        current_mesh() is None and get_global_mesh() is None
    ):
        mesh = placements.mesh
    return as_bound_mesh(mesh, call)


def shape_of(call: str, size: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape of `weft.zeros(4, 5)` or `weft.zeros((4, 5))`."""
    given, fits = size, True
    if size and isinstance(size[0], Sequence) and not isinstance(size[0], (str, P)) and not (
        is_placements(size[0])
    ):
        given, fits = (*size[0], *size[1:]), len(size) == 1
    lengths = [_length(one) for one in given]
    negative = [f"dim {dim}: {length}" for dim, length in enumerate(lengths) if (length or 0) < 0]
    if negative:
        raise LayoutError(
            f"{call}(*size)", f"{len(negative)} of {len(lengths)} lengths are negative",
            "a length is at least 0", negative, f"{call}(8, 16, mesh=mesh)")
    if fits and None not in lengths:
        return tuple(lengths)  # type: ignore[arg-type]
    wrong = size[1:] if not fits else [one for one, length in zip(given, lengths) if length is None]
    shape = ", ".join(repr(one) for one in lengths if one is not None)
    raise ShardTypeError(
        f"{call}(*size)", f"{len(wrong)} of {len(size)} positional arguments are no "
        "lengths", "positional arguments are the global shape; mesh and placements are "
        "given by name", [f"{one!r} ({type(one).__name__})" for one in wrong],
        f"{call}({', '.join([shape] * bool(shape) + [_named(one) for one in wrong])})")


def _length(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def _named(value: Any) -> str:
    """A positional argument as the keyword that it was meant for."""
    if isinstance(value, P) or is_placements(value):
        return f"placements={value!r}"
    if isinstance(value, (Layout, ShardTensor)):
        return "placements=..."
    if isinstance(value, torch.dtype):
        return f"dtype={value}"
    return "mesh=mesh" if isinstance(value, Mesh) or hasattr(value, "mesh_dim_names") else "..."


def mesh_and_placements(device_mesh: Any, placements: Any) -> tuple[Any, Any]:
    """Both; placements may come first if the mesh is known otherwise."""
    if placements is None and device_mesh is not None and (
        isinstance(device_mesh, (P, Placement, Layout, ShardTensor)) or is_placements(device_mesh)
    ):
        return None, device_mesh
    return device_mesh, placements

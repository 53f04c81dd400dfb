"""How the blocks of ranks make up one tensor: a caller's statements, checked.

Every rank with the same statements knows all of this, so all ranks find a contradiction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from weft.comm import BoundMesh
from weft.core import Layout, P, Shard
from weft.core.integers import integers
from weft.errors import LayoutError, ShardTypeError
from weft.tensor.placing.layouts import as_layout

__all__ = ["form_of", "is_asked", "said_layout"]

_ASKS = ("infer", "chunk")
"""Sizes that ranks have to exchange."""

_FIX = "from_local(x, mesh, [Shard(0)], sizes={0: (3, 2)})"

Map = Mapping[Any, Any]


def is_asked(placements: Any, shape: Any, sizes: Any, shapes: Any) -> bool:
    """Whether ranks have to exchange the sizes of their blocks. It depends only on the arguments,
    not on the local tensor, which is each rank's own."""
    is_map = isinstance(sizes, Mapping)
    if not is_map and sizes not in _ASKS:
        raise LayoutError(
            "from_local(sizes=)", f"sizes is {sizes!r}",
            'sizes is "infer", "chunk" or a map tensor dim -> sizes in shard order',
            [repr(sizes)], _FIX)
    if shapes is not None and not isinstance(shapes, Mapping):
        kind = LayoutError if isinstance(shapes, str) else ShardTypeError
        raise kind(
            "from_local(sharding_shapes=)", f"it is of type {type(shapes).__name__}, and sizes is "
            f"{sizes!r}", 'sharding_shapes is "infer", "chunk" or a map mesh dim -> shapes of the '
            "shards along it, and says the same as sizes, which is then left out", [repr(shapes)],
            "sharding_shapes={0: [(3, 6), (2, 6)]}")
    if isinstance(placements, Layout) or shape is not None or is_map or shapes is not None:
        return False
    if isinstance(placements, P):
        return any(entry not in (None, ()) for entry in placements.entries)
    return isinstance(placements, (list, tuple)) and any(
        getattr(one, "dim", None) is not None and not getattr(one, "sizes", None)
        for one in placements
    )


def form_of(mesh: BoundMesh, ndim: int, placements: Any, call: str) -> Layout:
    """Which axes shard which dim; lengths and sizes are arbitrary."""
    if isinstance(placements, (list, tuple)):
        placements = [
            type(one)(one.dim) if isinstance(one, Shard) and one.sizes else one
            for one in placements
        ]
    return Layout.placed(mesh, (0,) * ndim, placements, call)


def said_layout(
    mesh: BoundMesh, local: Sequence[int], placements: Any, shape: Any, sizes: Any, shapes: Any,
    call: str,
) -> Layout:
    """The layout of local tensors, given this rank's shape `local` and the caller's statements,
    which have to be complete and consistent."""
    if isinstance(placements, Layout):
        return as_layout(mesh, placements.shape, placements)
    if mesh.here is None and shape is None:
        raise LayoutError(
            "from_local(shape=)", f"rank {mesh.rank} is outside {mesh.abstract!r} and "
            "does not give the global shape",
            "a rank outside the mesh exchanges nothing, so it has to give the global shape",
            ["shape=None"], "from_local(x, mesh, [Shard(0)], shape=(8, 4)), or a Layout")
    ndim = len(local) if shape is None else len(shape)
    form = form_of(mesh, ndim, placements, call)
    told = {_dim(dim, ndim): given for dim, given in sizes.items()} if (
        isinstance(sizes, Mapping)) else {}
    if shapes is not None:
        told = _with_shapes(told, form, shapes)
    if shape is not None:
        return Layout.placed(mesh, shape, placements, call, told or None)
    placed = {
        one.dim % ndim: one.sizes for one in placements if getattr(one, "sizes", None)
    } if isinstance(placements, (list, tuple)) else {}
    lengths, wrong = list(local), []
    for dim, axes in enumerate(form.dims):
        given = told.get(dim, placed.get(dim))
        if given is None and axes:
            wrong.append(f"dim {dim}, in {form.num_shards(dim)} shards")
        elif isinstance(given, str):
            wrong.append(f"dim {dim}: {given!r}, of no known length")
        elif given is not None:
            lengths[dim] = sum(integers(given, f"from_local(sizes={{{dim}: ...}})", "sizes", _FIX))
    if wrong:
        name = "sizes=" if shapes is None else "sharding_shapes="
        raise LayoutError(
            f"from_local({name})", f"{len(told)} dims are given, and {len(wrong)} that the "
            f"placements shard are not", "without shape=, every sharded dim has its "
            "sizes, one per shard", wrong, _FIX)
    return Layout.placed(mesh, lengths, placements, call, told or None)


def _dim(dim: Any, ndim: int) -> Any:
    is_one = isinstance(dim, int) and not isinstance(dim, bool) and -ndim <= dim < ndim
    return dim % ndim if is_one else dim  # Layout refuses the others


def _with_shapes(told: Map, form: Layout, shapes: Map) -> dict[Any, Any]:
    """The given sizes, and those of the dims that one axis shards, from the shapes of the shards
    along each axis."""
    out: dict[Any, Any] = dict(told)
    wrong: list[str] = []
    seen: set[int] = set()
    for name, given in shapes.items():
        axis = form.mesh.axis(name, "from_local(sharding_shapes=)")
        dim, each = form.on(axis), _as_shapes(given)
        if axis in seen:
            wrong.append(f"{name!r}: the axis is given twice")
        elif not _fit(each, form.mesh.axis_sizes[axis], form.ndim, dim):
            wrong.append(f"{name!r}: {given!r}")
        elif isinstance(dim, int):
            mine = tuple([one[dim] for one in each])
            if len(form.dims[dim]) > 1:
                wrong.append(f"{name!r}: dim {dim} is sharded over {len(form.dims[dim])} axes, "
                             "and needs sizes=")
            elif _as_shapes([out.setdefault(dim, mine)]) != [mine]:
                wrong.append(f"dim {dim}: sizes {out[dim]}, sharding_shapes {mine}")
        seen.add(axis)
    wrong += [
        f"no shapes along {form.mesh.axis_names[axis]!r}, which shards dim {dim}"
        for dim, axes in enumerate(form.dims) for axis in axes if axis not in seen
    ]
    if wrong:
        raise LayoutError(
            "from_local(sharding_shapes=)", f"they do not fit {form.spec!r} of {form.ndim} dims "
            f"on {form.mesh}", "per mesh dim that shards, one shape per shard "
            "along it; they differ only in the dim that it shards, and say what sizes= says",
            wrong, "sharding_shapes={0: [(3, 6), (2, 6)]}, or sizes={0: (3, 2)}")
    return out


def _as_shapes(given: Any) -> list[tuple[int, ...]]:
    """Nothing of what is no sequence of shapes."""
    try:
        return [tuple([index(length) for length in one]) for one in given]
    except TypeError:
        return []


def _fit(each: Sequence[tuple[int, ...]], count: int, ndim: int, dim: Any) -> bool:
    """Whether there are so many shapes, which differ only in the dim."""
    rest = {tuple([length for at, length in enumerate(one) if at != dim]) for one in each}
    return len(each) == count and len(rest) == 1 and all(
        len(one) == ndim and min(one, default=0) >= 0 for one in each)

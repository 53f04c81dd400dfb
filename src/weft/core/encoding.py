"""Layouts to and from their spellings: placements, partition specs, text.

Works on parts (mesh, dims, sizes, partial) so that `layout` can build on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.cuts import cuts_from_sizes
from weft.core.mesh import Mesh
from weft.core.partition_spec import P
from weft.core.placement import Partial, Placement, Replicate, Shard, StridedShard, as_placement
from weft.errors import LayoutError, PlacementError, message

__all__ = ["Decoded", "check_sizes", "decode", "encode_placements", "encode_spec", "text"]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a spelling says: axes per dim, explicit sizes per dim, a kind per axis."""

    dims: tuple[tuple[int, ...], ...]
    sizes: Mapping[int, tuple[int, ...]]
    partial: tuple[str | None, ...]


def decode(mesh: Mesh, ndim: int, placements: Any) -> Decoded:
    """Parts of a layout from a spec, from placements, or from None (replicated)."""
    if placements is None:
        return Decoded(((),) * ndim, {}, (None,) * mesh.ndim)
    if isinstance(placements, P):
        return _decode_spec(mesh, ndim, placements)
    return _decode_placements(mesh, ndim, placements)


def _decode_spec(mesh: Mesh, ndim: int, spec: P) -> Decoded:
    call = f"P for {mesh}"
    if len(spec.entries) > ndim:
        raise PlacementError(
            message(call, f"{spec!r} has {len(spec.entries)} entries, the tensor {ndim} dims",
                    "a spec has at most one entry per tensor dim",
                    spec.entries[ndim:], f"P({', '.join(['None'] * ndim)})")
        )
    dims = [tuple(mesh.axis(axis, call) for axis in entry) for entry in spec.entries]
    dims += [()] * (ndim - len(dims))
    partial: list[str | None] = [None] * mesh.ndim
    for axis, kind in spec.partial:
        partial[mesh.axis(axis, call)] = kind
    used = [axis for axes in dims for axis in axes]
    used += [axis for axis, kind in enumerate(partial) if kind]
    repeated = sorted({axis for axis in used if used.count(axis) > 1})
    if repeated:
        raise PlacementError(
            message(call, f"{spec!r} names {len(repeated)} axes more than once",
                    "a mesh axis cuts one tensor dim or is partial, once",
                    [mesh.axis_names[axis] for axis in repeated], "name each axis in one entry")
        )
    return Decoded(tuple(dims), {}, tuple(partial))


def _decode_placements(mesh: Mesh, ndim: int, placements: Any) -> Decoded:
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        placements = (placements,)
    given = [as_placement(placement) for placement in placements]
    if len(given) != mesh.ndim:
        raise PlacementError(
            message("placements", f"{len(given)} placements for {mesh.ndim} axes of {mesh}",
                    "there is one placement per mesh axis", [str(p) for p in given],
                    f"[{', '.join(['Replicate()'] * mesh.ndim)}]")
        )
    _check_dims(mesh, ndim, given)
    dims: list[list[int]] = [[] for _ in range(ndim)]
    sizes: dict[int, tuple[int, ...]] = {}
    partial: list[str | None] = [None] * mesh.ndim
    for axis in reversed(range(mesh.ndim)):
        match given[axis]:
            case Shard(dim, explicit):
                dims[dim % ndim].insert(0, axis)
            case StridedShard(dim, factor, explicit):
                dims[dim % ndim].insert(_strided_place(mesh, dims[dim % ndim], axis, factor), axis)
            case Partial(kind):
                partial[axis] = kind
                continue
            case _:
                continue
        if explicit is not None:
            sizes[dim % ndim] = explicit
    return Decoded(tuple(map(tuple, dims)), sizes, tuple(partial))


def _check_dims(mesh: Mesh, ndim: int, placements: Sequence[Placement]) -> None:
    wrong = [
        f"{placement} on axis {mesh.axis_names[axis]!r}"
        for axis, placement in enumerate(placements)
        if isinstance(placement, (Shard, StridedShard)) and not -ndim <= placement.dim < ndim
    ]
    if wrong:
        raise PlacementError(
            message("placements", f"{len(wrong)} placements name a dim that a tensor of {ndim} "
                    "dims lacks", f"a dim lies in [{-ndim}, {ndim})", wrong, "Shard(0)")
        )


def _strided_place(mesh: Mesh, axes: Sequence[int], axis: int, factor: int) -> int:
    product = 1
    for place in range(len(axes) + 1):
        if product == factor:
            return place
        if place < len(axes):
            product *= mesh.axis_sizes[axes[place]]
    raise PlacementError(
        message("StridedShard(dim, split_factor)", f"split_factor {factor} on axis "
                f"{mesh.axis_names[axis]!r} is the size of no group of the axes to its right: "
                f"{[mesh.axis_names[a] for a in axes]}",
                "split_factor is the product of the sizes of the axes that cut the dim first",
                [factor], "use a partition spec, P(('tp', 'dp')), to give the order of axes")
    )


def check_sizes(
    mesh: Mesh,
    shape: Sequence[int],
    dims: Sequence[Sequence[int]],
    sizes: Mapping[int, Sequence[int]],
) -> tuple[tuple[int, ...] | None, ...]:
    """Cuts per dim from explicit sizes, all offenders reported at once."""
    wrong: list[str] = []
    cuts: list[tuple[int, ...] | None] = [None] * len(shape)
    for dim, given in sizes.items():
        if not -len(shape) <= dim < len(shape):
            wrong.append(f"dim {dim} of a tensor of {len(shape)} dims")
            continue
        dim %= len(shape)
        count = math.prod(mesh.axis_sizes[axis] for axis in dims[dim])
        if len(given) != count or sum(given) != shape[dim] or any(size < 0 for size in given):
            wrong.append(f"dim {dim}: {tuple(given)} are {len(given)} sizes with sum {sum(given)} "
                         f"for {count} shards of {shape[dim]}")
            continue
        cuts[dim] = cuts_from_sizes(given)
    if wrong:
        raise LayoutError(
            message("Layout(sizes=)", f"{len(wrong)} of {len(sizes)} entries do not fit shape "
                    f"{tuple(shape)} on {mesh}",
                    "sizes are at least 0, one per shard, and sum to the global size", wrong,
                    "leave sizes out for default cuts")
        )
    return tuple(cuts)


def encode_placements(
    mesh: Mesh,
    dims: Sequence[Sequence[int]],
    sizes: Mapping[int, tuple[int, ...]],
    partial: Sequence[str | None],
) -> tuple[Placement, ...]:
    """One placement per mesh axis; explicit sizes stand on the major axis of their dim."""
    out: list[Placement] = [Replicate()] * mesh.ndim
    for axis, kind in enumerate(partial):
        if kind is not None:
            out[axis] = Partial(kind)
    for dim, axes in enumerate(dims):
        for place, axis in enumerate(axes):
            explicit = sizes.get(dim) if place == 0 else None
            before = [a for a in axes[:place] if a > axis]
            factor = math.prod(mesh.axis_sizes[a] for a in before)
            out[axis] = StridedShard(dim, factor, explicit) if before else Shard(dim, explicit)
    return tuple(out)


def encode_spec(mesh: Mesh, dims: Sequence[Sequence[int]], partial: Sequence[str | None]) -> P:
    """The partition spec of a layout."""
    names = mesh.axis_names
    kinds = {names[axis]: kind for axis, kind in enumerate(partial) if kind is not None}
    return P(*(tuple(names[axis] for axis in axes) for axes in dims), partial=kinds)


def text(
    mesh: Mesh,
    shape: Sequence[int],
    dims: Sequence[Sequence[int]],
    sizes: Mapping[int, tuple[int, ...]],
    partial: Sequence[str | None],
) -> str:
    """`[8@dp, 16@(tp,sp)] partial(sum@cp)`; explicit sizes follow their axes in braces."""
    shown = []
    for dim, (length, axes) in enumerate(zip(shape, dims)):
        names = ",".join(str(mesh.axis_names[axis]) for axis in axes)
        cut = f"@({names})" if len(axes) > 1 else f"@{names}" if axes else ""
        ragged = "{" + ",".join(map(str, sizes[dim])) + "}" if dim in sizes else ""
        shown.append(f"{length}{cut}{ragged}")
    kinds = [f"{kind}@{mesh.axis_names[axis]}" for axis, kind in enumerate(partial) if kind]
    return f"[{', '.join(shown)}]" + (f" partial({', '.join(kinds)})" if kinds else "")

"""Layouts to and from placements, partition specs and text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from weft.core.cuts import NAMED_CUTS, cuts_from_sizes
from weft.core.dtypes import dtype_text
from weft.core.integers import integers
from weft.core.mesh import Mesh
from weft.core.partition_spec import P
from weft.core.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    as_placement,
    is_name,
    is_torch_strided,
)
from weft.errors import LayoutError, PlacementError, ShardTypeError

__all__ = [
    "Cuts", "Decoded", "Sizes", "Spelled", "check_sizes", "decode", "encode_placements",
    "encode_spec", "text",
]

Cuts = tuple[tuple[int, ...] | None, ...]
"""Per tensor dim, explicit offsets of its shards, or None for the default."""

Sizes = Mapping[int, Sequence[int] | str]
"""Map tensor dim -> shard sizes in shard order, or the name of a way to cut."""


class Decoded(NamedTuple):
    """The content of a spelling: axes per dim, explicit sizes per dim, a kind per axis.

    `torch_strided` holds the placements if torch's own `_StridedShard` is among them.
    """

    dims: tuple[tuple[int, ...], ...]
    sizes: Mapping[int, tuple[int, ...]]
    partial: tuple[str | None, ...]
    torch_strided: tuple[Placement, ...] = ()


def decode(mesh: Mesh, ndim: int, placements: Any, call: str = "placements") -> Decoded:
    """Parts of a layout from a spec, from placements, or from None (replicated).

    Args:
        call: the public call and its argument, for errors: "distribute_tensor(placements)".

    Raises:
        MeshError: an unknown axis.
        PlacementError: too many entries, a number of placements different from that of axes, a dim
            out of range, a repeated axis, kinds that do not mix.
        ShardTypeError: something that is not a placement.
    """
    if placements is None:
        return Decoded(((),) * ndim, {}, (None,) * mesh.ndim)
    if isinstance(placements, P):
        named = f"{call[:-1]}={placements!r})" if call.endswith(")") else f"{call} {placements!r}"
        return _decode_spec(mesh, ndim, placements, named)
    return _decode_placements(mesh, ndim, placements, call)


def _decode_spec(mesh: Mesh, ndim: int, spec: P, call: str) -> Decoded:
    if len(spec.entries) > ndim:
        raise PlacementError(
            call, f"{len(spec.entries)} entries for a tensor of {ndim} dims",
            "a spec has at most one entry per tensor dim",
            [repr(entry) for entry in spec.entries[ndim:]],
            f"{P(*spec[:ndim], partial=dict(spec.partial))!r}; a spec that is for tensors "
            "of several sorts names each sort by a pattern of its own")
    names = [axis for entry in spec.entries for axis in entry]
    used = mesh.axes(names + [axis for axis, _ in spec.partial], call)
    repeated = [repr(mesh.axis_names[axis]) for axis, count in Counter(used).items() if count > 1]
    if repeated:
        raise PlacementError(
            call, f"{len(used)} entries name {len(set(used))} axes",
            "a mesh axis shards one tensor dim or is partial, once", repeated,
            "name each axis in one entry")
    numbers = iter(used)
    dims = [tuple(next(numbers) for _ in entry) for entry in spec.entries]
    dims += [()] * (ndim - len(dims))
    partial: list[str | None] = [None] * mesh.ndim
    for axis, (_, kind) in zip(numbers, spec.partial):
        partial[axis] = kind
    _check_kinds(mesh, partial, call)
    return Decoded(tuple(dims), {}, tuple(partial))


def _decode_placements(mesh: Mesh, ndim: int, placements: Any, call: str) -> Decoded:
    lone = isinstance(placements, (str, int)) or not isinstance(placements, Sequence)
    listed = cast(Sequence[Any], (placements,) if lone else placements)
    if not lone and any(isinstance(one, str) for one in listed):
        raise _no_spec(listed, call)
    given = [as_placement(placement, call) for placement in listed]
    if len(given) != mesh.ndim:
        fix: list[Placement] = [*given, *[Replicate()] * mesh.ndim][: mesh.ndim]
        raise PlacementError(
            call, f"{len(given)} placements for the {mesh.ndim} axes of {mesh}",
            "there is one placement per mesh axis", [str(p) for p in given], repr(fix))
    _check_dims(mesh, ndim, given, call)
    dims: list[list[int]] = [[] for _ in range(ndim)]
    partial: list[str | None] = [None] * mesh.ndim
    for axis in reversed(range(mesh.ndim)):
        match given[axis]:
            case Shard(dim):
                dims[dim % ndim].insert(0, axis)
            case StridedShard(dim) as strided:
                axes = dims[dim % ndim]
                axes.insert(_strided_place(mesh, axes, axis, strided), axis)
            case Partial(kind):
                partial[axis] = kind
            case _:
                pass
    _check_kinds(mesh, partial, call)
    strided = tuple(given) if any(map(is_torch_strided, listed)) else ()
    return Decoded(
        tuple(map(tuple, dims)), _explicit_sizes(mesh, dims, given, call), tuple(partial), strided
    )


def _no_spec(entries: Sequence[Any], call: str) -> ShardTypeError:
    """The entries of a spec that stand in no `P`."""
    texts = [one for one in entries if isinstance(one, str)]
    names = list(map(repr, texts))
    fix = f"P({', '.join(map(repr, entries))})"
    if not all(map(is_name, texts)):
        fix = "P('dp', None), or [Shard(0), Replicate()]"
    return ShardTypeError(
        call, f"{entries!r} has {len(names)} names among {len(entries)} entries",
        "a spec of names is a P, with one entry per tensor dim; a list has placements, one "
        "per mesh axis", names, fix)


def _check_dims(mesh: Mesh, ndim: int, placements: Sequence[Placement], call: str) -> None:
    wrong = [
        f"{placement} on axis {mesh.axis_names[axis]!r}"
        for axis, placement in enumerate(placements)
        if isinstance(placement, (Shard, StridedShard)) and not -ndim <= placement.dim < ndim
    ]
    if wrong:
        raise PlacementError(
            call, f"{len(wrong)} of {len(placements)} placements name a dim that "
            f"a tensor of {ndim} dims lacks", f"a dim lies in [{-ndim}, {ndim})", wrong,
            "Shard(0)" if ndim else "Replicate()")


def _check_kinds(mesh: Mesh, partial: Sequence[str | None], call: str) -> None:
    kinds = {kind for kind in partial if kind is not None}
    if len(kinds) > 1 and kinds != {"sum", "avg"}:
        raise PlacementError(
            call, f"{len(kinds)} kinds of reduction on one tensor of {mesh}",
            "all partial axes have one kind; only sum and avg may stand together",
            [f"{kind}@{axis}" for kind, axis in zip(partial, mesh.axis_names) if kind],
            "reduce the axes of one kind first: x.redistribute(...)")


def _explicit_sizes(
    mesh: Mesh, dims: Sequence[Sequence[int]], placements: Sequence[Placement], call: str
) -> dict[int, tuple[int, ...]]:
    # All sizes of a dim are on its major axis; elsewhere they would have no meaning.
    sizes: dict[int, tuple[int, ...]] = {}
    misplaced: list[str] = []
    for dim, axes in enumerate(dims):
        for place, axis in enumerate(axes):
            placement = placements[axis]
            assert isinstance(placement, (Shard, StridedShard))
            if placement.sizes is not None and place == 0:
                sizes[dim] = placement.sizes
            elif placement.sizes is not None:
                misplaced.append(f"{placement} on axis {mesh.axis_names[axis]!r}, below axis "
                                 f"{mesh.axis_names[axes[0]]!r}")
    if misplaced:
        raise PlacementError(
            call, f"{len(misplaced)} placements carry sizes on a minor axis",
            "where several axes shard one dim, the sizes of all its shards stand on the "
            "major axis", misplaced, "Layout(mesh, shape, placements, sizes={0: (...)})")
    return sizes


def check_sizes(
    mesh: Mesh, shape: Sequence[int], dims: Sequence[Sequence[int]], sizes: Any,
    placed: Sizes, call: str,
) -> Cuts:
    """Cuts per dim from explicit sizes; reports all offenders at once.

    Args:
        sizes: what the user passed.
        placed: the sizes that the placements already carry.
        call: the public call and its argument, for errors about lengths.

    Raises:
        LayoutError: sizes that do not sum to the length, are negative, or differ in number from
            the shards; a dim that does not exist or is given twice; an unknown name.
        ShardTypeError: not a mapping, or sizes that are not whole numbers.
    """
    if not isinstance(sizes, Mapping):
        meant = repr(sizes) if type(sizes) in (tuple, list, str) else "(6, 14)"
        raise ShardTypeError(
            "Layout(sizes=)", f"{sizes!r} is of type {type(sizes).__name__}",
            "sizes is a map tensor dim -> shard sizes, or one of "
            f"{', '.join(map(repr, NAMED_CUTS))}", [repr(sizes)],
            f"Layout(mesh, shape, spec, sizes={{0: {meant}}})")
    wrong: list[str] = []
    cuts: list[tuple[int, ...] | None] = [None] * len(shape)
    asked = cast(Mapping[Any, Any], sizes)
    for dim, given in [*placed.items(), *asked.items()]:
        if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
            wrong.append(f"dim {dim!r} of a tensor of {len(shape)} dims")
            continue
        cut = _cuts_of(shape[dim], [mesh.axis_sizes[axis] for axis in dims[dim]], given)
        if isinstance(cut, str):
            wrong.append(f"dim {dim}: {cut}")
        elif cuts[dim] not in (None, cut):
            wrong.append(f"dim {dim}: given twice, with cuts {cuts[dim]} and {cut}")
        else:
            cuts[dim] = cut
    if wrong:
        raise LayoutError(
            call, f"{len(wrong)} entries do not fit shape {tuple(shape)} on "
            f"{mesh}", "sizes are at least 0, one per shard, and sum to the global size; "
            f"or one of {', '.join(map(repr, NAMED_CUTS))}", wrong,
            "leave sizes out for default cuts")
    return tuple(cuts)


def _cuts_of(length: int, sizes: Sequence[int], given: Any) -> tuple[int, ...] | str:
    # The offsets, or what is wrong with `given`.
    if isinstance(given, str):
        if given not in NAMED_CUTS:
            return f"no cuts are called {given!r}"
        return NAMED_CUTS[given](length, sizes)
    given = integers(given, "Layout(sizes=)", "shard sizes", "sizes={0: (6, 14)}")
    count = math.prod(sizes)
    if len(given) != count or sum(given) != length or min(given) < 0:
        return (f"{given} are {len(given)} sizes with sum {sum(given)} for {count} shards of "
                f"{length}")
    return cuts_from_sizes(given)


def _strided_place(mesh: Mesh, axes: Sequence[int], axis: int, strided: StridedShard) -> int:
    places = _strided_places([mesh.axis_sizes[a] for a in axes], strided.split_factor)
    if strided.skip < len(places):
        return places[strided.skip]
    sizes = {mesh.axis_names[a]: mesh.axis_sizes[a] for a in axes}
    raise PlacementError(
        "StridedShard(dim, split_factor)", f"{strided} on axis {mesh.axis_names[axis]!r} "
        f"fits no place among the axes to its right that shard the dim, {sizes}",
        "split_factor is the product of the sizes of the axes that shard the dim before; a "
        "flattened dim has no such axes and cannot be said by an order of axes",
        [repr(strided)],
        "give the order of axes by a partition spec, P(('tp', 'dp')), or cut the dim "
        "before it is flattened")


def _strided_places(sizes: Sequence[int], factor: int) -> list[int]:
    # Where an axis may be inserted among axes of `sizes` so that those before it multiply to
    # `factor`: below some axis, or in front of all if no such place has the factor 1.
    places = [place for place in range(1, len(sizes) + 1) if math.prod(sizes[:place]) == factor]
    return places or ([0] if factor == 1 else [])


class Spelled(Protocol):
    """A layout, as its spellings read it."""

    mesh: Mesh
    shape: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    cuts: Cuts
    partial: tuple[str | None, ...]

    @property
    def kinds(self) -> dict[str, str]:
        """The partial axes."""
        ...

    @property
    def explicit_sizes(self) -> dict[int, tuple[int, ...]]:
        """The shard sizes of dims whose cuts are not the default."""
        ...

    def sizes_of(self, dim: int) -> tuple[int, ...]:
        """The shard sizes of a dim."""
        ...


def encode_placements(layout: Spelled) -> tuple[Placement, ...]:
    """One placement per mesh axis; explicit sizes are on the major axis of their dim."""
    mesh, sizes = layout.mesh, layout.explicit_sizes
    out: list[Placement] = [Replicate() if kind is None else Partial(kind)
                            for kind in layout.partial]
    for dim, axes in enumerate(layout.dims):
        for place, axis in enumerate(axes):
            explicit = sizes.get(dim) if place == 0 else None
            right = [mesh.axis_sizes[a] for a in axes if a > axis]
            before = sum(a > axis for a in axes[:place])
            if before == 0:
                out[axis] = Shard(dim, explicit)
                continue
            factor = math.prod(right[:before])
            skip = _strided_places(right, factor).index(before)
            out[axis] = StridedShard(dim, factor, explicit, skip)
    return tuple(out)


def encode_spec(layout: Spelled) -> P:
    """The partition spec of a layout."""
    names = layout.mesh.axis_names
    kinds = {name: kind for name, kind in zip(names, layout.partial) if kind is not None}
    return P(*(tuple(names[axis] for axis in axes) for axes in layout.dims), partial=kinds)


def text(layout: Spelled, dtype: str | None, sizes: Mapping[int, Sequence[object]]) -> str:
    """`f32[8@dp, 16@(tp,sp)] partial(sum@cp)`; the sizes follow their axes in braces."""
    shown: list[str] = []
    for dim, (length, axes) in enumerate(zip(layout.shape, layout.dims)):
        names = ",".join(str(layout.mesh.axis_names[axis]) for axis in axes)
        cut = f"@({names})" if len(axes) > 1 else f"@{names}" if axes else ""
        ragged = "{" + ",".join(map(str, sizes[dim])) + "}" if dim in sizes else ""
        shown.append(f"{length}{cut}{ragged}")
    prefix, kinds = "" if dtype is None else dtype_text(dtype), ", ".join(layout.kinds)
    return f"{prefix}[{', '.join(shown)}]" + (f" partial({kinds})" if kinds else "")

"""The layouts that a tensor of a given shape can take on a small mesh, by short names.

`r` replicated, `s0` dim 0 cut by the mesh's axis, `s0.dt` by dp then tp, `s0.td` the other order;
`!` ragged cuts, `?` ragged with an empty shard, `%` everything on one rank; `p` partial (sum),
`pavg`, `pmax`; `+` joins what several axes do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

from weft.core import Layout, Mesh, P


def layouts_of(
    mesh: Mesh, shape: Sequence[int], partial: bool = True
) -> Mapping[str, Layout]:
    """Every layout that the tests know for `shape`, by name."""
    return _layouts_of(mesh, tuple(shape), partial)


@cache
def _layouts_of(mesh: Mesh, shape: tuple[int, ...], partial: bool) -> Mapping[str, Layout]:
    specs = _specs(mesh, len(shape), partial)
    out = {name: Layout(mesh, shape, spec) for name, spec in specs.items()}
    known = set(out.values())
    for name, spec in specs.items():
        cut = [dim for dim, entry in enumerate(spec.entries) if entry]
        if not cut or mesh.size() == 1:
            continue
        for mark, kind in (("!", "ragged"), ("?", "empty"), ("%", "one")):
            if (kind == "one" and len(cut) > 1) or (kind == "empty" and spec.partial):
                continue
            sizes = {
                dim: ragged(shape[dim], _count(mesh, spec.entries[dim]), f"{name}{mark}{dim}")
                if kind == "ragged"
                else _hollow(shape[dim], _count(mesh, spec.entries[dim]), kind == "one")
                for dim in cut
            }
            layout = Layout(mesh, shape, spec, sizes=sizes)
            if layout not in known:
                known.add(layout)
                out[name + mark] = layout
    return MappingProxyType(out)


def ragged(length: int, count: int, seed: str) -> tuple[int, ...]:
    """`count` sizes that sum to `length`, drawn at random; empty shards may come out."""
    draw = random.Random(f"{length} {count} {seed}")
    cuts = sorted(draw.randint(0, length) for _ in range(count - 1))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, length]))


def _hollow(length: int, count: int, on_one: bool) -> tuple[int, ...]:
    """Sizes with an empty shard: the first one, or all but the last."""
    if on_one:
        return (*(0,) * (count - 1), length)
    rest = length // max(count - 1, 1)
    return (0, *(rest,) * (count - 2), length - rest * (count - 2))


def _count(mesh: Mesh, axes: Sequence[str | int]) -> int:
    return math.prod(mesh.size(axis) for axis in axes)


def _specs(mesh: Mesh, ndim: int, partial: bool) -> dict[str, P]:
    return _on_one_axis(ndim, partial) if mesh.ndim == 1 else _on_two_axes(ndim, partial)


def _on_one_axis(ndim: int, partial: bool) -> dict[str, P]:
    specs = {"r": P()}
    specs.update({f"s{dim}": P(*(None,) * dim, "x") for dim in range(ndim)})
    if partial:
        specs["p"] = P(partial={"x": "sum"})
    return specs


def _on_two_axes(ndim: int, partial: bool) -> dict[str, P]:
    specs = {"r": P()}
    for dim in range(ndim):
        before = (None,) * dim
        specs[f"s{dim}.d"] = P(*before, "dp")
        specs[f"s{dim}.t"] = P(*before, "tp")
        specs[f"s{dim}.dt"] = P(*before, ("dp", "tp"))
        specs[f"s{dim}.td"] = P(*before, ("tp", "dp"))
        if partial:
            specs[f"s{dim}.d+p.t"] = P(*before, "dp", partial={"tp": "sum"})
        for other in range(ndim):
            if other != dim:
                entries: list[str | None] = [None] * ndim
                entries[dim], entries[other] = "dp", "tp"
                specs[f"s{dim}.d+s{other}.t"] = P(*entries)
    if partial:
        specs["p.dt"] = P(partial={"dp": "sum", "tp": "sum"})
        specs["p.t"] = P(partial={"tp": "sum"})
    return specs

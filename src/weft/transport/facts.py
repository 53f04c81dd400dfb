"""What a transition does to each axis, read from its two layouts: for gradients and for messages.

Axes of two meshes are different axes. Partial values stay partial over axes of the same name and
size. Products do not, because each factor has its own gradient, which the ranks that hold it on
the other mesh could not compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.core.layout import Layout
from weft.planner import IDEMPOTENT, Fetch, Fold, Plan, is_local, kept_partials

__all__ = [
    "communicates", "divisor", "factors", "partial_axes", "products", "replicated", "text",
    "with_halo",
]


def replicated(layout: Layout, axes: Iterable[int]) -> frozenset[int]:
    """Those of the axes over which the layout replicates."""
    return frozenset(axis for axis in axes if layout.on(axis) is None)


def partial_axes(layout: Layout) -> frozenset[int]:
    return frozenset(axis for axis, kind in enumerate(layout.partial) if kind)


def factors(layout: Layout) -> frozenset[int]:
    """The axes that are partial by product."""
    return frozenset(axis for axis, kind in enumerate(layout.partial) if kind == "product")


def communicates(found: Plan) -> bool:
    """Whether any rank sends anything."""
    return any(not is_local(step) for step in found.steps)


def products(src: Layout, dst: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The source's axes that are reduced by product, and the target's axes that become factors."""
    reduced, made = _changing(src, dst)
    return tuple(
        tuple(axis for axis in axes
              if layout.partial[axis] == "product" and layout.mesh.axis_sizes[axis] > 1)
        for layout, axes in ((src, reduced), (dst, made))
    )  # type: ignore[return-value]


def divisor(src: Layout, dst: Layout) -> int:
    """The number of partial values that share a gradient, over all axes where they do."""
    reduced, made = _changing(src, dst)
    sizes = [src.mesh.axis_sizes[axis] for axis in reduced if src.partial[axis] == "avg"]
    sizes += [dst.mesh.axis_sizes[axis] for axis in made if dst.partial[axis] in IDEMPOTENT]
    return math.prod(sizes)


def _changing(src: Layout, dst: Layout) -> tuple[list[int], list[int]]:
    """The source's axes that are reduced, and the target's axes that become partial."""
    kept = kept_partials(src, dst)
    if src.mesh != dst.mesh:
        kept = {one: other for one, other in kept.items() if src.partial[one] != "product"}
    stay = set(kept.values())
    return (
        [axis for axis, kind in enumerate(src.partial) if kind and axis not in kept],
        [axis for axis, kind in enumerate(dst.partial) if kind and axis not in stay],
    )


def text(src: Layout, dst: Layout, src_varying: frozenset[int], dst_varying: frozenset[int]) -> str:
    """`S(0)->R on dp`, one part per axis that changes; between two meshes, their names."""
    if src.mesh != dst.mesh:
        return f"{src.mesh} -> {dst.mesh}"
    parts = []
    for axis, name in enumerate(src.mesh.axis_names):
        before, after = _word(src, axis, src_varying), _word(dst, axis, dst_varying)
        if before != after:
            parts.append(f"{before}->{after} on {name}")
    if not parts:
        moved = [dim for dim in range(src.ndim)
                 if (src.dims[dim], src.cuts[dim]) != (dst.dims[dim], dst.cuts[dim])]
        parts = [f"S({dim})->S({dim}) other cuts" for dim in moved]
    return ", ".join(parts) or "nothing"


def with_halo(said: str, found: Plan) -> str:
    """The text of a transition, and of the halo that it reads or sums."""
    for step in found.steps:
        if isinstance(step, (Fetch, Fold)):
            dims = [dim for dim, mine in enumerate(step.cover.reads) if mine is not None]
            word = "halo" if isinstance(step, Fetch) else "sum of halo"
            halo = f"{word} of {', '.join(f'dim {dim}' for dim in dims)}"
            halo += f" on {','.join(step.names)}" if step.axes else ""
            said = halo if said == "nothing" else f"{said}, {halo}"
    return said


def _word(layout: Layout, axis: int, varying: frozenset[int]) -> str:
    match layout.on(axis):
        case int(dim):
            return f"S({dim})"
        case str(kind):
            return f"P({kind})"
        case _:
            return "R" if axis in varying else "I"

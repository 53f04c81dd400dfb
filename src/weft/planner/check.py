"""Which layouts can become which: the pairs that a plan refuses before anything moves."""

from __future__ import annotations

from weft.core.layout import Layout
from weft.errors import LayoutError

__all__ = ["IDEMPOTENT", "LINEAR", "check", "kept_partials"]

LINEAR = frozenset({"sum", "avg"})
"""Kinds that may occur together: a sum of means is a mean of sums."""

IDEMPOTENT = frozenset({"max", "min", "and", "or", "band", "bor"})
"""Kinds for which reducing the same value twice does no harm."""

_FROM_REPLICATED = IDEMPOTENT | {"sum", "product"}
_FROM_SHARDED = frozenset({"sum"})


def check(src: Layout, dst: Layout, call: str = "plan(src, dst)") -> None:
    """Raise LayoutError for a pair that the table of transitions lacks: different global shapes,
    kinds that do not mix, or a row such as S -> P(max)."""
    if src.shape != dst.shape:
        raise LayoutError(
            call, f"src has global shape {src.shape}, dst {dst.shape}",
            "a transition changes where elements lie, never the global shape",
            [src, dst], "reshape first, then redistribute")
    if src.is_partial or dst.is_partial:
        _check_kinds(src, dst, call)
        _check_rows(src, dst, call)


def kept_partials(src: Layout, dst: Layout) -> dict[int, int]:
    """Source axis -> target axis, for the axes over which partial values stay partial.

    On one mesh these are the same axis with the same kind; on two, axes of the same name and size.
    """
    if src.mesh == dst.mesh:
        pairs = zip(src.partial, dst.partial)
        return {axis: axis for axis, (a, b) in enumerate(pairs) if a is not None and a == b}
    there = {name: axis for axis, name in enumerate(dst.mesh.axis_names)}
    out: dict[int, int] = {}
    for axis, kind in enumerate(src.partial):
        to = there.get(src.mesh.axis_names[axis])
        if kind is None or to is None or src.mesh.axis_sizes[axis] != dst.mesh.axis_sizes[to]:
            continue
        if dst.partial[to] == kind:
            out[axis] = to
    return out


def _check_kinds(src: Layout, dst: Layout, call: str) -> None:
    wrong: list[str] = []
    for end, layout in (("src", src), ("dst", dst)):
        kinds = {kind for kind in layout.partial if kind}
        if len(kinds) > 1 and not kinds <= LINEAR:
            wrong.append(f"{end} {layout}: {', '.join(sorted(kinds))}")
    if wrong:
        raise LayoutError(
            call, f"{len(wrong)} of 2 layouts wait for reductions of kinds that do not mix",
            "the partial axes of a layout have one kind; sum and avg may stand together",
            wrong, "reduce one kind first, by a redistribute of its own")


def _check_rows(src: Layout, dst: Layout, call: str) -> None:
    kept = set(kept_partials(src, dst).values())
    alone = src.mesh == dst.mesh
    wrong: list[str] = []
    for axis, kind in enumerate(dst.partial):
        if kind is None or axis in kept or dst.mesh.axis_sizes[axis] == 1:
            continue
        # Partial values from another mesh are reduced there, and arrive replicated if need be.
        before = src.on(axis) if alone else None
        if kind not in (_FROM_SHARDED if isinstance(before, int) else _FROM_REPLICATED):
            word = f"S({before})" if isinstance(before, int) else f"P({before})" if before else "I"
            wrong.append(f"{word} -> P({kind}) on axis {dst.mesh.axis_names[axis]!r}")
    if wrong:
        raise LayoutError(
            call, f"{len(wrong)} axes would become partial by a row that the table of "
            f"transitions lacks, from {src} to {dst}",
            f"S becomes P(sum) only; I becomes P of {', '.join(sorted(_FROM_REPLICATED))}; P keeps "
            "its kind, or is reduced and follows I", wrong,
            "leave the axis sharded or replicated in the target")

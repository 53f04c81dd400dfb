"""Which layouts can become which: the pairs that a plan refuses, before anything moves."""

from __future__ import annotations

from weft.core.layout import Layout
from weft.errors import LayoutError, message

__all__ = ["IDEMPOTENT", "LINEAR", "check"]

LINEAR = frozenset({"sum", "avg"})
"""Kinds that may stand together: a sum of means is a mean of sums."""

IDEMPOTENT = frozenset({"max", "min", "and", "or", "band", "bor"})
"""Kinds that take the same term twice without harm."""

_FROM_REPLICATED = IDEMPOTENT | {"sum", "product"}
_FROM_SHARDED = frozenset({"sum"})


def check(src: Layout, dst: Layout, call: str = "plan(src, dst)") -> None:
    """Refuse a pair that the table of transitions lacks.

    Raises:
        LayoutError: other meshes or global shapes, or a row such as S -> P(max).
    """
    if src.mesh != dst.mesh:
        raise LayoutError(
            message(call, f"src lies on {src.mesh!r}, dst on {dst.mesh!r}",
                    "a plan leads from one layout to another on the same mesh",
                    [src.mesh, dst.mesh], "go through the full tensor, x.full_tensor()")
        )
    if src.shape != dst.shape:
        raise LayoutError(
            message(call, f"src has global shape {src.shape}, dst {dst.shape}",
                    "a transition changes where elements lie, never the global shape",
                    [src, dst], "reshape first, then redistribute")
        )
    _check_rows(src, dst, call)


def _check_rows(src: Layout, dst: Layout, call: str) -> None:
    wrong = []
    for axis, kind in enumerate(dst.partial):
        before = src.on(axis)
        if kind is None or kind == before or src.mesh.axis_sizes[axis] == 1:
            continue
        if kind not in (_FROM_SHARDED if isinstance(before, int) else _FROM_REPLICATED):
            word = f"S({before})" if isinstance(before, int) else f"P({before})" if before else "I"
            wrong.append(f"{word} -> P({kind}) on axis {src.mesh.axis_names[axis]!r}")
    if wrong:
        raise LayoutError(
            message(call, f"{len(wrong)} axes would become partial by a row that the table of "
                    f"transitions lacks, from {src} to {dst}",
                    f"S becomes P(sum) only; I becomes P of {_listed(_FROM_REPLICATED)}; P keeps "
                    "its kind, or is reduced and follows I", wrong,
                    "leave the axis sharded or replicated in the target")
        )


def _listed(kinds: frozenset[str]) -> str:
    return ", ".join(sorted(kinds))

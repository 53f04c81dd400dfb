"""Writing to what a view would show: slice_scatter, diagonal_scatter. The source comes to where
that view's elements lie, and each shard places its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weft.core import Layout
from weft.rules import index
from weft.rules.notation import Call, Decision, LocalArgs, TensorArg

__all__ = ["DECISIONS"]


def _placed(
    call: Call, layouts: Sequence[Layout], view: Callable[[Call, Sequence[Layout]], Decision],
    rest: tuple[Any, ...],
) -> Decision:
    """`call` places its second tensor where `view`, an op with the arguments `rest`, looks."""
    target, source = call.tensors
    layout = layouts[0]
    if layout.is_partial:
        layout = layout.replace(cuts=layout.cuts, partial=(None,) * layout.mesh.ndim)
    shown = view(
        Call("", (target, *rest), {}, (TensorArg(source.shape, target.dtype),)), (layout,)
    )
    local: LocalArgs | None = None
    if shown.args is not None:
        of_view = shown.args

        def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            (_, *numbers), named = of_view(coordinate)
            return (target, source, *numbers), named

        local = args
    return Decision((layout, shown.results[0]), (layout,), local)


def _slice_scatter(call: Call, layouts: Sequence[Layout]) -> Decision:
    """`slice_scatter(x, source, dim, start, end, step)`."""
    numbers = (
        call.arg(2, "dim", 0), call.arg(3, "start"), call.arg(4, "end"), call.arg(5, "step", 1)
    )
    return _placed(call, layouts, index.slice_decision, numbers)


def _diagonal_scatter(call: Call, layouts: Sequence[Layout]) -> Decision:
    """`diagonal_scatter(x, source, offset, dim1, dim2)`."""
    numbers = call.arg(2, "offset", 0), call.arg(3, "dim1", 0), call.arg(4, "dim2", 1)
    return _placed(call, layouts, index.diagonal_decision, numbers)


DECISIONS = {
    "aten.slice_scatter": _slice_scatter,
    "aten.diagonal_scatter": _diagonal_scatter,
}

"""What ranks read of windowed operands, and what runs on the boxes that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.core import Cover, Interval, Layout, Reads, default_cuts
from weft.rules import Boxed, BoxedDim, Call, LocalArgs, Rule

__all__ = ["on_boxes"]

Cut = tuple[tuple[int, ...], tuple[int, ...] | None]
Runs = Callable[[tuple[int, ...]], Callable[..., Any] | None]


def on_boxes(
    rule: Rule, call: Call, operands: Sequence[Layout], results: Sequence[Layout],
    cut: Mapping[str, Cut], args: LocalArgs | None,
) -> tuple[tuple[Cover | None, ...], Runs | None, LocalArgs | None]:
    """Per operand what ranks read of it; what runs on their tensors, and with which arguments.

    Args:
        operands, results: the layouts that they come to, and that they leave.
        cut: per sharded factor its axes and cuts. args: the arguments of the op otherwise.
    """
    reads: list[Cover | None] = []
    sharded: dict[tuple[int, int], tuple[Interval, ...]] = {}
    for index, (dims, layout) in enumerate(zip(rule.operands, operands)):
        mine: list[Any] = [None] * layout.ndim
        for dim, factors in enumerate(dims or ()):
            window = rule.windows.get((index, factors[0])) if factors else None
            if window is None or factors[0] not in cut or layout.num_shards(dim) == 1:
                continue
            mine[dim] = window.reads(_units(rule, layout, factors[0], cut), layout.cuts_of(dim))
            sharded[index, dim] = mine[dim]
        reads.append(Cover.of(layout, tuple(mine), rule.fill))
    if rule.on_box is None or not (sharded or any(map(_has_empty_shards, results))):
        return tuple(reads) if any(reads) else (), None, args

    def boxed(coordinate: tuple[int, ...]) -> Any:
        assert rule.on_box is not None
        given, named = (call.args, dict(call.kwargs)) if args is None else args(coordinate)
        dims = _dims(rule, operands, cut, sharded, coordinate)
        shapes = tuple([layout.local_shape_at(coordinate) for layout in results])
        return rule.on_box(call, Boxed(given, named, dims, shapes))

    return (
        tuple(reads) if any(reads) else (), lambda coordinate: boxed(coordinate)[0],
        lambda coordinate: boxed(coordinate)[1:],
    )


def _units(rule: Rule, layout: Layout, factor: str, cut: Mapping[str, Cut]) -> tuple[int, ...]:
    axes, units = cut[factor]
    sizes = [layout.mesh.axis_sizes[axis] for axis in axes]
    return units or default_cuts(rule.sizes[factor], sizes)


def _has_empty_shards(layout: Layout) -> bool:
    return any(
        0 in layout.sizes_of(dim) for dim, axes in enumerate(layout.dims) if axes
    )


def _dims(
    rule: Rule, operands: Sequence[Layout], cut: Mapping[str, Cut],
    sharded: Mapping[tuple[int, int], tuple[Interval, ...]], coordinate: tuple[int, ...],
) -> tuple[BoxedDim, ...]:
    index = min((index for index, _ in rule.windows), default=0)
    layout, found = operands[index], []
    for dim, factors in enumerate(rule.operands[index] or ()):
        window = rule.windows.get((index, factors[0])) if factors else None
        if window is None:
            continue
        box, outputs = None, (0, rule.sizes[factors[0]])
        if (index, dim) in sharded:
            shard = layout.shard_index(dim, coordinate)
            units = _units(rule, layout, factors[0], cut)
            box, outputs = sharded[index, dim][shard], (units[shard], units[shard + 1])
        found.append(BoxedDim(dim, layout.shape[dim], window, box, outputs))
    return tuple(found)

"""What runs on the local tensors, with which arguments; what ranks read of windowed operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from weft.core import Cover, Interval, Layout, default_cuts
from weft.rules import AnyWindow, Boxed, BoxedDim, Call, Idle, LocalArgs, Rule, Window, is_ring

__all__ = ["Cut", "in_full", "local_call", "window_of", "windowed_cuts"]

Cut = tuple[tuple[int, ...], tuple[int, ...] | None]
"""The axes that shard a factor, and its cuts in units of it; None means the default."""


def local_call(
    rule: Rule, call: Call, operands: Sequence[Layout], results: Sequence[Layout],
    cut: Mapping[str, Cut],
) -> dict[str, Any]:
    """The parts of a Decision that say what runs on the ranks' tensors: `args`, and of windows
    `reads`, `folds` and `runs`.

    Args:
        operands, results: the layouts that they come to, and that they leave.
        cut: per sharded factor its axes and cuts.
    """
    args = _local_args(rule, call, results, cut)
    if not (rule.windows or rule.spreads) and rule.on_box is None:
        return {"args": args}
    if rule.folds:
        return _folding(rule, call, results, cut, args)
    reads: list[Cover | None] = []
    sharded: dict[tuple[int, int], tuple[Interval, ...]] = {}
    for index, (dims, layout) in enumerate(zip(rule.operands, operands)):
        mine: list[Any] = [None] * layout.ndim
        for dim, factors in enumerate(dims or ()):
            if not factors or factors[0] not in cut or layout.num_shards(dim) == 1 or (
                index in rule.unread
            ):
                continue
            found = _reads(rule, index, dim, factors[0], layout, results, cut)
            if found is not None:
                sharded[index, dim] = mine[dim] = found
        rings = tuple([dim for dim in range(layout.ndim) if is_ring(
            window_of(rule, index, (dims or ())[dim][0]) if mine[dim] else None)])
        reads.append(Cover.of(layout, tuple(mine), rule.fill, rings))
    decided: dict[str, Any] = {"args": args, "reads": tuple(reads) if any(reads) else ()}
    if rule.on_box is None or not (sharded or any(one.has_empty_shards for one in results)):
        return decided

    def boxed(coordinate: tuple[int, ...]) -> Any:
        dims = _dims(rule, operands, results, cut, sharded, coordinate)
        shapes = tuple([layout.local_shape_at(coordinate) for layout in results])
        return _on_box(rule, call, args, coordinate, dims, shapes)

    return decided | _run(boxed)


def _on_box(
    rule: Rule, call: Call, args: LocalArgs | None, coordinate: tuple[int, ...],
    dims: tuple[BoxedDim, ...], shapes: tuple[tuple[int, ...], ...],
) -> Any:
    assert rule.on_box is not None
    given, named = (call.args, dict(call.kwargs)) if args is None else args(coordinate)
    if any(0 in shape for shape in shapes):
        return Idle(shapes), given, named
    return rule.on_box(call, Boxed(given, named, dims))


def _run(boxed: Callable[[tuple[int, ...]], Any]) -> dict[str, Any]:
    def runs(coordinate: tuple[int, ...]) -> Any:
        return boxed(coordinate)[0]

    def args(coordinate: tuple[int, ...]) -> Any:
        return boxed(coordinate)[1:]

    return {"runs": runs, "args": args}


def _folding(
    rule: Rule, call: Call, results: Sequence[Layout], cut: Mapping[str, Cut],
    args: LocalArgs | None,
) -> dict[str, Any]:
    """Of a rule with one result, whose boxes are summed."""
    (layout,), (named,) = results, rule.results
    reads: list[Any] = [None] * layout.ndim
    for dim, factors in enumerate(named):
        window = rule.spreads.get((0, factors[0])) if factors else None
        if window is not None and layout.num_shards(dim) > 1:
            units = in_full(rule, layout, factors[0], cut[factors[0]])
            reads[dim] = window.reads(units, layout.cuts_of(dim))
    if not any(reads) and not layout.has_empty_shards:
        return {"args": args}
    cover = Cover(tuple(reads))

    def boxed(coordinate: tuple[int, ...]) -> Any:
        box = cover.box_at(layout, coordinate)
        dims: list[BoxedDim] = []
        for dim, factors in enumerate(named):
            window = rule.spreads.get((0, factors[0])) if factors else None
            if window is not None:
                length, mine = layout.shape[dim], box[dim] if reads[dim] else None
                dims.append(BoxedDim(dim, length, window, mine, box[dim]))
        shape = tuple([stop - start for start, stop in box])
        return _on_box(rule, call, args, coordinate, tuple(dims), (shape,))

    return {"folds": (Cover.of(layout, cover.reads),)} | _run(boxed)


def _reads(
    rule: Rule, index: int, dim: int, factor: str, layout: Layout, results: Sequence[Layout],
    cut: Mapping[str, Cut],
) -> tuple[Interval, ...] | None:
    """What each shard of a sharded dim reads of it; None where it is no matter of windows."""
    window = window_of(rule, index, factor)
    if window is not None:
        return window.reads(in_full(rule, layout, factor, cut[factor]), layout.cuts_of(dim))
    spread = _spread(rule, factor)
    if spread is None:
        return None
    window, result, at = spread
    return tuple([
        window.needs(start, stop, layout.shape[dim]) if start < stop else (place, place)
        for (start, stop), place in zip(
            pairwise(results[result].cuts_of(at)), layout.cuts_of(dim))
    ])


def _spread(rule: Rule, factor: str) -> tuple[Window, int, int] | None:
    """The window by which a dim of a result belongs to the factor, the result, and the dim."""
    for (result, name), window in rule.spreads.items():
        if name == factor:
            dims = [factors[0] if factors else "" for factors in rule.results[result]]
            return window, result, dims.index(factor)
    return None


def in_full(rule: Rule, layout: Layout, factor: str, cut: Cut) -> tuple[int, ...]:
    """The cuts of a factor on the mesh of a layout, also where they are the default."""
    axes, units = cut
    sizes = [layout.mesh.axis_sizes[axis] for axis in axes]
    return units or default_cuts(rule.sizes[factor], sizes)


def _dims(
    rule: Rule, operands: Sequence[Layout], results: Sequence[Layout], cut: Mapping[str, Cut],
    sharded: Mapping[tuple[int, int], tuple[Interval, ...]], coordinate: tuple[int, ...],
) -> tuple[BoxedDim, ...]:
    index = min((index for index, _ in (*rule.windows, *sharded)), default=0)
    layout = operands[index]
    found: list[BoxedDim] = []
    for dim, factors in enumerate(rule.operands[index] or ()):
        if not factors:
            continue
        window, spread = window_of(rule, index, factors[0]), _spread(rule, factors[0])
        if window is None and spread is None:
            continue
        box = None
        if (index, dim) in sharded:
            box = sharded[index, dim][layout.shard_index(dim, coordinate)]
        if spread is not None:
            window, result, at = spread
            outputs = results[result].box_at(coordinate)[at]
        else:
            outputs = (0, rule.sizes[factors[0]])
            if box is not None:
                units = in_full(rule, layout, factors[0], cut[factors[0]])
                shard = layout.shard_index(dim, coordinate)
                outputs = units[shard], units[shard + 1]
        assert window is not None
        found.append(BoxedDim(dim, layout.shape[dim], window, box, outputs))
    return tuple(found)


def window_of(rule: Rule, operand: int, factor: str) -> AnyWindow | None:
    return rule.windows.get((operand, factor)) if rule.windows else None


def windowed_cuts(
    rule: Rule, layout: Layout, dim: int, factor: str, window: AnyWindow, cut: Cut
) -> tuple[int, ...] | None:
    """The cuts of a windowed dim: its own, of which any boxes can be read; else those to which the
    cuts of its factor belong."""
    if layout.dims[dim] == cut[0]:
        return layout.cuts[dim]
    return window.cuts(in_full(rule, layout, factor, cut), layout.shape[dim])


def _local_args(
    rule: Rule, call: Call, results: Sequence[Layout],
    cut: Mapping[str, Cut],
) -> LocalArgs | None:
    """The local op's arguments where they are not those of the call."""
    if rule.args is not None:
        fixed = rule.args
        return lambda coordinate: (fixed, {})
    counts = {
        place: Layout.make(results[0].mesh, (rule.sizes[factor],), [cut[factor][0]],
                           [cut[factor][1]])
        for place, factor in rule.counts.items() if factor in cut
    }
    if counts:
        return lambda coordinate: (tuple([
            counts[at].local_shape_at(coordinate)[0] if at in counts else arg
            for at, arg in enumerate(call.args)
        ]), dict(call.kwargs))
    if rule.size_arg is None or not any(results[0].dims):
        return None
    layout, place = results[0], rule.size_arg
    first, last = rule.size_dims or (0, len(layout.shape))

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        size = list(layout.local_shape_at(coordinate)[first:last])
        return (*call.args[:place], size, *call.args[place + 1 :]), dict(call.kwargs)

    return args

"""Elements that move by a fixed distance along a dim, or to its other end: flip, roll, pad, unfold.

A sharded dim stays sharded. Each rank fetches the missing rows of its part of the result, as for
other windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout, default_cuts
from weft.ops.elementwise import result_like
from weft.ops.idle import unless_idle
from weft.propagate import fairest
from weft.rules import (
    Boxed,
    Call,
    Decision,
    Length,
    OnRank,
    RuleText,
    Shift,
    op,
    page,
    rule,
)
from weft.rules.factors import names

__all__ = ["PAGE"]

Layouts = Sequence[Layout]


def _windowed(
    shifts: Callable[[Call], Mapping[int, Shift]],
    mark: Callable[[Call, int], str] = lambda call, dim: "", **more: Any,
) -> RuleText:
    """The rule of an op of which each place reads another one, along dims that have a shift; a
    `mark` stands behind the others."""
    def text(call: Call, wants_grad: Any) -> str:
        moved, dims = shifts(call), names(len(call.tensors[0].shape))
        given = [f"@{name}" if dim in moved else name + mark(call, dim)
                 for dim, name in enumerate(dims)]
        return f"{' '.join(given)} -> {' '.join(dims)}"

    def tables(call: Call) -> Mapping[str, Shift]:
        return {f"d{dim}": shift for dim, shift in shifts(call).items()}

    return rule(text, linear=[0], moves=True, tables=tables, keeps=False, **more)


# Flips: a place reads the one as far from the other end.


def _mirrors(call: Call) -> dict[int, Shift]:
    shape = call.tensors[0].shape
    return {
        dim % len(shape): Shift(0, shape[dim], "mirror") for dim in call.get("dims")}


# Rolls: a dim is a ring.


def _rolled(call: Call) -> dict[int, int]:
    """Per dim that is rolled, by how much; at most half of its length, in either direction."""
    shape = call.tensors[0].shape
    total: dict[int, int] = {}
    for dim, shift in zip(call.get("dims"), call.get("shifts")):
        at = dim % len(shape)
        total[at] = (total.get(at, 0) + shift) % max(shape[at], 1)
    return {
        dim: shift - shape[dim] if 2 * shift > shape[dim] else shift
        for dim, shift in total.items()
    }


def _rings(call: Call) -> dict[int, Shift]:
    shape = call.tensors[0].shape
    return {dim: Shift(by, shape[dim], "circular") for dim, by in _rolled(call).items()}


def _roll_on_box(call: Call, boxed: Boxed) -> OnRank:
    """In sharded dims the box is the result; other dims are rolled in place."""
    fetched = {at.dim for at in boxed.dims if at.box}
    rest = {dim: by for dim, by in _rolled(call).items() if dim not in fetched}

    def roll(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.roll(list(rest.values()), list(rest)) if rest else x.clone()

    return roll, boxed.args, boxed.kwargs


# Pads.


def _widths(call: Call) -> dict[int, tuple[int, int]]:
    """Per padded dim, the widths in front and behind. Negative ones crop."""
    pad, ndim = list(call.get("pad")), len(call.tensors[0].shape)
    pairs = zip(pad[::2], pad[1::2])
    return {ndim - 1 - at: pair for at, pair in enumerate(pairs) if any(pair)}


def _pad_with_value(call: Call, layouts: Layouts, wants_grad: Any) -> Decision | None:
    """The first shard pads in front, the last one behind: nothing is sent, unless that would leave
    most of the result with one of them. Other modes fetch the border that they repeat."""
    if call.get("mode", "constant") != "constant":
        return None
    value = call.get("value") or 0
    layout, source = layouts[0], call.tensors[0]
    if value != 0:
        layout = layout.without_partial()
    ndim, shape = len(source.shape), call.results[0].shape
    pad = list(call.get("pad"))
    before = [0] * ndim
    before[ndim - len(pad) // 2 :] = pad[::2][::-1]
    padded = [dim for dim in range(ndim) if layout.dims[dim] and (
        before[dim] or shape[dim] != layout.shape[dim]
    )]
    given, made = list(layout.cuts), list(layout.cuts)
    for dim in padded:
        given[dim], made[dim] = _padded_cuts(layout, dim, before[dim], shape[dim])
    result = Layout.make(layout.mesh, shape, layout.dims, made, layout.partial)
    if not padded:  # cuts that stay say nothing: what one end loses the other may gain
        cropped = sum([-width for width in pad if width < 0])  # longer dims are cropped alike
        lengths = tuple([
            Length(((0, dim),), shape[dim] - source.shape[dim], least=((0, dim, 1 + cropped),))
            for dim in range(ndim)
        ])
        return Decision((layout,), (result,), by_form=True, lengths=lengths)
    layout = Layout.make(layout.mesh, layout.shape, layout.dims, given, layout.partial)

    def args(coordinate: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        local: list[int] = []
        for dim, (old, new) in enumerate(zip(layout.box_at(coordinate), result.box_at(coordinate))):
            # The shard's place in the padded dim, against the box of the result. A shard that
            # is cropped away altogether is cropped from the front, then padded behind.
            start, stop = old[0] + before[dim], old[1] + before[dim]
            gone = min(stop, new[1]) <= max(start, new[0])
            local[:0] = (start - stop, new[1] - new[0]) if gone else (start - new[0], new[1] - stop)
        return (source, local, value), {}

    return Decision((layout,), (result,), args, "aten.constant_pad_nd.default")


def _padded_cuts(
    layout: Layout, dim: int, before: int, length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cuts of a dim that is padded so far in front to this length: those it comes to, and those
    of the result."""
    have = layout.cuts_of(dim)
    moved = tuple([cut + before for cut in have])
    stays = (0, *[min(max(cut, 0), length) for cut in moved[1:-1]], length)
    equal = default_cuts(length, [layout.mesh.axis_sizes[axis] for axis in layout.dims[dim]])
    if fairest((stays, equal), [(moved, 1.0)]) == stays:
        return have, stays
    size = layout.shape[dim]
    return (0, *[min(max(cut - before, 0), size) for cut in equal[1:-1]], size), equal


def _repeats_border(call: Call) -> bool:
    """Of a circle, torch crops before it closes it; `_cropped_circle` does so."""
    if call.args[2] != "circular":
        return True
    shape = call.tensors[0].shape
    return all(
        min(pair) >= 0 and max(pair) <= shape[dim] for dim, pair in _widths(call).items())


def _has_some(call: Call, dim: int) -> str:
    """Of a batch, if there is one, torch takes nothing as well."""
    several = len(call.args[1]) // 2 == len(call.tensors[0].shape) - 2
    return "" if several and not dim else ">0"


def _pad_shifts(call: Call) -> dict[int, Shift]:
    """Pads with elements of the tensor."""
    shape = call.tensors[0].shape
    return {
        dim: Shift(before, shape[dim], call.args[2], before)
        for dim, (before, _) in _widths(call).items()
    }


def _pad_on_box(call: Call, boxed: Boxed) -> OnRank:
    """Of sharded dims each place is picked from the box, which a circular pad leaves as it is."""
    fetched = {at.dim: at for at in boxed.dims if at.box}
    rest = list(call.args[1])
    picks: list[tuple[int, Any]] = []
    for dim, at in fetched.items():
        back = 2 * (len(call.tensors[0].shape) - 1 - dim)
        rest[back : back + 2] = 0, 0
        assert at.box is not None and isinstance(at.window, Shift)
        if at.window.mode != "circular":
            places: Any = torch.arange(*at.outputs)
            picks.append((dim, at.window.place(places) - at.box[0]))

    def pad(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for dim, places in picks:
            x = x.index_select(dim, places.to(x.device))
        # Also by no element: ranks would not agree on whether the gradient requires one.
        pads = any(rest) or (picks and x.numel())
        return torch.ops.aten.pad(x, rest, call.args[2]) if pads else x.clone()

    return pad, boxed.args, boxed.kwargs


def _cropped_circle(x: Tensor, pad: Sequence[int], mode: str, value: Any = None) -> Tensor:
    """A circle is cropped, then closed."""
    if mode != "circular" or min(pad) >= 0:
        return NotImplemented
    x = torch.constant_pad_nd(x, [min(width, 0) for width in pad])
    return torch.ops.aten.pad(x, [max(width, 0) for width in pad], mode)


# Windows as a dim of their own.


def _unfold_rule(call: Call, wants_grad: Any) -> str | None:
    """A window is on the rank of its centre."""
    ndim = len(call.tensors[0].shape)
    if not ndim:
        return "-> w!"
    dim, size, step = call.args[1] % ndim, call.args[2], call.args[3]
    given, made = [*names(ndim)], [*names(ndim)]
    given[dim] = f"{step}*{made[dim]}+w<{size}" if size else f"{made[dim]}!"
    if not size:
        made[dim] = "y!"
    return f"{' '.join(given)} -> {' '.join(made)} w!"


def _unfold_view(call: Call, wants_grad: Any) -> str | None:
    """Along a whole dim it is a view of each shard, also of one without elements."""
    ndim = len(call.tensors[0].shape)
    dim = call.args[1] % ndim if ndim else 0
    if not ndim or any(layout.dims[dim] for layout in call.layouts):
        return None
    given, made = [*names(ndim)], [*names(ndim)]
    given[dim], made[dim] = "x!", "y!"
    return f"{' '.join(given)} -> {' '.join(made)} w!"


def _roll_result(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor | None:
    if len(shifts) != (len(dims) or 1) or not all(-x.ndim <= dim < x.ndim for dim in dims):
        return None
    return result_like(x, x.dtype) if x.is_contiguous() else None


PAGE = page(
    op("flip", _windowed(_mirrors)),
    op("roll", _windowed(_rings, on_box=_roll_on_box, serves=lambda call: bool(call.get("dims"))),
       result=_roll_result),
    op("pad", _windowed(_pad_shifts, _has_some, on_box=_pad_on_box, serves=_repeats_border),
       layouts=_pad_with_value, compose=_cropped_circle),
    op("constant_pad_nd", layouts=_pad_with_value),
    op("unfold unfold_copy", rule(_unfold_view, linear=[0], moves=True),
       rule(_unfold_rule, linear=[0], moves=True, on_box=unless_idle, keeps=False)),
)

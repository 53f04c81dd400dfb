"""Pools and im2col.

Batch and channels pass. In pools, sharded positions stay sharded: each rank fetches the border that
its windows read. In other ops positions are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Cover, Layout
from weft.ops.algorithm import Local
from weft.ops.convolutions import each_of
from weft.ops.indexing.row_exchange import RowExchange, Units, plan_by_request
from weft.ops.indexing.rows import grid
from weft.ops.places import apart, counted
from weft.rules import (
    Boxed,
    BoxedDim,
    Call,
    Decision,
    Idle,
    OnBox,
    OnRank,
    Rule,
    RuleText,
    bind,
    op,
    page,
    parse,
    rule,
)

__all__ = ["PAGE", "with_places"]

_LEADS = ("b c>0", "c>0")
"""Kernels take a batch of nothing, and no other dim of length 0."""


def _unpool(num: int) -> RuleText:
    """Operands and results of `num` dims of positions, all of them whole."""
    before = " ".join([f"s{at}!" for at in range(num)])
    after = " ".join([f"t{at}" for at in range(num)])

    def serves(call: Call) -> bool:
        """Where positions are whole, or there are none."""
        sharded = any(any(layout.dims[-num:]) for layout in call.layouts)
        return not sharded or 0 in call.tensors[0].shape

    return rule(
        *[f"{lead} {before}, {lead} {before} -> {lead} {after}" for lead in _LEADS], serves=serves)


def _windows(call: Call, num: int) -> list[tuple[int, int, int, int]]:
    """Per dim of positions, kernel, stride, padding and dilation."""
    kernel = each_of(call.get("kernel_size"), num, 1)
    return list(zip(
        kernel, each_of(call.get("stride"), num, kernel), each_of(call.get("padding"), num, 0),
        each_of(call.get("dilation"), num, 1),
    ))


def _without_kernel(call: Call) -> NotImplementedError:
    """What torch's kernels raise for a dtype, and its meta kernels do not."""
    return NotImplementedError(f"{call.op} is not implemented for {call.tensors[0].dtype}")


def _pool(num: int) -> Callable[[Call, Sequence[bool]], str]:
    def text(call: Call, wants_grad: Sequence[bool]) -> str:
        """Positions in windows: of one dim with a kernel of 2, "b c 2*y0+v0<2 -> b c y0"."""
        x = call.tensors[0]
        averages = "avg" in call.op
        if x.dtype == "bool" or "complex" in x.dtype or (
            averages and "float" not in x.dtype and x.dtype != "int64"
        ):
            raise _without_kernel(call)
        windows = [
            f"y{at}" if kernel == stride == 1 and not pad and len(call.results) == 1
            else f"{stride}*y{at}+{far}*v{at}<{kernel}{-pad:+}"
            for at, (kernel, stride, pad, far) in enumerate(_windows(call, num))
        ]
        after = " ".join([f"y{at}" for at in range(num)])
        if averages and "float" not in x.dtype:  # a mean of integers is rounded once
            windows = [f"s{at}!" for at in range(num)]
        lead = "c" if len(x.shape) == num + 1 else "b c"
        made = ", ".join([f"{lead} {after}"] * len(call.results))
        return f"{lead} {' '.join(windows)} -> {made}"

    return text


def _on_box(num: int) -> OnBox:
    def on_box(call: Call, boxed: Boxed) -> OnRank:
        """The pool without padding along dims of which boxes were fetched."""
        windows, namespace = _windows(call, num), torch.ops.aten
        function = getattr(namespace, call.base)
        kernel, stride, padding, dilation = map(list, zip(*windows))
        fetched = {at.dim - len(call.tensors[0].shape) + num: at for at in boxed.dims if at.box}
        given = {
            "kernel_size": kernel, "stride": stride, "dilation": dilation,
            "padding": [0 if at in fetched else pad for at, pad in enumerate(padding)],
        }
        if len(call.results) == 2:
            lengths = call.tensors[0].shape[-num:]
            function = with_places(function, lengths, {
                at: dim.box[0] for at, dim in fetched.items() if dim.box is not None})
        elif "avg" in call.op and call.get("divisor_override") is None:
            function = _counted(function, num, {
                at: _ratios(dim, windows[at], bool(call.get("count_include_pad", True)))
                for at, dim in fetched.items()
            })
        args = [given.get(name, arg) for name, arg in zip(call.names, boxed.args)]
        return function, tuple(args), boxed.kwargs

    return on_box


def with_places(
    function: Callable[..., Any], lengths: Sequence[int], starts: Mapping[int, int]
) -> Callable[..., Any]:
    """The pool with places in the whole dims, of which boxes begin at `starts`."""
    def pool(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        values, local = function(x, *args)
        places = apart(local, x.shape[-len(lengths):])
        for at, start in starts.items():  # of nothing but -inf, the first is the tensor's own
            places[at] = (places[at] + start).clamp(0, lengths[at] - 1)
        return values, counted(places, lengths)

    return pool


def _ratios(dim: BoxedDim, window: tuple[int, int, int, int], with_pad: bool) -> list[float]:
    """Per window, by what the mean of its box has to be multiplied: not all of it may count."""
    kernel, stride, pad, _ = window
    found = []
    for place in range(*dim.outputs):
        start = place * stride - pad
        stop = min(start + kernel, dim.length + pad)
        count = stop - start if with_pad else min(stop, dim.length) - max(start, 0)
        found.append(kernel / count)
    return found


def _counted(
    function: Callable[..., Any], num: int, ratios: Mapping[int, list[float]]
) -> Callable[..., Any]:
    """The mean over what counts, where that is less than the whole window."""
    due = {at: each for at, each in ratios.items() if any(ratio != 1 for ratio in each)}
    if not due:
        return function
    made: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def pool(x: Tensor, *args: Any) -> Tensor:
        out = function(x, *args)
        key = out.dtype, out.device
        if key not in made:
            made[key] = [
                torch.tensor(each, dtype=out.dtype, device=out.device).view(
                    [-1, *[1] * (num - 1 - at)]) for at, each in due.items()
            ]
        for ratio in made[key]:
            out = out * ratio
        return out

    return pool


def _unpooled(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """Positions are sharded as those of the values; each value goes to the rank whose shard has its
    place, and takes the place along. Of several values for one place any may be left, as in torch.
    """
    (result,), num = call.results, len(call.args[2])
    given = [one.without_partial() for one in layouts]
    at = next((at for at, one in enumerate(given) if any(one.dims[-num:])), None)
    if at is None or 0 in result.shape:
        return None
    x = given[at]
    cuts = [
        own and tuple([cut * after // before for cut in own])
        for own, before, after in zip(x.cuts, x.shape, result.shape)]
    out = Layout.make(x.mesh, result.shape, x.dims, cuts)
    lengths = out.shape[-num:]

    def bind(mesh: BoundMesh) -> Callable[[Tensor, Tensor], Tensor]:
        assert mesh.here is not None
        units = Units(mesh, out, range(out.ndim), range(out.ndim - num, out.ndim))
        exchange = RowExchange(units.comm, call.op, units.names)
        block = out.local_shape_at(mesh.here)

        def local(x: Tensor, places: Tensor) -> Tensor:
            wrong = _outside(places, lengths)
            if wrong:
                places = places.new_zeros(places.shape)
            names = [grid(places, dim) for dim in range(out.ndim - num)]
            holder, row = units.locate([*names, *apart(places, lengths)])
            routes = plan_by_request(exchange, holder, row, wrong, once=False)
            rows, values = routes.deliver(x.reshape(-1))
            return x.new_zeros(math.prod(block)).index_put_((rows,), values).view(block)

        return local

    axes = sorted({axis for dim in out.dims[-num:] for axis in dim})
    return Local(Decision((x, x), (out,)), bind, tuple(axes))


def _outside(places: Tensor, lengths: Sequence[int]) -> str:
    """torch's message for a place outside of the result, or ""."""
    if places.device.type == "cpu" and places.numel():
        for wrong in map(int, places.aminmax()):
            if not 0 <= wrong < math.prod(lengths):
                sizes = "x".join(map(str, lengths))
                return f"Found an invalid max index: {wrong} (output volumes are of size {sizes})"
    return ""


def _blocks(call: Call) -> tuple[list[int], int]:
    """Of an im2col or col2im: how many blocks there are in each dim of the image, and how many
    columns a channel gives."""
    image, windows = (call.get("output_size") or call.tensors[0].shape)[-2:], _windows(call, 2)
    counts = [(length + 2 * pad - far * (taps - 1) - 1) // step + 1
              for length, (taps, step, pad, far) in zip(image, windows)]
    return counts, math.prod([taps for taps, *_ in windows])


def _columns(call: Call, wants_grad: Sequence[bool]) -> Rule:
    """The first dim of the image in windows, "b c 2*y+v<3-1 w -> b (c q!) (y x!)"; of a col2im
    backwards: what blocks give to it is summed."""
    (x,), (result,), folds = call.tensors, call.results, call.base == "col2im"
    if "int" in x.dtype:
        raise _without_kernel(call)
    lead = "b " if len(x.shape) == (3 if folds else 4) else ""
    dims = " ".join([f"{step}*y{at}+{far}*v{at}<{taps}{-pad:+}"
                     for at, (taps, step, pad, far) in enumerate(_windows(call, 2))])
    sides = [f"{lead}c {dims}", f"{lead}(c q!) (y0 y1!)"]
    counts, num = _blocks(call)
    return bind(
        parse(" -> ".join(sides[::-1] if folds else sides)), [x.shape], [result.shape],
        known_sizes={"y0": counts[0], "y1": counts[1], "q": num}, linear=((0,),), folds=folds,
        on_box=_on_columns)


def _on_columns(call: Call, boxed: Boxed) -> OnRank:
    """The op without padding along dims of which there are boxes."""
    function = getattr(torch.ops.aten, call.base)
    padding = list(each_of(call.get("padding"), 2, 0))
    image: list[int] = list(call.get("output_size") or ())
    for at, dim in enumerate(boxed.dims):
        if dim.box is not None:
            padding[at] = 0
            if image:
                image[at] = dim.box[1] - dim.box[0]
    given = {"padding": padding, "output_size": image}
    args = [given.get(name, arg) for name, arg in zip(call.names, boxed.args)]
    return function, tuple(args), boxed.kwargs


def _from_within_rows(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Decision | None:
    """Where a rank's blocks begin within a row of them, it sums these into rows of the image, with
    zeros for the others; rows of the image that several ranks give to are summed."""
    (x,), (result,) = layouts, call.results
    if not x.dims[-1] or x.is_partial or 0 in (*x.shape, *result.shape) or (
        "int" in call.tensors[0].dtype
    ):
        return None
    (_, width), num = _blocks(call)
    shards, channels = [*pairwise(x.cuts_of(x.ndim - 1))], x.cuts_of(x.ndim - 2)
    if not any(start % width for start, _ in shards) or any(cut % num for cut in channels):
        return None
    of_channels, of_rows = x.cuts[-2:]
    out = Layout.make(x.mesh, result.shape, (*x.dims, ()), (
        *x.cuts[:-2], of_channels and tuple([cut // num for cut in of_channels]),
        of_rows and tuple([cut * result.shape[-2] // x.shape[-1] for cut in of_rows]), None))
    (taps, step, pad, far), (_, _, beside, _) = _windows(call, 2)
    rows = tuple([
        (start // width * step - pad, (stop - 1) // width * step + far * (taps - 1) + 1 - pad)
        if start < stop else (place, place)
        for (start, stop), place in zip(shards, out.cuts_of(out.ndim - 2))])
    cover = Cover((*[None] * (x.ndim - 1), rows, None))

    def runs(coordinate: tuple[int, ...]) -> Callable[..., Tensor] | Idle:
        shape = [stop - start for start, stop in cover.box_at(out, coordinate)]
        start, stop = x.box_at(coordinate)[-1]
        if 0 in shape:
            return Idle((tuple(shape),))
        beyond = start % width, -stop % width

        def local(columns: Tensor, size: Any, kernel: Any, dilation: Any, *rest: Any) -> Tensor:
            return torch.ops.aten.col2im(
                torch.constant_pad_nd(columns, beyond), shape[-2:], kernel, dilation, (0, beside),
                rest[-1])

        return local

    return Decision((x,), (out,), folds=(cover,), runs=runs)


PAGE = page(
    *[op(f"avg_pool{num}d", rule(_pool(num), on_box=_on_box(num))) for num in (1, 2, 3)],
    *[op(f"max_pool{num}d max_pool{num}d_with_indices",
         rule(_pool(num), fill=-math.inf, on_box=_on_box(num))) for num in (1, 2, 3)],
    *[op(f"max_unpool{num}d", _unpool(num), layouts=_unpooled) for num in (2, 3)],
    op("im2col", rule(_columns)),
    op("col2im", rule(_columns), layouts=_from_within_rows),
)

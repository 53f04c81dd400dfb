"""Pools and im2col.

Batch and channels pass. In pools, sharded positions stay sharded: each rank fetches the border that
its windows read. In other ops positions are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.convolutions import each_of
from weft.ops.places import apart, counted
from weft.rules import (
    Boxed,
    BoxedDim,
    Call,
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


def _unpooled(x: Tensor, indices: Tensor, output_size: Sequence[int], *rest: Any) -> Tensor:
    """Zeros whose rows are sharded as those of x are, to which the values are written: they go to
    the shards of rows that their places name."""
    num = len(output_size)
    flat = x.flatten(-num)
    zeros = torch.zeros_like(flat).unflatten(-1, x.shape[-num:])
    for dim, length in zip(range(-num, 0), output_size):
        zeros = zeros.repeat_interleave(-(-length // x.shape[dim]), dim).narrow(dim, 0, length)
    out = zeros.flatten(-num).scatter(-1, indices.flatten(-num), flat)
    return out.unflatten(-1, tuple(output_size))


def _blocks(call: Call) -> tuple[list[int], int, str, str]:
    """Of an im2col or col2im: how many blocks there are in each dim of the image, how many columns
    a channel gives, the dims of the image, and those of the columns."""
    kernel, dilation, padding, stride = [
        each_of(call.get(name), 2, 1) for name in ("kernel_size", "dilation", "padding", "stride")]
    image = (call.get("output_size") or call.tensors[0].shape)[-2:]
    counts, dims = [], []
    for at, (taps, far, pad, step) in enumerate(zip(kernel, dilation, padding, stride)):
        counts.append((image[at] + 2 * pad - far * (taps - 1) - 1) // step + 1)
        dims.append(f"{step}*y{at}+{far}*v{at}<{taps}{-pad:+}")
    lead = "b " if len(call.tensors[0].shape) == (3 if "col2im" in call.op else 4) else ""
    return counts, math.prod(kernel), f"{lead}c {' '.join(dims)}", f"{lead}(c q!) (y0 y1!)"


def _im2col(call: Call, wants_grad: Sequence[bool]) -> Rule:
    """The first dim of the image in windows, "b c 2*y+v<3-1 w -> b (c q!) (y x!)"."""
    counts, num, image, columns = _blocks(call)
    return _bound(call, f"{image} -> {columns}", counts, num, False)


def _col2im(call: Call, wants_grad: Sequence[bool]) -> Rule:
    """What blocks give to the first dim of the image is summed, "b (c q!) (y x!) -> b c 2*y+v<3-1
    w"."""
    counts, num, image, columns = _blocks(call)
    return _bound(call, f"{columns} -> {image}", counts, num, True)


def _bound(call: Call, text: str, counts: Sequence[int], num: int, folds: bool) -> Rule:
    (x,), (result,) = call.tensors, call.results
    if "int" in x.dtype:
        raise _without_kernel(call)
    known_sizes = {"y0": counts[0], "y1": counts[1], "q": num}
    return bind(
        parse(text), [x.shape], [result.shape], known_sizes=known_sizes, linear=((0,),),
        folds=folds, on_box=_on_columns)


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


PAGE = page(
    *[op(f"avg_pool{num}d", rule(_pool(num), on_box=_on_box(num))) for num in (1, 2, 3)],
    *[op(f"max_pool{num}d max_pool{num}d_with_indices",
         rule(_pool(num), fill=-math.inf, on_box=_on_box(num))) for num in (1, 2, 3)],
    *[op(f"max_unpool{num}d", _unpool(num), compose=_unpooled) for num in (2, 3)],
    op("im2col", rule(_im2col)),
    op("col2im", rule(_col2im)),
)

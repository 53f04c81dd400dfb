"""Convolutions and their transposes: a contraction of channels, positions in windows.

Batch dims and groups pass. The channels of the input are summed over, and the weight's rows give
new channels. Sharded positions stay sharded: each rank fetches the border that its windows read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Composite
from weft.rules import Boxed, Call, OnRank, Window, op, page, rule

__all__ = ["PAGE", "each_of", "num_positions"]


def each_of(value: Any, num: int, default: Any) -> tuple[Any, ...]:
    """An argument with a value for each of `num` dims, or one for all."""
    if value is None or value == [] or value == ():
        value = default
    if isinstance(value, (list, tuple)):
        return tuple(value) * num if len(value) == 1 else tuple(value)
    return (value,) * num


def num_positions(call: Call) -> int:
    """How many dims of positions the op has by its name."""
    return int(call.base[-2])


def _pads(call: Call) -> list[tuple[int, int]]:
    """Per dim of positions, how many zeros stand before and behind."""
    kernel = call.tensors[1].shape[2:]
    padding, num = call.get("padding"), len(kernel)
    if padding == "same":
        dilation = each_of(call.get("dilation"), num, 1)
        totals = [step * (taps - 1) for taps, step in zip(kernel, dilation)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in each_of(0 if padding == "valid" else padding, num, 0)]


def _is_transposed(call: Call) -> bool:
    return "transpose" in call.op or bool(call.get("transposed"))


def _convolution(call: Call, wants_grad: Sequence[bool]) -> str:
    """Positions in windows: of one dim with stride 2, "b k>0 2*y0+v0-1, n k v0!, [n] -> b n y0".
    Transposed, windows are read backwards: "b k>0 y0, k n v0!, [n] -> b n 2*y0+v0-1"."""
    x, weight, *_ = call.tensors
    num = len(weight.shape) - 2
    _check(call)
    turned = _is_transposed(call)
    batch = "b " if len(x.shape) == num + 2 else ""
    windows, taps = [], []
    for at, (kernel, step, far, pad, more) in enumerate(_steps(call, num)):
        if turned and more >= max(step, far):  # its meta kernel takes it
            raise RuntimeError("output padding must be smaller than either stride or dilation, but "
                               f"got output_padding {more}, stride {step}, dilation {far}")
        alone = kernel == step == 1 and pad == more == 0
        windows.append(f"y{at}" if alone else f"{step}*y{at}+{far}*v{at}{-pad:+}")
        taps.append("1" if alone else f"v{at}!")
    places = [" ".join(windows), " ".join([f"y{at}" for at in range(num)])]
    given, made = reversed(places) if turned else places
    rows = " ".join(taps)
    if call.get("groups", 1) > 1:
        weights = "(g k) n!" if turned else "(g n!) k"
        return f"{batch}(g k!) {given}, {weights} {rows}, [(g n)] -> {batch}(g n) {made}"
    weights = "k n" if turned else "n k"
    return f"{batch}k>0 {given}, {weights} {rows}, [n] -> {batch}n {made}"


def _steps(call: Call, num: int) -> list[tuple[int, int, int, int, int]]:
    """Per dim of positions: kernel, stride, dilation, and the zeros in front and behind; of a
    transposed convolution padding and output padding."""
    strides, dilations = [each_of(call.get(name), num, 1) for name in ("stride", "dilation")]
    if _is_transposed(call):
        pads = zip(*[each_of(call.get(name), num, 0) for name in ("padding", "output_padding")])
    else:
        pads = _pads(call)
    kernel = call.tensors[1].shape[2:]
    return [(taps, step, far, pad, more)
            for taps, step, far, (pad, more) in zip(kernel, strides, dilations, pads)]


def _check(call: Call) -> None:
    """Raise torch's errors, which its meta kernel does not, on ranks without data, too."""
    x, weight, *bias = [one.shape for one in call.tensors]
    if bias and "complex" in call.tensors[2].dtype and "complex" not in call.results[0].dtype:
        raise RuntimeError(f"result type {call.tensors[2].dtype} can't be cast to the desired "
                           f"output type {call.results[0].dtype}")
    if call.base.endswith("d") and len(weight) != num_positions(call) + 2:
        raise RuntimeError(
            f"Expected {len(weight)}-dimensional input for {len(weight)}-dimensional weight "
            f"{list(weight)}, but got {len(x)}-dimensional input of size {list(x)} instead")
    turned = _is_transposed(call)
    rows = weight[1] * call.get("groups", 1) if turned else weight[0]
    channels = x[1 - len(weight)]
    if turned and channels != weight[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight)}, expected input{list(x)} to have "
            f"{weight[0]} channels, but got {channels} channels instead")
    if bias and bias[0] != (rows,):
        raise RuntimeError(
            f"Given transposed={int(turned)}, weight of size {list(weight)}, expected bias to be "
            f"1-dimensional with {rows} elements, but got bias of size {list(bias[0])} instead")
    for name, least, said in _LEAST:
        given = call.get(name)
        if given is not None and not isinstance(given, str) and min(each_of(given, 1, 1)) < least:
            raise RuntimeError(said)


_LEAST = (
    ("output_padding", 0, "negative output_padding is not supported"),
    ("padding", 0, "negative padding is not supported"),
    ("stride", 1, "non-positive stride is not supported"),
    ("dilation", 1, "dilation should be greater than zero"),
)


def _on_box(call: Call, boxed: Boxed) -> OnRank:
    """The convolution without padding along dims of which boxes were fetched."""
    x, weight, bias = *boxed.args[:2], boxed.arg(call, "bias")
    num = len(weight.shape) - 2
    operands = (x, weight) if bias is None else (x, weight, bias)
    if _is_transposed(call):
        return _on_box_backwards(call, boxed, num), operands, {}
    _, stride, dilation, before, behind = map(list, zip(*_steps(call, num)))
    fetched = {at.dim - len(x.shape) + num for at in boxed.dims if at.box is not None}
    pads = [(0, 0) if at in fetched else pad for at, pad in enumerate(zip(before, behind))]
    function = getattr(torch, f"conv{num}d")
    groups = boxed.arg(call, "groups", 1)
    if any(pad != behind for pad, behind in pads):
        widths = [width for pad in reversed(pads) for width in pad]

        def padded(x: Tensor, *others: Any) -> Tensor:
            return function(F.pad(x, widths), *others)

        return padded, (x, weight, bias, stride, [0] * num, dilation, groups), {}
    return function, (x, weight, bias, stride, [pad for pad, _ in pads], dilation, groups), {}


def _on_box_backwards(call: Call, boxed: Boxed, num: int) -> Callable[..., Tensor]:
    """The transposed convolution of boxes: cropped to the rank's places, or padded where nothing is
    added to them; then the bias."""
    function, groups = getattr(torch, f"conv_transpose{num}d"), boxed.arg(call, "groups", 1)
    _, stride, dilation, padding, more = map(list, zip(*_steps(call, num)))
    widths = [0] * (2 * num)
    for dim in boxed.dims:
        if dim.box is None:
            continue
        at, window = dim.dim - len(call.tensors[0].shape) + num, dim.window
        assert isinstance(window, Window)
        start = dim.box[0] * window.stride - window.pad
        stop = (dim.box[1] - 1) * window.stride - window.pad + window.extent
        first, last = dim.outputs
        apart = min(stop, last) <= max(start, first)  # it adds nothing to the rank's places
        widths[2 * (num - 1 - at)] = start - stop if apart else start - first
        widths[2 * (num - 1 - at) + 1] = last - first if apart else last - stop
        padding[at] = more[at] = 0

    def convolved(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        out = function(x, weight, None, stride, padding, more, groups, dilation)
        out = F.pad(out, widths) if any(widths) else out
        return out + bias[0].view(-1, *[1] * num) if bias else out

    return convolved


def _far(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """Where the taps of a window lie further apart than a shard is long: most of a box that has
    them all would be read by nobody. The result then has no more channels than the input."""
    if _is_transposed(call):
        return None
    x, (made, _, *positions) = layouts[0], call.tensors[1].shape
    num = len(positions)
    if made > x.shape[-num - 1]:
        return None
    for at, (kernel, step, far, *pads) in enumerate(_steps(call, num)):
        dim = x.ndim - num + at
        if x.dims[dim] and kernel > 1 and far > max(1, *x.sizes_of(dim)) and step == 1:
            _check(call)
            taps = _taps(kernel, far, x.shape[dim], pads)
            return Composite(partial(_by_taps, call, at, taps), each_call=True) if taps else None
    return None


Tap = tuple[int, tuple[int, int], tuple[int, int]]


def _taps(num: int, far: int, length: int, pads: Sequence[int]) -> list[Tap]:
    """Of the taps that read more than padding: the number, the places that it reads, and how many
    places of the result it adds nothing to, before and behind."""
    places, found = length + sum(pads) - far * (num - 1), []
    for tap in range(num):
        start = tap * far - pads[0]
        first, last = max(start, 0), min(start + places, length)
        if first < last:
            found.append((tap, (first, last), (first - start, start + places - last)))
    return found


def _by_taps(
    call: Call, at: int, taps: Sequence[Tap], x: Tensor, weight: Tensor,
    bias: Tensor | None = None, *_: Any, **__: Any,
) -> Tensor:
    """A sum of convolutions, one for each tap of a dim. Each reads a slice of the input where it
    lies, and what it adds to the result moves."""
    num = weight.dim() - 2
    dim, groups = x.dim() - num + at, call.get("groups", 1)
    _kernel, strides, dilation, before, behind = map(list, zip(*_steps(call, num)))
    pads = [pad if one != at else (0, 0) for one, pad in enumerate(zip(before, behind))]
    even = [min(pad) for pad in pads]
    widths = [width - even[one] for one in reversed(range(num)) for width in pads[one]]
    x = F.pad(x, widths) if any(widths) else x
    total = None
    for tap, (first, last), around in taps:
        one = getattr(torch, f"conv{num}d")(
            x.narrow(dim, first, last - first), weight.narrow(2 + at, tap, 1), None, strides, even,
            dilation, groups)
        one = F.pad(one, [0, 0] * (num - 1 - at) + [*around]) if any(around) else one
        total = one if total is None else total + one
    assert total is not None
    return total if bias is None else total + bias.view(-1, *[1] * num)


PAGE = page(
    op("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
       rule(_convolution, linear=[0, 1], bias=[2], counts={"groups": "g"}, on_box=_on_box),
       layouts=_far),
)

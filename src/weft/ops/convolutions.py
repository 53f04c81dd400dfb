"""Convolutions and their transposes: a contraction of channels, positions in windows.

Batch dims pass, and groups. The channels of an input are summed over, those of the weight's rows
are new ones. Sharded positions stay sharded: each rank fetches the border that its windows read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.rules import Boxed, Call, op, page, rule

__all__ = ["PAGE", "each_of", "fitted", "nothing_of"]


def each_of(value: Any, num: int, default: Any) -> tuple[Any, ...]:
    """An argument that says something of each of `num` dims, or one thing of all."""
    if value is None or value == [] or value == ():
        value = default
    if isinstance(value, (list, tuple)):
        return tuple(value) * num if len(value) == 1 else tuple(value)
    return (value,) * num


def fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor, cropped and padded with zeros to a shape; differentiable."""
    for dim, length in enumerate(shape):
        x = x.narrow(dim, 0, min(length, x.shape[dim]))
    missing = [length - have for length, have in zip(shape, x.shape)]
    return F.pad(x, [width for more in reversed(missing) for width in (0, more)])


def nothing_of(out: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of this shape, which has no elements, with the graph of `out`."""
    return out.new_zeros(shape) + out.reshape(-1).narrow(0, 0, 0).sum().to(out.dtype)


def _pads(call: Call) -> list[tuple[int, int]]:
    """Per dim of positions, how many zeros stand before and behind."""
    kernel = call.tensors[1].shape[2:]
    padding, num = call.get("padding"), len(kernel)
    if padding == "same":
        dilation = each_of(call.get("dilation"), num, 1)
        totals = [step * (taps - 1) for taps, step in zip(kernel, dilation)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in each_of(0 if padding == "valid" else padding, num, 0)]


def _convolution(call: Call, wants_grad: Sequence[bool]) -> str:
    """Positions in windows: of one dim with stride 2, "b k>0 2*y0+v0-1, n k v0!, [n] -> b n y0"."""
    x, weight, *_ = call.tensors
    num = len(weight.shape) - 2
    batch = "b " if len(x.shape) == num + 2 else ""
    if "transpose" in call.op or call.get("transposed"):
        return _transposed(call, batch, num)
    strides = each_of(call.get("stride"), num, 1)
    dilations = each_of(call.get("dilation"), num, 1)
    before, taps = [], []
    for at, (step, far, (pad, behind)) in enumerate(zip(strides, dilations, _pads(call))):
        alone = weight.shape[2 + at] == step == 1 and pad == behind == 0
        before.append(f"y{at}" if alone else f"{step}*y{at}+{far}*v{at}{-pad:+}")
        taps.append("1" if alone else f"v{at}!")
    after = " ".join([f"y{at}" for at in range(num)])
    given, rows = " ".join(before), " ".join(taps)
    if call.get("groups", 1) > 1:
        return f"{batch}(g k!) {given}, (g n!) k {rows}, [(g n)] -> {batch}(g n) {after}"
    return f"{batch}k>0 {given}, n k {rows}, [n] -> {batch}n {after}"


def _transposed(call: Call, batch: str, num: int) -> str:
    kernel = call.tensors[1].shape[2:]
    alone = [size == step == 1 and pad == more == 0 for size, step, pad, more in zip(kernel, *[
        each_of(call.get(name), num, default)
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0))])]
    before = " ".join([f"s{at}>0" if one else f"s{at}!" for at, one in enumerate(alone)])
    after = " ".join([f"s{at}" if one else f"t{at}" for at, one in enumerate(alone)])
    taps = " ".join(["1" if one else f"w{at}!" for at, one in enumerate(alone)])
    if call.get("groups", 1) > 1:
        return f"{batch}(g>0 k!) {before}, (g k) n! {taps}, [(g n)] -> {batch}(g n) {after}"
    return f"{batch}k>0 {before}, k n>0 {taps}, [n] -> {batch}n {after}"


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {
    1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d,
}


def _on_box(
    call: Call, boxed: Boxed
) -> tuple[Callable[..., Any] | None, tuple[Any, ...], dict[str, Any]]:
    """The convolution without padding along dims of which boxes were fetched."""
    x, weight, bias = *boxed.args[:2], boxed.arg(call, "bias")
    num = len(weight.shape) - 2
    if "transpose" in call.op or call.get("transposed"):
        return None, boxed.args, boxed.kwargs
    stride, dilation = [
        list(each_of(call.get(name), num, 1)) for name in ("stride", "dilation")]
    operands = (x, weight) if bias is None else (x, weight, bias)
    if boxed.is_idle:
        return _idle(num, dilation, boxed.shapes[0]), operands, {}
    fetched = {at.dim - len(x.shape) + num for at in boxed.dims if at.box is not None}
    pads = [(0, 0) if at in fetched else pad for at, pad in enumerate(_pads(call))]
    function = _CONVOLUTIONS[num]
    groups = boxed.arg(call, "groups", 1)
    if any(pad != behind for pad, behind in pads):
        widths = [width for pad in reversed(pads) for width in pad]

        def padded(x: Tensor, *others: Any) -> Tensor:
            return function(F.pad(x, widths), *others)

        return padded, (x, weight, bias, stride, [0] * num, dilation, groups), {}
    return function, (x, weight, bias, stride, [pad for pad, _ in pads], dilation, groups), {}


def _idle(num: int, dilation: Sequence[int], shape: Sequence[int]) -> Callable[..., Tensor]:
    """A convolution of nothing: one position of zeros, so that its graph is that of other ranks."""
    def idle(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        weight = fitted(weight, (1, *weight.shape[1:]))
        extents = [far * (taps - 1) + 1 for far, taps in zip(dilation, weight.shape[2:])]
        x = fitted(x, (*[1] * (x.dim() - num - 1), weight.shape[1], *extents))
        out = _CONVOLUTIONS[num](x, weight, *[fitted(one, (1,)) for one in bias], dilation=dilation)
        return nothing_of(out, shape)

    return idle


PAGE = page(
    op("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
       rule(_convolution, linear=[0, 1], bias=[2], counts={"groups": "g"}, on_box=_on_box)),
)

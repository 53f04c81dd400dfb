"""Convolutions and their transposes: a contraction of channels.

Batch dims pass, and groups. The channels of an input are summed over, those of the weight's rows
are new ones. Positions are whole but where a window is a single position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.rules import Call, op, page, rule

__all__ = ["PAGE", "each_of"]


def each_of(value: Any, num: int, default: Any) -> tuple[Any, ...]:
    """An argument that says something of each of `num` dims, or one thing of all."""
    if value is None or value == [] or value == ():
        value = default
    if isinstance(value, (list, tuple)):
        return tuple(value) * num if len(value) == 1 else tuple(value)
    return (value,) * num


def _convolution(call: Call, wants_grad: Sequence[bool]) -> str:
    """Of two dims, "b k>0 s0! s1!, n>0 k w0! w1!, [n] -> b n t0 t1"; s0 stays where a window is a
    single position."""
    x, weight, *_ = call.tensors
    num = len(weight.shape) - 2
    alone = _are_single(call, weight.shape[2:])
    before = " ".join([f"s{at}>0" if one else f"s{at}!" for at, one in enumerate(alone)])
    after = " ".join([f"s{at}" if one else f"t{at}" for at, one in enumerate(alone)])
    taps = " ".join(["1" if one else f"w{at}!" for at, one in enumerate(alone)])
    batch = "b " if len(x.shape) == num + 2 else ""
    is_transpose = "transpose" in call.op or call.get("transposed")
    if call.get("groups", 1) > 1:
        rows = "(g k) n!" if is_transpose else "(g n!) k"
        return f"{batch}(g>0 k!) {before}, {rows} {taps}, [(g n)] -> {batch}(g n) {after}"
    rows = "k n>0" if is_transpose else "n>0 k"
    return f"{batch}k>0 {before}, {rows} {taps}, [n] -> {batch}n {after}"


def _are_single(call: Call, kernel: Sequence[int]) -> list[bool]:
    """Which windows are a single position."""
    num = len(kernel)
    return [
        size == step == 1 and pad in (0, "valid", "same") and more == 0
        for size, step, pad, more in zip(
            kernel, each_of(call.get("stride"), num, 1), each_of(call.get("padding"), num, 0),
            each_of(call.get("output_padding"), num, 0),
        )
    ]


PAGE = page(
    op("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
       rule(_convolution, linear=[0, 1], bias=[2], counts={"groups": "g"})),
)

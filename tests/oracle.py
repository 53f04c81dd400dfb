"""The oracle: what each rank must hold, by plain arithmetic from a layout's description.

It shares no code with the library. Of a layout it reads data only: the mesh's axis sizes, the
global shape, the axes that cut each dim (`dims`), explicit cuts (`cuts`) and the kind of each
partial axis (`partial`). The chunk arithmetic and the mixed radix are its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.complex128: 1e-9}
"""Absolute and relative; every dtype that is not here must be exact."""


Close = float | Tensor | None
"""How far values may be off: all, or each; None: as far as the dtype says. Each may be negative:
then it may be so far off, or not finite."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor; `layout` is None for a plain one."""

    layout: Any
    local: Tensor
    full: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]


def coordinates(layout: Any) -> list[tuple[int, ...]]:
    """Every mesh coordinate, row-major."""
    return list(itertools.product(*map(range, layout.mesh.axis_sizes)))


def block(layout: Any, dense: Tensor, coordinate: Sequence[int]) -> Tensor:
    """The part of `dense` that the rank at `coordinate` must hold (a partial axis cuts nothing)."""
    for dim, axes in enumerate(layout.dims):
        rows, index = list(range(dense.shape[dim])), 0
        for axis in axes:
            size, place = layout.mesh.axis_sizes[axis], coordinate[axis]
            index = index * size + place
            if layout.cuts[dim] is None:
                per = -(-len(rows) // size)
                rows = rows[place * per :][:per]
        if layout.cuts[dim] is not None:
            rows = rows[layout.cuts[dim][index] : layout.cuts[dim][index + 1]]
        dense = dense.index_select(dim, torch.tensor(rows, dtype=torch.long))
    return dense


def reduce_partials(layout: Any, terms: Tensor) -> Tensor:
    """The value whose terms over all partial axes are stacked in dim 0."""
    kinds = set(layout.partial) - {None}
    if kinds <= {"sum", "avg"}:
        sizes = zip(layout.partial, layout.mesh.axis_sizes)
        total = terms.sum(0, dtype=terms.dtype)
        count = math.prod(size for kind, size in sizes if kind == "avg")
        return total / count if count > 1 else total
    (kind,) = kinds
    whole = {
        "max": lambda: terms.amax(0), "min": lambda: terms.amin(0),
        "product": lambda: terms.prod(0, dtype=terms.dtype),
        "and": lambda: terms.all(0), "or": lambda: terms.any(0),
        "bxor": lambda: functools.reduce(torch.bitwise_xor, terms.unbind()),
    }
    return whole[kind]()


def check(
    dense: Tensor, held: Sequence[Held], what: str = "result", close: Close = None
) -> None:
    """Every rank's block, dtype and shape, then the gathered whole, against the dense tensor.

    `close`: as `same` takes it.
    """
    layout = held[0].layout
    for rank, mine in enumerate(held):
        where = f"{what} on rank {rank} ({mine.layout})"
        assert mine.layout == layout, f"{where}: rank 0 has layout {layout}"
        assert mine.shape == tuple(dense.shape), f"{where}: shape {mine.shape}, {dense.shape} due"
        assert mine.dtype == dense.dtype, f"{where}: {mine.dtype} instead of {dense.dtype}"
        assert order(mine.stride, dense.shape) == order(dense.stride(), dense.shape), (
            f"{where}: strides {mine.stride}, the order of {dense.stride()} is due"
        )
        same(mine.full, dense, f"{where}, gathered", close)
        if layout is None:
            same(mine.local, dense, where, close)
            continue
        assert tuple(layout.shape) == tuple(dense.shape), f"{where}: the layout's shape"
        places = coordinates(layout)
        assert len(places) == len(held), f"{what}: {len(held)} ranks, {len(places)} due"
        here = places[rank]
        peers = [
            other.local
            for place, other in zip(places, held)
            if all(kind or a == b for kind, a, b in zip(layout.partial, here, place))
        ]
        expected = block(layout, dense, here)
        for term in peers:
            assert term.shape == expected.shape, (
                f"{where}: local shape {tuple(term.shape)}, {tuple(expected.shape)} due"
            )
        due = block(layout, close, here) if isinstance(close, Tensor) else close
        same(reduce_partials(layout, torch.stack(peers)), expected, where, due)
        assert mine.local.dtype == dense.dtype, f"{where}: local {mine.local.dtype}"


def check_gradient(
    dense: Tensor | None, layout: Any, held: Sequence[Held | None], what: str = "gradient",
    close: Close = None,
) -> None:
    """A gradient against the dense one, in the dual of the operand's layout: S-S, I-I, P-I."""
    if dense is None:
        assert all(mine is None for mine in held), f"{what}: a gradient where torch gives none"
        return
    present = [mine for mine in held if mine is not None]
    assert len(present) == len(held), f"{what}: {len(held) - len(present)} ranks have no gradient"
    for mine in present:
        if layout is None:
            assert mine.layout is None, f"{what}: {mine.layout} for a plain operand"
            continue
        assert mine.layout is not None, f"{what}: a plain gradient for {layout}"
        is_dual = (mine.layout.dims, mine.layout.cuts) == (layout.dims, layout.cuts)
        assert is_dual and not any(mine.layout.partial), f"{what}: {mine.layout} for {layout}"
    check(dense, present, what, close)


def order(stride: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Dims from the largest stride to the smallest; dims of size 1 and expanded ones left out."""
    if 0 in shape:
        return []
    dims = [dim for dim in range(len(shape)) if shape[dim] > 1 and stride[dim]]
    return sorted(dims, key=lambda dim: -stride[dim])


def same(actual: Tensor, expected: Tensor, what: str, close: Close = None) -> None:
    """Shape, dtype and values, within `close`, or else the tolerance of the dtype."""
    if isinstance(close, Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), (
            f"{what}: {actual.dtype} of {tuple(actual.shape)}"
        )
        off = (actual.to(torch.complex128) - expected.to(torch.complex128)).abs()
        near = (actual == expected) | (off <= close) | (actual.isnan() & expected.isnan())
        near |= (close < 0) & ((off <= -close) | ~actual.isfinite())
        assert near.all(), f"{what}: {int((~near).sum())} of {near.numel()} elements are off"
        return
    alike = (actual.dtype, actual.device, actual.layout) == (
        expected.dtype, expected.device, torch.strided)
    if alike and torch.equal(actual, expected):
        return  # as most are, and what follows takes long
    relative = 0.0 if close is not None else TOLERANCE.get(expected.dtype, 0.0)
    torch.testing.assert_close(
        actual, expected, rtol=relative, atol=relative if close is None else close, equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )

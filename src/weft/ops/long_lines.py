"""The Fourier transform of a long sharded line, for tensors where no other dim can take over its
axes.

A line of N = rows * columns elements is a matrix. Its columns are transformed, each element is
turned by a twiddle factor, then the rows are transformed; the result is transposed (the four steps
of Bailey, FFTs in external or hierarchical memory, 1990). Each of three exchanges brings a rank the
part of its shard that it lacks. A gather brings it the other shards, which is less on few ranks: on
two, and for real lines, whose elements are half as large, on up to five.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout, balanced_cuts
from weft.ops.places import resized

__all__ = ["Step", "is_less", "long_line"]

_fft: Any = torch.ops.aten._fft_c2c


@dataclass(frozen=True, slots=True)
class Step:
    """A block comes to the layout `before`, and `local` makes it one of the layout `after`.

    `on_mesh`: `local` takes the bound mesh, then the block.
    """

    before: Layout
    local: Callable[..., Tensor] | None
    after: Layout
    on_mesh: bool = False


def is_less(layout: Layout, dim: int, kind: str, length: int) -> bool:
    """Whether the three exchanges of complex numbers bring a rank no more than a gather would, of
    real numbers or of half a spectrum where `kind` is not "c2c"; and all ranks have work."""
    num = layout.num_shards(dim)
    total = layout.shape[dim] if kind == "r2c" else length
    return num >= (3 if kind == "c2c" else 6) and _num_rows(total, num) > 0 and (
        kind != "c2r" or layout.shape[dim] == length // 2 + 1)


def _num_rows(length: int, num: int) -> int:
    """The divisor nearest to the root that leaves each of `num` ranks rows, and columns; 0 if there
    is none."""
    found = [rows for rows in range(num, math.isqrt(length) + 1) if length % rows == 0]
    even = [rows for rows in found if rows % num == 0]
    return max(even or found, default=0)


def long_line(
    layout: Layout, dim: int, kind: str, length: int, norm: int, forward: bool
) -> list[Step]:
    """The steps for a dim that is sharded, and stays so. `length` is that of the result's dim."""
    axes, total = layout.dims[dim], layout.shape[dim] if kind == "r2c" else length
    num = layout.num_shards(dim)
    rows = _num_rows(total, num)
    columns, kept = total // rows, -(-length // rows)
    steps: list[Step] = []
    if kind == "c2r":
        steps.append(_with_zeros(layout, dim, total))
        layout = steps[0].after
    rest = layout.gathered((dim,)).take([at for at in range(layout.ndim) if at != dim])

    def cut(first: int, second: int = 1) -> tuple[int, ...]:
        """Where a matrix of so many rows, of so many columns each, is cut between rows."""
        return tuple([at * second for at in balanced_cuts(first, [num])])

    def matrix(first: int, second: int, at: int) -> Layout:
        """The line as a matrix, of which side `at` is sharded."""
        cuts = (cut(first), None) if at == 0 else (None, cut(second))
        both = (axes, ()) if at == 0 else ((), axes)
        return rest.insert(dim, Layout.make(layout.mesh, (first, second), both, cuts))

    def line(first: int, second: int) -> Layout:
        """The line, cut between the rows of such a matrix."""
        return layout.recut(dim, first * second, cut(first, second))

    def transformed(x: Tensor, at: int) -> Tensor:
        return _fft(x, [at], norm, forward) if x.numel() else x * 1

    def as_matrix(x: Tensor) -> Tensor:
        x = x if x.is_complex() else x.to(x.dtype.to_complex())
        return x.reshape(*x.shape[:dim], x.shape[dim] // columns, columns, *x.shape[dim + 1 :])

    def of_columns(mesh: BoundMesh, x: Tensor) -> Tensor:
        assert mesh.here is not None
        start, _ = matrix(rows, columns, 1).box_at(mesh.here)[dim + 1]
        return transformed(x, dim) * _twiddles(x, dim, start, total, forward)

    def of_rows(x: Tensor) -> Tensor:
        return transformed(x, dim + 1).transpose(dim, dim + 1).narrow(dim, 0, kept)

    steps += [
        Step(line(rows, columns), as_matrix, matrix(rows, columns, 0)),
        Step(matrix(rows, columns, 1), of_columns, matrix(rows, columns, 1), on_mesh=True),
        Step(matrix(rows, columns, 0), of_rows, matrix(kept, rows, 1)),
        Step(matrix(kept, rows, 0), lambda x: x.flatten(dim, dim + 1), line(kept, rows)),
    ]
    if length < kept * rows:
        steps.append(_cropped(steps[-1].after, dim, length))
    if kind == "c2r":
        last = steps[-1].after
        steps.append(Step(last, lambda x: x.real.contiguous(), last))
    return steps


def _twiddles(x: Tensor, dim: int, start: int, total: int, forward: bool) -> Tensor:
    """exp(-+ 2 pi i row column / total) for the columns of a block, from `start` on."""
    rows = torch.arange(x.shape[dim], device=x.device)
    columns = torch.arange(start, start + x.shape[dim + 1], device=x.device)
    angle = (rows[:, None] * columns).double() * ((-2 if forward else 2) * math.pi / total)
    turns = torch.complex(angle.cos(), angle.sin()).to(x.dtype)
    return turns.reshape(*turns.shape, *[1] * (x.dim() - dim - 2))


def _cropped(layout: Layout, dim: int, length: int) -> Step:
    """Keeps only the first elements of a line, in place."""
    after = layout.recut(dim, length, tuple([min(cut, length) for cut in layout.cuts_of(dim)]))

    def local(mesh: BoundMesh, x: Tensor) -> Tensor:
        assert mesh.here is not None
        return x.narrow(dim, 0, after.local_shape_at(mesh.here)[dim]).clone()

    return Step(layout, local, after, on_mesh=True)


def _with_zeros(layout: Layout, dim: int, total: int) -> Step:
    """Half a spectrum as a whole one whose transform has the due real part: zeros follow, and what
    stands for two elements of the whole is doubled."""
    half = layout.shape[dim]
    after = layout.recut(dim, total, (*layout.cuts_of(dim)[:-1], total))

    def local(mesh: BoundMesh, x: Tensor) -> Tensor:
        assert mesh.here is not None
        start, stop = after.box_at(mesh.here)[dim]
        place = torch.arange(start, start + x.shape[dim], device=x.device)
        once = (place == 0) | (2 * place == total)
        weight = torch.where(once, 1.0, 2.0).to(x.dtype)
        x = x * weight.reshape(-1, *[1] * (x.dim() - dim - 1))
        return resized(x, dim, stop - start)

    assert half == total // 2 + 1
    return Step(layout, local, after, on_mesh=True)

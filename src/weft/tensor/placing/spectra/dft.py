"""Discrete Fourier transforms dim by dim: of few modes as products with rows of the DFT matrix, of
others by exchanges.

A transform of a sharded dim to k of its n modes is a product that contracts the dim: each rank
multiplies its own positions, and the sums are partial values of k elements. The inverse makes each
rank's positions of the k modes, which are replicated. A rank computes 8 k operations per position
for the 5 log2(n) of a fast transform, and sends modes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import Any

import torch
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.core import Layout
from weft.ops.transforms import handed_over, spread_over
from weft.tensor.modes import check_strict
from weft.tensor.placing.construct import arange
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.placing.scatter import distribute_tensor
from weft.tensor.placing.spectra.ranges import Range, count
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["at_positions", "check_move", "modes_of", "one_by_one", "summed"]

_EVEN = 1.5
"""As of `ops.transforms`, but of modes, which are few: where they are sharded by modes, an inverse
transform leads back to the layout of the field."""


def modes_of(x: ShardTensor, dim: int, kept: Sequence[Range], norm: str | None) -> Any:
    """The modes in these ranges of a dim, whose sum over ranks is still to be made."""
    length, layout = x.shape[dim], x._meta.layout
    matrix = _rows(x, layout.dims[dim], layout.cuts[dim], length, kept, -1)
    factor = {"forward": 1 / length, "ortho": length**-0.5}.get(norm or "backward", 1)
    if x.is_complex():
        return _product(x, (matrix * factor).to(x.dtype), dim, "mn")
    parts = torch.view_as_real(matrix * factor).to(x.dtype).unbind(-1)
    return torch.complex(*[_product(x, part, dim, "mn") for part in parts])


def at_positions(
    x: ShardTensor, dim: int, kept: Sequence[Range], to: Layout, norm: str | None, is_half: bool
) -> ShardTensor:
    """The values of modes, which are in these ranges of a whole dim, at the positions of a dim that
    is sharded as in `to`; `is_half`: the real part of the values, of modes of a half spectrum."""
    length = to.shape[dim]
    factor = {"forward": 1.0, "ortho": length**-0.5}.get(norm or "backward", 1 / length)
    matrix = _rows(x, to.dims[dim], to.cuts[dim], length, kept, 1).T * factor
    if not is_half:
        return _product(x, matrix.to(x.dtype), dim, "nm")
    modes = [mode for start, stop in kept for mode in range(start, stop)]
    both = distribute_tensor(  # a mode of a half spectrum stands for two, but for those alone
        torch.tensor([1.0 if 2 * mode in (0, length) else 2.0 for mode in modes],
                     dtype=torch.float64, device=x._meta.mesh.device),
        x._meta.mesh, Layout.replicated(to.mesh, (len(modes),)), src_data_rank=None)
    parts = torch.view_as_real(matrix * both).to(x.dtype.to_real())
    return _product(x.real, parts[..., 0], dim, "nm") - _product(x.imag, parts[..., 1], dim, "nm")


def _rows(
    x: ShardTensor, axes: Sequence[int], cuts: Any, length: int, kept: Sequence[Range], sign: int
) -> Any:
    """Rows of the DFT matrix, exp(+-2 pi i mode position / length): modes times positions, which
    are sharded like this."""
    mesh = x._meta.mesh
    line = Layout.make(mesh.abstract, (length,), [axes], [cuts])
    positions = arange(length, mesh=mesh, placements=line)
    modes = distribute_tensor(
        torch.cat([torch.arange(*ends, device=mesh.device) for ends in kept]), mesh,
        Layout.replicated(mesh.abstract, (count(kept),)),
        src_data_rank=None)
    turns = torch.outer(modes, positions).remainder(length).double() * (sign * 2 * math.pi / length)
    return torch.complex(turns.cos(), turns.sin())


def _product(x: Any, matrix: Any, dim: int, names: str) -> Any:
    """The product with a matrix of these dims, m of modes and n of positions, over the dim."""
    given = list(ascii_uppercase[: x.dim()])
    given[dim] = "n" if names == "mn" else "m"
    made = list(given)
    made[dim] = "m" if names == "mn" else "n"
    with _DisableAutocast():  # transforms are not cast to narrow dtypes
        return torch.einsum(f"{''.join(given)},{names}->{''.join(made)}", x, matrix)


def one_by_one(
    x: Any, dims: Sequence[int], done: Sequence[int], transform: Callable[[Any, int], Any]
) -> Any:
    """Transform these dims, the last one first, after others. The axes of a sharded dim go where a
    transform of all of them would bring them."""
    done, pending = list(done), list(dims)
    while pending:
        dim = pending.pop()
        layout = x._meta.layout
        if layout.dims[dim]:
            x = _handed(x, handed_over(layout, dim, done, pending, _EVEN))
        x = transform(x, dim)
        done.append(dim)
    return x


def summed(x: ShardTensor, done: Sequence[int], pending: Sequence[int]) -> ShardTensor:
    """The tensor with its partial values summed; the axes go to dims that they divide."""
    layout = x._meta.layout
    axes = [axis for axis, kind in enumerate(layout.partial) if kind is not None]
    if not axes:
        return x
    return _handed(x, spread_over(layout.without_partial(), axes, done, pending, _EVEN)[0])


def _handed(x: ShardTensor, layout: Layout) -> ShardTensor:
    check_move(x, layout)
    return redistribute_to(x, layout, "rfftn")


def check_move(x: ShardTensor, layout: Layout) -> None:
    """Raise StrictError where strict mode forbids to bring a tensor to this layout."""
    move = transition_between(x._meta.mesh, x._meta.layout, layout, order=x._meta.order())
    if move is not None:
        check_strict("rfftn", move)

"""Discrete Fourier transforms of few modes, as products with rows of the DFT matrix.

A transform of a sharded dim to k of its n modes is a product that contracts the dim: each rank
multiplies its own positions, and the sums are partial values of k elements. The inverse makes each
rank's positions of the k modes, which are replicated. A rank computes 8 k operations per position
for the 5 log2(n) of a fast transform, and sends modes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

import torch
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.core import Layout
from weft.tensor.placing.construct import arange
from weft.tensor.placing.scatter import distribute_tensor
from weft.tensor.placing.spectra.ranges import Range, count
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["at_positions", "modes_of", "real_at_positions"]

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
    x: ShardTensor, dim: int, kept: Sequence[Range], to: Layout, norm: str | None
) -> ShardTensor:
    """The values of modes, which are in these ranges of a whole dim, at the positions of a dim that
    is sharded as in `to`."""
    return _product(x, _inverse(x, dim, kept, to, norm).to(x.dtype), dim, "nm")


def real_at_positions(
    x: ShardTensor, dim: int, kept: Sequence[Range], to: Layout, norm: str | None
) -> ShardTensor:
    """As `at_positions`, of the modes of a half spectrum: the real part of the values."""
    length = to.shape[dim]
    modes = [mode for start, stop in kept for mode in range(start, stop)]
    both = distribute_tensor(  # a mode of a half spectrum stands for two, but for those alone
        torch.tensor([1.0 if 2 * mode in (0, length) else 2.0 for mode in modes],
                     dtype=torch.float64, device=x._meta.mesh.device),
        x._meta.mesh, Layout.replicated(to.mesh, (len(modes),)), src_data_rank=None)
    matrix = torch.view_as_real(_inverse(x, dim, kept, to, norm) * both).to(x.dtype.to_real())
    return _product(x.real, matrix[..., 0], dim, "nm") - _product(x.imag, matrix[..., 1], dim, "nm")


def _inverse(
    x: ShardTensor, dim: int, kept: Sequence[Range], to: Layout, norm: str | None
) -> Any:
    """Columns of the inverse DFT matrix, positions times modes."""
    length = to.shape[dim]
    factor = {"forward": 1.0, "ortho": length**-0.5}.get(norm or "backward", 1 / length)
    return _rows(x, to.dims[dim], to.cuts[dim], length, kept, 1).T * factor


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

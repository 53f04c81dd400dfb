"""Discrete Fourier transforms of few modes, as products with a matrix of waves.

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
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["at_positions", "modes_of", "real_at_positions"]

Ranges = Sequence[tuple[int, int]]


def modes_of(x: ShardTensor, dim: int, kept: Ranges, norm: str | None) -> Any:
    """The modes in these ranges of a dim, whose sum over ranks is still to be made."""
    length, layout = x.shape[dim], x._meta.layout
    waves = _waves(x, layout.dims[dim], layout.cuts[dim], length, kept, -1)
    factor = {"forward": 1 / length, "ortho": length**-0.5}.get(norm or "backward", 1)
    if x.is_complex():
        return _product(x, (waves * factor).to(x.dtype), dim, "mn")
    parts = torch.view_as_real(waves * factor).to(x.dtype).unbind(-1)
    return torch.complex(*[_product(x, part, dim, "mn") for part in parts])


def at_positions(
    x: ShardTensor, dim: int, kept: Ranges, to: Layout, norm: str | None
) -> ShardTensor:
    """The values of modes, which are in these ranges of a whole dim, at the positions of a dim that
    is sharded as in `to`."""
    return _product(x, _inverse(x, dim, kept, to, norm).to(x.dtype), dim, "nm")


def real_at_positions(
    x: ShardTensor, dim: int, kept: Ranges, to: Layout, norm: str | None
) -> ShardTensor:
    """As `at_positions`, of the modes of a half spectrum: the real part of the values."""
    length = to.shape[dim]
    modes = [mode for start, stop in kept for mode in range(start, stop)]
    both = distribute_tensor(  # a mode of a half spectrum stands for two, but for those alone
        torch.tensor([1.0 if 2 * mode in (0, length) else 2.0 for mode in modes],
                     dtype=torch.float64, device=x._local.device),
        x._meta.mesh, Layout.replicated(to.mesh, (len(modes),)), src_data_rank=None)
    waves = torch.view_as_real(_inverse(x, dim, kept, to, norm) * both).to(x.dtype.to_real())
    return _product(x.real, waves[..., 0], dim, "nm") - _product(x.imag, waves[..., 1], dim, "nm")


def _inverse(
    x: ShardTensor, dim: int, kept: Ranges, to: Layout, norm: str | None
) -> Any:
    """The waves at positions times modes."""
    length = to.shape[dim]
    factor = {"forward": 1.0, "ortho": length**-0.5}.get(norm or "backward", 1 / length)
    return _waves(x, to.dims[dim], to.cuts[dim], length, kept, 1).T * factor


def _waves(
    x: ShardTensor, axes: Sequence[int], cuts: Any, length: int, kept: Ranges, sign: int
) -> Any:
    """exp(+-2 pi i mode position / length), modes times positions, which are sharded like this."""
    mesh = x._meta.mesh
    line = Layout.make(mesh.abstract, (length,), [axes], [cuts])
    positions = arange(length, mesh=mesh, placements=line)
    modes = distribute_tensor(
        torch.cat([torch.arange(*ends, device=mesh.device) for ends in kept]), mesh,
        Layout.replicated(mesh.abstract, (sum(stop - start for start, stop in kept),)),
        src_data_rank=None)
    turns = torch.outer(modes, positions).remainder(length).double() * (sign * 2 * math.pi / length)
    return torch.complex(turns.cos(), turns.sin())


def _product(x: Any, waves: Any, dim: int, names: str) -> Any:
    """The product with waves of these dims, m of modes and n of positions, over the dim."""
    given = list(ascii_uppercase[: x.dim()])
    given[dim] = "n" if names == "mn" else "m"
    made = list(given)
    made[dim] = "m" if names == "mn" else "n"
    with _DisableAutocast():  # transforms are not cast to narrow dtypes
        return torch.einsum(f"{''.join(given)},{names}->{''.join(made)}", x, waves)

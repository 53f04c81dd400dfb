"""Ops on places that consist of others: joins, diagonals, turns, differences.

Each is the torch code that says what it means, so the rules of slices, views and joins serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.algorithm import where_cut
from weft.rules import Call

__all__ = ["TABLE"]


def _diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """The diagonal, or a matrix of it: elements stay where they lie; any dim may be cut."""
    return x.diag_embed(diagonal) if x.dim() == 1 else x.diagonal(diagonal).clone()


def _diagflat(x: Tensor, offset: int = 0) -> Tensor:
    """The matrix whose diagonal is all elements: its rows are cut where these are."""
    return x.reshape(-1).diag_embed(offset)


def _trace(x: Tensor) -> Tensor:
    """The sum of the diagonal: terms, of the elements that each shard has of it."""
    return x.diagonal().sum()


def _hstack(tensors: Sequence[Tensor]) -> Tensor:
    """A `cat` in dim 1 (lines: in dim 0): any dim may be cut, that of the joint too."""
    tensors = [torch.atleast_1d(one) for one in tensors]
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1)


def _vstack(tensors: Sequence[Tensor]) -> Tensor:
    """A `cat` in dim 0, lines as rows: any dim may be cut, that of the joint too."""
    return torch.cat([torch.atleast_2d(one) for one in tensors], 0)


def _dstack(tensors: Sequence[Tensor]) -> Tensor:
    """A `cat` in dim 2: any dim may be cut, that of the joint too."""
    return torch.cat([torch.atleast_3d(one) for one in tensors], 2)


def _column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """A `cat` in dim 1, lines as columns: any dim may be cut, that of the joint too."""
    return torch.cat([one if one.dim() > 1 else one.reshape(-1, 1) for one in tensors], 1)


def _block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """Blocks padded to the whole width, then a `cat` of rows: any dim may be cut."""
    blocks = [torch.atleast_2d(one) for one in tensors]
    dtype = torch.result_type(blocks[0], blocks[0])
    for one in blocks:
        dtype = torch.promote_types(dtype, one.dtype)
    width, rows, at = sum(one.shape[1] for one in blocks), [], 0
    for one in blocks:
        pad = [at, width - at - one.shape[1]]
        rows.append(torch.constant_pad_nd(one.to(dtype), pad))
        at = at + one.shape[1]
    return torch.cat(rows, 0)


def _rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Flips and a transposition: any dim may be cut; a cut dim that turns is exchanged."""
    one, other = dims
    match k % 4:
        case 1:
            return x.flip([other]).transpose(one, other)
        case 2:
            return x.flip([one, other])
        case 3:
            return x.flip([one]).transpose(one, other)
    return x.clone()


def _diff(
    x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """Later elements less earlier ones: any dim may be cut; along a cut dim, borders are sent."""
    if n == 0:
        return x.clone()
    parts = [one for one in (prepend, x, append) if one is not None]
    if len(parts) > 1:
        x = torch.cat(parts, dim)
    for _ in range(n):
        later = x.narrow(dim, 1, x.shape[dim] - 1)
        earlier = x.narrow(dim, 0, x.shape[dim] - 1)
        x = later ^ earlier if x.dtype is torch.bool else later - earlier
    return x


def _kron(x: Tensor, y: Tensor) -> Tensor:
    """An outer product, its dims joined in pairs: cuts of the first operand stay, the
    second's are exchanged."""
    ndim = max(x.dim(), y.dim())
    x = x.reshape([1] * (ndim - x.dim()) + list(x.shape))
    y = y.reshape([1] * (ndim - y.dim()) + list(y.shape))
    shape = [a * b for a, b in zip(x.shape, y.shape)]
    both = [length for pair in zip(x.shape, [1] * ndim) for length in pair]
    own = [length for pair in zip([1] * ndim, y.shape) for length in pair]
    return (x.reshape(both) * y.reshape(own)).reshape(shape)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """A contraction of the last dims: other cuts stay, a cut of the last dim leaves terms."""
    if not x.dim() or not y.dim():
        return x * y
    contract: Any = torch.tensordot
    return contract(x, y, ([-1], [-1]))


def _vdot(x: Tensor, y: Tensor) -> Tensor:
    """The dot product with the conjugate: a cut of the dim leaves terms."""
    return torch.dot(x.conj(), y)


def _dist(a: Tensor, b: Tensor, p: float = 2) -> Tensor:
    """The norm of the difference: any dim may be cut; a number for each shard is sent."""
    return torch.linalg.vector_norm(a - b, p)


def _addbmm(
    x: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    """One `addmm` of batch and inner dim joined: rows and columns stay cut, a cut batch leaves
    terms, a cut inner dim is exchanged."""
    rows = left.transpose(0, 1).reshape(left.shape[1], -1)
    return torch.addmm(x, rows, right.reshape(-1, right.shape[2]), beta=beta, alpha=alpha)


def _chained(tensors: Sequence[Tensor]) -> Tensor:
    """Matrix products from left to right: any dim may be cut, as by `matmul`."""
    out = tensors[0]
    for one in tensors[1:]:
        out = out @ one
    return out


def _meshgrid(tensors: Sequence[Tensor], *, indexing: str = "ij") -> list[Tensor]:
    """Each line as a dim of an expanded result: a cut line cuts that dim, and nothing is sent."""
    order = list(range(len(tensors)))
    if indexing == "xy" and len(order) > 1:
        order[:2] = [1, 0]
    lengths = [tensors[at].numel() for at in order]
    return [
        one.reshape([-1 if at == place else 1 for at in order]).expand(lengths)
        for place, one in enumerate(tensors)
    ]


def _broadcast_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each is expanded where it lies, whatever its cuts: the results need not lie alike."""
    shape = torch.broadcast_shapes(*(one.shape for one in tensors))
    return [one.expand(shape) for one in tensors]


def _linalg_diagonal(x: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """A diagonal, by the rule of `diagonal`: any dim may be cut, and nothing is sent."""
    return x.diagonal(offset, dim1, dim2)


def _cartesian_prod(tensors: Sequence[Tensor]) -> Tensor:
    """Expanded lines, each flattened, side by side: any may be cut; the first one's cut is the
    result's."""
    if len(tensors) == 1:
        return tensors[0].view(-1)
    lengths = [one.shape[0] for one in tensors]
    spread = [
        one.reshape([-1 if dim == at else 1 for dim in range(len(tensors))]).expand(lengths)
        for at, one in enumerate(tensors)
    ]
    return torch.stack([one.reshape(-1) for one in spread], 1)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """A `slice_scatter` of one slice: any dim may be cut; only the slice is sent."""
    length = x.shape[dim]
    if not -length <= index < length:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(x.shape)} at "
            f"dimension {dim}"
        )
    at = index % length
    return torch.slice_scatter(x, source.unsqueeze(dim), dim, at, at + 1)


def _narrow_copy(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`narrow`, copied: any dim may be cut; what is left of a cut dim is ragged, and nothing is
    sent."""
    return x.narrow(dim, start, length).clone()


def _flat_repeat_interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Elements repeated a number of times each, by the rule of the flat view: any dim may be
    cut."""
    return x.reshape(-1).repeat_interleave(repeats, 0)


def _pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Channels unfolded into height and width: batch and positions stay cut, cut channels by whole
    groups."""
    *lead, channels, height, width = x.shape
    apart = x.reshape([*lead, channels // factor**2, factor, factor, height, width])
    at = len(lead)
    order = [*range(at), at, at + 3, at + 1, at + 4, at + 2]
    shape = [*lead, channels // factor**2, height * factor, width * factor]
    return apart.permute(order).reshape(shape)


def _pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """Height and width folded into channels: batch and channels stay cut, positions by whole
    steps."""
    *lead, channels, height, width = x.shape
    apart = x.reshape([*lead, channels, height // factor, factor, width // factor, factor])
    at = len(lead)
    order = [*range(at), at, at + 2, at + 4, at + 1, at + 3]
    shape = [*lead, channels * factor**2, height // factor, width // factor]
    return apart.permute(order).reshape(shape)


def _steps(call: Call) -> bool:
    """Whether every difference of `diff` is one of elements that are there."""
    x, n, dim = call.tensors[0], call.args[1], call.args[2]
    return len(x.shape) > 0 and math.prod(x.shape) > 0 and 0 <= n <= x.shape[dim]


TABLE = {
    "aten.diag.default": where_cut(_diag),
    "aten.diagflat.default": where_cut(_diagflat),
    "aten.trace.default": where_cut(_trace),
    "aten.hstack.default": where_cut(_hstack),
    "aten.vstack.default": where_cut(_vstack),
    "aten.row_stack.default": where_cut(_vstack),
    "aten.dstack.default": where_cut(_dstack),
    "aten.column_stack.default": where_cut(_column_stack),
    "aten.block_diag.default": where_cut(_block_diag),
    "aten.rot90.default": where_cut(_rot90),
    "aten.diff.default": where_cut(_diff, _steps),
    "aten.kron.default": where_cut(_kron),
    "aten.broadcast_tensors.default": where_cut(_broadcast_tensors),
    "aten.cartesian_prod.default": where_cut(_cartesian_prod),
    "aten.select_scatter.default": where_cut(_select_scatter),
    "aten.inner.default": where_cut(_inner),
    "aten.vdot.default": where_cut(_vdot),
    "aten.dist.default": where_cut(_dist),
    "aten.addbmm.default": where_cut(_addbmm),
    "aten.chain_matmul.default": where_cut(_chained),
    "aten.linalg_multi_dot.default": where_cut(_chained),
    "aten.meshgrid.default": where_cut(_meshgrid),
    "aten.meshgrid.indexing": where_cut(_meshgrid),
    "aten.linalg_diagonal.default": where_cut(_linalg_diagonal),
    "aten.pixel_shuffle.default": where_cut(_pixel_shuffle),
    "aten.pixel_unshuffle.default": where_cut(_pixel_unshuffle),
    "aten.narrow_copy.default": where_cut(_narrow_copy),
    "aten.repeat_interleave.self_int": where_cut(
        _flat_repeat_interleave, lambda call: call.args[2] is None
    ),
}
"""Op name -> who answers for it."""

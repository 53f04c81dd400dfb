"""`affine_grid`: each sample's matrix times the positions of a grid.

Matrices are small and grids are large, and nothing in a call says where the positions are used. So
the grid is replicated, and made late: a use that shards positions makes each rank's part alone, any
other use makes the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local
from weft.ops.precision import widened
from weft.rules import Call, Decision, op, page
from weft.transport import Transition
from weft.transport.in_flight import late
from weft.transport.nodes import transforms, with_gradient

__all__ = ["PAGE"]


def _late_grid(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local:
    """A sharded batch stays. Positions are made where they are used."""
    theta, shape = layouts[0].without_partial().gathered((1, 2)), call.results[0].shape
    result = theta.take([0]).insert(1, Layout.replicated(theta.mesh, shape[1:]))
    lengths, aligned = tuple(shape[1:-1]), bool(call.args[2])

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        def run(matrices: Tensor, *rest: Any) -> Tensor:
            lines = _lines(lengths, aligned, matrices)
            if mesh.here is None or transforms() is not None:
                return _grid(matrices, lines)
            kept = matrices.clone()  # it may change before the grid is used
            shape = (matrices.shape[0], *lengths, len(lengths))
            return late(
                _late(kept, lines, shape), lambda: _grid(kept.detach(), lines),
                lambda move: _part(kept, lines, theta, move))

        return run

    return Local(Decision((theta,), (result,)), bind)


def _part(matrices: Tensor, lines: Sequence[Tensor], theta: Layout, move: Transition) -> Any:
    """What a transition of the grid gives, of the matrices and of this rank's positions; None where
    it does more than to shard the grid."""
    src, dst, here = move.src, move.dst, move.mesh.here
    if here is None or move.cover is not None or dst.is_partial or dst.dims[-1] or (
        src.dims[0] and (dst.dims[0] != src.dims[0] or dst.cuts[0] != src.cuts[0])
    ):
        return None
    axes = {axis for dims in dst.dims for axis in dims} - {*src.dims[0]}
    varies = Transition(move.mesh, theta, theta, src_varying=move.src_varying,
                        dst_varying=move.dst_varying | axes)
    if not varies.is_identity:
        matrices = varies(matrices)
    (first, last), *box = dst.box_at(here)[:-1]
    if not src.dims[0]:
        matrices = matrices[first:last]
    return _grid(matrices, [line[start:stop] for line, (start, stop) in zip(lines, box)])


def _lines(lengths: Sequence[int], aligned: bool, like: Tensor) -> list[Tensor]:
    """The positions along each dim, from -1 to 1."""
    lines: list[Tensor] = []
    for length in lengths:
        ends = 1 if aligned or length < 1 else (length - 1) / length
        ends = ends if length > 1 else 0
        lines.append(torch.linspace(-ends, ends, length, dtype=like.dtype, device=like.device))
    return lines


def _grid(matrices: Tensor, lines: Sequence[Tensor]) -> Tensor:
    """Columns of the matrices, the first for the last dim, times positions, and the last column."""
    num = len(lines)
    columns = widened(matrices).unbind(-1)
    out = columns[num].view(-1, *[1] * num, num)
    for at, line in zip(range(num - 1, -1, -1), reversed(lines)):
        column = columns[num - 1 - at].view(-1, *[1] * num, num)
        out = out + line.to(column.dtype).view(-1, *[1] * (num - at)) * column
    return out.to(matrices.dtype)


def _late(matrices: Tensor, lines: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The place of a grid in autograd's graph, without its data."""
    dtype, dims = matrices.dtype, range(1, len(lines) + 1)

    def back(grad: Tensor) -> Tensor:
        grad = widened(grad)
        columns = [grad.sum([dim for dim in dims if dim != at]) for at in reversed(dims)]
        columns = [
            (column * line.to(grad.dtype)[:, None]).sum(1)
            for column, line in zip(columns, reversed(lines))
        ]
        return torch.stack([*columns, grad.sum(list(dims))], -1).to(dtype)

    return with_gradient(matrices, lambda x: x.new_empty(1).expand(shape), back)


PAGE = page(op("affine_grid_generator", layouts=_late_grid))

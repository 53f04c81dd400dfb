"""How attention of one call is carried out: by heads, or by blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.attending.blocks import Blocks
from weft.ops.attending.heads import ByHeads
from weft.ops.attending.sequence import Keys, attend
from weft.ops.attending.tiles import Asked
from weft.transport import Transition

__all__ = ["Way"]


class Way:
    """How the operands of a call lie, and what that allows.

    Args:
        layouts: of queries, keys, values and the mask, if there is one.
        is_causal: whether a query sees no key of a later position.
        enable_gqa: whether several heads of queries may share one of keys.
    """

    __slots__ = ("axes", "first", "groups", "heads", "is_causal", "keys", "layouts", "mesh")

    def __init__(
        self, mesh: BoundMesh, layouts: tuple[Layout, ...], is_causal: bool, enable_gqa: bool
    ) -> None:
        assert mesh.here is not None
        self.mesh, self.layouts, self.is_causal = mesh, layouts, is_causal
        query, key = layouts[:2]
        self.groups = 1
        if enable_gqa and key.shape[-3] not in (1, query.shape[-3]):
            self.groups = query.shape[-3] // key.shape[-3]
        self.axes = tuple(sorted(key.dims[-2]))
        both = tuple([axis for axis in self.axes if axis in query.dims[-2]])
        rest = tuple([axis for axis in self.axes if axis not in both])
        columns = 0 if len(layouts) < 4 or not layouts[3].dims[-1] else _first(mesh, layouts[3], -1)
        self.first = _first(mesh, query, -2), columns
        self.keys = Keys(
            _first(mesh, key, -2), _blocks(mesh, query, key, both, is_causal) if both else None,
            mesh.comm(rest) if rest else None, self._gathered,
        )
        self.heads = ByHeads.of(mesh, layouts) if both and not rest else None

    def attend(self, tensors: Sequence[Tensor], scale: float) -> Tensor:
        """This rank's part of the result."""
        if self.heads is not None and self._by_heads(self.heads, tensors):
            return self.heads.attend(list(tensors), is_causal=self.is_causal, scale=scale)
        q, k, v, *masks = tensors
        mask = masks[0] if masks else None
        if mask is not None and mask.dim() == 1:
            mask = mask.unsqueeze(0)
        if self.groups > 1:
            q = q.unflatten(-3, (k.shape[-3], self.groups))
            k, v = k.unsqueeze(-3), v.unsqueeze(-3)
            if mask is not None and mask.dim() > 2:
                mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(
                    -3, (k.shape[-4], self.groups))
        row, column = self.first
        out = attend(self.keys, Asked(scale, self.is_causal, row, mask, column), q, k, v)
        return out.flatten(-4, -3) if self.groups > 1 else out

    def _by_heads(self, heads: ByHeads, tensors: Sequence[Tensor]) -> bool:
        """Whether an exchange of heads sends less than blocks do."""
        assert self.keys.blocks is not None
        grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        fetched = self.keys.blocks.busiest(grad) * sum([
            math.prod(one.shape[:-2]) * one.shape[-1] * one.element_size() for one in tensors[1:3]
        ])
        exchanged = heads.nbytes(tensors[0].element_size())
        return (2 * exchanged if grad else exchanged) <= fetched

    def _gathered(self, x: Tensor, is_value: bool) -> Tensor:
        """Keys or values of all ranks."""
        layout = self.layouts[2 if is_value else 1]
        whole = layout.gathered([layout.ndim - 2])
        move = Transition(self.mesh, layout, whole, dst_varying=frozenset(self.axes))
        return move(x.squeeze(-3)).unsqueeze(-3) if self.groups > 1 else move(x)


def _first(mesh: BoundMesh, layout: Layout, dim: int) -> int:
    """The position in a dim of this rank's first element."""
    assert mesh.here is not None
    return layout.box_at(mesh.here)[dim][0]


def _blocks(
    mesh: BoundMesh, query: Layout, key: Layout, axes: tuple[int, ...], is_causal: bool
) -> Blocks:
    """The blocks of the ranks along these axes, which stand in the order of the mesh."""
    comm, queries, keys = mesh.comm(axes), [], []
    for place in range(comm.size):
        at = list(mesh.here or ())
        for axis in reversed(axes):
            place, at[axis] = divmod(place, mesh.axis_sizes[axis])
        queries.append(query.box_at(at)[-2])
        keys.append(key.box_at(at)[-2])
    return Blocks(comm, queries, keys, is_causal)

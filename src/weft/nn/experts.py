"""Rows of a layer of experts, sharded as the matrices of their experts are."""

from __future__ import annotations

from torch import Tensor

from weft.core import Layout
from weft.errors import LayoutError
from weft.tensor.families.grouped import cuts_at_owners
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["by_expert"]


def by_expert(index: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
    """An index of rows that are sorted by expert, sharded as the experts are: `x[index]` then sends
    each row to the ranks that hold the matrix of its expert, and nowhere else.

    `F.grouped_mm(x[index], experts, offs=ends)` sends the rows there by itself. But an index is
    sharded evenly before experts are known, so rows on another rank move twice. With this index
    they move once.

    Args:
        index: of shape (n,), for instance `expert.argsort(stable=True)`.
        ends: of shape (e,), where the rows of each expert end; they are read.
        experts: of shape (e, ...), sharded in dim 0.

    Returns:
        An index with the same values. If `index` or `experts` is a plain tensor, or experts are not
        sharded, it is `index` itself.

    Raises:
        LayoutError: shapes that do not fit each other.
    """
    if index.dim() != 1 or ends.dim() != 1 or len(ends) != len(experts):
        raise LayoutError(
            "by_expert(index, ends, experts)", f"index is of shape {tuple(index.shape)}, "
            f"ends {tuple(ends.shape)}, experts {tuple(experts.shape)}",
            "an index is a list of rows, and there is an end for each expert",
            [tuple(ends.shape)], "ends = expert.bincount(minlength=len(experts)).cumsum(0)")
    if type(index) is not ShardTensor or type(experts) is not ShardTensor:
        return index
    of_experts, lies = experts.sharding, index.sharding
    owners = of_experts.dims[0]
    if not owners or of_experts.mesh != lies.mesh:
        return index
    within = tuple(axis for axis in lies.dims[0] if axis not in owners)
    whole = ends.full_tensor() if type(ends) is ShardTensor else ends
    cuts = cuts_at_owners(of_experts, within, whole.tolist(), len(index))
    return index.redistribute(Layout.make(lies.mesh, index.shape, ((*owners, *within),), (cuts,)))

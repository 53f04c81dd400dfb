"""The border between ShardTensors and code on local tensors, which may differ between ranks.

Inside, what a rank computes varies over every axis of the mesh. So by the gradient rule an operand
that is replicated over an axis passes I -> R, whose backward sums the gradients of the ranks. A
result that is replicated over an axis passes R -> I, whose backward gives the gradient to one
coordinate: the ranks have computed one value together, and it counts once.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.comm import BoundMesh
from weft.errors import PlacementError
from weft.tensor.placing.from_local import from_local
from weft.tensor.placing.layouts import as_layout, as_sharded
from weft.tensor.placing.operands import NamedCaller, move_operand
from weft.tensor.placing.redistribute import copied_on_write, redistribute_to, to_local
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor, wrap
from weft.tensor.views.moved import unwrap_view
from weft.transport.facts import replicated
from weft.transport.in_flight import landed

__all__ = ["into_local", "out_of_local"]


def into_local(
    x: torch.Tensor, mesh: BoundMesh, placements: Any, call: str, *, grads_as_placed: bool = False,
    grad_placements: Any = None,
) -> torch.Tensor:
    """This rank's block of `x` in the requested layout, as a separate value.

    A function of partial values is not one of their sum: PlacementError. `grads_as_placed`:
    gradients have the placements of `grad_placements`, as in `to_local`, instead of being those of
    the whole.
    """
    layout = as_layout(mesh, x.shape, placements, f"{call}(in_specs)")
    if layout.is_partial:
        raise PlacementError(
            f"{call}(in_specs)", f"a tensor of shape {tuple(x.shape)} is asked for as "
            f"{layout}", "inside, a rank computes on blocks of values; a function of "
            "partial values is no function of their sum", [str(layout)],
            "P(...) for the block that a rank needs")
    sharded = redistribute_to(as_sharded(x, mesh), layout, call)
    if grads_as_placed:
        return copied_on_write(to_local(sharded, grad_placements))
    varying = replicated(layout, range(mesh.ndim))
    seen = transition_between(mesh, layout, layout, frozenset(), varying)
    if seen is not None and sharded.requires_grad and torch.is_grad_enabled():
        local = move_operand(sharded, seen, NamedCaller(call))
    else:
        local = unwrap_view(landed(sharded._local))
    return copied_on_write(local)  # a write to the block changes no replica


def out_of_local(
    local: torch.Tensor, mesh: BoundMesh, placements: Any, *, sizes: Any = "infer",
    run_check: bool = False, grads_as_placed: bool = False, region: str,
) -> ShardTensor:
    """The ShardTensor of which every rank has computed its block, in what the call `region` runs.

    `grads_as_placed`: gradients of local tensors are as in `from_local`, as for `into_local`.
    """
    out = from_local(local, mesh, placements, run_check=run_check, sizes=sizes, region=region)
    if grads_as_placed:
        return out
    layout = out.sharding
    leave = transition_between(mesh, layout, layout, replicated(layout, range(mesh.ndim)))
    return out if leave is None else wrap(leave(out._local), out._meta)

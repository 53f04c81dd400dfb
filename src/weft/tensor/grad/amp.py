"""Gradient scaling (`torch.amp.GradScaler`): blocks are unscaled in place, with one verdict for all
ranks.

torch's op divides gradients by the scale in place and says whether one of them is not finite. Here
each rank does so with its blocks, and the verdicts are reduced: either all ranks take the step or
none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import UnsupportedOpError
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import local_of
from weft.tensor.views.moved import written_to
from weft.transport import traffic

__all__ = ["unscale"]

_unscale: Any = torch._amp_foreach_non_finite_check_and_unscale_


def unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: Any) -> None:
    """`torch._amp_foreach_non_finite_check_and_unscale_`; one float32 is reduced over the mesh.
    Values of a partial gradient are not known: UnsupportedOpError."""
    sharded = [grad for grad in grads if type(grad) is ShardTensor]
    partial = [str(grad.sharding) for grad in sharded if grad.sharding.is_partial]
    if partial or type(found_inf) is ShardTensor or type(inv_scale) is ShardTensor:
        raise UnsupportedOpError(
            "GradScaler.unscale_", f"{len(partial)} of {len(grads)} gradients are partial"
            if partial else "the scale, or found_inf, is a ShardTensor",
            "a partial gradient has no value to check before it is reduced, and the scale "
            "is plain", partial or [str(type(inv_scale).__name__)],
            "x.grad = x.grad.redistribute(placements=[Replicate()])")
    _unscale([local_of(grad) for grad in grads], found_inf, inv_scale)
    for grad in sharded:
        written_to(grad)
    meshes = {grad._meta.mesh: grad for grad in sharded if not grad.sharding.is_replicated}
    for mesh in meshes:
        if mesh.here is None:
            continue
        axes = tuple(range(mesh.ndim))
        with traffic.label("GradScaler.unscale_", "whether a gradient is inf or nan"):
            found_inf.copy_(mesh.comm(axes).all_reduce(found_inf, "max"))

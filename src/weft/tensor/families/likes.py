"""Tensors made beside another: of its shape on another device, or of data on its mesh."""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import UnsupportedOpError
from weft.rules import op, page
from weft.tensor.attributes import other_device
from weft.tensor.call.dispatch import call
from weft.tensor.leaves import track_leaf
from weft.tensor.meta import replicated_meta
from weft.tensor.shard_tensor import ShardTensor, wrap

__all__ = ["PAGE"]


def _empty_like(
    tensor: torch.Tensor, *, device: Any = None, dtype: torch.dtype | None = None,
    requires_grad: bool = False, **options: Any
) -> Any:
    """Memory in x's layout; on the meta device or off it, where `device` says so."""
    assert type(tensor) is ShardTensor
    meta = tensor._meta
    asked = meta.device if device is None else torch.device(device)
    if asked.type == meta.device.type:
        given = {"dtype": dtype, **options} if dtype is not None else options
        made = call(torch.ops.aten.empty_like.default, (tensor,), given)
        return made.requires_grad_() if requires_grad else made
    if asked.type not in ("meta", meta.mesh.device.type):
        raise other_device("empty_like(device=)", tensor, asked)
    where = meta.mesh.device if asked.type != "meta" else asked
    local = torch.empty_like(
        tensor._local.detach(), device=where, dtype=dtype, requires_grad=requires_grad, **options)
    made = meta.replace(dtype=local.dtype, device=where, requires_grad=local.requires_grad)
    return wrap(track_leaf(local), made)


def _new_tensor(tensor: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
    """Data, replicated on the mesh; a ShardTensor is copied in its layout."""
    if type(data) is ShardTensor:
        dtype, requires_grad = options.get("dtype") or tensor.dtype, options.get("requires_grad")
        return data.detach().to(dtype, copy=True).requires_grad_(bool(requires_grad))
    assert type(tensor) is ShardTensor
    local = tensor._local.detach().new_tensor(data, **options)
    return wrap(local, replicated_meta(tensor._meta.mesh, local))


def _new(tensor: ShardTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Uninitialized memory of a size, or data: replicated on the mesh."""
    data = bool(args) and isinstance(args[0], (list, tuple)) and not isinstance(args[0], torch.Size)
    if data:
        return _new_tensor(tensor, *args)
    if any(isinstance(arg, (torch.Tensor, torch.UntypedStorage)) for arg in args) or kwargs:
        raise UnsupportedOpError(
            "new()", f"it is given {[type(arg).__name__ for arg in args]}",
            "new() makes tensors of sizes and of lists", ["new"],
            "x.new_tensor(data), x.new_empty(size), torch.empty_like(x)")
    return tensor.new_empty(*args or (0,))


PAGE = page(
    op("torch.empty_like", compose=_empty_like, each_call=True),
    op("torch.Tensor.new_tensor", compose=_new_tensor, each_call=True),
    op("torch.Tensor.new", compose=_new, each_call=True),
)

"""Refuses to make a ShardTensor from a tensor alone, without a mesh, and another class of one.

`t.as_subclass(ShardTensor)` does not call the class, so torch's method is replaced.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from weft.errors import ShardTypeError, UnsupportedOpError
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["as_subclass", "new"]


def new(cls: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """`ShardTensor(...)`."""
    raise _refusal("ShardTensor(...)", args[0] if args else None)


def as_subclass(original: Any, tensor: torch.Tensor, cls: Any) -> Any:
    """As torch's: the same data as a tensor of the class."""
    if cls is ShardTensor and type(tensor) is not ShardTensor:
        raise _refusal("t.as_subclass(ShardTensor)", tensor)
    if type(tensor) is ShardTensor:
        name = getattr(cls, "__name__", cls)
        raise UnsupportedOpError(
            f"x.as_subclass({name})", f"x is a ShardTensor {tensor.sharding}",
            "a ShardTensor is global and has no memory that another class could show", [name],
            "leave the class out: of MONAI, monai.data.set_track_meta(False); "
            "of torchvision, x itself in place of tv_tensors.Image(x)\n"
            f"{name}(x.full_tensor()), which is whole on every rank")
    return original(tensor, cls)


def _refusal(call: str, given: Any) -> ShardTypeError:
    what = type(given).__name__
    if isinstance(given, torch.Tensor):
        what += f" of shape {tuple(given.shape)}"
    return ShardTypeError(
        call, f"it is given {'nothing' if given is None else 'a ' + what}, and no mesh",
        "a ShardTensor has a mesh and a layout beside its blocks", [what],
        "weft.distribute_tensor(full, mesh, placements), or "
        "ShardTensor.from_local(block, mesh, placements)")

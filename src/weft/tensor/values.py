"""A ShardTensor's value outside torch: numbers, numpy arrays, text.

On a replicated tensor nothing here communicates; otherwise it is a collective, except `text`.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import MeshError, message
from weft.tensor.redistribute import gathered
from weft.tensor.shard_tensor import ShardTensor, version_of

__all__ = ["allclose", "contains", "equal", "global_value", "numpy", "text"]


def global_value(tensor: ShardTensor) -> torch.Tensor:
    """The whole tensor, plain and detached, on every rank.

    After `loss.backward()` the loss is known on every rank and this does not communicate.

    Raises:
        MeshError: on a rank outside the tensor's mesh.
    """
    meta = tensor._meta
    if meta.mesh.here is None:
        raise MeshError(
            message("item, bool, full_tensor", f"rank {meta.mesh.rank} is outside {meta.mesh!r}",
                    "only ranks of its mesh know a tensor's value", [meta.mesh.rank],
                    "if x.device_mesh.here is not None: ...")
        )
    if meta.layout.is_replicated:
        return tensor._local.detach()
    known = getattr(tensor, "_known", None)
    if type(known) is tuple and known[0] == version_of(tensor):
        return known[1]
    with torch.no_grad():
        return gathered(tensor)


def numpy(tensor: ShardTensor, force: bool) -> Any:
    """The global value as a numpy array; as torch, refused while a gradient is wanted."""
    if tensor.requires_grad and not force:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    return global_value(tensor).numpy(force=force)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """`torch.equal`: only the verdict travels."""
    return one.shape == other.shape and bool((one == other).all())


def allclose(
    one: torch.Tensor, other: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    """`torch.allclose`: only the verdict travels."""
    return bool(torch.isclose(one, other, rtol, atol, equal_nan).all())


def contains(tensor: torch.Tensor, element: Any) -> bool:
    """`element in tensor`: only the verdict travels."""
    if not isinstance(element, (torch.Tensor, bool, int, float, complex)):
        raise RuntimeError(
            "Tensor.__contains__ only supports Tensor or scalar, but you passed in a "
            f"{type(element)}."
        )
    return bool((tensor == element).any())


def text(tensor: ShardTensor) -> str:
    """Global shape, layout, and this rank's block. Never communicates."""
    meta = tensor._meta
    lines = [f"ShardTensor({meta.layout.text(str(meta.dtype).removeprefix('torch.'))}"]
    if meta.mesh.here is None:
        lines.append(f"rank {meta.mesh.rank} is outside {meta.mesh}")
    else:
        box = ", ".join(f"{start}:{stop}" for start, stop in meta.layout.box_at(meta.mesh.here))
        lines.append(f"rank {meta.mesh.rank} holds [{box}]:")
        local = repr(tensor._local.detach()).removesuffix(")")
        lines.extend(line[len("tensor(") :] for line in local.split("\n"))
    if tensor.grad_fn is not None:
        lines.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        lines.append("requires_grad=True")
    return ",\n  ".join(lines[:1]) + ",\n  " + "\n  ".join(lines[1:]) + ")"

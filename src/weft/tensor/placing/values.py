"""A ShardTensor's value outside torch: numbers, numpy arrays, text.

On a replicated tensor nothing here communicates; otherwise it is a collective, except `text`.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core.display import drawn, preformatted
from weft.errors import MeshError
from weft.tensor.meta import Meta
from weft.tensor.placing.freed import fill, keep
from weft.tensor.placing.layouts import as_sharded
from weft.tensor.placing.left_whole import tell
from weft.tensor.placing.redistribute import gathered
from weft.tensor.shard_tensor import ShardTensor, version_of

__all__ = [
    "array", "formatted", "from_array", "global_value", "like_dense", "numpy", "one_value",
    "text",
]


def global_value(tensor: ShardTensor) -> torch.Tensor:
    """The whole tensor, plain and detached, on every rank.

    After `loss.backward()` the loss is known on every rank and this does not communicate.

    Raises:
        MeshError: on a rank outside the tensor's mesh.
    """
    meta = tensor._meta
    if meta.mesh.here is None:
        raise MeshError(
            "item, bool, full_tensor", f"rank {meta.mesh.rank} is outside {meta.mesh!r}",
            "only ranks of its mesh know a tensor's value", [meta.mesh.rank],
            f"weft run -n {meta.mesh.size()}, if there are more ranks than meant\n"
            "of ranks outside on purpose: if x.device_mesh.here is not None: ...")
    fill(tensor)
    value = _known(tensor)
    if value is None:
        with torch.no_grad():
            value = gathered(tensor)
    return value


def one_value(tensor: ShardTensor) -> torch.Tensor:
    """`global_value`, for what torch takes of one element only: of others, nothing is sent for its
    error."""
    if tensor.numel() == 1 or tensor._meta.mesh.here is None:
        return global_value(tensor)
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def _known(tensor: ShardTensor) -> torch.Tensor | None:
    """The value, if this rank knows it without communication."""
    meta = tensor._meta
    if meta.mesh.here is None:
        return None
    if meta.layout.is_replicated:
        return tensor._local.detach()
    known = getattr(tensor, "_known", None)
    return known[1] if type(known) is list and known[0] == version_of(tensor) else None


def like_dense(tensor: ShardTensor) -> torch.Tensor:
    """The global value with the tensor's strides."""
    keep(tensor)
    value, strides = global_value(tensor), tensor.stride()
    if value.stride() == strides or 0 in strides:
        return value
    return torch.empty_strided(
        value.shape, strides, dtype=value.dtype, device=value.device
    ).copy_(value)


def formatted(tensor: ShardTensor, spec: str) -> str:
    """`format(x, spec)`: for a 0-d tensor the number, by a collective if there is a spec."""
    if tensor.dim() == 0:
        value = global_value(tensor) if spec else _known(tensor)
        if value is not None:
            return format(value.item(), spec)
    return object.__format__(tensor, spec)


def numpy(tensor: ShardTensor, force: bool = False) -> Any:
    """The global value as a numpy array; as in torch, refused while a gradient is required.

    A complex tensor with lazy conjugation is conjugated, like local parts of other layouts.
    """
    if tensor.requires_grad and not force:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    keep(tensor)
    return global_value(tensor).resolve_conj().resolve_neg().numpy(force=force)


def array(tensor: ShardTensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """`np.asarray(x, dtype, copy=)`, by numpy's protocol."""
    found = numpy(tensor)
    cast = dtype is not None and found.dtype != dtype
    if copy is False and (cast or not tensor._meta.layout.is_replicated):
        raise ValueError("Unable to avoid copy while creating an array as requested.")
    if cast:
        return found.astype(dtype)
    return found.copy() if copy else found


def from_array(tensor: ShardTensor, array: Any, context: Any = None) -> ShardTensor:
    """The result of a numpy function on the tensor's value, the same on every rank: replicated.

    Warns once per function that it gathers, and raises in strict mode, where nothing knew the
    value.
    """
    if _known(tensor) is None:
        name = f"numpy.{context[0].__name__}" if context else "numpy"
        tell(name, "numpy computes on the whole value", [tensor], _FOR_ARRAYS,
             in_strict=_FOR_ARRAYS)
    if array.dtype == bool:  # as in torch's own `__array_wrap__`
        array = array.astype("uint8")
    return as_sharded(torch.from_numpy(array), tensor._meta.mesh)


_FOR_ARRAYS = ("torch's own: x + torch.from_numpy(array), x.exp(); x.numpy() gathers where it is "
               "meant")

_VALUE = "the value:"

_KINDS = {
    "sum": "a sum", "avg": "a mean", "max": "a maximum", "min": "a minimum",
    "product": "a product", "and": "a logical and", "or": "a logical or",
    "band": "a bitwise and", "bor": "a bitwise or", "bxor": "a bitwise xor",
}


def text(tensor: ShardTensor) -> str:
    """Global shape, layout, and this rank's block, or the value if it is known; in one line for a
    tensor without dims.

    Never communicates. A partial value is called one: it is not the value.
    """
    meta = tensor._meta
    lines = [f"ShardTensor({meta.layout.text(str(meta.dtype).removeprefix('torch.'))}"]
    if meta.mesh.here is None:
        lines.append(f"rank {meta.mesh.rank} is outside {meta.mesh}")
    else:
        known = _known(tensor) if not meta.layout.is_replicated else None
        what = _what_is_shown(meta) if known is None else _VALUE
        shown = tensor._local.detach() if known is None else known
        body = [line[len("tensor(") :] for line in repr(shown).removesuffix(")").split("\n")]
        number = body[0].partition(",")[0]  # of a tensor without dims; its dtype stands elsewhere
        if meta.shape:
            lines.extend([what, *body])
        elif what == _VALUE:
            lines[0] = lines[0].replace("(", f"({number}, ", 1)
        else:
            lines.append(f"{what} {number} (item() gives the value)")
    if tensor.grad_fn is not None:
        lines.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        lines.append("requires_grad=True")
    if getattr(tensor, "_is_param", False):
        lines[0] = f"Parameter containing:\n{lines[0]}"
    if not meta.shape:
        return ", ".join(lines) + ")"
    return lines[0] + ",\n  " + "\n  ".join(lines[1:]) + ")"


def shown(tensor: ShardTensor) -> str:
    """For a notebook: the text, and a picture of the layout."""
    return f"{preformatted(text(tensor))}{drawn(tensor)}"


def _what_is_shown(meta: Meta) -> str:
    """A description of this rank's local tensor: a block, the whole, or a partial value."""
    mesh, layout = meta.mesh, meta.layout
    assert mesh.here is not None
    over: dict[str, list[str]] = {}
    for axis, kind in enumerate(layout.partial):
        if kind is not None and mesh.axis_sizes[axis] > 1:
            over.setdefault(kind, []).append(str(mesh.axis_names[axis]))
    if layout.is_stretched:
        return f"rank {mesh.rank} holds a part of each stretch, {list(meta.local_shape)}:"
    box = ", ".join(f"{start}:{stop}" for start, stop in layout.box_at(mesh.here))
    if not over:
        return f"rank {mesh.rank} holds [{box}]:" if meta.shape else _VALUE
    kinds = " and ".join(f"{_KINDS[kind]} over {', '.join(axes)}" for kind, axes in over.items())
    where = f", [{box}]" if meta.shape else ""
    return f"rank {mesh.rank}'s partial value of {kinds}{where}:"

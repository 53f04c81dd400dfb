"""Picking by index along a cut dim: embedding, gather, index_select.

Each rank answers for the indices that fall into its interval and contributes zero for the others,
so the result is partial(sum) over the axes that cut the dim, and only indices travel. An empty
shard answers for none, on the same graph edge as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local, replicated
from weft.rules import Call, Decision

__all__ = ["embedding_lookup", "gather_lookup", "renorm_lookup", "repeats_lookup",
           "select_lookup"]


def _own(indices: torch.Tensor, start: int, stop: int, length: int) -> tuple[Any, Any]:
    """Indices relative to this shard, clamped into it, and which of them are its own."""
    if indices.device.type == "cpu" and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= length:
            raise IndexError(f"index out of range: {low if low < 0 else high} is not in "
                             f"[0, {length})")
    inside = (indices >= start) & (indices < stop)
    return (indices - start).clamp(0, max(stop - start - 1, 0)), inside


def embedding_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """`embedding(weight, indices)` with a sharded vocabulary."""
    weight, indices = layouts
    if call.args[3]:  # scale_grad_by_freq: frequencies are those of all indices
        return replicated(call, layouts)
    if not weight.dims[0] or weight.is_partial:
        return None
    mesh = weight.mesh
    used = set(weight.sharded_axes)
    # An axis cuts one thing: where it cuts the weight, the indices (small) come whole; terms of
    # indices are no indices.
    index_dims = [tuple(axis for axis in axes if axis not in used) for axes in indices.dims]
    indices = indices.replace(dims=index_dims, partial=(None,) * mesh.ndim)
    partial: list[str | None] = [None] * mesh.ndim
    for axis in weight.dims[0]:
        partial[axis] = "sum"
    result = Layout.make(
        mesh, call.results[0].shape, (*indices.dims, weight.dims[1]),
        (*indices.cuts, weight.cuts[1]), partial,
    )
    padding = call.args[2] if isinstance(call.args[2], int) else -1
    length = weight.shape[0]

    def bind(bound: BoundMesh) -> Callable[..., torch.Tensor]:
        assert bound.here is not None
        start, stop = weight.interval(0, weight.shard_index(0, bound.here))
        own_padding = padding - start if start <= padding < stop else -1

        def local(table: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            own, inside = _own(wanted, start, stop, length)
            if start == stop:
                return table.sum(0).expand(*wanted.shape, table.shape[1])
            rows = torch.embedding(table, own, own_padding)
            return rows.masked_fill(~inside.unsqueeze(-1), 0)

        return local

    return Local(Decision((weight, indices), (result,)), bind)


def renorm_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`embedding_renorm(weight, indices, max_norm, norm_type)`: which rows are named is a flag
    for each, and what they shrink by another."""

    def renorm(
        weight: torch.Tensor, indices: torch.Tensor, most: float, norm_type: float
    ) -> torch.Tensor:
        named = weight.new_zeros(weight.shape[0], dtype=torch.bool)
        named = named.index_fill(0, indices.reshape(-1), True).unsqueeze(-1)
        norms = torch.linalg.vector_norm(weight, norm_type, 1, True)
        return weight * torch.where(named & (norms > most), most / (norms + 1e-7), 1.0)

    return None if all(layout.is_replicated for layout in layouts) else Composite(renorm)


def repeats_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | Decision:
    """`repeat_interleave(repeats)`, of so many that are known: all ranks know the repeats, and
    each names its own part of the places."""
    repeats = layouts[0]
    if not repeats.dims[0]:
        return replicated(call, layouts)
    result = Layout.make(repeats.mesh, call.results[0].shape, repeats.dims)
    total = result.shape[0]

    def bind(bound: BoundMesh) -> Callable[..., torch.Tensor]:
        assert bound.here is not None
        ((start, stop),) = result.box_at(bound.here)
        return lambda counts: torch.repeat_interleave(counts, output_size=total)[start:stop].clone()

    return Local(Decision((Layout.replicated(repeats.mesh, repeats.shape),), (result,)), bind)


def gather_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`gather(x, dim, index)` along a cut dim; the other dims of both are cut alike."""
    source, index = layouts
    if not source.ndim or source.ndim != index.ndim or source.is_partial:
        return None
    dim = call.args[1] % source.ndim
    if not source.dims[dim]:
        return None
    cutting = set(source.dims[dim])
    same = [
        at != dim and source.shape[at] == index.shape[at] for at in range(source.ndim)
    ]
    index_layout = Layout.make(
        source.mesh, index.shape,
        [source.dims[at] if same[at] else () for at in range(source.ndim)],
        [source.cuts[at] if same[at] else None for at in range(source.ndim)],
    )
    source = source.replace(dims=[
        axes if at == dim or same[at] else () for at, axes in enumerate(source.dims)
    ])
    partial = ["sum" if axis in cutting else None for axis in range(source.mesh.ndim)]
    result = index_layout.replace(partial=partial)

    def bind(bound: BoundMesh) -> Callable[..., torch.Tensor]:
        assert bound.here is not None
        start, stop = source.interval(dim, source.shard_index(dim, bound.here))

        def local(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            own, inside = _own(wanted, start, stop, source.shape[dim])
            if start == stop:
                empty = x.sum(dim, keepdim=True, dtype=x.dtype)
                return empty[tuple(map(slice, _with(wanted.shape, dim, 1)))].expand(wanted.shape)
            return torch.gather(x, dim, own).masked_fill(~inside, 0)

        return local

    return Local(Decision((source, index_layout), (result,)), bind)


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    return [length if at == dim else size for at, size in enumerate(shape)]


def select_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`select(x, dim, index)` on a cut dim: the slice of length 1 stays where it lies, for free,
    and comes to whole by itself, so that no more than the result is sent."""
    layout = layouts[0]
    if not layout.ndim or not layout.dims[call.args[1] % layout.ndim]:
        return None

    def select(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
        return x.narrow(dim, index % x.shape[dim], 1).squeeze(dim)

    return Composite(select)

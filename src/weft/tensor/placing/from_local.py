"""ShardTensors from local tensors.

Other ranks are asked for sizes only where `from_local` is told to infer them, in one exchange over
the mesh that all ranks make; faults are then found by all of them and raised on all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.comm import BoundMesh, as_bound_mesh
from weft.core import Layout
from weft.errors import LayoutError, ShardTypeError, message
from weft.planner import gradient_layout
from weft.tensor.meta import contiguous_strides
from weft.tensor.placing.arguments import mesh_and_placements
from weft.tensor.placing.enter import transition_between
from weft.tensor.placing.foreign import is_foreign
from weft.tensor.placing.layouts import (
    as_layout,
    check_given,
    common_strides,
    local_to_sharded,
)
from weft.tensor.placing.redistribute import placed_gradients
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.order import laid, order_due
from weft.transport.transition import gradient_through

__all__ = ["from_local"]


def from_local(
    local: torch.Tensor,
    device_mesh: Any,
    placements: Any,
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    sizes: Any,
    sharding_shapes: Any,
    sync: bool,
    grad_placements: Any = None,
) -> ShardTensor:
    """See `ShardTensor.from_local`."""
    device_mesh, placements = mesh_and_placements(device_mesh, placements)
    mesh = as_bound_mesh(device_mesh)
    if isinstance(sharding_shapes, str):
        sizes, sharding_shapes = _sizes_by_name(sharding_shapes, sizes), None
    if type(local) is ShardTensor:
        raise ShardTypeError(
            message("from_local(local_tensor)", f"it is a ShardTensor {local.sharding} already",
                    "a local tensor is a plain torch.Tensor", [str(local.sharding)],
                    "x.redistribute(placements=...)")
        )
    if is_foreign(local):
        raise ShardTypeError(
            message("from_local(local_tensor)", f"it is a {type(local).__name__}, a global tensor "
                    "already", "a local tensor is a plain torch.Tensor", [type(local).__name__],
                    "weft.from_dtensor(d)")
        )
    check_given(local, "from_local(local_tensor)")
    layout = _layout_of_local(local, mesh, placements, shape, sizes, sharding_shapes)
    if run_check:
        _check_over_ranks(local, mesh, layout)
    if mesh.here is None and local.shape != (0,):
        local = local.flatten()[:0].clone()
    _check_local(local, mesh, layout)
    if sync:
        local = _synced(local, mesh, layout)
    # What becomes of the ShardTensor (requires_grad_, a gradient) must not befall the argument.
    keeps = local.requires_grad or forward_ad._current_level >= 0  # `detach` drops a tangent
    local = local.view_as(local) if keeps else local.detach()
    if grad_placements is not None:
        local = _gradients_placed(local, mesh, layout, grad_placements)
    return local_to_sharded(*_lying(local, mesh, layout, stride))


def _lying(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, stride: Sequence[int] | None
) -> tuple[torch.Tensor, BoundMesh, Layout, tuple[int, ...] | None]:
    """The local tensor as the global strides say, and these: None is row-major.

    Where they are not told, they are in the order of the local ones, if every rank sees the same;
    else the local tensor is copied. So is one that lies otherwise than is told, or has gaps.
    """
    strides = None if stride is None else tuple(stride)
    if strides is None and not local.is_contiguous():
        strides = common_strides(layout, local)
    due = order_due(layout.shape, strides or contiguous_strides(layout.shape), local)
    if due is not None:
        local = laid(local, due)
    if strides == contiguous_strides(layout.shape):
        strides = None
    return local, mesh, layout, strides


def _sizes_by_name(sharding_shapes: str, sizes: Any) -> str:
    """What PhysicsNeMo's `sharding_shapes="infer"` or `"chunk"` says."""
    if sharding_shapes in ("infer", "chunk") and sizes in ("infer", sharding_shapes):
        return sharding_shapes
    raise LayoutError(
        message("from_local(sharding_shapes=)", f"sharding_shapes is {sharding_shapes!r}, sizes "
                f"is {sizes!r}", 'sharding_shapes is "infer", "chunk" or a map mesh dim -> shapes, '
                "and says the same as sizes, which is then left out",
                [f"sharding_shapes={sharding_shapes!r}", f"sizes={sizes!r}"],
                'from_local(x, mesh, [Shard(0)], "infer")')
    )


def _gradients_placed(
    local: torch.Tensor, mesh: BoundMesh, layout: Layout, placements: Any
) -> torch.Tensor:
    """`local`, to which gradients come back as the user says that they lie."""
    seen = placed_gradients(mesh, layout, placements, local.dtype, "from_local")
    seen = seen.replace(cuts=seen.cuts, partial=[  # the value is a term of its own mean
        None if kind == "avg" else kind for kind in seen.partial])
    terms = frozenset(axis for axis, kind in enumerate(layout.partial) if kind)
    back = transition_between(mesh, gradient_layout(layout), seen, terms, terms)
    if back is None or not (local.requires_grad and torch.is_grad_enabled()):
        return local
    return gradient_through(local, back)


def _layout_of_local(
    local: torch.Tensor, mesh: BoundMesh, placements: Any, shape: Any, sizes: Any, shapes: Any
) -> Layout:
    if isinstance(placements, Layout):
        return as_layout(mesh, placements.shape, placements)
    if mesh.here is None and shape is None:
        raise LayoutError(
            message("from_local(shape=)", f"rank {mesh.rank} is outside {mesh.abstract!r} and is "
                    "not told the global shape",
                    "a rank outside the mesh knows the layout all the same, and asks nobody",
                    ["shape=None"], "from_local(x, mesh, [Shard(0)], shape=(8, 4)), or a Layout")
        )
    ndim = local.dim() if shape is None else len(shape)
    # Which axes cut which dim depends on the number of dims alone.
    form = Layout(mesh, (0,) * ndim, _without_sizes(placements))
    cut = [dim for dim, axes in enumerate(form.dims) if axes]
    told = _told_sizes(placements, ndim)
    if shapes is not None:
        sizes = _sizes_from_shapes(form, shapes)
    elif told and set(told) == set(cut):
        sizes = told
    if isinstance(sizes, Mapping):
        given = {dim % ndim: tuple(each) for dim, each in sizes.items()}
        if shape is None:
            shape = [sum(given[d]) if d in given else n for d, n in enumerate(local.shape)]
        return Layout(mesh, shape, placements, sizes=given)
    if shape is not None:
        return Layout(mesh, shape, placements)
    if sizes == "chunk":
        lengths = [n * form.num_shards(d) for d, n in enumerate(local.shape)]
        return Layout(mesh, lengths, placements)
    if sizes != "infer":
        raise LayoutError(
            message("from_local(sizes=)", f"sizes is {sizes!r}",
                    'sizes is "infer", "chunk" or a map tensor dim -> sizes in shard order',
                    [repr(sizes)], "from_local(x, mesh, [Shard(0)], sizes={0: (3, 2)})")
        )
    if not cut:
        return Layout(mesh, local.shape, placements)
    inferred = _infer(local, mesh, form, cut)
    lengths = [sum(inferred[d]) if d in inferred else n for d, n in enumerate(local.shape)]
    return Layout(mesh, lengths, form.spec, sizes=inferred)


def _without_sizes(placements: Any) -> Any:
    if not isinstance(placements, (list, tuple)):
        return placements
    return [
        type(placement)(placement.dim) if getattr(placement, "sizes", None) else placement
        for placement in placements
    ]


def _told_sizes(placements: Any, ndim: int) -> dict[int, tuple[int, ...]]:
    """The sizes that placements bring along: `Shard(0, sizes=(6, 3, 4, 7))`."""
    if not isinstance(placements, (list, tuple)):
        return {}
    return {
        one.dim % ndim: tuple(one.sizes) for one in placements if getattr(one, "sizes", None)
    }


def _sizes_from_shapes(form: Layout, shapes: Mapping[Any, Any]) -> dict[int, tuple[int, ...]]:
    out: dict[int, tuple[int, ...]] = {}
    for name, each in shapes.items():
        dim = form.on(form.mesh.axis(name))
        if isinstance(dim, int):
            out[dim] = tuple(int(shape[dim]) for shape in each)
    return out


def _infer(
    local: torch.Tensor, mesh: BoundMesh, form: Layout, cut: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Sizes of the cut dims, from one exchange of all local shapes. The same on every rank."""
    shapes: list[Any] = mesh.comm(tuple(range(mesh.ndim))).exchange(tuple(local.shape))
    found: dict[int, dict[int, int]] = {dim: {} for dim in cut}
    wrong: list[str] = []
    first = shapes[0]
    for position, shape in enumerate(shapes):
        rank = mesh.rank_at(position)
        if len(shape) != len(first):
            wrong.append(f"rank {rank}: {len(shape)} dims")
            continue
        coordinate = mesh.coordinate(position)
        for dim, length in enumerate(shape):
            if dim not in found:
                if length != first[dim]:
                    wrong.append(f"rank {rank}: {length} in dim {dim}, which no axis cuts")
                continue
            known = found[dim].setdefault(form.shard_index(dim, coordinate), length)
            if known != length:
                wrong.append(f"rank {rank}: {length} in dim {dim}, another rank with the same "
                             f"shard has {known}")
    if wrong:
        raise LayoutError(
            message('from_local(sizes="infer")', f"the local shapes {shapes} do not make one "
                    f"tensor on {form.mesh} with {form.spec!r}",
                    "local shapes differ only in the dims that mesh axes cut, and ranks with the "
                    "same shard agree", wrong, "check each rank's local tensor")
        )
    return {
        dim: tuple(lengths[index] for index in range(form.num_shards(dim)))
        for dim, lengths in found.items()
    }


def _check_local(local: torch.Tensor, mesh: BoundMesh, layout: Layout) -> None:
    if mesh.here is None:
        return
    expected = layout.local_shape_at(mesh.here)
    if tuple(local.shape) != expected:
        raise LayoutError(
            message("from_local(local_tensor)", f"rank {mesh.rank} gives shape "
                    f"{tuple(local.shape)}, the layout {layout} gives it {expected}",
                    "a local tensor has the shape that the layout gives its rank", [mesh.rank],
                    'from_local(..., sizes="infer"), or sizes={dim: (...)}')
        )


def _check_over_ranks(local: torch.Tensor, mesh: BoundMesh, layout: Layout) -> None:
    """Compare shapes, dtypes and replicas over the mesh; raise the same error on all ranks."""
    if mesh.here is None:
        return
    mine = (tuple(local.shape), str(local.dtype), str(layout), _digest(local))
    facts: list[Any] = mesh.comm(tuple(range(mesh.ndim))).exchange(mine)
    wrong: list[str] = []
    replicas: dict[Any, tuple[int, int]] = {}
    for position, (shape, dtype, text, digest) in enumerate(facts):
        rank, coordinate = mesh.rank_at(position), mesh.coordinate(position)
        if (dtype, text) != facts[0][1:3]:
            wrong.append(f"rank {rank}: {dtype} {text}, rank {mesh.rank_at(0)}: "
                         f"{facts[0][1]} {facts[0][2]}")
        elif shape != layout.local_shape_at(coordinate):
            wrong.append(f"rank {rank}: shape {shape} for {layout.local_shape_at(coordinate)}")
        terms = tuple(coordinate[a] for a, kind in enumerate(layout.partial) if kind)
        first = replicas.setdefault((layout.box_at(coordinate), terms), (rank, digest))
        if first[1] != digest:
            wrong.append(f"rank {rank}: other values than its replica, rank {first[0]}")
    if wrong:
        raise LayoutError(
            message("from_local(run_check=True)", f"{len(wrong)} ranks contradict layout {layout}",
                    "all ranks agree on layout and dtype, and replicas are equal", wrong,
                    "from_local(..., sync=True) takes the first replica's values")
        )


def _digest(local: torch.Tensor) -> int:
    flat = local.detach().contiguous().cpu().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def _synced(local: torch.Tensor, mesh: BoundMesh, layout: Layout) -> torch.Tensor:
    """Replicas take the values of the first coordinate of the axes that replicate."""
    axes = tuple(axis for axis in range(mesh.ndim) if layout.on(axis) is None)
    if not axes or mesh.here is None:
        return local
    with torch.no_grad():
        got = mesh.comm(axes).broadcast(local.detach().contiguous().flatten(), 0)
        local.data.copy_(got.view(local.shape))
    return local

"""Differentiable collectives on local tensors, for hand-written parallel code.

They run over axes of a mesh (by default that of the innermost `local_map`, else the current mesh),
on plain tensors. What the ranks compute from a result varies, so a result that is equal on all of
them has a gradient that is the sum over the ranks: `psum` is an all-reduce in both directions, and
the gradient of `all_gather` is reduce-scattered, as in JAX's `jax.lax` under `shard_map`. All ranks
along the axes call the same collectives in the same order; `weft.debug()` compares these calls.

Each, except `ppermute`, is a transition between two layouts of the tensor that the ranks hold
together, planned and run like every other. Where a dim is joined from the ranks' blocks, their
lengths may differ: the lengths are exchanged first, unless `sizes` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from weft.comm import BoundMesh, Communicator
from weft.core import AxisName, Layout, P
from weft.core.arguments import MeshLike
from weft.core.counterparts import said_of
from weft.core.integers import listed
from weft.core.names import also_called
from weft.errors import LayoutError, ShardTypeError
from weft.local.sides import mesh_of_region
from weft.ops.all_to_all import AllToAll
from weft.tensor.placing.transitions import transition_between
from weft.tensor.shard_tensor import ShardTensor
from weft.transport import traffic

__all__ = [
    "all_gather", "all_to_all", "axis_index", "axis_size", "pmax", "pmean", "pmin", "ppermute",
    "psum", "reduce_scatter",
]


def __getattr__(name: str) -> NoReturn:
    """For torch.distributed's names."""
    raise AttributeError(f"module 'weft.collectives' has no attribute {name!r}{said_of(name)}")


Axes = AxisName | int | tuple[AxisName | int, ...]
"""One mesh axis, by name or number, or several, major to minor."""

_JOINED = "dim=0; blocks are joined unless tiled=False, which is JAX's default"


@also_called(axis_name="axes")
def axis_index(axes: Axes, *, mesh: MeshLike | None = None) -> int:
    """This rank's position along the axes, the first axis most significant.

    Args:
        axes: the mesh axis, or a tuple of them.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    sub = _along(mesh, axes, "axis_index")
    assert sub.here is not None
    return sub.position(sub.here)


@also_called(axis_name="axes")
def axis_size(axes: Axes, *, mesh: MeshLike | None = None) -> int:
    """The number of ranks along the axes.

    Args:
        axes: the mesh axis, or a tuple of them.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    return _along(mesh, axes, "axis_size").size()


@also_called(axis_name="axes")
def psum(x: Tensor, axes: Axes, *, mesh: MeshLike | None = None) -> Tensor:
    """The sum of every rank's `x`, on all of them.

    Args:
        x: this rank's tensor, with the same shape and dtype on all ranks.
        axes: the mesh axis, or a tuple of them.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    return _reduced(x, axes, "sum", mesh, "psum")


@also_called(axis_name="axes")
def pmean(x: Tensor, axes: Axes, *, mesh: MeshLike | None = None) -> Tensor:
    """The mean of every rank's `x`, on all of them.

    Args:
        x: this rank's tensor, with the same shape and dtype on all ranks.
        axes: the mesh axis, or a tuple of them.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    return _reduced(x, axes, "avg", mesh, "pmean")


@also_called(axis_name="axes")
def pmax(x: Tensor, axes: Axes, *, mesh: MeshLike | None = None) -> Tensor:
    """The elementwise maximum of every rank's `x`, without gradient (like `jax.lax.pmax`).

    Args:
        x: this rank's tensor, with the same shape and dtype on all ranks.
        axes: the mesh axis, or a tuple of them.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    return _reduced(x, axes, "max", mesh, "pmax")


@also_called(axis_name="axes")
def pmin(x: Tensor, axes: Axes, *, mesh: MeshLike | None = None) -> Tensor:
    """The elementwise minimum of every rank's `x`, without gradient (like `jax.lax.pmin`).

    Args:
        x: this rank's tensor, with the same shape and dtype on all ranks.
        axes: the mesh axis, or a tuple of them.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    return _reduced(x, axes, "min", mesh, "pmin")


@also_called({"axis": _JOINED}, axis_name="axes")
def all_gather(
    x: Tensor, axes: Axes, dim: int = 0, *, tiled: bool = True,
    sizes: Sequence[int] | None = None, mesh: MeshLike | None = None,
) -> Tensor:
    """Every rank's `x`, in rank order along `dim`.

    Args:
        x: this rank's block; only its length along `dim` may differ from the others'.
        axes: the mesh axes to gather over.
        dim: the dim along which blocks are joined.
        tiled: False stacks them along a new dim instead.
        sizes: the length along `dim` of every rank's block, in order; None asks the ranks.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        LayoutError: no such dim, or sizes that differ from those of the blocks.
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    sub = _along_of(x, mesh, axes, "all_gather")
    if not tiled:
        x, sizes = x.unsqueeze(dim), (1,) * sub.size()
        dim = dim if dim >= 0 else dim + x.ndim
    dim = _dim(x, dim, "all_gather")
    src = _cut(sub, x, dim, sizes, "all_gather")
    return _moved(x, sub, src, Layout.replicated(sub.abstract, src.shape), "all_gather")


@also_called({"scatter_dimension": _JOINED}, axis_name="axes")
def reduce_scatter(
    x: Tensor, axes: Axes, dim: int = 0, *, tiled: bool = True,
    sizes: Sequence[int] | None = None, mesh: MeshLike | None = None,
) -> Tensor:
    """This rank's block along `dim` of the sum of every rank's `x` (JAX's `psum_scatter`).

    Args:
        x: this rank's tensor, with the same shape and dtype on all ranks.
        axes: the mesh axes to sum and scatter over.
        dim: the dim that is scattered.
        tiled: False takes one index of `dim` for each rank, and drops the dim.
        sizes: the lengths of the blocks, in order; None uses those of `torch.chunk`, with empty
            blocks at the end: if the length does not divide evenly, the last ranks get less.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        LayoutError: no such dim, or sizes that do not add up to its length.
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    sub = _along_of(x, mesh, axes, "reduce_scatter")
    dim = _dim(x, dim, "reduce_scatter")
    if not tiled and x.shape[dim] != sub.size():
        raise LayoutError(
            "reduce_scatter(tiled=False)", f"dim {dim} has length {x.shape[dim]}, and "
            f"there are {sub.size()} ranks along {axes!r}", "each rank takes one index of "
            "the dim", [tuple(x.shape)], "reduce_scatter(x, axes, dim)")
    src = Layout.replicated(sub.abstract, x.shape).with_partial(range(sub.ndim))
    dst = _cut_whole(sub, x.shape, dim, sizes)
    out = _moved(x, sub, src, dst, "reduce_scatter")
    return out if tiled else out.squeeze(dim)


@also_called(dict.fromkeys(
    ("split_axis", "concat_axis", "tiled"),
    "all_to_all(x, axes, split_dim, concat_dim), which joins blocks as JAX does with tiled=True",
), axis_name="axes")
def all_to_all(
    x: Tensor, axes: Axes, split_dim: int, concat_dim: int, *,
    sizes: Sequence[int] | None = None, split_sizes: Sequence[int] | None = None,
    mesh: MeshLike | None = None,
) -> Tensor:
    """Every rank's block along `split_dim`, from blocks along `concat_dim`.

    `x` is split along `split_dim`, the pieces go to the ranks in order, and the received pieces are
    joined along `concat_dim`: a tensor that was sharded along `concat_dim` is then sharded along
    `split_dim`.

    Args:
        x: this rank's block; only its length along `concat_dim` may differ from the others'.
        axes: the mesh axes to exchange over.
        split_dim: the dim that is sharded afterwards.
        concat_dim: the dim that is sharded before.
        sizes: the length along `concat_dim` of every rank's block, in order; None asks the ranks.
        split_sizes: the lengths of the pieces; None as in `reduce_scatter`.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        LayoutError: no such dim, or sizes that do not add up to its length.
        MeshError: no mesh; an axis that it does not have; a rank outside of it.
    """
    sub = _along_of(x, mesh, axes, "all_to_all")
    split, concat = (_dim(x, dim, "all_to_all") for dim in (split_dim, concat_dim))
    src = _cut(sub, x, concat, sizes, "all_to_all")
    dst = _cut_whole(sub, src.shape, split, split_sizes)
    return _moved(x, sub, src, dst, "all_to_all")


@also_called(axis_name="axes")
def ppermute(
    x: Tensor, axes: Axes, perm: Sequence[tuple[int, int]], *,
    shapes: Sequence[Sequence[int]] | None = None, mesh: MeshLike | None = None,
) -> Tensor:
    """The `x` of the rank that sends to this one; zeros of `x`'s shape if none does.

    Args:
        x: what this rank sends; shapes may differ between the ranks, dtypes must not.
        axes: the mesh axes whose ranks take part.
        perm: pairs (from, to) of positions along the axes, no position twice on a side.
        shapes: the shape of every rank's `x`, in order; None asks the ranks.
        mesh: None is that of the innermost `local_map`, else the current one.

    Raises:
        LayoutError: pairs that are not part of a permutation.
        MeshError: as in `psum`.
    """
    sub = _along_of(x, mesh, axes, "ppermute")
    pairs = _as_pairs(perm, sub.size())
    comm = sub.everyone()
    known = [tuple(shape) for shape in shapes or comm.exchange(tuple(x.shape))]  # type: ignore
    with traffic.label("ppermute", "asked for"):
        return _Permute(comm)(x, pairs, known)


def _along(mesh: MeshLike | None, axes: Axes, call: str) -> BoundMesh:
    """The mesh of only these axes, in their order, through this rank."""
    whole = mesh_of_region(mesh, call)
    numbers = whole.axes(axes if isinstance(axes, tuple) else (axes,), call)
    known = whole.cache.setdefault("along", {})
    if numbers not in known:
        whole.comm(numbers)  # raises outside the mesh; all rows of the mesh make their groups
        known[numbers] = whole[tuple(whole.axis_names[axis] for axis in numbers)]
    return known[numbers]


def _along_of(x: Tensor, mesh: MeshLike | None, axes: Axes, call: str) -> BoundMesh:
    """The same for a collective of `x`, which is this rank's tensor."""
    if isinstance(x, ShardTensor):
        raise ShardTypeError(
            f"{call}(x)", f"x is a ShardTensor {x.sharding}",
            "a collective takes what this rank holds; a ShardTensor is one global value, "
            "the same on all ranks", [str(x.sharding)],
            f"inside of weft.local_map, or {call}(x.to_local(), {axes!r}); "
            "x.redistribute(placements=...) moves a ShardTensor")
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardTypeError(
            f"{call}(x)", f"x is {x!r}, of type {type(x).__name__}",
            "a collective takes a tensor", [repr(x)],
            f"{call}(torch.tensor({x!r}), {axes!r}); the number of ranks is "
            f"axis_size({axes!r})")
    return _along(mesh, axes, call)


def _reduced(x: Tensor, axes: Axes, kind: str, mesh: MeshLike | None, call: str) -> Tensor:
    sub = _along_of(x, mesh, axes, call)
    whole = Layout.replicated(sub.abstract, x.shape)
    return _moved(x, sub, whole.with_partial(range(sub.ndim), kind), whole, call)


def _moved(x: Tensor, sub: BoundMesh, src: Layout, dst: Layout, call: str) -> Tensor:
    src.check_dtype(str(x.dtype).removeprefix("torch."))
    varying = frozenset(range(sub.ndim)) if dst.is_replicated else frozenset()
    move = transition_between(sub, src, dst, frozenset(), varying)
    if move is None:
        return x.clone()
    with traffic.label(call, "asked for"):
        return move(x)


def _dim(x: Tensor, dim: int, call: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise LayoutError(
            f"{call}(dim={dim})", f"x has {x.ndim} dims", "a dim is one of the tensor's",
            [dim], f"one of {list(range(x.ndim))}")
    return dim % x.ndim


def _cut(sub: BoundMesh, x: Tensor, dim: int, sizes: Sequence[int] | None, call: str) -> Layout:
    """The layout of a tensor whose blocks along a dim are the ranks' own. All ranks raise
    LayoutError if other lengths, or the dtypes, differ between them."""
    if sizes is None:
        told: Any = sub.everyone().exchange((tuple(x.shape), str(x.dtype)))
        sizes = [shape[dim] if dim < len(shape) else -1 for shape, _ in told]
        others = {(*shape[:dim], "*", *shape[dim + 1:], dtype) for shape, dtype in told}
        if len(others) > 1:
            raise LayoutError(
                f"{call}(dim={dim})", f"{len(others)} different blocks along axes "
                f"{sub.axis_names}", "blocks differ in their length along that dim alone",
                [f"place {at}: {shape} {dtype}" for at, (shape, dtype) in enumerate(told)],
                "pad or reshape them before the call")
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return _cut_whole(sub, shape, dim, sizes)


def _cut_whole(
    sub: BoundMesh, shape: Sequence[int], dim: int, sizes: Sequence[int] | None
) -> Layout:
    spec = P(*[None] * dim, tuple(range(sub.ndim)))
    return Layout(sub.abstract, shape, spec, sizes={dim: "flat" if sizes is None else tuple(sizes)})


_Pairs = tuple[tuple[int, int], ...]
"""(from, to), positions in a group."""


def _as_pairs(perm: Sequence[tuple[int, int]], size: int) -> _Pairs:
    """The pairs, checked: of positions that exist, each at most once on a side."""
    given: Any = perm
    if isinstance(given, Mapping) or any(len(listed(pair) or ()) != 2 for pair in given):
        raise ShardTypeError(
            "ppermute(perm)", f"{perm!r} is of type {type(perm).__name__}",
            "it is a list of pairs (from, to) of places", [repr(perm)],
            f"[(i, (i + 1) % {size}) for i in range({size})]")
    pairs = tuple((int(source), int(target)) for source, target in perm)
    outside = [pair for pair in pairs if not all(0 <= place < size for place in pair)]
    twice = [
        pair for side in (0, 1) for pair in pairs
        if sum(other[side] == pair[side] for other in pairs) > 1
    ]
    if outside or twice:
        raise LayoutError(
            "ppermute(perm)", f"{len(outside)} pairs name no place of 0 to {size - 1}, "
            f"{len(set(twice))} name a place that another pair names on the same side",
            "each place sends to one place at most and receives from one at most",
            [*outside, *dict.fromkeys(twice)],
            f"[(i, (i + 1) % {size}) for i in range({size})]")
    return pairs


@dataclass(frozen=True)
class _Permute(AllToAll):
    """Sends blocks by pairs of positions in a group: no change of layout."""

    what: ClassVar[str] = "blocks by pairs"
    of_gradient: ClassVar[str] = "gradient of ppermute"

    comm: Communicator

    def __call__(self, x: Tensor, pairs: _Pairs, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """What comes to this rank; zeros like `x` where nothing does. `shapes` are those of all
        ranks' tensors."""
        me, size = self.comm.index, self.comm.size
        send, recv = [0] * size, [0] * size
        made, flat = shapes[me], x.reshape(-1)[:0]
        for source, target in pairs:
            if source == me:
                flat = x.reshape(-1)
                send[target] = flat.numel()
            if target == me:
                made, recv[source] = shapes[source], math.prod(shapes[source])
        got = self.send(flat, send, recv)
        if any(target == me for _, target in pairs):
            return got.view(made)
        return x.new_zeros(made) + got.sum().to(x.dtype)  # all ranks take part in the backward

"""ShardTensors whose blocks each rank makes, reads or writes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Box, Layout, on_multiples
from weft.core.integers import integers
from weft.core.names import ADVICE, PLACEMENTS, also_called
from weft.errors import LayoutError, ShardTypeError, WeftError
from weft.tensor.placing.agreed import check_same, exchanged
from weft.tensor.placing.arguments import mesh_and_placements, place, shape_of
from weft.tensor.placing.layouts import check_given, check_tensor, leaf
from weft.tensor.placing.redistribute import redistribute_to
from weft.tensor.shard_tensor import ShardTensor
from weft.transport.boxes import shape_of as box_shape
from weft.transport.boxes import slices
from weft.transport.nodes import untransformed

__all__ = ["from_callback", "to_callback"]

_CALL = "from_callback(shape, mesh, placements, fn)"
_OUT = "to_callback(x, fn)"

Index = tuple[slice, ...]
"""Per dim, the global positions of a block."""


@also_called(ADVICE, device_mesh="mesh", data_callback="fn", callback="fn", **PLACEMENTS)
@untransformed
def from_callback(
    shape: Sequence[int], mesh: Any = None, placements: Any = None,
    fn: Callable[[Index], Any] | None = None, *, dtype: torch.dtype | None = None,
    chunks: Sequence[int] | None = None, requires_grad: bool = False,
) -> ShardTensor:
    """A tensor for which each rank calls `fn` for its own block: no rank needs the whole.

    All ranks of the mesh call it together. They compare the results of `fn` in one small exchange.

        data = numpy.load("field.npy", mmap_mode="r")
        x = weft.from_callback(data.shape, mesh, [Shard(0)], lambda index: data[index])

    Args:
        shape: the global shape, in elements.
        mesh: a mesh; None is the current one, or else that of a Layout.
        placements: placements, a `P` or a Layout; None replicates. They may stand in the place of
            the mesh, as in JAX: `from_callback(shape, layout, fn)`.
        fn: makes a block. `fn(index)`, with a slice of global positions per dim, returns a
            tensor, an array or nested lists of that shape. It is called once on every rank, with
            empty slices if the rank has no elements. Ranks with the same block (replicas) each
            call it and must get the same values.
        dtype: the dtype of the tensor; blocks are converted, and ranks without elements do not call
            `fn`. None takes the dtype of `fn`'s results.
        chunks: per dim, the number of elements of a chunk of the file. Shards then begin where
            chunks begin, so that each chunk is read for one shard of each dim.
        requires_grad: whether the result, a leaf, requires a gradient.

    Returns:
        A ShardTensor. A result of `fn` is copied if it is part of a larger tensor, a memory-mapped
        file or an array that other code uses.

    Raises:
        LayoutError: on all ranks, if `fn` raises on one, returns a shape different from its index,
            or different dtypes on some ranks; for placements with partial values; for chunks that
            are not one length of at least 1 per dim.
        MeshError: no mesh is given, none is set.

    As `jax.make_array_from_callback`.
    """
    if fn is None and callable(placements):
        placements, fn = None, placements
    mesh, placements = mesh_and_placements(mesh, placements)
    given: Any = tuple(shape) if isinstance(shape, Iterable) else shape
    bound, layout = place("weft.from_callback", shape_of("weft.from_callback", (given,)),
                          {"mesh": mesh, "placements": placements})
    if not callable(fn):
        raise ShardTypeError(
            _CALL, f"fn is of type {type(fn).__name__}", "each rank calls fn(index) for its block",
            [type(fn).__name__], "weft.from_callback(shape, mesh, P(...), lambda i: data[i])")
    if layout.is_partial:
        raise LayoutError(
            _CALL, f"the layout is {layout}", "fn gives the values of a block, which are no "
            "partial ones", [str(layout)], "weft.from_callback(shape, mesh, [Shard(0)], fn)")
    layout = _on_chunks(_CALL, layout, chunks)
    block, fault = _block(bound, layout, fn, dtype)
    check_same(_CALL, bound, None if block is None else str(block.dtype), "fn gives {} dtypes",
               "the blocks of one tensor have one dtype",
               "weft.from_callback(..., dtype=torch.float32)", fault)
    assert block is not None
    return leaf(block, bound, layout, requires_grad)


@also_called(callback="fn")
def to_callback(
    x: ShardTensor, fn: Callable[[Index, torch.Tensor], Any], *,
    chunks: Sequence[int] | None = None, in_turns: bool = False,
) -> None:
    """Each rank calls `fn` with its own block of `x`, to write it: no rank needs the whole.

    All ranks of the mesh call it together. `fn` is called when all of them are there, so that one
    of them may have made the file before; and when the call returns, all blocks are written.

        out = numpy.load("result.npy", mmap_mode="r+")
        weft.to_callback(x, lambda index, block: out.__setitem__(index, block))

    Args:
        x: any tensor; partial values are reduced first.
        fn: `fn(index, block)` gets a slice of global positions per dim, and the local tensor,
            without gradient. It is called once per block that has elements: of replicas, by the
            first rank. The block may share memory with `x` and must not be changed.
        chunks: per dim, the number of elements of a chunk of the file. Ranks first send each other
            the rows and columns that make each chunk whole on one rank. If two ranks wrote parts
            of one chunk, each would read all of it, and one of the writes would be lost.
        in_turns: one rank after the other calls `fn`, for files with one writer at a time (HDF5).

    Raises:
        LayoutError: on all ranks, if `fn` raises on one; if ranks pass different chunks; for chunks
            that are not one length of at least 1 per dim.
        ShardTypeError: `x` is no ShardTensor.
    """
    if type(x) is not ShardTensor:
        raise ShardTypeError(
            _OUT, f"x is a {type(x).__name__}", "to_callback takes a ShardTensor",
            [type(x).__name__], "fn((...,), x), where x is no ShardTensor")
    mesh = x._meta.mesh
    layout = _on_chunks(_OUT, x._meta.layout.without_partial(), chunks)
    check_same(  # and wait for all of them
        _OUT, mesh, f"{layout}, in_turns={in_turns}", "ranks ask for {} ways of writing",
        "all ranks pass the same arguments",
        "weft.to_callback(x, fn, chunks=...) with the same chunks on all ranks")
    block = redistribute_to(x.detach(), layout, _OUT).to_local()
    if mesh.here is None:
        return
    everyone = map(mesh.coordinate, range(mesh.size()))  # those that write, in mesh order
    owners = [at for at in everyone if _writes(layout, at)] if in_turns else [mesh.here]
    for owner in owners:
        fault = None
        if owner == mesh.here and _writes(layout, owner):
            box = layout.box_at(owner)
            try:
                fn(slices(box), block)
            except Exception as error:
                fault = _raised(_OUT, box, error, "fn writes the block of its rank")
        exchanged(_OUT, mesh, None, fault)


def _writes(layout: Layout, place: tuple[int, ...]) -> bool:
    """Whether this rank has elements and is the first of those that have the same."""
    replicas = [at for axis, at in enumerate(place) if axis not in layout.sharded_axes]
    return not any(replicas) and 0 not in layout.local_shape_at(place)


def _on_chunks(call: str, layout: Layout, chunks: Sequence[int] | None) -> Layout:
    """The layout whose cuts are the nearest multiples of chunks."""
    if chunks is None:
        return layout
    fix = f"chunks={(1,) * layout.ndim}"
    lengths = integers(chunks, call, "chunks", fix)
    if len(lengths) != layout.ndim or min(lengths, default=1) < 1:
        raise LayoutError(
            call, f"chunks are {lengths}, the shape is {layout.shape}",
            "chunks are one length of at least 1 per dim", [str(lengths)], fix)
    return layout.replace(cuts=[
        on_multiples(layout.cuts_of(dim), length) if layout.dims[dim] else None
        for dim, length in enumerate(lengths)
    ])


def _block(
    mesh: BoundMesh, layout: Layout, fn: Callable[[Index], Any], dtype: torch.dtype | None
) -> tuple[torch.Tensor | None, WeftError | None]:
    """This rank's block, or why it cannot be used."""
    box = ((0, 0),) * layout.ndim if mesh.here is None else layout.box_at(mesh.here)
    expected = box_shape(box)
    if dtype is not None and (mesh.here is None or 0 in expected):
        shape = (0,) if mesh.here is None else expected
        return torch.empty(shape, dtype=dtype, device=mesh.device), None
    try:
        block = _own_memory(fn(slices(box)), dtype)
        check_tensor(block, _CALL)
        check_given(block, _CALL)
    except Exception as error:
        return None, _raised(_CALL, box, error, "fn gives every rank its block")
    if tuple(block.shape) != expected:
        return None, LayoutError(
            _CALL, f"fn({_text(box)}) gives shape {tuple(block.shape)}, the index has "
            f"{expected}", "fn gives the block of its index", [_text(box)],
            "lambda index: data[index]")
    if mesh.here is None:
        block = block.new_empty((0,))
    return block.to(mesh.device), None


def _raised(call: str, box: Box, error: Exception, rule: str) -> WeftError:
    if isinstance(error, WeftError):
        return error
    fault = LayoutError(
        call, f"fn({_text(box)}) raises {type(error).__name__}: {error}", rule,
        [f"fn({_text(box)})"], "a function that does it on every rank")
    fault.__cause__ = error
    return fault


def _own_memory(block: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in row-major order that shares memory with nothing else."""
    if isinstance(block, torch.Tensor):
        block = block.detach().to(dtype or block.dtype).contiguous()
        whole = block.untyped_storage().nbytes() == block.nbytes
        return block if whole else block.clone()
    flags = getattr(block, "flags", None)
    alone = getattr(flags, "writeable", False) and getattr(flags, "owndata", False)
    made = torch.as_tensor(block, dtype=dtype) if alone else torch.tensor(block, dtype=dtype)
    return made.contiguous()


def _text(box: Box) -> str:
    return ", ".join([f"{start}:{stop}" for start, stop in box])

"""ShardTensors of which each rank makes, or reads, its own block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError, WeftError, message
from weft.tensor.leaf_gradients import track_leaf
from weft.tensor.placing.agreed import exchanged
from weft.tensor.placing.arguments import place, shape_of
from weft.tensor.placing.layouts import check_given, check_tensor, local_to_sharded
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["from_callback"]

_CALL = "from_callback(shape, mesh, placements, fn)"


def from_callback(
    shape: Sequence[int], mesh: Any = None, placements: Any = None,
    fn: Callable[[tuple[slice, ...]], Any] | None = None, *, requires_grad: bool = False,
) -> ShardTensor:
    """A tensor for which each rank calls `fn` for its own block: no rank needs the whole.

    All ranks of the mesh call it together. They compare the results of `fn` in one small exchange.

        data = numpy.load("field.npy", mmap_mode="r")
        x = weft.from_callback(data.shape, mesh, [Shard(0)], lambda index: data[index])

    Args:
        shape: the global shape, in elements.
        mesh: a mesh; None is the current one.
        placements: placements, a `P` or a Layout; None replicates.
        fn: makes a block. `fn(index)`, with a slice of global positions per dim, returns a
            tensor, an array or nested lists of that shape. It is called once on every rank, with
            empty slices if the rank has no elements. Ranks with the same block (replicas) each
            call it and must get the same values.
        requires_grad: of the leaf.

    Returns:
        A ShardTensor with the dtype of `fn`'s results. A result of `fn` is copied if it is part of
        a larger tensor, a memory-mapped file or an array that other code uses.

    Raises:
        LayoutError: on all ranks, if `fn` raises on one, returns a shape different from its index,
            or different dtypes on some ranks; for placements with partial values.
        MeshError: no mesh is given, none is set.
    """
    if fn is None and callable(placements):
        placements, fn = None, placements
    bound, layout = place("weft.from_callback", shape_of("weft.from_callback", (tuple(shape),)),
                          {"mesh": mesh, "placements": placements})
    if layout.is_partial or fn is None:
        facts = f"the layout is {layout}" if fn is not None else "fn is None"
        raise LayoutError(
            message(_CALL, facts, "fn gives the values of a block, which are no partial ones",
                    [str(layout)], "weft.from_callback(shape, mesh, [Shard(0)], fn)")
        )
    block, fault = _block(bound, layout, fn)
    if bound.here is not None:
        told = exchanged(_CALL, bound, None if block is None else str(block.dtype), fault)
        if len(set(told)) > 1:
            raise LayoutError(
                message(_CALL, f"fn gives {len(set(told))} dtypes", "the blocks of one tensor have "
                        "one dtype", [f"rank {bound.rank_at(at)}: {one}"
                                      for at, one in enumerate(told)],
                        "lambda index: fn(index).to(dtype)")
            )
    elif fault is not None:
        raise fault
    assert block is not None
    return local_to_sharded(track_leaf(block.requires_grad_(requires_grad)), bound, layout)


def _block(
    mesh: BoundMesh, layout: Layout, fn: Callable[[tuple[slice, ...]], Any]
) -> tuple[torch.Tensor | None, WeftError | None]:
    """This rank's block, or why it cannot be used."""
    box = ((0, 0),) * layout.ndim if mesh.here is None else layout.box_at(mesh.here)
    index = tuple([slice(start, stop) for start, stop in box])
    try:
        block = _own_memory(fn(index))
        check_tensor(block, _CALL)
        check_given(block, _CALL)
    except WeftError as error:
        return None, error
    except Exception as error:
        fault = LayoutError(
            message(_CALL, f"fn({_text(box)}) raises {type(error).__name__}: {error}",
                    "fn gives every rank its block", [_text(box)], "a function that gives it")
        )
        fault.__cause__ = error
        return None, fault
    expected = tuple([stop - start for start, stop in box])
    if tuple(block.shape) != expected:
        return None, LayoutError(
            message(_CALL, f"fn({_text(box)}) gives shape {tuple(block.shape)}, the index has "
                    f"{expected}", "fn gives the block of its index", [_text(box)],
                    "lambda index: data[index]")
        )
    if mesh.here is None:
        block = block.new_empty((0,))
    return block.to(mesh.device), None


def _own_memory(block: Any) -> torch.Tensor:
    """A tensor in row-major order that shares memory with nothing else."""
    if isinstance(block, torch.Tensor):
        block = block.detach().contiguous()
        whole = block.untyped_storage().nbytes() == block.nbytes
        return block if whole else block.clone()
    flags = getattr(block, "flags", None)
    alone = getattr(flags, "writeable", False) and getattr(flags, "owndata", False)
    return (torch.as_tensor(block) if alone else torch.tensor(block)).contiguous()


def _text(box: Sequence[tuple[int, int]]) -> str:
    return ", ".join([f"{start}:{stop}" for start, stop in box])

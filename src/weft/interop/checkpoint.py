"""torch.distributed.checkpoint: every rank writes its block once, and reads what its box needs.

torch's planners ask a tensor three things, which DTensor implements itself: what this rank
writes, which boxes it reads, and the memory that a box is read into. With these, files are
resharded when loaded, whatever meshes and layouts they were written from, DTensor's included.

If replicas hold a block, all of them offer it, and torch lets one write. A rank without elements
offers nothing: its box begins where the next one does, and torch distinguishes blocks by where they
begin. The first rank of the mesh writes a tensor that has no elements at all.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

from weft.core.layout import Box
from weft.errors import UnsupportedOpError, message
from weft.tensor import ShardTensor

__all__ = ["install"]

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"


def install() -> None:
    """Give ShardTensor the three methods."""
    methods: dict[str, Any] = {
        "__create_write_items__": _write_items, "__create_chunk_list__": _chunks,
        "__get_tensor_shard__": _memory,
    }
    for name, method in methods.items():
        setattr(ShardTensor, name, method)


def _write_items(tensor: ShardTensor, fqn: str, _: Any) -> list[Any]:
    metadata, planner = pkgutil.resolve_name(_METADATA), pkgutil.resolve_name(_PLANNER)
    properties = metadata.TensorProperties.create_from_tensor(_memory(tensor))
    properties.requires_grad = tensor.requires_grad
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(fqn, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, properties, torch.Size(tensor.shape)),
        )
        for chunk in _chunks(tensor)
    ]


def _chunks(tensor: ShardTensor) -> list[Any]:
    chunk = pkgutil.resolve_name(_METADATA).ChunkStorageMetadata
    return [
        chunk(torch.Size(start for start, _ in box), torch.Size(end - start for start, end in box))
        for box in _boxes(tensor)
    ]


def _boxes(tensor: ShardTensor) -> list[Box]:
    """The box of this rank, if it takes part.

    Raises:
        UnsupportedOpError: the tensor is partial.
    """
    layout, mesh = tensor.sharding, tensor.device_mesh
    if layout.is_partial:
        raise UnsupportedOpError(
            message("torch.distributed.checkpoint", f"a tensor is {layout}, of which each rank "
                    "holds a term", "a checkpoint holds values", [str(layout)],
                    "x.redistribute(placements=P()), or another spec without partial axes")
        )
    if mesh.here is None:
        return []
    if not tensor.numel():
        first = all(place == 0 for place in mesh.here)
        return [tuple([(0, length) for length in tensor.shape])] if first else []
    box = layout.box_at(mesh.here)
    return [box] if all(start < stop for start, stop in box) else []


def _memory(tensor: ShardTensor, index: Any = None) -> torch.Tensor:
    """The memory to write from and read into: the block itself, or for an empty tensor nothing."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.detach().to_local()

"""A field in a zarr store: each rank reads and writes the chunks of its own block.

    pip install zarr matplotlib
    weft run -n 4 examples/files/zarr_store.py [FOLDER]

zarr writes whole chunks. Two ranks that write parts of one chunk would each read all of it first,
and one of the writes would be lost. `chunks=` moves the borders of shards to those of chunks. For
an array with zarr's own shards, of several chunks in one file, give the shape of these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import zarr

import weft
from smoothing import run

__all__ = ["CHUNKS", "read", "write"]

CHUNKS = 100, 90


def read(path: Path, mesh: Any, spec: weft.P) -> Any:
    """The field of a store; each chunk is read and unpacked by one rank."""
    data: Any = zarr.open_array(path, mode="r")
    return weft.from_callback(
        data.shape, mesh, spec, lambda index: data[index], chunks=data.chunks)


def write(path: Path, field: Any) -> None:
    """A store of the field: rank 0 makes it, each rank writes its own chunks."""
    if field.device_mesh.get_rank() == 0:
        zarr.create_array(path, shape=tuple(field.shape), chunks=CHUNKS, dtype="float32",
                          overwrite=True)

    def put(index: tuple[slice, ...], block: torch.Tensor) -> None:
        zarr.open_array(path, mode="r+")[index] = block.numpy()

    weft.to_callback(field, put, chunks=CHUNKS)


if __name__ == "__main__":
    run(read, write, ".zarr")

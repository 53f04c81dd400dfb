"""A field in an HDF5 file: ranks read at the same time, and write one after the other.

    pip install h5py matplotlib
    weft run -n 4 examples/files/hdf5.py [FOLDER]

An HDF5 file has any number of readers or one writer, so ranks take turns (`in_turns=`). Then
it does not matter whether two ranks write parts of one chunk. h5py with MPI has its own way for
all ranks to write at once: it needs no turns, but `chunks=` if the chunks are packed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import torch

import weft
from smoothing import run

__all__ = ["read", "write"]


def read(path: Path, mesh: Any, spec: weft.P) -> Any:
    """The field of a file."""
    with h5py.File(path, "r") as file:
        data: Any = file["field"]
        return weft.from_callback(data.shape, mesh, spec, lambda index: data[index])


def write(path: Path, field: Any) -> None:
    """A file of the field: rank 0 makes it, each rank writes its own block in its turn."""
    if field.device_mesh.get_rank() == 0:
        with h5py.File(path, "w") as file:
            file.create_dataset("field", tuple(field.shape), "float32", chunks=(100, 90))

    def put(index: tuple[slice, ...], block: torch.Tensor) -> None:
        with h5py.File(path, "r+") as file:
            data: Any = file["field"]
            data[index] = block.numpy()

    weft.to_callback(field, put, in_turns=True)


if __name__ == "__main__":
    run(read, write, ".h5")

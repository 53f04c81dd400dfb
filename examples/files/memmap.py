"""A field in a numpy file: each rank maps the file into memory and touches its own block.

    pip install matplotlib
    weft run -n 4 examples/files/memmap.py [FOLDER]

Ranks of one machine share the pages of the file. A network file system may not join what two
machines write to one page: there, give `chunks=` with whole pages, or use zarr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft
from smoothing import run

__all__ = ["read", "write"]


def read(path: Path, mesh: Any, spec: weft.P) -> Any:
    """The field of a file; the operating system loads the pages of this rank's block."""
    data = np.load(path, mmap_mode="r")
    return weft.from_callback(data.shape, mesh, spec, lambda index: data[index])


def write(path: Path, field: Any) -> None:
    """A file of the field: rank 0 makes it, each rank writes its own block."""
    if field.device_mesh.get_rank() == 0:
        np.lib.format.open_memmap(path, "w+", np.float32, tuple(field.shape))

    def put(index: tuple[slice, ...], block: torch.Tensor) -> None:
        data = np.load(path, mmap_mode="r+")
        data[index] = block.numpy()
        data.flush()

    weft.to_callback(field, put)


if __name__ == "__main__":
    run(read, write, ".npy")

"""What the examples of this folder have in common: a field goes to a file, and through a stencil.

No rank ever holds the whole field. See memmap.py, zarr_store.py and hdf5.py for the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weft

__all__ = ["run", "smooth"]

Read = Callable[[Path, Any, weft.P], Any]
Write = Callable[[Path, Any], None]


def smooth(u: torch.Tensor) -> torch.Tensor:
    """Each place takes the mean of itself and its four neighbours, on a torus."""
    around = [torch.roll(u, shift, dim) for dim in (0, 1) for shift in (-1, 1)]
    return (u + sum(around)) / 5


def run(read: Read, write: Write, ending: str) -> None:
    """Write a field, read it again, smooth it, write the result, draw it; each rank its part."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    folder.mkdir(parents=True, exist_ok=True)
    mesh = weft.init_mesh({"y": 2, "x": 2})
    torch.manual_seed(0)
    spec = weft.P("y", "x")
    write(folder / f"field{ending}", weft.randn(500, 333, mesh=mesh, spec=spec))
    field = read(folder / f"field{ending}", mesh, spec)
    result = smooth(field)
    write(folder / f"smooth{ending}", result)
    again = read(folder / f"smooth{ending}", mesh, spec)
    if not (again == result).all():
        sys.exit("the file does not contain what was written")
    axes = weft.plot(result)
    if mesh.get_rank() == 0:
        axes.figure.savefig(folder / "smooth.png")
        print(f"read {field.sharding}; wrote smooth{ending} and smooth.png into {folder}")

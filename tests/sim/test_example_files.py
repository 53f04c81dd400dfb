"""The examples of files: what ranks write block by block is the field, and is read again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import P

SHAPE = 210, 95


@pytest.mark.parametrize("name", ["memmap", "zarr_store", "hdf5"])
def test_a_field_goes_to_a_file_and_back(name: str, tmp_path: Path) -> None:
    example, smooth = importlib.import_module(name), importlib.import_module("smoothing").smooth
    field = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))

    def on_rank(mesh: Any) -> Any:
        spec = P("y", "x")
        example.write(tmp_path / "a", weft.distribute_tensor(field, mesh, spec))
        read = example.read(tmp_path / "a", mesh, spec)
        example.write(tmp_path / "b", smooth(read))
        return read.full_tensor(), example.read(tmp_path / "b", mesh, P()).to_local()

    for same, smoothed in weft.testing.run(on_rank, mesh={"y": 2, "x": 2}):
        assert torch.equal(same, field)
        torch.testing.assert_close(smoothed, smooth(field))

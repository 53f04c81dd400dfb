"""Rows of the table in every dtype and from memory of every form."""

from __future__ import annotations

import pytest
import torch

from tests.cases.dtypes import MEMORY, MESH, dtypes_in, faults, run_rows
from weft.comm import run_simulated

EACH = [(memory, dtype) for memory in MEMORY for dtype in dtypes_in(memory)]


@pytest.mark.parametrize(("memory", "dtype"), EACH, ids=str)
def test_every_row(memory: str, dtype: torch.dtype) -> None:
    ranks = run_simulated(lambda mesh: run_rows(mesh, dtype, memory), 4, MESH)
    assert faults(ranks, dtype) == []

"""Bad input to annotations, a case for each line of the issue: who is wrong, and what there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import weft
from weft import LayoutError, MeshError, PlacementError, ShardTypeError, WeftError, spmd
from weft.spmd import Mesh, ShardedLoader

MESH = {"data": 2, "model": 2}
X = torch.arange(42.0).view(7, 6)

Case = tuple[Callable[[Any], Any], type[WeftError], str, list[str]]


def dicts() -> DataLoader:
    return DataLoader([{"x": X[0], "y": X[1]} for _ in range(4)], batch_size=2)  # type: ignore


CASES: dict[str, Case] = {
    "ids that repeat": (
        lambda m: Mesh([0, 1, 1, 3], (2, 2)), MeshError, "1",
        ["4 device ids, 3 of them different"]),
    "ids that do not multiply up": (
        lambda m: Mesh([0, 1, 2], (2, 2)), MeshError, "3 ids", ["3 device ids", "mesh of 4"]),
    "an axis twice": (
        lambda m: spmd.mark_sharding(X, m, ("data", "data")), PlacementError, "data", []),
    "an axis twice in a tuple": (
        lambda m: spmd.mark_sharding(X, m, (("data", "data"),)), PlacementError, "data", []),
    "an axis by name and by number": (
        lambda m: spmd.mark_sharding(X, m, ("data", 0)), PlacementError, "data", []),
    "nested tuples": (
        lambda m: spmd.mark_sharding(X, m, (("data", ("model",)),)), ShardTypeError,
        "('model',)", []),
    "an unknown name": (
        lambda m: spmd.mark_sharding(X, m, ("rows",)), MeshError, "'rows'", ["data", "model"]),
    "an unknown number": (
        lambda m: spmd.mark_sharding(X, m, (2,)), MeshError, "2", ["data", "model"]),
    "an unknown name to a mesh": (
        lambda m: Mesh(range(4), (2, 2), ("data", "model")).get_op_sharding(("rows",)), MeshError,
        "'rows'", ["data", "model"]),
    "a spec longer than the rank": (
        lambda m: spmd.mark_sharding(X, m, ("data", None, "model")), PlacementError, "model",
        ["3 entries", "2 dims"]),
    "no spec for a key": (
        lambda m: next(iter(ShardedLoader(dicts(), {"x": ("data",)}, mesh=m))), LayoutError,
        "no spec for 'y'", ["'x'", "'y'"]),
    "a spec for no key": (
        lambda m: next(iter(ShardedLoader(dicts(), {"x": None, "y": None, "z": None}, mesh=m))),
        LayoutError, "no 'z' in the batch", ["'x'", "'y'"]),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_name_the_offender_and_the_choices(case: str) -> None:
    call, kind, offender, facts = CASES[case]

    def on_rank(mesh: Any) -> str:
        with pytest.raises(kind) as told:
            call(mesh)
        return str(told.value)

    texts = weft.testing.run(on_rank, mesh=MESH)
    assert len(set(texts)) == 1
    said, offenders = texts[0].split("Offenders:")
    offenders = offenders.split("Fix:")[0]
    assert offender in offenders, texts[0]
    assert all(fact in texts[0] for fact in facts), texts[0]
    assert "Rule:" in said and "Fix:" in texts[0]

"""The lines of docs/migration.md run and give what they are said to; every name in it exists."""

from __future__ import annotations

from typing import Any

import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug, experimental, parallel

import weft
from tests.migration import CODE, DTENSORS, lines, rows, run

LIBRARIES = ("DTensor", "PhysicsNeMo", "torch_xla", "JAX", "in none of them")
ROOTS: dict[str, Any] = {
    "weft": weft, "spmd": weft.spmd, "collectives": weft.collectives, "Layout": weft.Layout,
    "ShardTensor": weft.ShardTensor, "Mesh": weft.Mesh, "BoundMesh": weft.BoundMesh,
}


def exists(name: str) -> bool:
    first, *rest = name.split(".")
    found = ROOTS.get(first)
    for part in rest:
        found = getattr(found, part, None)
    # What an instance gets when it is made stands in the class's annotations alone.
    owner = ROOTS.get(first)
    return found is not None or (
        isinstance(owner, type) and rest[-1:] != [] and rest[-1] in owner.__annotations__
    )


def test_the_lines_give_what_is_said() -> None:
    chosen = [line for line in lines() if line.section != DTENSORS]
    assert len(chosen) > 45
    found = weft.testing.run(lambda mesh: run(chosen, mesh), 4, {"dp": 2, "tp": 2})[0]
    assert [
        (line.code, given) for line, given in zip(chosen, found, strict=True)
        if line.gives not in ("", given)
    ] == []
    assert sum(line.gives != "" for line in chosen) > 40


def test_every_name_exists_or_says_why_not() -> None:
    missing, count = [], 0
    for library in LIBRARIES:
        for number, (theirs_cell, ours) in rows(library):
            assert theirs_cell
            if ours.startswith("later: "):
                continue
            if ours.startswith("none: "):
                names = [name.split("(")[0] for name in CODE.findall(ours)]
                names = [name for name in names if name.split(".")[0] in ROOTS]
            else:
                names = CODE.findall(ours)
                assert names, f"line {number}: neither a name, nor none, nor later"
            missing += [f"line {number}: {name}" for name in names if not exists(name)]
            count += len(names)
    assert missing == []
    assert count > 120
    assert not exists("weft.nonsense") and not exists("ShardTensor.nonsense")


def test_all_of_dtensor_is_there() -> None:
    told = {name for _, cells in rows("DTensor") for name in CODE.findall(cells[0])}
    public = {*theirs.__all__, *parallel.__all__, *experimental.__all__, "CommDebugMode",
              "visualize_sharding"}
    assert hasattr(debug, "visualize_sharding") and hasattr(debug, "CommDebugMode")
    for kind in (theirs.DTensor, DeviceMesh):
        public |= {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}
    assert public - told == set()


def test_all_of_weft_is_there() -> None:
    """Each public name of weft stands in the page: for what it replaces, or as what is new."""
    told = {name for library in LIBRARIES for _, cells in rows(library)
            for name in CODE.findall(cells[-1])}
    errors = {name for name in weft.__all__ if name.endswith(("Error", "Warning"))}
    modules = {"collectives", "spmd", "testing"}
    tops = {name.split(".")[1] for name in told if name.startswith("weft.")} | {
        name.split(".")[0] for name in told}
    assert set(weft.__all__) - errors - modules - tops == set()
    assert set(weft.spmd.__all__) <= {
        name.split(".")[1] for name in told if name.startswith("spmd.")}

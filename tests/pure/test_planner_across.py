"""From one mesh to another: every device gets its box, takes what it lacks, from near by."""

from __future__ import annotations

import itertools

import pytest

from tests.transitions import layouts
from weft.core import Layout, Mesh, P
from weft.planner import Plan, Transfer, interpret

MESHES = {
    "disjoint": (Mesh((2,)), Mesh((3,), ranks=(2, 3, 4))),
    "overlapping": (Mesh((3,)), Mesh((2, 2), ranks=(1, 2, 3, 4))),
    "other order": (Mesh((2, 2)), Mesh((4,), ranks=(2, 0, 3, 1))),
    "other factors": (Mesh((2, 3)), Mesh((3, 2))),
    "part of it": (Mesh((2, 2)), Mesh((2,), ranks=(1, 3))),
    "one device": (Mesh((1,), ranks=(5,)), Mesh((2, 2))),
    "other nodes": (Mesh((2, 2)), Mesh((2, 2), ranks=range(3, 11, 2))),
}


@pytest.mark.parametrize("node_size", [1, 2, 8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (4,), (5,), (3, 4)])
@pytest.mark.parametrize("meshes", MESHES.values(), ids=MESHES)
def test_every_device_gets_its_box(
    meshes: tuple[Mesh, Mesh], shape: tuple[int, ...], node_size: int
) -> None:
    ends = [layouts(mesh, shape, kinds=()) for mesh in meshes]
    for src, dst in itertools.product(*ends):
        interpret(Plan(src, dst, (Transfer(src, dst, node_size=node_size),)))
        interpret(Plan(dst, src, (Transfer(dst, src, node_size=node_size),)))


@pytest.mark.parametrize("kind", ["sum", "avg", "bxor"])
def test_terms_move_as_values_do(kind: str) -> None:
    src_mesh = Mesh({"a": 2, "b": 2})
    dst_mesh = Mesh({"b": 2, "c": 3}, ranks=(3, 2, 4, 5, 6, 7))
    src = Layout(src_mesh, (5,), P("a", partial={"b": kind}))
    for dst in (P("c", partial={"b": kind}), P(partial={"b": kind})):
        interpret(Plan(src, Layout(dst_mesh, (5,), dst),
                       (Transfer(src, Layout(dst_mesh, (5,), dst)),)))

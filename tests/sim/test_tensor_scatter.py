"""Data of one rank: each rank receives its block, the source sends every element once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.cases.dtypes import as_bytes
from tests.sim.test_transport_copies import lies_in
from weft import Layout, LayoutError, MeshError, P, Shard
from weft.comm.simulated import SimulatedCommunicator

X = torch.arange(35.0, dtype=torch.float64).view(5, 7)
SPECS = [P("dp", "tp"), P(("tp", "dp")), P(), P("dp"), P(None, "tp"),
         P("dp", partial={"tp": "sum"}), P(partial={"dp": "max"})]


@pytest.mark.parametrize("source", [0, 1, 3])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("told", [False, True])
def test_scatter_tensor(source: int, spec: P, told: bool) -> None:
    def on_rank(mesh: Any) -> bool:
        mine = X.clone() if mesh.rank == source else None
        facts: dict[str, Any] = {"global_shape": (5, 7), "dtype": X.dtype} if told else {}
        x = weft.scatter_tensor(mine, source, mesh, spec, requires_grad=True, **facts)
        assert x.is_leaf and x.requires_grad and x.sharding == Layout(mesh, (5, 7), spec)
        with torch.no_grad():
            whole = torch.equal(x.full_tensor(), X)
            x.zero_()
        return whole and (mine is None or torch.equal(mine, X))

    assert weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}) == [True] * 4


@pytest.mark.parametrize("rows", [5, 6, 9, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bool, torch.complex64, torch.uint16],
                         ids=str)
def test_any_rows_of_any_dtype(rows: int, dtype: torch.dtype) -> None:
    """Over 4 ranks; PhysicsNeMo's crashes for 5, 6 and 9."""
    full = (torch.arange(rows * 2).view(rows, 2) % 5).float().to(dtype)

    def on_rank(mesh: Any) -> None:
        x = weft.scatter_tensor(full if mesh.rank == 2 else None, 2, mesh, [Shard(0)])
        assert as_bytes(x.full_tensor()) == as_bytes(full) and x.dtype == dtype
        ragged = weft.scatter_tensor(
            full if mesh.rank == 0 else None, 0, mesh, [Shard(0, sizes=(0, rows, 0, 0))]
        )
        assert ragged.to_local().shape == (rows if mesh.rank == 1 else 0, 2)

    weft.testing.run(on_rank, mesh={"x": 4})


class Count:
    """What each rank hands to its communicators, and what it makes room for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
        self.sent: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        self.received: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        self.broadcasts: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        swap, broadcast = SimulatedCommunicator._swap, SimulatedCommunicator._broadcast

        def count_swap(comm, send, recv, dtype):
            self.sent[comm.world.rank] += [piece for _, piece in send]
            self.received[comm.world.rank] += [piece for _, piece in recv]
            return swap(comm, send, recv, dtype)

        def count_broadcast(comm, x, source):
            self.broadcasts[comm.world.rank].append(x)
            return broadcast(comm, x, source)

        def refuse(*_):
            raise AssertionError("blocks go by swap and broadcast alone")

        monkeypatch.setattr(SimulatedCommunicator, "_swap", count_swap)
        monkeypatch.setattr(SimulatedCommunicator, "_broadcast", count_broadcast)
        monkeypatch.setattr(SimulatedCommunicator, "scatter", refuse)
        monkeypatch.setattr(SimulatedCommunicator, "_all_gather", refuse)

    @staticmethod
    def elements(tensors: list[Tensor]) -> int:
        return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("spec", SPECS[:5], ids=str)
@pytest.mark.parametrize("call", ["scatter_tensor", "distribute_tensor"])
def test_what_is_handed_over(monkeypatch: pytest.MonkeyPatch, spec: P, call: str) -> None:
    """By the source: the whole less its block, and its block for the tree of its replicas."""
    count, source, full = Count(monkeypatch, 8), 5, X.clone()
    layout = Layout(weft.Mesh({"dp": 2, "tp": 2, "copies": 2}), (5, 7), spec)

    def on_rank(mesh: Any) -> None:
        if call == "scatter_tensor":
            weft.scatter_tensor(full if mesh.rank == source else None, source, mesh, spec)
        else:
            mine = full if mesh.rank == source else torch.zeros_like(full)
            weft.distribute_tensor(mine, mesh, spec, src_data_rank=source)

    weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2, "copies": 2})
    blocks = [layout.local_shape(rank) for rank in range(8)]
    own = blocks[source][0] * blocks[source][1]
    assert count.elements(count.sent[source]) == full.numel() - own
    assert [count.elements(count.sent[rank]) for rank in range(8) if rank != source] == [0] * 7
    for rank, (rows, columns) in enumerate(blocks):
        assert count.elements(count.broadcasts[rank]) == rows * columns
        assert count.elements(count.received[rank]) in (0, rows * columns)
    if layout.spec == P(("tp", "dp")):  # rows lie together: no copy is made of them
        assert all(lies_in(piece, full) for piece in count.sent[source])


def fails(call: Any, kind: type[Exception]) -> list[str]:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value).splitlines()


def test_faults_are_raised_on_all_ranks() -> None:
    def on_rank(mesh: Any) -> list[list[str]]:
        mine = X if mesh.rank == 1 else None
        return [
            fails(lambda: weft.scatter_tensor(None, 1, mesh, P("x")), LayoutError),
            fails(lambda: weft.scatter_tensor(
                mine, 1, mesh, P("x"), global_shape=(5, 6) if mesh.rank == 2 else None
            ), LayoutError),
            fails(lambda: weft.scatter_tensor(mine, 1, mesh, P("x"), dtype=torch.half),
                  LayoutError),
            fails(lambda: weft.scatter_tensor(mine, 7, mesh, P("x")), MeshError),
        ]

    said = weft.testing.run(on_rank, mesh={"x": 3})
    assert said == [said[0]] * 3
    assert said[0][0] == [
        "scatter_tensor(tensor): rank 1 has no tensor, 1 ranks say otherwise.",
        "  Rule: the source has the full tensor, of the shape and dtype that ranks say.",
        "  Offenders: rank 1: None",
        "  Fix: tensor=full on the source, global_shape=None elsewhere",
    ]
    assert said[0][1][2] == "  Offenders: rank 2: (5, 6), None"
    assert said[0][2][2].startswith("  Offenders: rank 0: None, torch.float16, rank 1: None, torch")
    assert said[0][3] == [
        "scatter_tensor(global_src): rank 7 is outside Mesh({'x': 3}).",
        "  Rule: the source is one of the mesh's ranks.", "  Offenders: 7",
        "  Fix: scatter_tensor(tensor, 0, ...)",
    ]


def test_a_source_outside_a_part_of_the_mesh() -> None:
    def on_rank(mesh: Any) -> list[float]:
        part = mesh["tp"]
        full = torch.full((3, 2), float(mesh.rank))
        if mesh.rank > 1:
            with pytest.raises(MeshError, match=r"Fix: scatter_tensor\(tensor, mesh.rank_at\(0\),"):
                weft.scatter_tensor(full, 0, part, P("tp"))
        out = weft.scatter_tensor(full, part.rank_at(0), part, P("tp"))
        return out.full_tensor().unique().tolist()

    assert weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}) == [[0.0], [0.0], [2.0], [2.0]]


def test_a_rank_outside_knows_the_facts_by_itself() -> None:
    def on_rank(_: Any) -> str:
        mesh = weft.init_mesh({"x": 2}, ranks=(2, 0))
        x = weft.scatter_tensor(
            X if mesh.rank == 2 else None, 2, mesh, P("x"), global_shape=(5, 7), dtype=X.dtype,
            requires_grad=True,
        )
        if mesh.here is None:
            assert fails(lambda: weft.scatter_tensor(None, 2, mesh, P("x")), LayoutError)[0] == (
                "scatter_tensor(global_shape, dtype): they are None and None on rank 1, which is "
                "outside Mesh({'x': 2}, ranks=(2, 0))."
            )
        assert x.to_local().dtype == X.dtype and x.requires_grad
        return f"{x.sharding} {tuple(x.to_local().shape)}"

    assert weft.testing.run(on_rank, num_ranks=3, mesh={"w": 3}) == [
        "[5@x, 7] (2, 7)", "[5@x, 7] (0,)", "[5@x, 7] (3, 7)",
    ]

"""ShardTensors from local and full tensors and back, and on ranks outside the mesh."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import weft
from tests.harness import ranks
from weft import (
    Layout,
    LayoutError,
    Mesh,
    MeshError,
    P,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    ShardTensor,
    ShardTypeError,
    UnsupportedOpError,
)
from weft.tensor.placing import left_whole

X = torch.arange(30.0, dtype=torch.float64).view(5, 6)
ROWS = (3, 0, 2)
OFFSETS = (0, 3, 3)


def rows_of(rank: int) -> torch.Tensor:
    return X[OFFSETS[rank] : OFFSETS[rank] + ROWS[rank]].clone()


def on_three(fn: Any) -> list[Any]:
    return weft.testing.run(fn, mesh={"x": 3})


def is_ragged(x: ShardTensor) -> bool:
    return (
        str(x.sharding) == "[5@x{3,0,2}, 6]" and torch.equal(x.detach().full_tensor(), X)
        and x.to_local().shape == (ROWS[x.device_mesh.rank], 6)
    )


@pytest.mark.parametrize(
    "options",
    [
        {}, {"sizes": "infer"}, {"run_check": True}, {"sizes": {0: ROWS}}, {"sizes": {-2: ROWS}},
        {"sizes": {0: ROWS}, "run_check": True}, {"sizes": {0: ROWS}, "shape": (5, 6)},
        {"sharding_shapes": {0: [(3, 6), (0, 6), (2, 6)]}},
        {"sharding_shapes": {"x": [torch.Size((3, 6)), torch.Size((0, 6)), torch.Size((2, 6))]}},
        {"stride": (6, 1)},
    ],
    ids=str,
)
def test_from_local_of_ragged_rows(options: dict[str, Any]) -> None:
    for placements in ([Shard(0)], P("x"), (Shard(-2),)):
        made = on_three(
            lambda mesh, how=placements: is_ragged(
                ShardTensor.from_local(rows_of(mesh.rank), mesh, how, **options)
            )
        )
        assert made == [True] * 3


def test_from_local_in_other_spellings() -> None:
    def on_rank(mesh: Any) -> list[str]:
        local = rows_of(mesh.rank)
        layout = Layout(mesh, (5, 6), P("x"), sizes={0: ROWS})
        with mesh:
            default = ShardTensor.from_local(local, None, [Shard(0)])
        return [str(x.sharding) for x in (
            ShardTensor.from_local(local, mesh, layout),
            ShardTensor.from_local(local, mesh, [Shard(0, sizes=ROWS)]),
            default,
            ShardTensor.from_local(torch.ones(2, 6), mesh, P("x"), sizes="chunk"),
            ShardTensor.from_local(torch.ones(2, 6), mesh, P("x"), shape=(6, 6)),
            ShardTensor.from_local(torch.ones(2, 6), mesh),
            ShardTensor.from_local(torch.ones(2, 6), mesh, [Partial()]),
            ShardTensor.from_local(torch.ones(2, 6), mesh, [Partial("max")]),
        )]

    due = ["[5@x{3,0,2}, 6]"] * 3 + ["[6@x, 6]"] * 2 + [
        "[2, 6]", "[2, 6] partial(sum@x)", "[2, 6] partial(max@x)",
    ]
    assert on_three(on_rank) == [due] * 3


def test_only_infer_asks_the_other_ranks() -> None:
    def on_rank(mesh: Any) -> str:
        if mesh.rank != 1:
            return "absent"
        made = ShardTensor.from_local(rows_of(1), mesh, P("x"), sizes={0: ROWS})
        chunks = ShardTensor.from_local(
            torch.ones(2), mesh, P("x"), sizes="chunk", shape=(6,)
        )
        return f"{made.sharding} {made.offsets()} {chunks.sharding} {chunks.offsets('x')}"

    assert on_three(on_rank)[1] == "[5@x{3,0,2}, 6] (3,) [6@x] 2"


@pytest.mark.parametrize(("spec", "sizes", "due"), [
    (P("a", "b"), None, [(0, 0), (0, 3), (4, 0), (4, 3)]),
    (P("b", "a"), None, [(0, 0), (0, 4), (3, 0), (3, 4)]),
    (P(None, "a"), None, [(0, 0), (0, 0), (3, 0), (3, 0)]),
    (P("a", partial={"b": "sum"}), {0: (0, 7)}, [(0, 0)] * 4),
    (P(None, "b"), {1: (5, 1)}, [(0, 0), (0, 5), (0, 0), (0, 5)]),
    (P(("b", "a")), None, [(0, 0), (4, 4), (2, 2), (6, 6)]),
    (P(), None, [(0, 0)] * 4),
])
def test_offsets_are_those_of_mesh_dims(spec: P, sizes: Any, due: list[tuple[int, int]]) -> None:
    """As PhysicsNeMo's: where the shard begins in the dim that each mesh axis cuts."""
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(
            torch.zeros(7, 6), mesh, weft.Layout(mesh, (7, 6), spec, sizes=sizes))
        assert [x.offsets(axis) for axis in range(2)] == list(x.offsets())
        assert [x.offsets(axis) for axis in "ab"] == list(x.offsets())
        return x.offsets()

    assert weft.testing.run(on_rank, mesh={"a": 2, "b": 2}) == due


def test_gradients_reach_the_local_tensor() -> None:
    def on_rank(mesh: Any) -> bool:
        local = rows_of(mesh.rank).requires_grad_()
        x = ShardTensor.from_local(local * 2, mesh, P("x"))
        (x * x).sum().backward()
        assert local.grad is not None
        return torch.equal(local.grad, 8 * local.detach())

    assert on_three(on_rank) == [True] * 3


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("spec", [P(), P("x"), [Partial()]], ids=str)
@ranks(x=2)
def test_what_leaves_without_grad_mode_is_plain(mesh: Any, spec: Any, computed: bool) -> None:
    local = torch.ones(2, 3, requires_grad=True)
    x = ShardTensor.from_local(local, mesh, spec)
    x = x * 2 if computed else x
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            outs = [x.to_local(), x.full_tensor(), x.redistribute(placements=P()),
                    weft.spmd.enable_manual_sharding(x, P())]
            if not isinstance(spec, list):
                outs.append(x.to_local(grad_placements=spec))
        for out in outs:
            assert not out.requires_grad and out.grad_fn is None
    with torch.no_grad():
        x.to_local().fill_(3.0)  # the memory is the tensor's
    assert bool((x == 3).all()) == (not isinstance(spec, list))
    assert x.to_local().requires_grad


def test_sync_takes_the_first_replica() -> None:
    def on_rank(mesh: Any) -> torch.Tensor:
        local = torch.full((2,), float(mesh.rank))
        x = ShardTensor.from_local(local, mesh, P("tp"), sync=True, sizes="chunk")
        return x.full_tensor()

    for full in weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}):
        assert full.tolist() == [0.0, 0.0, 1.0, 1.0]


FAULTS: dict[str, tuple[Any, list[str]]] = {
    "columns": (
        lambda mesh: ShardTensor.from_local(torch.ones(2, 4 + (mesh.rank == 2)), mesh, P("x")),
        ['from_local(sizes="infer"): the local shapes [(2, 4), (2, 4), (2, 5)] do not make one '
         "tensor on Mesh(x=3) with P('x').",
         "  Rule: local shapes differ only in the dims that mesh axes shard, and ranks with the "
         "same shard agree.",
         "  Offenders: rank 2: 5 in dim 1, which no axis shards",
         "  Fix: check each rank's local tensor"],
    ),
    "dims": (
        lambda mesh: ShardTensor.from_local(
            torch.ones((2,) * (2 + (mesh.rank == 1))), mesh, P("x")
        ),
        ['from_local(sizes="infer"): the local shapes [(2, 2), (2, 2, 2), (2, 2)] do not make one '
         "tensor on Mesh(x=3) with P('x').",
         "  Rule: local shapes differ only in the dims that mesh axes shard, and ranks with the "
         "same shard agree.",
         "  Offenders: rank 1: 3 dims",
         "  Fix: check each rank's local tensor"],
    ),
    "replicas": (
        lambda mesh: ShardTensor.from_local(
            torch.full((2,), float(mesh.rank > 1)), mesh, [Replicate()], run_check=True
        ),
        ["from_local(run_check=True): 1 ranks contradict layout [2].",
         "  Rule: all ranks agree on layout and dtype, and replicas are equal.",
         "  Offenders: rank 2: other values than its replica, rank 0",
         "  Fix: from_local(..., sync=True) takes the first replica's values"],
    ),
    "dtype": (
        lambda mesh: ShardTensor.from_local(
            torch.ones(2, dtype=torch.float32 if mesh.rank else torch.float64), mesh, P("x"),
            shape=(6,), run_check=True,
        ),
        ["from_local(run_check=True): 2 ranks contradict layout [6@x].",
         "  Rule: all ranks agree on layout and dtype, and replicas are equal.",
         "  Offenders: rank 1: torch.float32 [6@x], rank 0: torch.float64 [6@x], "
         "rank 2: torch.float32 [6@x], rank 0: torch.float64 [6@x]",
         "  Fix: from_local(..., sync=True) takes the first replica's values"],
    ),
    "shape that one rank contradicts": (
        lambda mesh: ShardTensor.from_local(
            torch.ones(2 + (mesh.rank == 1)), mesh, P("x"), sizes={0: (2, 2, 2)}, run_check=True
        ),
        ["from_local(run_check=True): 1 ranks contradict layout [6@x].",
         "  Rule: all ranks agree on layout and dtype, and replicas are equal.",
         "  Offenders: rank 1: shape (3,) for (2,)",
         "  Fix: from_local(..., sync=True) takes the first replica's values"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_one_rank_are_raised_on_all(fault: str) -> None:
    make, due = FAULTS[fault]

    def on_rank(mesh: Any) -> list[str]:
        with pytest.raises(LayoutError) as caught:
            make(mesh)
        return str(caught.value).splitlines()

    assert on_three(on_rank) == [due] * 3


def test_a_local_tensor_that_contradicts_its_layout() -> None:
    def on_rank(mesh: Any) -> list[str]:
        with pytest.raises(LayoutError) as caught:
            ShardTensor.from_local(torch.ones(4, 6), mesh, P("x"), sizes={0: ROWS})
        return str(caught.value).splitlines()

    assert on_three(on_rank)[1] == [
        "from_local(local_tensor): rank 1 gives shape (4, 6), the layout [5@x{3,0,2}, 6] gives it "
        "(0, 6).",
        "  Rule: a local tensor has the shape that the layout gives its rank.",
        "  Offenders: 1",
        '  Fix: from_local(..., sizes="infer"), or sizes={dim: (...)}',
    ]


BAD: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "to nothing": (
        lambda x: x.redistribute(), PlacementError,
        ["redistribute(): neither a mesh nor placements are given for [5@dp, 6].",
         "  Rule: redistribute needs a mesh or placements.", "  Offenders: placements=None",
         "  Fix: x.redistribute(placements=P())"],
    ),
    "distributed already": (
        lambda x: weft.distribute_tensor(x, x.device_mesh, P("tp")), LayoutError,
        ["distribute_tensor(tensor): it is distributed as [5@dp, 6], not as [5@tp, 6].",
         "  Rule: a distributed tensor passes unchanged or not at all.",
         "  Offenders: [5@dp, 6]", "  Fix: x.redistribute(placements=...)"],
    ),
    "local is sharded": (
        lambda x: ShardTensor.from_local(x, x.device_mesh, P()), ShardTypeError,
        ["from_local(local_tensor): it is distributed already, as [5@dp, 6].",
         "  Rule: what a rank gives is a plain torch.Tensor.", "  Offenders: [5@dp, 6]",
         "  Fix: x.redistribute(mesh, placements); of a DTensor, weft.from_dtensor(d)"],
    ),
    "unknown sizes": (
        lambda x: ShardTensor.from_local(X, x.device_mesh, P("dp"), sizes="guess"), LayoutError,
        ["from_local(sizes=): sizes is 'guess'.",
         '  Rule: sizes is "infer", "chunk" or a map tensor dim -> sizes in shard order.',
         "  Offenders: 'guess'", "  Fix: from_local(x, mesh, [Shard(0)], sizes={0: (3, 2)})"],
    ),
    "two meshes": (
        lambda x: x + weft.distribute_tensor(X, weft.init_mesh({"y": 4}), P("y")), MeshError,
        ["__add__: operands live on Mesh({'dp': 2, 'tp': 2}) and on Mesh({'y': 4}).",
         "  Rule: all operands of one call live on one mesh.", "  Offenders: [5@y, 6]",
         "  Fix: x.redistribute(mesh, placements) first"],
    ),
    "gradients that cannot be": (
        lambda x: x.requires_grad_().to_local(grad_placements=P("tp")), PlacementError,
        ["to_local(grad_placements): P('tp') for a tensor [5@dp, 6].",
         "  Rule: where the tensor is sharded, gradients of its local tensors are sharded alike; "
         "elsewhere they are Replicate(), or Partial() of any kind.",
         "  Offenders: dp: Replicate() for Shard(dim=0), tp: Shard(dim=0) for Replicate()",
         "  Fix: to_local(grad_placements=None)"],
    ),
    "gradients of the whole that cannot be": (
        lambda x: x.full_tensor(grad_placements=P("tp")), PlacementError,
        ["full_tensor(grad_placements): P('tp') for a tensor [5, 6].",
         "  Rule: where the tensor is sharded, gradients of its local tensors are sharded alike; "
         "elsewhere they are Replicate(), or Partial() of any kind.",
         "  Offenders: tp: Shard(dim=0) for Replicate()",
         "  Fix: full_tensor(grad_placements=None)"],
    ),
    "sizes that do not fit": (
        lambda x: weft.distribute_tensor(X, x.device_mesh, [Shard(0, sizes=(4, 4)), Replicate()]),
        LayoutError,
        ["distribute_tensor(placements): 1 entries do not fit shape (5, 6) on Mesh(dp=2, tp=2).",
         "  Rule: sizes are at least 0, one per shard, and sum to the global size; or one of "
         "'default', 'flat', 'balanced'.",
         "  Offenders: dim 0: (4, 4) are 2 sizes with sum 8 for 2 shards of 5",
         "  Fix: leave sizes out for default cuts"],
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_told_on_all_ranks(fault: str) -> None:
    call, kind, due = BAD[fault]

    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P("dp"))
        with weft.explain() as log, pytest.raises(kind) as caught:
            call(x)
        assert all(event.op != "redistribute" for event in log.events)
        return str(caught.value).splitlines()

    assert weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}) == [due] * 4


@pytest.mark.parametrize(
    ("placements", "kind"),
    [
        (P("dq"), MeshError), (P("dp", "dp"), PlacementError),
        (P("dp", None, "tp"), PlacementError),
        ([Shard(0)], PlacementError), ([Shard(0), Shard(2)], PlacementError),
        ([Shard(0), Replicate(), Replicate()], PlacementError),
        ([Shard(0, sizes=(4, 4)), Replicate()], LayoutError),
        (["dp", Replicate()], ShardTypeError),
        (P(partial={"dq": "sum"}), MeshError), (7, ShardTypeError),
    ],
    ids=str,
)
def test_placements_that_cannot_be(placements: Any, kind: type[Exception]) -> None:
    def on_rank(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(X, mesh, P())
        said = []
        for call in (
            lambda: weft.distribute_tensor(X, mesh, placements),
            lambda: x.redistribute(placements=placements),
            lambda: weft.zeros(5, 6, mesh=mesh, spec=placements),
            lambda: ShardTensor.from_local(X, mesh, placements),
        ):
            with pytest.raises(kind) as caught:
                call()
            said.append(str(caught.value))
        return said

    results = weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2})
    # What from_local says may name the rank: its local tensor is its own.
    assert [one[:3] for one in results] == [results[0][:3]] * 4
    for text in results[0]:
        lines = text.splitlines()
        assert len(lines) >= 4 and lines[1].startswith("  Rule: "), text
        assert lines[2].startswith("  Offenders: ") and lines[3].startswith("  Fix: "), text


def test_to_local_gradients() -> None:
    """By default S -> S and P -> R; from replicas that are used differently Partial is due."""
    def on_rank(mesh: Any) -> list[Any]:
        seen = []
        for spec, grads in ((P("x"), None), (P(partial={"x": "sum"}), None), (P(), [Partial()])):
            x = weft.distribute_tensor(X, mesh, spec).requires_grad_()
            local = x.to_local(grad_placements=grads)
            (local * (mesh.rank + 1 if grads else 1)).sum().backward()
            seen.append((str(x.grad.sharding), x.grad.full_tensor()))
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        (x.full_tensor(grad_placements=[Partial()]) * (mesh.rank + 1)).sum().backward()
        seen.append((str(x.grad.sharding), x.grad.full_tensor()))
        x.grad = None
        x.full_tensor().sum().backward()
        seen.append((str(x.grad.sharding), x.grad.full_tensor()))
        return seen

    for seen in weft.testing.run(on_rank, mesh={"x": 2}):
        layouts = [layout for layout, _ in seen]
        assert layouts == ["[5@x, 6]", "[5, 6]", "[5, 6]", "[5@x, 6]", "[5@x, 6]"]
        assert [full.unique().tolist() for _, full in seen] == [[1.0], [1.0], [3.0], [3.0], [1.0]]


KINDS = ["sum", "avg", "max", "min", "product", None]
ROWS_OVER_B = [P("b"), P(None, "b"), (0, 5)]


@pytest.mark.parametrize("cut", [*ROWS_OVER_B, P()], ids=str)
@pytest.mark.parametrize("given", KINDS)
@pytest.mark.parametrize("held", [None, "sum", "avg", "product"])
@ranks(a=2, b=2)
def test_local_gradients_of_every_placement(
    mesh: Any, held: str | None, given: str | None, cut: Any
) -> None:
    """Over `a` the local gradients are terms of one kind (None: replicas); over `b` shards."""
    spec = P("b") if isinstance(cut, tuple) else cut
    sizes = {0: cut} if isinstance(cut, tuple) else {}
    whole = Layout(mesh, (5, 6), spec, sizes=sizes)
    partial: Any = {"a": held} if held else None
    terms = Layout(mesh, (5, 6), P(*spec.entries, partial=partial), sizes=sizes)
    mine = weft.distribute_tensor(X, mesh, whole, src_data_rank=None).to_local()
    x = ShardTensor.from_local(mine, mesh, terms).requires_grad_()
    grads = P(*spec.entries, partial={"a": given} if given else None)
    local = x.to_local(grad_placements=grads)
    assert local.data_ptr() == mine.data_ptr() and local.shape == mine.shape
    one, two = (torch.full_like(local, value) for value in (2.0, 6.0))
    local.backward((one, two)[mesh.here[0]] if given else two)
    due = {"sum": 8, "avg": 4, "max": 6, "min": 2, "product": 12, None: 6}[given]
    if held == "product":
        with pytest.raises(UnsupportedOpError):
            _ = x.grad
        return
    assert x.grad.sharding == whole
    assert x.grad.to_local().unique().tolist() in ([float(due)], [])


def test_local_gradients_have_gradients() -> None:
    """Of sums of local terms: x**2 on each of two ranks, weighted 1 and 2, twice differentiated."""
    def on_rank(mesh: Any) -> tuple[Any, Any]:
        x = weft.distribute_tensor(X, mesh, P()).requires_grad_()
        local = x.to_local(grad_placements=[Partial()])
        loss = ShardTensor.from_local(
            (local**3 * (mesh.rank + 1)).sum(), mesh, [Partial()]
        )
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        return first.detach().full_tensor(), second.full_tensor()

    for first, second in weft.testing.run(on_rank, mesh={"x": 2}):
        assert torch.allclose(first, 9 * X**2) and torch.allclose(second, 324 * X**3)


@ranks(x=2, one=1)
def test_local_gradients_on_axes_of_one_rank_may_be_anything(mesh: Any) -> None:
    x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
    for one in (Replicate(), Partial("max"), Shard(1)):
        x.grad = None
        x.to_local(grad_placements=[Shard(0), one]).sum().backward()
        assert x.grad.full_tensor().unique().tolist() == [1.0]


@pytest.mark.parametrize("source", [0, 1, 3, None])
@pytest.mark.parametrize(
    "spec", [P("dp", "tp"), P(("tp", "dp")), P(), P("dp", partial={"tp": "sum"}), None], ids=str
)
def test_distribute_tensor(source: int | None, spec: P | None) -> None:
    """Of the source's data; with None every rank takes its own and nobody is asked."""
    def on_rank(mesh: Any) -> bool:
        mine = X + (0 if source is None else 100 * (mesh.rank - source))
        with weft.explain() as log:
            x = weft.distribute_tensor(mine.requires_grad_(), mesh, spec, src_data_rank=source)
        assert source is not None or not log.events
        assert x.is_leaf and x.requires_grad and weft.distribute_tensor(x, mesh, spec) is x
        whole = torch.equal(x.detach().full_tensor(), X)
        with torch.no_grad():
            x.zero_()
        return whole and torch.equal(mine[0], mine.detach()[0]) and bool(mine.detach().any())

    assert weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2}) == [True] * 4


@pytest.mark.parametrize("spec", [P("x"), P(), P(partial={"x": "sum"})], ids=str)
def test_distribute_tensor_gives_a_gradient_to_what_has_history(spec: P) -> None:
    def on_rank(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = torch.arange(5.0).requires_grad_()
        weights = weft.arange(5.0, mesh=mesh, spec=P("x"))
        x = weft.distribute_tensor(leaf**2, mesh, spec, src_data_rank=None)
        assert x.placements == weft.Layout(mesh, (5,), spec).placements
        (x * weights).sum().backward()
        assert leaf.grad is not None
        return leaf.grad, weft.distribute_tensor((leaf**2).detach(), mesh, spec).full_tensor()

    for grad, full in weft.testing.run(on_rank, mesh={"x": 3}):
        assert torch.equal(grad, 2 * torch.arange(5.0) ** 2)
        assert torch.equal(full, torch.arange(5.0) ** 2)


@pytest.mark.parametrize("make", [
    lambda x, mesh: weft.distribute_tensor(x, mesh, P("x")),
    lambda x, mesh: weft.scatter_tensor(x, 0, mesh, P("x")),
], ids=["distribute", "scatter"])
def test_what_one_rank_sends_has_no_history(make: Any) -> None:
    """On one rank or on all: each of them is told."""
    def on_rank(mesh: Any) -> str:
        x = torch.ones(5, requires_grad=True)
        with pytest.raises(UnsupportedOpError) as caught:
            make(x * 2 if mesh.rank == 0 else x.detach(), mesh)
        with torch.no_grad():
            assert make(x * 2, mesh).is_leaf
        return str(caught.value)

    for text in weft.testing.run(on_rank, mesh={"x": 3}):
        assert "it has history (MulBackward0), and becomes a leaf" in text


@ranks(x=3)
def test_makers(mesh: Any) -> None:
    where: dict[str, Any] = {"mesh": mesh, "spec": P("x")}
    for made, due in (
        (weft.zeros(5, 6, **where), torch.zeros(5, 6)),
        (weft.ones((5, 6), dtype=torch.int64, **where), torch.ones(5, 6, dtype=torch.int64)),
        (weft.full((5,), 2.5, **where), torch.full((5,), 2.5)),
        (weft.full(5, 7, **where), torch.full((5,), 7)),
        (weft.full((5,), 3.0, mesh=mesh, spec=P(partial={"x": "sum"})), torch.full((5,), 3.0)),
        (weft.arange(5, **where), torch.arange(5)),
        (weft.arange(1, 10, 2, **where), torch.arange(1, 10, 2)),
        (weft.arange(0.0, 1.0, 0.3, **where), torch.arange(0.0, 1.0, 0.3)),
        (weft.zeros(0, 6, **where), torch.zeros(0, 6)),
        (weft.zeros((), mesh=mesh), torch.zeros(())),
    ):
        full = made.full_tensor()
        assert full.dtype == due.dtype and torch.equal(full, due)
    assert weft.empty(5, 6, **where).shape == (5, 6)
    assert weft.ones(5, requires_grad=True, **where).requires_grad
    with mesh:
        assert str(weft.zeros(4, spec=P("x")).sharding) == "[4@x]"


def test_without_a_mesh_it_says_so() -> None:
    with pytest.raises(MeshError) as caught:
        weft.zeros(3)
    assert str(caught.value).splitlines()[0] == (
        "weft.zeros(mesh=): no mesh is given, and there is no default mesh."
    )


@pytest.mark.parametrize(("call", "said"), [
    (lambda mesh: weft.ones(4, mesh=mesh), "weft.ones(mesh=)"),
    (lambda mesh: weft.randn(4, device_mesh=mesh), "weft.randn(device_mesh=)"),
    (lambda mesh: weft.distribute_tensor(X, mesh, P("x")), "distribute_tensor(device_mesh)"),
    (lambda mesh: weft.scatter_tensor(X, 0, mesh, P("x")), "scatter_tensor(mesh)"),
    (lambda mesh: ShardTensor.from_local(X, mesh, P("x")), "from_local(device_mesh)"),
    (lambda mesh: weft.zeros(4, mesh=Mesh({"x": 1})).redistribute(mesh, P("x")),
     "redistribute(device_mesh)"),
    (lambda mesh: weft.distribute_module(torch.nn.Linear(2, 2), mesh),
     "distribute_module(device_mesh)"),
    (lambda mesh: weft.collectives.psum(X, "x", mesh=mesh), "psum(mesh=)"),
])
def test_a_wrong_mesh_is_refused_in_the_name_of_the_call(call: Any, said: str) -> None:
    """Whether it is too large for the world or no mesh at all."""
    with pytest.raises(MeshError) as caught:
        call(Mesh({"x": 2}))
    assert str(caught.value).startswith(
        f"{said}: Mesh({{'x': 2}}) needs 2 ranks up to rank 1, the world has 1.\n")
    with pytest.raises(ShardTypeError) as mistyped:
        call({"x": 2})
    lines = str(mistyped.value).splitlines()
    assert lines[0] == f"{said}: {{'x': 2}} is of type dict."
    assert lines[-1] == "  Fix: weft.init_mesh({'x': 2})"


def test_arguments_that_factories_do_not_take() -> None:
    mesh = weft.init_mesh({"x": 1})
    with pytest.raises(ShardTypeError) as caught:
        weft.zeros(4, mesh=mesh, device="cuda")  # type: ignore[call-arg]
    assert str(caught.value) == (
        "weft.zeros(device=): 1 named argument is none of its 5.\n"
        "  Rule: it takes dtype, requires_grad, mesh, placements, layout.\n"
        "  Offenders: device\n"
        '  Fix: the mesh says where tensors live: weft.init_mesh(axes, "cuda")')
    with pytest.raises(ShardTypeError, match=r"Fix: weft.rand\(\.\.\., placements=\.\.\.\)$"):
        weft.rand(4, mesh=mesh, shardings=P("x"))  # type: ignore[call-arg]
    with pytest.raises(LayoutError, match=r"^weft.randn\(\*size\): 1 of 2 lengths are negative"):
        weft.randn(-4, 2, mesh=mesh)
    with pytest.raises(ShardTypeError, match="it is of type Tensor"):  # not with all its values
        weft.distribute_tensor(mesh, X, P("x"))  # type: ignore[arg-type]


def test_ranks_outside_the_mesh_run_the_same_program() -> None:
    def on_rank(_: Any) -> list[Any]:
        mesh = weft.init_mesh({"x": 2}, ranks=(2, 0))
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        w = torch.ones(6, 3, dtype=X.dtype, requires_grad=True)
        loss = F.cross_entropy(x @ w, torch.zeros(5, dtype=torch.long)) + (x * x).mean()
        loss.backward()
        y = x.detach().clone()
        y[0] = 1
        y.add_(1)
        parts = [*y.split(2), torch.cat([y, y]), y.redistribute(placements=[Replicate()])]
        torch.optim.AdamW([x]).step()
        seen: list[Any] = [tuple(loss.shape), x.dtype, [tuple(one.shape) for one in parts]]
        if mesh.here is None:
            assert x.to_local().shape == (0,) and x.offsets() is None
            assert x.grad.shape == (5, 6) and x.grad.to_local().shape == (0,) and w.grad is None
            assert repr(x).splitlines()[1] == "  rank 1 is outside Mesh(x=2)"
            for ask in (loss.item, lambda: bool(loss > 0), x.full_tensor, x.tolist, x.numpy):
                with pytest.raises((MeshError, RuntimeError)):
                    ask()
        else:
            assert x.grad.shape == (5, 6) and w.grad is not None
            seen.append(loss.item())
        return seen

    first, outside, last = weft.testing.run(on_rank, num_ranks=3, mesh={"world": 3})
    assert first == last and outside == first[:3]
    with pytest.raises(MeshError, match="rank 1 is outside"):
        weft.testing.run(
            lambda _: weft.zeros((), mesh=weft.init_mesh({"x": 2}, ranks=(2, 0))).item(),
            num_ranks=3, mesh={"world": 3},
        )


def test_memory_that_is_numpy_s() -> None:
    """torch cannot copy it on write."""
    def on_rank(mesh: Any) -> None:
        array = np.arange(6.0)
        x = ShardTensor.from_local(torch.from_numpy(array), mesh, P())
        y, z = x.redistribute(placements=P()), x.full_tensor()
        y.add_(1)
        z.add_(2)
        array[0] = 5
        assert x.tolist() == [5, 1, 2, 3, 4, 5] and y.tolist() == [1, 2, 3, 4, 5, 6]
        assert z.tolist() == [2, 3, 4, 5, 6, 7]

    weft.testing.run(on_rank, mesh={"x": 1})
    weft.testing.run(on_rank, mesh={"x": 2})


LIKE: list[Callable[..., Any]] = [
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like,
    lambda x, **more: torch.full_like(x, 2.0, **more),
]


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("grad", [False, True])
@ranks(x=2)
def test_what_is_made_like_a_tensor_is_a_leaf(
    mesh: Any, like: Callable[..., Any], grad: bool
) -> None:
    x = weft.ones(4, 5, mesh=mesh, spec=P("x")).requires_grad_(not grad)
    for more in ({}, {"dtype": torch.float64}):
        made = like(x, requires_grad=grad, **more)
        assert made.requires_grad is grad and made.is_leaf and made.sharding == x.sharding
        assert made.dtype is more.get("dtype", torch.float32)


def test_memory_that_was_read_from_a_file() -> None:
    """torch would copy it on write, and crash at the write."""
    def on_rank(mesh: Any) -> None:
        file = io.BytesIO()
        torch.save(torch.arange(6.0), file)
        file.seek(0)
        x = ShardTensor.from_local(torch.load(file), mesh, P())
        y, z = x.redistribute(placements=P()), x.full_tensor()
        for place, one in enumerate((x, y, z)):
            one.add_(place)
        assert [one[0].item() for one in (x, y, z)] == [0, 1, 2]

    weft.testing.run(on_rank, mesh={"x": 1})
    weft.testing.run(on_rank, mesh={"x": 2})


@ranks(x=2)
def test_what_befalls_the_tensor_does_not_befall_the_local_one(mesh: Any) -> None:
    local = torch.ones(2)
    x = ShardTensor.from_local(local, mesh, [Shard(0)]).requires_grad_()
    (x * x).sum().backward()
    assert not local.requires_grad and local.grad is None
    leaf = torch.ones(2, requires_grad=True)
    y = ShardTensor.from_local(leaf, mesh, [Shard(0)])
    assert y.requires_grad and not y.is_leaf
    (3 * y).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 3.0))  # type: ignore


def test_a_layout_brings_its_mesh() -> None:
    """As a NamedSharding of JAX; a mesh that is given or current comes first."""
    full = torch.arange(15.0).view(5, 3)

    def on_rank(mesh: Any) -> None:
        layout = Layout(mesh, (5, 3), P("a"))
        made = weft.distribute_tensor(full, layout)
        assert made.sharding == layout and torch.equal(made.full_tensor(), full)
        box = tuple(slice(*ends) for ends in layout.box(mesh.rank))
        assert torch.equal(made.to_local(), full[box])
        local = ShardTensor.from_local(made.to_local(), layout)
        assert local.sharding == layout and weft.zeros(5, 3, spec=layout).sharding == layout
        with weft.init_mesh({"b": 2}), pytest.raises(weft.WeftError):
            weft.distribute_tensor(full, layout)

    weft.testing.run(on_rank, mesh={"a": 2})


def test_a_write_of_a_shard_to_a_plain_tensor_says_what_to_make_instead() -> None:
    def on_rank(mesh: Any) -> None:
        x = weft.ones(4, 3, mesh=mesh, spec=P("a"))
        target = torch.zeros(2, 4, 3)
        target[0] = x
        assert torch.equal(target[0], torch.ones(4, 3))

    left_whole._WARNED.discard("__setitem__")
    with pytest.warns(weft.WeftWarning, match=r"Fix: a sharded target: torch.zeros_like\(x\)"):
        weft.testing.run(on_rank, mesh={"a": 2})


def test_a_mesh_beside_its_part() -> None:
    def on_rank(mesh: Any) -> str:
        whole, part = (weft.distribute_tensor(X, one) for one in (mesh, mesh["tp"]))
        with pytest.raises(MeshError) as caught:
            part + whole
        return str(caught.value).splitlines()[-1]

    assert {*weft.testing.run(on_rank, mesh={"dp": 2, "tp": 2})} == {
        "  Fix: x.redistribute(mesh, placements) first; or all on Mesh({'dp': 2, 'tp': 2}): a "
        "layout names those axes alone that it uses"}

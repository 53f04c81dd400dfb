"""The simulated collectives against the model, on every group, dtype and split."""

from __future__ import annotations

import pytest
import torch

from tests.cases.collectives import DTYPES, MESHES, differences, expected, faults_on_rank
from weft.comm import Communicator, check_kind, run_simulated
from weft.core import KINDS, Mesh
from weft.errors import PlacementError


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_every_collective_equals_the_model(mesh: Mesh, dtype: torch.dtype) -> None:
    outside = [mesh.position_of_rank(rank) is None for rank in range(4)]
    assert run_simulated(lambda bound: faults_on_rank(bound, dtype), 4, mesh) == [
        None if out else [] for out in outside
    ]


def test_the_comparison_sees_wrong_results() -> None:
    want = expected(MESHES[0], 0, torch.float32)
    name = ((0,), "all_reduce sum")
    assert differences(want, want) == []
    assert differences({**want, name: want[name] + 0.5}, want) != []
    assert differences({**want, name: want[name].double()}, want) != []
    assert differences({**want, name: want[name].flatten()}, want) != []
    assert differences({**want, name: want[name].nan_to_num()}, want) != []
    assert differences({**want, name: -want[name]}, want) != []
    assert differences({key: value for key, value in want.items() if key != name}, want) != []


def test_results_are_fresh_memory() -> None:
    def fn(mesh):
        x = torch.arange(4.0)
        comm = mesh.comm((0,))
        shared = comm.exchange([mesh.rank])
        shared[0].append("mine")  # type: ignore[attr-defined]
        comm.exchange(None)
        assert shared == [[0, "mine"], *([rank] for rank in range(1, comm.size))]
        results = [
            comm.all_reduce(x, "sum"), comm.all_gather(x, (4,) * comm.size),
            comm.reduce_scatter(x, (4 // comm.size,) * comm.size, "sum"),
            comm.all_to_all(x, (4 // comm.size,) * comm.size, (4 // comm.size,) * comm.size),
            comm.broadcast(x, 0),
        ]
        comm.exchange(None)
        before = [result.clone() for result in results]
        x.fill_(-1)
        comm.exchange(None)
        results[0].fill_(mesh.rank + 100)
        comm.exchange(None)
        assert results[0].tolist() == [mesh.rank + 100] * 4
        for result, kept in zip(results[1:], before[1:]):
            assert torch.equal(result, kept)
        pointers = {result.untyped_storage().data_ptr() for result in results}
        return pointers | {x.untyped_storage().data_ptr()}, results

    for size in (1, 2, 4):
        everything = run_simulated(fn, size)
        assert len(set.union(*(pointers for pointers, _ in everything))) == 6 * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_that_a_dtype_cannot_carry_are_refused_before_communication(dtype) -> None:
    real, whole = dtype.is_floating_point, not (dtype.is_floating_point or dtype.is_complex)
    refused = {"avg"} if whole else {"band", "bor", "bxor"}
    refused |= set() if real or whole else {"max", "min"}

    def fn(mesh):
        wrong = set()
        for kind in KINDS:
            try:
                mesh.comm((0,)).all_reduce(torch.ones(1).to(dtype), kind)
            except PlacementError:
                wrong.add(kind)
        return wrong

    for size in (1, 2):
        assert run_simulated(fn, size) == [refused] * size


def test_a_refused_kind_says_why() -> None:
    with pytest.raises(PlacementError) as caught:
        check_kind("avg", torch.int64)
    assert str(caught.value) == (
        "reduction: 'avg' of partial values of int64 is not exact.\n"
        "  Rule: avg is for floating-point and complex values.\n"
        "  Offenders: 'avg'\n"
        "  Fix: Partial(\"sum\"), or another dtype"
    )


def test_narrow_floats_are_rounded_once() -> None:
    terms = [1.0, 2.0**-8, 2.0**-8, 2.0**-8]  # each alone would vanish beside 1 in bfloat16
    totals = run_simulated(
        lambda mesh: mesh.comm((0,)).all_reduce(
            torch.tensor([terms[mesh.rank]], dtype=torch.bfloat16), "sum"
        ).item(), 4,
    )
    assert totals == [torch.tensor(sum(terms)).bfloat16().item()] * 4 != [1.0] * 4


def test_scatter_and_all_reduce_agree_bitwise() -> None:
    def fn(mesh):
        x = torch.randn(1001, generator=torch.Generator().manual_seed(mesh.rank))
        comm = mesh.comm((0,))
        sizes = (0, 900, 1, 100)
        scattered = comm.all_gather(comm.reduce_scatter(x, sizes, "sum"), sizes)
        return torch.equal(scattered, comm.all_reduce(x, "sum"))

    assert all(run_simulated(fn, 4))


def test_all_reduce_together_of_any_sizes_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones of a dtype share a collective; each comes back as it would alone."""
    original, calls = Communicator.all_reduce, [0] * 3

    def counted(comm: Communicator, x: torch.Tensor, kind: str, own: bool = False) -> torch.Tensor:
        calls[comm.index] += 1
        return original(comm, x, kind, own)

    def fn(mesh):
        comm, rank = mesh.comm((0,)), mesh.rank
        xs = [
            torch.full((5, 3), rank + 1.0), torch.full((), rank, dtype=torch.int64),
            torch.full((1 << 17,), rank + 2.0), torch.full((0, 4), 1.0),
            torch.full((7,), rank + 3, dtype=torch.float64), torch.full((1 << 15,), rank + 4.0),
            torch.full((2, 2), rank + 5, dtype=torch.int64), torch.full((1 << 15,), rank + 6.0),
            torch.full((9,), rank + 7.0),
        ]
        for x, total in zip(xs, comm.all_reduce_together([*xs], "sum")):
            assert total.dtype == x.dtype and total.shape == x.shape
            assert torch.equal(total, original(comm, x, "sum"))

    monkeypatch.setattr(Communicator, "all_reduce", counted)
    run_simulated(fn, 3, Mesh({"x": 3}))
    # float32: 5x3 with 0x4 and the first 128 KiB, the 512 KiB, the rest; int64; float64.
    assert calls == [5] * 3

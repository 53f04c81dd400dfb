"""Whole matrices at single ranks: `torch.optim.Muon`, `weft.nn.at_owners`, `weft.nn.Owners`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from weft import CommunicationError, LayoutError, P, ShardTypeError

SHAPES = ((12, 8), (8, 12), (30, 7), (9, 9), (5, 3), (16, 16))
RAGGED = weft.Shard(0, sizes=(0, 5, 1, 3))
WAYS: dict[str, tuple[dict[str, int], list[Any]]] = {
    "rows": ({"x": 4}, [P("x")] * 6),
    "columns, ragged, whole": ({"x": 4}, [P(None, "x")] * 3 + [[RAGGED], P("x"), P()]),
    "both": ({"a": 2, "b": 2}, [P("a", "b"), P(("b", "a")), P("a"), P(None, "b"), P(), P("b")]),
}
MUONS: list[dict[str, Any]] = [
    {}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}]


def matrices(turned: int = 2) -> list[Tensor]:
    """One of them lies by columns in memory."""
    draws = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=draws) for shape in SHAPES]
    made[turned] = made[turned].t().contiguous().t()
    return made


def laid(mesh: Any, specs: list[Any], grad: bool = True) -> list[Any]:
    return [
        weft.distribute_tensor(one, mesh, spec).requires_grad_(grad)
        for one, spec in zip(matrices(), specs)
    ]


def stepped(params: list[Any], options: dict[str, Any]) -> list[Any]:
    optimizer = torch.optim.Muon(params, lr=0.1, **options)
    for step in range(3):
        optimizer.zero_grad()
        sum((p * p * (at + step)).sum() for at, p in enumerate(params)).backward()  # type: ignore
        optimizer.step()
    return [*params, *(one["momentum_buffer"] for one in optimizer.state.values())]


@pytest.mark.parametrize("options", MUONS)
@pytest.mark.parametrize("way", WAYS)
def test_muon_has_the_bits_of_one_process(way: str, options: dict[str, Any]) -> None:
    due = stepped([one.requires_grad_() for one in matrices()], options)
    axes, specs = WAYS[way]

    def on_rank(mesh: Any) -> None:
        for one, other in zip(stepped(laid(mesh, specs), options), due, strict=True):
            assert torch.equal(one.full_tensor(), other)

    weft.testing.run(on_rank, mesh=axes)


def test_muon_sends_each_matrix_once_there_and_once_back() -> None:
    def on_rank(mesh: Any) -> list[int]:
        params = laid(mesh, WAYS["rows"][1])
        optimizer = torch.optim.Muon(params)
        sum(p.square().sum() for p in params).backward()  # type: ignore[union-attr]
        with weft.explain() as log:
            optimizer.step()
        assert {one.op for one in log.events} == {"Muon.step"}
        return [one.nbytes for one in log.events]

    there, back = zip(*weft.testing.run(on_rank, mesh={"x": 4}))
    total = 2 * sum(one.numel() for one in matrices())  # in bfloat16
    for moved in (there, back):
        assert 0.65 * total < sum(moved) < 0.85 * total  # a quarter is there already


@ranks(x=3)
def test_muon_takes_plain_parameters_and_those_without_gradient(mesh: Any) -> None:
    due, plain = matrices(), matrices()
    mixed = [weft.distribute_tensor(plain[0], mesh, P("x")), *plain[1:]]
    for some in (due, mixed):
        for one in some:
            one.requires_grad_()
        optimizer = torch.optim.Muon(some)
        sum(one.square().sum() for one in some[:4]).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert torch.equal(mixed[0].full_tensor(), due[0])  # type: ignore[attr-defined]
    assert all(torch.equal(one, other) for one, other in zip(mixed[1:], due[1:]))


@pytest.mark.parametrize("way", WAYS)
def test_a_function_runs_once_on_each_whole_matrix(way: str) -> None:
    axes, specs = WAYS[way]
    seen: list[torch.Size] = []

    def whiten(x: Tensor) -> Tensor:
        assert type(x) is Tensor
        seen.append(x.shape)
        return torch.linalg.qr(x.T)[0].T.contiguous() if x.shape[0] <= x.shape[1] else x - x.mean()

    due = [whiten(one) for one in matrices()]
    seen.clear()

    def on_rank(mesh: Any) -> None:
        given = laid(mesh, specs, grad=False)
        for one, was, other in zip(weft.nn.at_owners(whiten, given), given, due, strict=True):
            assert one.sharding == was.sharding  # type: ignore[attr-defined]
            assert torch.equal(one.full_tensor(), other)  # type: ignore[attr-defined]

    weft.testing.run(on_rank, mesh=axes)
    assert sorted(seen) == sorted(torch.Size(one) for one in SHAPES)


@ranks(a=2, b=2)
def test_state_stays_with_its_owner(mesh: Any) -> None:
    given = laid(mesh, WAYS["both"][1], grad=False)
    owners = weft.nn.Owners(given)
    assert set(owners.ranks) == {0, 1, 2, 3}
    grams = [owners.zeros(at, (one.shape[0],) * 2) for at, one in enumerate(given)]

    def step(x: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
        gram += x @ x.T
        return gram @ x, gram

    for turn in (1, 2):
        with weft.explain() as log:
            out, grams = owners.map(step, given, grams, num_results=2)
        assert [one.collective for one in log.events] == ["AllToAll"] * 2
        for one, other in zip(out, matrices()):
            gram = sum([other @ other.T] * turn)
            torch.testing.assert_close(one.full_tensor(), gram @ other)  # type: ignore[attr-defined]
    for gram, rank in zip(grams, owners.ranks):
        assert (gram.to_local().numel() > 0) is (rank == mesh.rank)  # type: ignore[attr-defined]


@ranks(x=4)
def test_a_function_that_raises_stops_all_ranks(mesh: Any) -> None:
    def fail(x: Tensor) -> Tensor:
        if x.shape == (30, 7):
            raise ZeroDivisionError
        return x

    given = laid(mesh, [P("x")] * 6, grad=False)
    owner = weft.nn.Owners(given).ranks[2]
    expected = ZeroDivisionError if mesh.rank == owner else CommunicationError
    with pytest.raises(expected):
        weft.nn.at_owners(fail, given)


@ranks(x=2)
def test_what_owners_cannot_compute_is_refused(mesh: Any) -> None:
    given = laid(mesh, [P("x")] * 6)
    with pytest.raises(ShardTypeError, match="has no gradient"):
        weft.nn.at_owners(torch.sin, given)
    with pytest.raises(ShardTypeError, match="some are plain"):
        weft.nn.at_owners(torch.sin, [given[0].detach(), torch.zeros(2, 2)])
    with pytest.raises(LayoutError, match="a tensor for each owner"):
        weft.nn.Owners(given).map(torch.add, given, given[1:])
    plain = [torch.ones(2, 2)]
    assert torch.equal(weft.nn.at_owners(torch.neg, plain)[0], -plain[0])


def test_tensors_of_any_dtype_and_of_no_dims_go_together_and_come_back() -> None:
    """The third rank is outside the mesh, and knows the layouts."""
    full = [torch.tensor(2.0), torch.arange(6), torch.eye(4, 3, dtype=torch.float64)]

    def on_rank(_: Any) -> None:
        mesh = weft.init_mesh(weft.Mesh({"x": 2}))
        given = [weft.distribute_tensor(one, mesh, P("x") if one.dim() else P()) for one in full]
        given.append(
            weft.ShardTensor.from_local(torch.ones(2, 2), mesh, [weft.Partial()], shape=(2, 2)))
        for one, other, was in zip(
            weft.nn.at_owners(torch.neg, given), [*full, torch.full((2, 2), 2.0)], given
        ):
            assert one.sharding == was.sharding.without_partial()  # type: ignore[attr-defined]
            if mesh.here is not None:
                assert torch.equal(one.full_tensor(), -other)  # type: ignore[attr-defined]

    weft.testing.run(on_rank, mesh={"x": 3})


@ranks(x=4)
def test_momentum_follows_a_parameter_whose_data_take_another_layout(mesh: Any) -> None:
    """Else the iteration ran on blocks, and rounded in bfloat16 as no single process does."""
    due, params = [one.requires_grad_() for one in matrices()], laid(mesh, [P("x")] * 6)
    due_steps, steps = torch.optim.Muon(due, lr=0.1), torch.optim.Muon(params, lr=0.1)
    for spec in (P("x"), P(None, "x"), P()):
        for one in params:
            one.data = one.detach().redistribute(placements=spec)
        for some, optimizer in ((due, due_steps), (params, steps)):
            optimizer.zero_grad()
            sum(one.pow(3).sum() for one in some).backward()  # type: ignore[union-attr]
            optimizer.step()
        for one, other in zip(params, due, strict=True):
            held = steps.state[one]["momentum_buffer"]
            assert held.sharding == one.sharding
            assert torch.equal(held.full_tensor(), due_steps.state[other]["momentum_buffer"])
            assert torch.equal(one.full_tensor(), other)

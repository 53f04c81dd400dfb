"""`embedding_bag` on sharded tables, bags and indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.harness import held
from tests.oracle import check
from weft import P
from weft.testing import peak_memory

WAYS: dict[str, tuple[Any, Any, Any]] = {
    "table": (P("x"), P(), P()),
    "table of ragged rows": ([weft.Shard(0, sizes=(0, 5, 2))], P(), P("x")),
    "columns, bags": (P(None, "x"), P(), P("x")),
    "indices": (P(), P("x"), P()),
    "all": (P("x"), P("x"), P("x")),
    "bags": (P(), P(), P("x")),
}
OFFSETS = {"plain": [0, 2, 2, 6], "late": [0, 0, 0, 9], "one": [0]}


def _bags(
    weight: Any, input: Any, offsets: Any, by: Any, mode: str, padding: int | None
) -> list[Tensor]:
    by = by.requires_grad_() if mode == "sum" else None
    out = F.embedding_bag(input, weight.requires_grad_(), offsets, mode=mode,
                          per_sample_weights=by, padding_idx=padding)
    given = [weight] if by is None else [weight, by]
    return [out.detach(), *torch.autograd.grad(out, given, out.detach().cos())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offsets", OFFSETS)
def test_bags_between_offsets(offsets: str, way: str) -> None:
    """A row that is not a number counts only in the bags that name it, and as padding in none."""
    torch.manual_seed(4)
    weight, by = torch.randn(7, 4, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    weight[3] = torch.nan
    input, bounds = torch.tensor([0, 3, 1, 1, 6, 5, 3, 2, 4]), torch.tensor(OFFSETS[offsets])
    for mode, padding in (("sum", 3), ("mean", 3), ("mean", None), ("max", 3), ("max", None)):
        def on_rank(mesh: Any, mode: str = mode, padding: int | None = padding) -> list[Any]:
            w, i, o = WAYS[way]
            table, rows, ends, factors = [
                weft.distribute_tensor(one.clone(), mesh, spec, src_data_rank=None)
                for one, spec in ((weight, w), (input, i), (bounds, o), (by, i))]
            return [held(one) for one in _bags(table, rows, ends, factors, mode, padding)]

        got = weft.testing.run(on_rank, mesh={"x": 3})
        due = _bags(weight.clone(), input, bounds, by.clone(), mode, padding)
        for place, one in enumerate(due):
            check(one, [mine[place] for mine in got], f"{way} {mode} {place}", 1e-12)


WRONG = {
    "first": ([1, 3], r"offsets\[0\] has to be 0.* got 1"),
    "last": ([0, 7], r"offsets\[-1\] can not be greater than input's length 5 .* of 7"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_wrong_offsets_are_torchs_error_on_all_ranks(name: str, spec: Any) -> None:
    offsets, text = WRONG[name]
    weight, input, bounds = torch.randn(6, 2), torch.tensor([0, 1, 2, 3, 4]), torch.tensor(offsets)
    with pytest.raises(RuntimeError, match=text):
        F.embedding_bag(input, weight, bounds)

    def on_rank(mesh: Any) -> bool:
        w = weft.distribute_tensor(weight, mesh, P("x"), src_data_rank=None)
        o = weft.distribute_tensor(bounds, mesh, spec, src_data_rank=None)
        for mode in ("sum", "mean", "max"):
            with pytest.raises(RuntimeError, match=text):
                F.embedding_bag(input, w, o, mode=mode)
        return True

    assert weft.testing.run(on_rank, mesh={"x": 3}) == [True] * 3


@pytest.mark.parametrize("way", WAYS)
def test_of_equal_elements_the_first_has_the_gradient(way: str) -> None:
    """Elements of a bag that are equal lie on several ranks; bags of one length."""
    torch.manual_seed(4)
    weight, input = torch.randint(-1, 2, (7, 4)).double(), torch.randint(7, (6, 5))
    weight[2] = -torch.inf
    weight[4, 1:] = torch.nan

    def on_rank(mesh: Any) -> list[Any]:
        w, i, _ = WAYS[way]
        table, rows = [weft.distribute_tensor(one.clone(), mesh, spec, src_data_rank=None)
                       for one, spec in ((weight, w), (input, i))]
        return [held(one) for one in _bags(table, rows, None, None, "max", 0)]

    got = weft.testing.run(on_rank, mesh={"x": 3})
    for place, one in enumerate(_bags(weight.clone(), input, None, None, "max", 0)):
        check(one, [mine[place] for mine in got], f"{way} {place}", 0.0)


@pytest.mark.parametrize("mode", ["mean", "max"])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_no_row_is_kept(spec: Any, mode: str) -> None:
    """Forward and backward take little more than a rank's part of table, gradient and bags."""
    weight, input = torch.randn(4000, 64), torch.randint(4000, (512, 16))
    with peak_memory(weight, input) as one:
        table = weight.clone().requires_grad_()
        F.embedding_bag(input, table, mode=mode).square().sum().backward()

    def on_rank(mesh: Any) -> int:
        table = weft.distribute_tensor(weight, mesh, spec, src_data_rank=None)
        bags = weft.distribute_tensor(input, mesh, P("x"), src_data_rank=None)
        with peak_memory(table, bags) as memory:
            F.embedding_bag(bags, table.requires_grad_(), mode=mode).square().sum().backward()
        return memory.peak

    got = weft.testing.run(on_rank, mesh={"x": 4})
    assert max(got) < 1.5 * one.peak / 4

"""`as_strided`, of what a rank's own memory has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.oracle import same
from weft import P, Replicate, Shard, ShardTensor, UnsupportedOpError

WHOLE = torch.arange(60.0, dtype=torch.float64).view(5, 4, 3)

CASES = {
    "own": (lambda x: x.as_strided(x.shape, x.stride()), (0, 1, 2, "partial", None)),
    "own of a turned one": (
        lambda x: x.permute(2, 0, 1).as_strided((3, 5, 4), (1, 12, 3)), (0, 1, 2, "partial", None)),
    "own of one with gaps": (
        lambda x: x[:, ::2].as_strided((5, 2, 3), (12, 6, 1)), (0, 1, 2, "partial", None)),
    "first element": (lambda x: torch.as_strided(x, (), ()), (0, 1, 2, "partial", None)),
    "windows in rows": (
        lambda x: x.as_strided(size=(5, 5, 4), stride=(12, 2, 1)), (0, "partial", None)),
    "rows, turned": (lambda x: torch.as_strided(x, (5, 3, 4), (12, 1, 3)), (0, "partial", None)),
    "a part of rows": (lambda x: x.as_strided((5, 4, 2), (12, 3, 1)), (0, 1, "partial", None)),
    "cut inside": (
        lambda x: x.permute(2, 0, 1).as_strided((3, 2), (1, 3)), (2, "partial")),
    "windows of rows": (
        lambda x: x.transpose(0, 1).as_strided((4, 3, 3, 3), (3, 12, 12, 1)), (1, "partial")),
    "windows around a cut dim": (
        lambda x: torch.as_strided(x.transpose(0, 1), (4, 2, 2), (3, 24, 2)), (1, "partial")),
    "whole": (lambda x: x.as_strided((6, 10), (10, 1)), ("partial", None)),
    "offset": (lambda x: x.as_strided((6, 9), (9, 1), 3), ("partial", None)),
    "of a turned one": (
        lambda x: x.permute(1, 0, 2).as_strided((2, 5), (3, 12)), ("partial", None)),
    "no elements": (lambda x: x.as_strided((0, 3), (3, 1)), ("partial", None)),
}


def laid(mesh: Any, cut: Any) -> ShardTensor:
    if cut == "partial":
        return weft.distribute_tensor(WHOLE, mesh, P(partial={"x": "sum"}), src_data_rank=None)
    placement = Replicate() if cut is None else Shard(cut)
    return weft.distribute_tensor(WHOLE, mesh, [placement], src_data_rank=None)


@pytest.mark.parametrize("num_ranks", [2, 6])
@pytest.mark.parametrize("name", CASES)
def test_as_plain(name: str, num_ranks: int) -> None:
    """Values, strides, gradients, and writes through what it shows; empty shards too."""
    fn, cuts = CASES[name]

    def on_rank(mesh: Any) -> None:
        for cut in cuts:
            x, dense = laid(mesh, cut).requires_grad_(), WHOLE.clone().requires_grad_()
            out, due = fn(x), fn(dense)
            assert (out.shape, out.stride()) == (due.shape, due.stride())
            same(out.full_tensor().detach(), due.detach(), f"{name}, {cut}")
            (out * out).sum().backward()
            (due * due).sum().backward()
            assert x.grad is not None and dense.grad is not None
            same(x.grad.full_tensor(), dense.grad, f"{name}, {cut}: gradient")
            x, dense = laid(mesh, cut), WHOLE.clone()
            fn(x).mul_(2)
            fn(dense).mul_(2)
            if not torch._debug_has_internal_overlap(fn(dense)):  # type: ignore[attr-defined]
                same(x.full_tensor(), dense, f"{name}, {cut}: written through")

    weft.testing.run(on_rank, num_ranks, {"x": num_ranks})


WINDOWS = {
    "rows": (lambda x: x.as_strided((2, 3, 4, 3), (24, 12, 3, 1)), 0),
    "not all": (lambda x: x.as_strided((2, 2, 4, 3), (12, 12, 3, 1)), 0),
    "columns": (lambda x: x.as_strided((5, 3, 2, 3), (12, 3, 3, 1)), 1),
    "of a turned one": (lambda x: x.mT.as_strided((5, 3, 2, 2), (12, 1, 6, 3)), 1),
    "last": (lambda x: torch.as_strided(x, (5, 4, 2, 2), (12, 3, 1, 1)), 2),
    "of two dims": (lambda x: x.as_strided((9, 4, 3), (6, 3, 1)), 0),
    "of all dims": (lambda x: x.as_strided((11, 10), (5, 1)), 0),
}


@pytest.mark.parametrize("num_ranks", [2, 6])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_along_a_sharded_dim(name: str, num_ranks: int) -> None:
    """They stay sharded, and fetch what they share with other shards."""
    fn, cut = WINDOWS[name]

    def on_rank(mesh: Any) -> None:
        x, dense = laid(mesh, cut).requires_grad_(), WHOLE.clone().requires_grad_()
        out, due = fn(x), fn(dense)
        assert (out.shape, out.stride()) == (due.shape, due.stride()) and any(out.sharding.dims)
        same(out.full_tensor().detach(), due.detach(), name)
        (out * out).sum().backward()
        (due * due).sum().backward()
        assert x.grad is not None and dense.grad is not None
        same(x.grad.full_tensor(), dense.grad, f"{name}: gradient")
        x, dense = laid(mesh, cut), WHOLE.clone()
        if torch._debug_has_internal_overlap(fn(dense)):  # type: ignore[attr-defined]
            with pytest.raises(UnsupportedOpError):
                fn(x).mul_(2)
        else:
            fn(x).mul_(2)
            fn(dense).mul_(2)
            same(x.full_tensor(), dense, f"{name}: written through")

    weft.testing.run(on_rank, num_ranks, {"x": num_ranks})


@pytest.mark.parametrize(
    ("cut", "call", "said"),
    [
        (0, lambda x: x.as_strided((2, 2), (2, 3)), "dim 0 is sharded, and does not stay as it is"),
        (0, lambda x: torch.as_strided(x, (5, 12), (12, 1), 0), "storage_offset=0 counts from"),
        (0, lambda x: x.as_strided((5, 13), (12, 1)), "steps out of the dims that are not sharded"),
        (1, lambda x: x.as_strided((5, 4, 4), (12, 3, 1)),
         "steps out of the dims that are not sharded"),
        (2, lambda x: x.permute(2, 0, 1).as_strided((3, 2), (1, 2)), "it steps out"),
        (1, lambda x: x.transpose(0, 1).as_strided((4, 6), (3, 12)), "it steps out of the dims"),
        (1, lambda x: x.transpose(0, 1).as_strided((4, 2), (3, 6)), "it steps out of the dims"),
        (None, lambda x: x[:, ::2].as_strided((2,), (6,)), "the tensor has gaps"),
    ],
)
def test_memory_of_others(cut: Any, call: Any, said: str) -> None:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(UnsupportedOpError) as caught:
            call(laid(mesh, cut))
        return str(caught.value)

    first, other = weft.testing.run(on_rank, 2, {"x": 2})
    assert first == other
    assert said in first and "Fix: x.redistribute(placements=P()).as_strided(" in first

"""Algorithms that communicate by themselves: refused where that is forbidden, listed where it is
looked at, and the same in place, under autograd twice, and in programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft import P, ShardTensor

LINE = {"x": 3}


def _sharded(on: Any, *shape: int, spec: P | None = None) -> tuple[torch.Tensor, ShardTensor]:
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return whole, weft.distribute_tensor(whole, on, P("x") if spec is None else spec)


STRICT = (
    ("cumsum", lambda a: a.cumsum(0)), ("sort", lambda a: a.sort()), ("std", lambda a: a.std()),
    ("argmax", lambda a: a.argmax()), ("quantile", lambda a: a.quantile(0.5)),
    ("flip", lambda a: a.flip(0)), ("roll", lambda a: a.roll(2, 0)),
)


@pytest.mark.parametrize("name, fn", STRICT)
def test_strict_refuses_and_names_the_redistribute(name: str, fn: Any) -> None:
    def on_rank(on: Any) -> str:
        _, x = _sharded(on, 7)
        fn(x)  # a hit is checked as well
        with weft.strict(), pytest.raises(weft.StrictError) as caught:
            fn(x)
        with weft.strict():
            fn(x.redistribute(placements=[weft.Replicate()]))
        return str(caught.value)

    for text in weft.testing.run(on_rank, 3, LINE):
        assert name in text and "over ['x']" in text and "[Replicate()]" in text


def test_strict_lets_other_dims_be_cut() -> None:
    def on_rank(on: Any) -> None:
        _, x = _sharded(on, 7, 4)
        with weft.strict():
            for fn in (torch.cumsum, torch.cumprod, torch.cummax, torch.cummin,
                       torch.logcumsumexp, torch.sort, torch.argsort, torch.std, torch.var,
                       torch.std_mean, torch.argmax, torch.argmin, torch.max, torch.amax,
                       torch.median, torch.nanmedian, torch.mode, torch.logsumexp, torch.prod,
                       torch.nansum, torch.nanmean, torch.count_nonzero):
                fn(x, 1)
            x.topk(2), x.kthvalue(2), x.quantile(0.5, 1), x.norm(dim=1)

    weft.testing.run(on_rank, 3, LINE)


def test_explain_names_op_line_and_direction() -> None:
    def on_rank(on: Any) -> list[tuple[str, bool, str, str, tuple[str, ...]]]:
        _, x = _sharded(on, 60)
        x.requires_grad_()
        with weft.explain() as log:
            (x.cumsum(0) * x.sort()[0]).sum().backward()
        return [(it.op, "test_ops_blocks" in it.line, it.direction, it.collective, it.axes)
                for it in log.events]

    for events in weft.testing.run(on_rank, 3, LINE):
        assert all(told and axes == ("x",) for _, told, _, _, axes in events), events
        for op in ("aten.cumsum.default", "aten.sort.default"):
            assert {way for name, _, way, _, _ in events if name == op} == {"forward", "backward"}
        assert ("aten.sort.default", True, "backward", "AllToAll", ("x",)) in events


def test_in_place_scans_write() -> None:
    def on_rank(on: Any) -> None:
        whole, x = _sharded(on, 7, 2)
        view = x[1:]
        assert x.cumsum_(0) is x
        expected = whole.clone().cumsum_(0)
        torch.testing.assert_close(x.full_tensor(), expected)
        torch.testing.assert_close(view.full_tensor(), expected[1:])
        numbers = weft.distribute_tensor(torch.arange(7, dtype=torch.int32), on, P("x"))
        numbers.cumsum_(0)
        assert numbers.dtype == torch.int32
        assert numbers.tolist() == torch.arange(7).cumsum(0).tolist()

    weft.testing.run(on_rank, 3, LINE)


TWICE = (
    ("cumprod", lambda a: a.cumprod(0).sin()), ("sort", lambda a: a.sort()[0].cumsum(0).sin()),
    ("std", lambda a: a.std() ** 2), ("norm", lambda a: a.norm(3)),
    ("logsumexp", lambda a: a.logsumexp(0)), ("max", lambda a: a.max(0)[0] ** 3),
    ("logcumsumexp", lambda a: a.logcumsumexp(0).sin()), ("topk", lambda a: a.topk(2)[0] ** 3),
    ("median", lambda a: a.median(0)[0] ** 3),
)


@pytest.mark.parametrize("name, fn", TWICE)
def test_second_gradient(name: str, fn: Any) -> None:
    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        return [first.detach(), second]

    def on_rank(on: Any) -> None:
        whole, x = _sharded(on, 41)
        for mine, due in zip(gradients(x), gradients(whole)):
            torch.testing.assert_close(mine.full_tensor(), due)  # type: ignore[attr-defined]

    weft.testing.run(on_rank, 3, LINE)


def test_new_lengths_and_data() -> None:
    """One recipe serves other data: what depends on them is settled at each call."""
    def on_rank(on: Any) -> None:
        for seed, length in enumerate((300, 300, 301, 5)):
            whole = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(seed))
            x = weft.distribute_tensor(whole.double(), on, P("x"))
            values, places = torch.sort(x, stable=True)
            due = torch.sort(whole.double(), stable=True)
            assert values.tolist() == due[0].tolist() and places.tolist() == due[1].tolist()
            assert values.sharding == x.sharding
            assert x.median().item() == whole.double().median().item()

    weft.testing.run(on_rank, 3, LINE)

"""Fractional max pools of sharded positions: the very elements and places that torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.cases.halos import WAYS, Field, judge, on_rank, ways_of
from tests.harness import held
from tests.oracle import check
from weft import P
from weft.testing import peak_memory


def _samples(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


def _pool(name: str, shape: tuple[int, ...], kernel: Any, **options: Any) -> Field:
    num = 3 if name.startswith("solid") else 2
    function = F.fractional_max_pool3d if num == 3 else F.fractional_max_pool2d
    lead = (1, *shape[:-num])[-2:]
    return Field(name, lambda x: function(
        x, kernel, return_indices=True, _random_samples=_samples(*lead, num), **options), (shape,))


FIELDS = [
    _pool("sizes", (2, 3, 8, 7), 2, output_size=(5, 4)),
    _pool("ratios", (2, 3, 8, 7), (3, 2), output_ratio=(0.5, 0.7)),
    _pool("more_than_apart", (2, 3, 8, 7), (1, 4), output_size=(8, 3)),
    _pool("one_sample", (3, 8, 7), 2, output_size=5),
    _pool("solid", (2, 3, 8, 7, 3), 2, output_size=(5, 4, 1)),
    _pool("solid_one_sample", (3, 8, 7, 3), (3, 2, 1), output_ratio=0.6),
]


@pytest.mark.parametrize("field, way", [
    pytest.param(field, way, id=f"{field.name}-{way}")
    for field in FIELDS for way in ways_of(field.name)
])
def test_positions_stay_sharded(field: Field, way: str) -> None:
    """Every rank's part of values, places, gradients and second derivatives."""
    judge(field, way, weft.testing.run(lambda mesh: on_rank(mesh, field, way), mesh=WAYS[way][0]))


def _pooled(x: Any, kernel: Any, size: Any, samples: Any) -> list[Any]:
    x.requires_grad_()
    values, places = F.fractional_max_pool2d(
        x, kernel, size, return_indices=True, _random_samples=samples)
    (grad,) = torch.autograd.grad(values, x, values.detach())
    return [values.detach(), places, grad]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16],
                         ids=str)
@pytest.mark.parametrize("size", [(31, 5), (90, 2), (1, 1), (64, 9)], ids=str)
def test_ties_numbers_that_are_none_and_narrow_floats(dtype: torch.dtype, size: Any) -> None:
    """Of equal elements the first, of NaN the last; starts are rounded as torch rounds them."""
    torch.manual_seed(1)
    x = torch.randint(-2, 3, (2, 3, 128, 12)).to(dtype)
    x[torch.rand(x.shape) < 0.1] = torch.nan
    x[torch.rand(x.shape) < 0.3] = -torch.inf
    samples = _samples(2, 3, 2, dtype=dtype)
    samples[0, 0] = 0
    due = _pooled(x.clone(), (3, 2), size, samples)
    got = weft.testing.run(lambda mesh: [held(one) for one in _pooled(weft.distribute_tensor(
        x.clone(), mesh, P("b", None, "x"), src_data_rank=None), (3, 2), size, samples)],
        mesh={"x": 3, "b": 2})
    for place, one in enumerate(due):
        assert all(mine[place].layout.dims[0] for mine in got)
        check(one, [mine[place] for mine in got], f"{dtype} {size} {place}", 0.0)


def test_samples_of_all_kinds() -> None:
    """However a start is drawn: its window lies in the box that was fetched."""
    x = torch.arange(97.0).view(1, 1, 97, 1).repeat(1, 200, 1, 1)
    samples = _samples(1, 200, 2, dtype=torch.float32)
    samples[0, :3, 1] = torch.tensor([0, 0.5, 1 - 2**-24])
    for length in (2, 17, 33, 49, 95, 96):
        due = F.fractional_max_pool2d(x, (2, 1), (length, 1), _random_samples=samples)
        got = weft.testing.run(lambda mesh, n=length: F.fractional_max_pool2d(
            weft.distribute_tensor(x, mesh, P(None, None, "x")), (2, 1), (n, 1),
            _random_samples=samples).full_tensor(), mesh={"x": 5})
        assert all(torch.equal(one, due) for one in got)


@pytest.mark.parametrize("name", ["2d", "3d"])
def test_drawn_numbers_do_not_depend_on_the_layout(name: str) -> None:
    x = torch.randn(2, 4, 12, 9, 5)[..., : 5 if name == "3d" else 1]
    x = x if name == "3d" else x.squeeze(-1)
    module = getattr(torch.nn, f"FractionalMaxPool{name}")(2, output_ratio=0.5)

    def on_rank(mesh: Any, spec: Any) -> Tensor:
        weft.manual_seed(3)
        out = module(weft.distribute_tensor(x, mesh, spec))
        assert set(out.sharding.sharded_axes) == {0, 1}
        return out.full_tensor()

    outs = [weft.testing.run(lambda mesh, spec=spec: on_rank(mesh, spec), mesh={"x": 2, "y": 2})
            for spec in (P("x", "y"), P("x", None, "y"), P(None, None, "x", "y"))]
    assert all(torch.equal(one, outs[0][0]) for each in outs for one in each)


def test_bytes_and_memory() -> None:
    """A rank receives a row from each side, whatever is drawn, and returns its gradient."""
    x = torch.randn(1, 2, 128, 24, dtype=torch.float64)
    samples = _samples(1, 2, 2)

    def step(x: Any) -> None:
        out = F.fractional_max_pool2d(x.requires_grad_() * 2, 2, (80, 15), _random_samples=samples)
        out.sum().backward()

    def on_rank(mesh: Any) -> tuple[int, int]:
        field = weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None)
        with weft.explain() as log, peak_memory(field) as memory:
            step(field)
        return log.nbytes, memory.peak

    got = weft.testing.run(on_rank, mesh={"x": 4})
    with peak_memory(x) as one:
        step(x)
    row = 2 * 24 * 8
    assert max(nbytes for nbytes, _ in got) <= 2 * 2 * row + 16
    assert max(peak for _, peak in got) < 1.5 * one.peak / 4

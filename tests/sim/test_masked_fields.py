"""Selections by masks of one sample, whose rows are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.harness import ranks
from weft import P
from weft.testing import peak_memory

SHAPES = [(1, 1, 64, 48), (1, 3, 64, 48), (3, 64, 48)]


def selected(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """The peak, what is positive, and the gradient."""
    x.requires_grad_()
    with peak_memory(x) as memory:
        out = x[x.detach() > 0] * 2
        (out * out).sum().backward()
    assert x.grad is not None
    return memory.peak, out.detach(), x.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_selects_of_its_rows(shape: tuple[int, ...]) -> None:
    """A first dim of one element would leave all of it to one rank."""
    x = torch.randn(shape, dtype=torch.float64)
    peak, *due = selected(x.clone())

    def on_rank(mesh: Any) -> int:
        spec = P(*[None] * (len(shape) - 2), "x")
        most, *found = selected(weft.distribute_tensor(x, mesh, spec, src_data_rank=None))
        for one, other in zip(found, due):
            assert torch.equal(one.full_tensor(), other)
        return most

    assert max(weft.testing.run(on_rank, mesh={"x": 4})) < 1.25 * peak / 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@ranks(x=4)
def test_places_and_writes(mesh: Any, shape: tuple[int, ...]) -> None:
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    spec = P(*[None] * (len(shape) - 2), "x")
    x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None)
    mask = x > 0
    assert torch.equal(mask.nonzero().full_tensor(), (full > 0).nonzero())
    assert mask.nonzero().stride() == (full > 0).nonzero().stride()
    for one, due in zip(mask.nonzero(as_tuple=True), (full > 0).nonzero(as_tuple=True)):
        assert torch.equal(one.full_tensor(), due)
    values = torch.arange(full.numel(), dtype=full.dtype)
    out = x.masked_scatter(mask, values)
    assert torch.equal(out.full_tensor(), full.masked_scatter(full > 0, values))
    assert out.sharding == x.sharding
    due = full.clone()
    due[full > 0] = values[: int((full > 0).sum())]
    x[mask] = values[: len(due[full > 0])]
    assert torch.equal(x.full_tensor(), due)


FIELD = torch.randn(12, 10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(12, 10, 6, generator=torch.Generator().manual_seed(1)) < 0.1
WAYS: dict[str, tuple[dict[str, int], P, Any, Any]] = {
    # name: the mesh, the layout, what of the mask is used, the index that it becomes
    "both dims": ({"x": 2, "y": 2}, P("x", "y"), lambda m: m, lambda m: m),
    "three dims": ({"x": 2, "y": 2, "z": 2}, P("x", "y", "z"), lambda m: m, lambda m: m),
    "columns": ({"x": 4}, P(None, "x"), lambda m: m, lambda m: m),
    "two axes on columns": ({"x": 2, "y": 2}, P(None, ("y", "x")), lambda m: m, lambda m: m),
    "dims behind": ({"x": 2, "y": 2}, P("x", "y"), lambda m: m[..., 0], lambda m: m),
    "sharded behind": ({"x": 2, "y": 2}, P(None, "x", "y"), lambda m: m[..., 0], lambda m: m),
    "dims in front": ({"x": 2, "y": 2}, P(None, "x", "y"), lambda m: m[0], lambda m: (..., m)),
    "sharded in front": ({"x": 2, "y": 2}, P("y", None, "x"), lambda m: m[0],
                         lambda m: (slice(None), m)),
    "beside a whole axis": ({"x": 2, "y": 2}, P(None, "y"), lambda m: m, lambda m: m),
}


def used(x: Any, mask: Any, index: Any, make: Any) -> list[Any]:
    """What is selected, two kinds of writes, and gradients."""
    x.requires_grad_()
    out = x[index(mask)]
    weights = torch.arange(out.numel(), dtype=x.dtype).view(out.shape)
    (out * weights).sum().backward()
    found = [out.detach(), x.grad]
    changed, values = x.detach().clone(), make(weights)
    changed[index(mask)] = values
    more = x.detach().clone()
    more[index(mask)] += 1
    found += [changed, more]
    if mask.shape == x.shape:
        target, source = (one.detach().clone().requires_grad_() for one in (x, values))
        filled = target.masked_scatter(mask, source)
        (filled * filled).sum().backward()
        found += [filled.detach(), target.grad, source.grad]
    return found


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_only_what_is_selected_changes_ranks(name: str, plain: bool) -> None:
    axes, spec, of, index = WAYS[name]
    due = used(FIELD.clone(), of(KEEP), index, lambda one: one)

    def on_rank(mesh: Any) -> int:
        x = weft.distribute_tensor(FIELD, mesh, spec, src_data_rank=None)
        at = spec[1:] if name.endswith("front") else spec
        mask: Any = of(KEEP)
        if not plain:
            mask = weft.distribute_tensor(
                mask, mesh, P(*list(at)[: mask.dim()]), src_data_rank=None)
        found = used(x, mask, index, lambda one: weft.distribute_tensor(one, mesh, P()))
        for one, other in zip(found, due, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
        assert found[2].sharding == found[3].sharding == x.sharding
        with weft.explain() as log:
            x.detach()[index(mask)] += 1
        return log.nbytes

    most = max(weft.testing.run(on_rank, mesh=axes))
    selected = due[0].numel() * 8
    assert most <= selected + 2 * (KEEP.numel() // 8 + 8 * 8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64, torch.complex64,
                                   torch.bfloat16, torch.float8_e4m3fn], ids=str)
@ranks(x=2, y=2)
def test_elements_of_any_dtype_are_selected(mesh: Any, dtype: torch.dtype) -> None:
    full = torch.arange(120).view(12, 10).to(dtype)
    x = weft.distribute_tensor(full, mesh, P("x", "y"), src_data_rank=None)
    found, due = x[KEEP[..., 0]].full_tensor(), full[KEEP[..., 0]]
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), due.view(torch.uint8))


@ranks(x=2, y=2)
def test_partial_values_are_selected_and_written(mesh: Any) -> None:
    local = torch.arange(60.0) * (1 + mesh.rank)
    x = weft.ShardTensor.from_local(
        local.view(12, 5), mesh, P(None, "x", partial={"y": "sum"}))
    full, mask = x.full_tensor(), KEEP[..., 0]
    assert torch.equal(x[mask].full_tensor(), full[mask])
    values = torch.arange(120.0)
    assert torch.equal(
        x.masked_scatter(mask, values).full_tensor(), full.masked_scatter(mask, values))
    x[mask] = values[: int(mask.sum())]
    assert torch.equal(x.full_tensor(), full.masked_scatter(mask, values))


@ranks(x=2, y=2)
def test_strict_refuses_what_a_mask_would_move(mesh: Any) -> None:
    x = weft.distribute_tensor(FIELD[..., 0], mesh, P("x", "y"), src_data_rank=None)
    whole = weft.distribute_tensor(KEEP[..., 0], mesh, P(), src_data_rank=None)
    for mask in (x > 0, whole):
        with weft.strict(), pytest.raises(weft.StrictError):
            x[mask]


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y")], ids=str)
@ranks(x=2, y=2)
def test_results_lie_in_memory_as_torch_leaves_them(mesh: Any, spec: P) -> None:
    full = FIELD.permute(2, 0, 1)
    x = weft.distribute_tensor(full, mesh, spec, src_data_rank=None)
    for out, due in ((x.masked_scatter(x > 1, x), full.masked_scatter(full > 1, full)),
                     (x[x > 1], full[full > 1])):
        assert torch.equal(out.full_tensor(), due)
        assert out.stride() == due.stride()
        assert out.to_local().is_contiguous()

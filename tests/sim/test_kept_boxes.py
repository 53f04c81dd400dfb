"""Boxes that autograd saves: the shard and the borders, put together in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import weft
from weft import Layout, P
from weft.tensor.placing import kept_boxes
from weft.testing import peak_memory

CONV = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _twice(x: Tensor, w: Tensor) -> Tensor:
    """Two ops that read one box, of which the first has saved it."""
    h = x.sin()
    return F.conv2d(h, w, padding=1) * F.conv2d(h, w.flip(0), padding=1)


def _narrow(x: Tensor, w: Tensor) -> Tensor:
    """Boxes of another memory order, and of steps that leave rows out."""
    h = x.sin().contiguous(memory_format=torch.channels_last)
    return F.conv2d(F.conv2d(h, w, padding=1), w, stride=3)



@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_boxes, "MIN_NUMEL", 0)


NETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two of one": _twice,
    "order and stride": _narrow,
    "pools": lambda x, w: F.avg_pool2d(F.max_pool2d(F.conv2d(x, w), 3, 2, 1), 3, 1, 1),
    "backwards": lambda x, w: F.conv_transpose2d(x.sin(), w, stride=2, padding=1),
    "far": lambda x, w: F.conv2d(x.sin(), w, padding=5, dilation=5),
    "ring": lambda x, w: F.conv2d(F.pad(x.sin(), (1, 1, 1, 1), "circular"), w),
    "checkpoint": lambda x, w: checkpoint(_twice, x, w, use_reentrant=False),  # type: ignore
}

LAYOUTS: dict[str, tuple[dict[str, int], P, Any]] = {
    "rows": ({"x": 4}, P(None, None, "x"), {}),
    "ragged": ({"x": 4}, P(None, None, "x"), {2: (1, 9, 0, 6)}),
    "grid": ({"x": 2, "y": 2}, P(None, None, "x", "y"), {}),
}


def _trained(x: Tensor, w: Tensor, net: Any) -> list[Tensor]:
    """Gradients, of which the graph is kept and used again; and gradients of these."""
    out = net(x, w)
    mean = (out * out).mean()
    kept = torch.autograd.grad(mean, (x, w), retain_graph=True)
    first = torch.autograd.grad(mean, (x, w), create_graph=True)
    second = torch.autograd.grad((first[0] ** 2).sum() + first[1].sum(), (x, w))
    return [out.detach(), *kept, *[one.detach() for one in first], *second]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("way", LAYOUTS)
def test_gradients_are_those_of_one_process(way: str, net: str) -> None:
    axes, spec, sizes = LAYOUTS[way]
    torch.manual_seed(1)
    full = torch.randn(1, 4, 16, 10, dtype=torch.float64)
    due = _trained(full.clone().requires_grad_(), CONV.clone().requires_grad_(), NETS[net])

    def program(mesh: Any) -> list[Tensor]:
        layout = Layout(mesh, full.shape, spec, sizes=sizes)
        x = weft.distribute_tensor(full, mesh, layout).requires_grad_()
        found = []
        for _ in range(2):  # the second step knows what is read together
            found += _trained(x, CONV.clone().requires_grad_(), NETS[net])
        return [one.full_tensor() if isinstance(one, weft.ShardTensor) else one for one in found]

    for got in weft.testing.run(program, mesh=axes):
        for mine, one in zip(got, [*due, *due]):
            torch.testing.assert_close(mine, one, rtol=1e-10, atol=1e-11)


def test_a_shard_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What convolutions save beside the results that activations save: borders of one row."""
    def program(mesh: Any) -> int:
        x = weft.distribute_tensor(torch.randn(1, 4, 64, 8), mesh, P(None, None, "x"))
        w = CONV.float().requires_grad_()
        with peak_memory(w, x) as memory:
            h = (x + 0).requires_grad_()
            for _ in range(3):
                h = F.conv2d(h, w, padding=1).relu()
            return memory.live - memory.start

    shard, row = 4 * 16 * 8 * 4, 4 * 8 * 4
    assert weft.testing.run(program, mesh={"x": 4}) == [4 * shard + 3 * 2 * row] * 4
    assert weft.testing.run(program, mesh={"x": 1}) == [4 * 4 * shard]
    monkeypatch.setattr(kept_boxes, "MIN_NUMEL", 4 * 64 * 8 + 1)  # too small to be taken apart
    assert min(weft.testing.run(program, mesh={"x": 4})) > 7 * shard


def test_a_frozen_input_is_held_once() -> None:
    def program(mesh: Any) -> int:
        x = weft.distribute_tensor(torch.randn(1, 4, 64, 8), mesh, P(None, None, "x"))
        with peak_memory(x) as memory:
            out = F.conv2d(x, CONV.float().requires_grad_(), padding=1)
            return memory.live - memory.start - out.to_local().nbytes

    assert max(weft.testing.run(program, mesh={"x": 4})) < 4 * 16 * 8 * 4


def test_a_write_to_a_saved_shard_raises() -> None:
    def program(mesh: Any) -> str:
        x = weft.distribute_tensor(torch.randn(1, 4, 16, 8), mesh, P(None, None, "x"))
        h = x.requires_grad_() * 2
        out = F.conv2d(h, CONV.float().requires_grad_(), padding=1)
        h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            out.sum().backward()
        return type(raised.value).__name__

    assert weft.testing.run(program, mesh={"x": 2}) == ["RuntimeError"] * 2

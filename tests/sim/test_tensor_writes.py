"""Writes that others see: bases that begin to require grad, values of redistribute, `out=` that
stands among the operands, plain targets, and what changes shapes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.sharded import Make, agree

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8 - 2
C = torch.arange(30.0, dtype=torch.float64).view(5, 6) % 7 - 3
ROW = torch.tensor([1.0, -2, 0.5, 3, -1, 0.25]).double()
SOME = ["even", "uneven", "replicated", "partial", "ragged", "both", "half partial"]


# A view that was made, and used, before its base began to require grad.


def a_view_of_a_bias(make: Make) -> Any:
    bias, x, w = make(ROW * 0, False), make(X, False), make(ROW)
    view = bias[:]
    before = x * view
    bias.copy_(w * 2)
    after = x * view
    (after * make(C, False)).sum().backward()
    return [before, after, view.requires_grad, w.grad]


def a_view_of_a_weight(make: Make) -> Any:
    weight, x, w = make(C[:3].clone() * 0, False), make(X, False), make(ROW)
    view = weight.view(3, 6)
    F.linear(x, view)
    weight.add_(w)
    out = F.linear(x, view)
    (out * out.detach()).sum().backward()
    return [out, w.grad]


def the_base_of_a_view(make: Make) -> Any:
    weight, x, w = make(C[:3].clone(), False), make(X, False), make(ROW)
    F.linear(x, weight)
    weight.t()[:4].mul_(w[:4, None])
    out = F.linear(x, weight)
    (out * out.detach()).sum().backward()
    return [out, w.grad]


def in_a_list(make: Make) -> Any:
    one, x, w = make(X * 0, False), make(C, False), make(ROW)
    view = one.view(5, 6)
    torch.cat([view, x])
    one.add_(w)
    out = torch.cat([view, x], 1)
    (out * out.detach()).sum().backward()
    return [out, w.grad]


def a_buffer_by_columns(make: Make) -> Any:
    buffer, x = make(X * 0, False), make(C)
    columns = buffer.t()
    for at in range(6):
        buffer[:, at] = (x * (at + 1)).sum(1)
    (columns * columns.detach()).sum().backward()
    return [buffer, columns, x.grad]


PROGRAMS: list[Callable[[Make], Any]] = [
    a_view_of_a_bias, a_view_of_a_weight, the_base_of_a_view, in_a_list, a_buffer_by_columns,
]


@pytest.mark.parametrize("way", SOME)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_plain_tensors(program: Callable[[Make], Any], way: str) -> None:
    agree(program, way)

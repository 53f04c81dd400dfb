"""Writes that others see: bases that begin to require grad, values of redistribute, `out=` that
stands among the operands, plain targets, and what changes shapes in place."""

from __future__ import annotations

import copy
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


# Views whose data had to move, where a dim that they drop is cut.


def gradients_of_a_row(make: Make) -> Any:
    x, seen = make(X), []
    y = x * 2
    row, other, last = y[1], y[2], y[4]
    (g,) = torch.autograd.grad((row * row).sum(), row, retain_graph=True)
    other.retain_grad()
    last.register_hook(lambda grad: seen.append(grad * 1) or grad * 2)
    (other * 3 + last).sum().backward()
    return [g, other.grad, *seen, x.grad]


def a_row_is_the_root_of_backward(make: Make) -> Any:
    x = make(X)
    y = x * 2
    row = y[1]
    y.mul_(3)
    row.backward(gradient=make(ROW, False))
    return x.grad


def copies_of_a_row(make: Make) -> Any:
    x = make(X, False)
    row = x[1]
    deep, clone, shallow = copy.deepcopy(row), row.clone(), copy.copy(row)
    x.add_(1)
    deep.add_(5)
    return [x, row, deep, clone, shallow, row.tolist(), float(row.sum()), bool((row > 0).all())]


def views_of_views(make: Make) -> Any:
    x = make(X, False)
    wide = x.view(6, 5)
    row = wide[1]
    element = row[2]
    x.mul_(2)
    seen = [element * 1]
    element.add_(7)
    seen += [x * 1, wide * 1, row * 1]
    row.zero_()
    return [seen, x, wide, row, element]


def rows_in_a_list(make: Make) -> Any:
    x = make(X, False)
    rows = [x[at] for at in range(5)]
    x.add_(1)
    stacked = torch.stack(rows)
    torch._foreach_mul_(rows, 2)
    return [stacked, x, torch.cat(rows)]


def rows_change_places(make: Make) -> Any:
    x = make(X, False)
    first, last = x[0], x[-1]
    kept = first.clone()
    first.copy_(last)
    last.copy_(kept)
    x[2] = first
    x[3] = last + 1
    return [x, first, last]


def rows_with_gradients(make: Make) -> Any:
    x, w = make(X), make(ROW)
    y = x * 1
    rows = [y[at] for at in range(5)]
    for row in rows[1:]:
        row.mul_(w)
    (y * make(C, False)).sum().backward()
    return [y, x.grad, w.grad, rows[2].requires_grad]


def a_base_that_changes_twice(make: Make) -> Any:
    x = make(X)
    y = x * 2
    row = y[1]
    one = row * 3
    y.add_(1)
    two = row * row.detach()
    y.mul_(make(C))
    three = row + 1
    (one.sum() + three.sum()).backward()
    return [one, two, three, x.grad]


def a_second_backward(make: Make) -> Any:
    x = make(X)
    y = x * x
    row = y[1]
    y.mul_(x)
    (g,) = torch.autograd.grad((row * row).sum(), x, create_graph=True)
    (g * g).sum().backward()
    return [g, x.grad]


def rows_of_a_parameter(make: Make) -> Any:
    x = make(X)
    row = x.data[1]
    row.fill_(3)
    x.data[2].copy_(row + 1)
    with torch.no_grad():
        x[4].copy_(x[2])
        first = x[0]
        x.add_(1)
    x.data.mul_(2)
    row_of_old = x.detach()[3]
    (x * make(C, False)).sum().backward()
    torch.optim.SGD([x], 0.5).step()
    with torch.no_grad():
        seen = [x * 1, row * 1, first * 1, row_of_old * 1]
    x.data = make(C, False)
    row_of_old.add_(1)
    return [*seen, x, row_of_old]


PARTS: list[Callable[[Any], Any]] = [
    lambda x: x.split(2)[0], lambda x: x.unbind(0)[3], lambda x: x.unbind(1)[2],
    lambda x: x.split(2, 1)[1], lambda x: list(x)[2], lambda x: x[:1].unbind(0)[0],
    lambda x: x.unbind(1)[2][1:3], lambda x: x.tensor_split(2)[0], lambda x: x.view(-1).unbind()[7],
]


def one_of_several_views(make: Make) -> Any:
    """torch records no write to one of them; unrecorded ones reach the base."""
    refused = []
    for part in PARTS:
        for grad in (True, False):
            x = make(X, grad) * 1
            view, factor = part(x), make(X).sum()
            for write in (lambda view=view: view.mul_(2), lambda v=view, by=factor: v.mul_(by)):
                try:
                    write()
                    refused.append(False)
                except RuntimeError as error:
                    refused.append("modified inplace" in str(error))
        x = make(X) * 1
        with torch.no_grad():
            part(x).mul_(3)
        refused.append(x)
    return refused


def in_inference_mode(make: Make) -> Any:
    made = make(X, False)
    with torch.inference_mode():
        x = made * 1
        row, wide = x[1], x.view(6, 5)
        x.add_(1)
        seen = [row * 1, wide * 1]
        row.mul_(2)
        wide[3].zero_()
        x[0] = row
        torch._foreach_add_([x], 1)
        of_made = made[1]
        made.add_(1)
        return [one.clone() for one in (*seen, x, row, wide, made, of_made)]


def a_gradient_is_wanted_since(make: Make) -> Any:
    """What is written to the base may have the view lie otherwise when it is read again."""
    found = []
    for view in (lambda y: y[1], lambda y: y.select(-1, 0), lambda y: y.flatten(0, 1)):
        y, by = make(X, False) * 1, C[:, :1].clone().requires_grad_()
        shown = view(y)
        y.sub_(by, alpha=2)
        (shown * shown).sum().backward()
        found += [shown, y, by.grad]
        y, by = make(X, False) * 1, C[0].clone().requires_grad_()
        shown = view(y)
        y.select(0, 2).mul_(by)
        (shown + shown).sum().backward()
        found += [shown, y, by.grad]
    return found


def data_of_views(make: Make) -> Any:
    """Their writes are the base's, and of whatever else shows it: torch counts them nowhere."""
    found = []
    for part in (lambda x: x[:2], lambda x: x.mT, lambda x: x.view(-1)[3:], lambda x: x[1],
                 lambda x: x.data, lambda x: x.detach().data[1:].data):
        x, other = make(X), make(C.mT.contiguous(), False).mT
        y = x * 1
        shown, row, column, flat = part(y), y[2], y[:, 1], y.flatten()
        before = y + other + (y * y).cumsum(0)
        shown.data.mul_(2)
        after = y + other + row + column.sum() + flat.sum()
        data = shown.data
        first = data[:1]
        y.add_(1)
        seen = [first * 1]
        data.data.add_(1)
        found += [before, after, *seen, y + other, first, shown, row * 1, flat]
        (y + other).sum().backward()
        found.append(x.grad)
    return found


def memory_of_two(make: Make) -> Any:
    """`x.data = y` shares y's memory: writes to either are the other's."""
    x, y, other = make(X), make(C, False), make(C.mT.contiguous(), False).mT
    x.data = y
    one = x + other
    y.mul_(2)
    two = x + other
    x.data.add_(1)
    y.data.add_(1)
    return [one, two, x + other, y + other, y]


MOVED: list[Callable[[Make], Any]] = [
    gradients_of_a_row, a_row_is_the_root_of_backward, copies_of_a_row, views_of_views,
    rows_in_a_list, rows_change_places, rows_with_gradients, a_base_that_changes_twice,
    a_second_backward, rows_of_a_parameter, one_of_several_views, in_inference_mode,
    a_gradient_is_wanted_since, data_of_views, memory_of_two,
]


@pytest.mark.parametrize("way", [*SOME, "empty"])
@pytest.mark.parametrize("program", MOVED, ids=lambda program: program.__name__)
def test_moved_views(program: Callable[[Make], Any], way: str) -> None:
    agree(program, way)

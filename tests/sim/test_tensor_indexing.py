"""Indices in spellings that no list of ops has; writes of what stands there already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.harness import ranks
from tests.sharded import ALONE, WAYS, Make, agree, in_ways
from weft import P

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8
CUBE = torch.arange(100.0, dtype=torch.float64).view(5, 4, 5) / 8
ROWS = torch.tensor([True, False, True, True, False])
COLUMNS = torch.tensor([True, False, True, False, False, True])
LISTS: list[Any] = [
    [[4, 0, 4]], [[0, 2], [1, -1]], [slice(1, 4), 2], [..., [3, 0]], [None, 3], [[True] * 5, 0],
    [torch.tensor([1, 3])], [np.array([1, 3]), 0], [0, torch.tensor(True)], [0, 3],
    [range(2), 0], [np.int64(4), 0], [(1, 2)], [[-1]] * 40,
]
"""torch takes a short list for a tuple, unless it holds numbers alone."""


def lists(make: Make) -> Any:
    found = []
    for key in LISTS:
        x = make(X)
        y = x * 1
        row = y[key]
        y[key] = 2.5
        (row * row).sum().backward()
        found += [row, y, x.grad]
    x, places = make(X), make(torch.tensor([3, 0, 3]))
    return [*found, x[[places]], x[[places, places]], x[[make(ROWS), 0]]]


def values_with_leading_dims(make: Make) -> Any:
    y, value = make(X) * 1, make(X)
    y[make(ROWS)] = value[None, None, :3]
    y[:, ROWS.new_tensor([True] * 6)] = value[None]
    return [y, torch.autograd.grad((y * y).sum(), value)]


def values_behind_a_number(make: Make) -> Any:
    """A number is no index to a write: new dims stand where the tensors among the indices do."""
    found = []
    places, some = torch.tensor([4, 0, 2]), torch.tensor([2, 2])
    for key, shape in (((-1, slice(None), places), (4, 3)), ((2, None, places[2:]), (1, 1, 5)),
                       ((slice(None), 1, None, places), (5, 1, 3)), ((0, some), (2, 5)),
                       ((1, slice(1, 3), some), (2, 2)), ((some, 3), (2, 5))):
        y, value = make(CUBE) * 1, make(CUBE.flatten()[: torch.Size(shape).numel()].view(shape))
        y[key] = value
        found += [y, torch.autograd.grad((y * y).sum(), value)]
    y, plane = make(CUBE) * 1, make(CUBE[:4, :, :].transpose(0, 2)[:4].contiguous())
    y[3, :, torch.tensor([0, 1, 2, 3])] = plane[:, :, 0]
    return [*found, y]


def fills_of_another_dtype(make: Make) -> Any:
    """Masks are filled with one element of any dtype."""
    y, one = make(X, False), torch.tensor(3.5)
    y[1, None, make(COLUMNS)] = one
    y[make(ROWS), 1] = one.view(1)
    y[2:, COLUMNS] = torch.tensor(7)
    return y


def other_dtypes_are_refused(make: Make) -> Any:
    make(X, False)[1, None, make(COLUMNS)] = torch.ones(3)


def numbers_of_one_rank(make: Make) -> Any:
    """What `x[i, j] += 1` ends with is a write of what is there."""
    y = make(X) * 1
    y[2, 1] += 1
    y[torch.tensor(3), 2] *= 2
    y[None, 0] += 1
    y[:, 3] -= 1
    y[..., :1] += 1
    return y


def what_is_there_in_views(make: Make) -> Any:
    """On ranks with no elements in the view as on the others."""
    found = []
    for view in (
        lambda y: y.flatten(), lambda y: y[0], lambda y: y.select(1, -1), lambda y: y.squeeze(),
        lambda y: y.unfold(1, 2, 2), lambda y: y.view(-1)[3:], lambda y: y.mT,
    ):
        y = make(X) * 1
        shown, beside = view(y), y[:, 1]
        shown[..., :1] += 1
        shown[...] = shown
        y[...] = y
        beside.mul_(2)
        found += [y, shown, beside]
    sum((one * one).sum() for one in found).backward()
    return found


def what_is_there_is_recorded(make: Make) -> Any:
    """In memory that another graph than the target's knows."""
    x = make(X)
    y = x * 1
    row = y.data
    row[:] = y
    return [row.requires_grad, torch.autograd.grad((row * row).sum(), x)]


PROGRAMS = [
    lists, values_with_leading_dims, values_behind_a_number, fills_of_another_dtype,
    other_dtypes_are_refused, numbers_of_one_rank, what_is_there_in_views,
    what_is_there_is_recorded,
]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore::weft.WeftWarning")
@pytest.mark.parametrize("program, way", in_ways(PROGRAMS, [*WAYS, *ALONE]))
def test_as_plain_tensors(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize("index", [5, -6, 2**63 - 1])
@ranks(x=2)
def test_select_scatter_outside_raises(mesh: Any, index: int) -> None:
    x = weft.distribute_tensor(torch.zeros(5, 6), mesh, P("x"))
    with pytest.raises(IndexError, match="out of range for tensor of size"):
        x.select_scatter(torch.ones(6), 0, index)


@pytest.mark.parametrize("rows, moves", [([0, 1, 2, 3, 4], False), ([4, 3, 2, 1, 0], True)])
def test_rows_that_stay_where_they_are_are_not_sent(rows: list[int], moves: bool) -> None:
    """All ranks know the indices: where nobody needs a row of another, there is no collective."""
    def program(mesh: Any) -> tuple[int, Any, Any]:
        x = weft.distribute_tensor(torch.arange(15.0).view(5, 3), mesh, P("x")).requires_grad_()
        at, column = torch.tensor(rows).view(5, 1), torch.tensor([[2, 0]])
        with weft.explain() as log:
            found = x[at, column]
            (found * found).sum().backward()
        sent = [event for event in log.events if "units by index" in event.transition]
        return len(sent), found.full_tensor().detach(), x.grad.full_tensor()

    x: Any = torch.arange(15.0).view(5, 3).requires_grad_()
    due = x[torch.tensor(rows).view(5, 1), torch.tensor([[2, 0]])]
    (due * due).sum().backward()
    for num, found, grad in weft.testing.run(program, mesh={"x": 3}):
        assert bool(num) is moves
        assert torch.equal(found, due) and torch.equal(grad, x.grad)

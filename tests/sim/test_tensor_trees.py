"""Nested arguments: every form is walked by all that walk, and keeps its form."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.tensor.trace.trees import (
    Slot,
    fill,
    flatten,
    leaves,
    map_tensors,
    slots_of,
    substitute,
)

Pair = namedtuple("Pair", ["one", "other"])


class Items(list):
    """A list of a user's own."""


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, 1, b),
    "list": lambda a, b: [a, None, b],
    "dict": lambda a, b: {"a": a, "more": 2.0, "b": b},
    "named tuple": Pair,
    "slice": lambda a, b: slice(a, b, 2),
    "ordered dict": lambda a, b: OrderedDict(a=a, b=b),
    "default dict": lambda a, b: defaultdict(list, a=a, b=b),
    "deep": lambda a, b: ([{"a": (a,)}], "text", Pair(slice(None, b), torch.Size([2, 3]))),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_all_walkers_see_the_same_leaves_and_keep_the_form(form: Callable[[Any, Any], Any]):
    x, y = torch.zeros(2), torch.ones(3)
    tensors, slots = form(x, y), form(Slot(0), Slot(1))
    assert all(mine is due for mine, due in zip(flatten(tensors), (x, y), strict=True))
    assert slots_of(slots) == leaves(slots, Slot) == [Slot(0), Slot(1)]
    assert fill(slots, ["a", "b"]) == form("a", "b")
    assert type(fill(slots, ["a", "b"])) is type(slots)
    assert substitute(tensors, iter(["a", "b"])) == form("a", "b")  # type: ignore[arg-type]
    assert map_tensors(len, tensors) == form(2, 3)
    assert flatten(tensors)[0] is x  # the given one stays as it is


def test_a_list_of_another_class_becomes_a_list():
    assert fill(Items([Slot(0), 1]), ["a"]) == ["a", 1]
    assert flatten(Items([torch.zeros(1)])) and slots_of(Items([Slot(0)])) == [Slot(0)]


def test_results_of_torch_keep_their_kind():
    found = torch.ones(2, 3).max(0)
    assert type(map_tensors(torch.neg, found)) is torch.return_types.max


def test_what_holds_nothing_is_a_leaf():
    size = torch.Size([2, 3])
    assert fill(size, []) is size and map_tensors(len, size) is size
    assert leaves((size, 4, 5.0), int) == [2, 3, 4]

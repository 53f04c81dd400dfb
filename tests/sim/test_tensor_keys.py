"""The key of a call: both routes make the same one, and other keys are made of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.harness import ranks
from weft import P
from weft.tensor import shard_tensor
from weft.tensor.keys import floats_of, key_of, structure_key, trace_key
from weft.tensor.meta import Meta

X = torch.arange(1.0, 25.0).view(4, 6)
NUMBER: Any = torch.tensor(0.5).numpy()[()]

CALLS: dict[str, Any] = {
    "sharded": lambda x, p: torch.add(x, x),
    "plain": lambda x, p: torch.add(x, p),
    "parameter": lambda x, p: F.linear(x, torch.nn.Parameter(torch.ones(3, 6))),
    "int": lambda x, p: x.sum(1), "bool": lambda x, p: x.sum(1, True),
    "float": lambda x, p: torch.mul(x, 0.5), "zero": lambda x, p: torch.mul(x, -0.0),
    "infinity": lambda x, p: torch.mul(x, float("inf")), "complex": lambda x, p: torch.mul(x, -0j),
    "ints": lambda x, p: torch.permute(x, (1, 0)), "list": lambda x, p: torch.permute(x, [1, 0]),
    "size": lambda x, p: x.expand(torch.Size([4, 6])), "dtype": lambda x, p: x.to(torch.float64),
    "keywords": lambda x, p: torch.sum(x, dim=1, keepdim=True),
    "slices": lambda x, p: x[1:3, ::2], "index": lambda x, p: x[None, ..., 1:3, 0],
    "ellipsis": lambda x, p: x[..., 0], "one slice": lambda x, p: x[1:],
    "sharded in a list": lambda x, p: torch.cat([x, x], 1),
    "sharded in a tuple": lambda x, p: torch.cat((x, x), dim=1),
    "floats": lambda x, p: torch._foreach_mul([x, x], [0.5, 0.0]),
    "text": lambda x, p: torch.div(x, 3, rounding_mode="floor"),
    "numpy": lambda x, p: torch.mul(x, NUMBER),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
@ranks(x=2)
def test_both_routes_make_one_key(
    mesh: Any, name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None).requires_grad_(grad)
    seen: list[Any] = []
    learn = shard_tensor.hooks.learn

    def watched(func: Any, args: Any, kwargs: Any, home: Meta, key: list[Any]) -> Any:
        if not seen:
            seen.append((key, key_of(func, args, kwargs or {})[0]))
        return learn(func, args, kwargs, home, key)

    monkeypatch.setattr(shard_tensor.hooks, "learn", watched)
    CALLS[name](x, X + 1)
    assert seen, "the short route did not make the key"
    mine, theirs = seen[0]
    assert mine == theirs
    assert list(map(type, mine)) == list(map(type, theirs))


@ranks(x=2)
def test_tensors_and_what_cannot_be_hashed_are_met(mesh: Any) -> None:
    x = weft.distribute_tensor(X, mesh, P("x"), src_data_rank=None)
    numbers = {1, 2}
    _, met = key_of(torch.add, (x, [X, (x, numbers)]), {"other": {"a": X}})
    assert [id(one) for one in met] == [id(one) for one in (x, X, x, numbers, X)]


@ranks(x=2)
def test_a_trace_is_that_of_all_layouts_and_not_of_other_numbers(mesh: Any) -> None:
    def key(spec: P, number: float, grad: bool = False, asks: bool = False) -> Any:
        x = weft.distribute_tensor(X, mesh, spec, src_data_rank=None).requires_grad_(grad)
        made, _ = key_of(torch.mul, (x, number), {})
        return trace_key(made, asks), floats_of((x, number))

    assert key(P("x"), 0.5) == key(P(None, "x"), 0.5) == key(P(), 0.5, grad=True)
    assert key(P("x"), 0.5) != key(P("x"), 0.25)
    assert key(P("x"), 0.5, asks=True) != key(P("x"), 0.5, grad=True, asks=True)


@ranks(x=2)
def test_a_structure_is_that_of_other_lengths(mesh: Any) -> None:
    def structure(rows: int, columns: int, dim: int = 0) -> Any:
        x = weft.distribute_tensor(torch.ones(rows, columns), mesh, P("x"), src_data_rank=None)
        return structure_key(key_of(torch.sum, (x, dim), {})[0], ()).key  # type: ignore

    assert structure(4, 6) == structure(8, 10)
    assert structure(4, 6) != structure(5, 5)
    assert structure(4, 6) != structure(4, 1)
    assert structure(4, 6, 4) != structure(8, 6, 4)

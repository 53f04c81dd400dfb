"""Functions are taken over wherever they were imported to, and given back whole."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from weft.tensor.takeover import give_back, replace, take_over

PROGRAM = """
import torch
from torch.autograd import backward, grad
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

twice = Twice.apply  # before weft is imported

import weft

def on_rank(mesh):
    x = weft.ones(4, 3, mesh=mesh, spec=weft.P(0), requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    y = twice(x) * w
    backward(y.sum())
    module = weft.distribute_module(torch.nn.Linear(4, 4), mesh)
    told = []
    for wrap in (fully_shard, FullyShardedDataParallel):
        try:
            wrap(module)
        except weft.ModuleError:
            told.append(wrap.__name__)
    return x.grad.full_tensor().tolist(), w.grad.tolist(), told

print(weft.testing.run(on_rank, 2))
"""


def test_what_was_imported_before_weft() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    told = ["fully_shard", "FullyShardedDataParallel"]
    assert done.stdout.strip() == str([([[2.0] * 3] * 4, [8.0] * 3, told)] * 2)


def make(k: int) -> Any:
    def function(a: int, b: int = 2, *, c: int = 3) -> int:
        """Adds."""
        return a + b + c + k

    return function


class Base:
    @classmethod
    def whoami(cls, x: int) -> Any:
        return cls, x, super().__init__ is not None


def plain(a: int, b: int = 2) -> int:
    return a - b


@pytest.mark.parametrize("function", [make(10), plain], ids=["closure", "plain"])
def test_taking_over_and_giving_back(function: Any) -> None:
    before = function(1), function(1, 5), inspect.signature(function), function.__doc__
    seen: list[Any] = []

    def answer(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return twin(*args, **kwargs)

    twin = take_over(function, answer)
    same = function(1), function(1, 5), inspect.signature(function), function.__doc__
    assert same == before and seen == [((1,), {}), ((1, 5), {})]
    assert function(b=1, a=4) == twin(4, 1) and seen[-1] == ((), {"b": 1, "a": 4})
    give_back(function, twin)
    assert (function(1), function(1, 5), inspect.signature(function), function.__doc__) == before
    assert len(seen) == 3


def test_a_method_with_a_cell_of_its_class() -> None:
    bound = Base.whoami
    twin = take_over(
        Base.__dict__["whoami"].__func__, lambda cls, x: ("taken", twin(cls, x))
    )
    assert bound(3) == Base.whoami(3) == ("taken", (Base, 3, True))
    give_back(Base.__dict__["whoami"].__func__, twin)
    assert bound(3) == (Base, 3, True)


class Kinds:
    def method(self, x: int) -> Any:
        return "method", x

    @classmethod
    def of_class(cls, x: int) -> Any:
        return cls, x

    @staticmethod
    def static(x: int) -> Any:
        return "static", x


class InC(list):  # type: ignore[type-arg]
    """Its methods are written in C."""


class Data(torch.Tensor):
    """Its attributes are written in C."""


def answer(original: Any, *args: Any) -> Any:
    return "instead", original(*args)


def test_every_kind_of_function_is_replaced() -> None:
    known = Kinds().method, Kinds.of_class, Kinds.static  # before
    for name in ("method", "of_class", "static"):
        replace(Kinds, name, answer)
    assert [one(3) for one in known] == [
        ("instead", ("method", 3)), ("instead", (Kinds, 3)), ("instead", ("static", 3)),
    ]
    replace(InC, "count", answer)
    assert InC([1, 1]).count(1) == ("instead", 2) and [1, 1].count(1) == 2


def test_an_attribute_in_c_is_replaced_where_it_is_assigned_to() -> None:
    given = []

    def assign(original: Any, tensor: Any, value: Any) -> None:
        given.append(value)
        original(tensor, value)

    replace(Data, "data", assign)
    x, value = torch.ones(3).as_subclass(Data), torch.zeros(3)
    x.data = value
    assert given[0] is value and not x.data.any()
    y = torch.ones(3)
    y.data = value
    assert len(given) == 1


def test_frames_can_be_looked_at() -> None:
    """Debuggers and pytest read the variables of every frame, free ones included."""
    function = make(10)
    take_over(function, lambda _: sys._getframe(1).f_locals)
    assert set(function(1)) >= {"args", "kwargs", "_weft_answer_"}

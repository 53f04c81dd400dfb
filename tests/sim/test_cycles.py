"""Nothing waits for Python's collector: a cycle would keep memory alive long after its last use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._decomp  # it and the next one leave cycles of torch's when they are imported
import torch._dynamo
from torch import nn
from torch.nn import functional as F

import weft
from tests import long_runs
from weft import P
from weft.tensor.trace import taken_dtypes


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(call: Callable[[Any], Any]) -> list[bool]:
    """Whether a sharded operand is alive after a call that raises or gives nothing."""
    def on_rank(mesh: Any) -> bool:
        x = weft.distribute_tensor(torch.ones(8, 8), mesh, P("x"))
        known = weakref.ref(x)
        try:
            call(x)
        except (RuntimeError, IndexError, TypeError, ValueError):
            raised = True
        else:
            raised = False
        assert raised == (call in RAISES.values())
        del x
        return known() is not None

    return weft.testing.run(on_rank, mesh={"x": 2})


RAISES: dict[str, Callable[[Any], Any]] = {
    "shapes": lambda x: x + torch.ones(3, 3),
    "inner lengths": lambda x: x @ weft.ones(3, 3, mesh=x.device_mesh, spec=P("x")),
    "dims": lambda x: x.sum(5),
    "dtypes": lambda x: torch.bitwise_and(x, x),  # no kernel takes floats
    "out=": lambda x: torch.add(x, x, out=torch.empty(8, 8, dtype=torch.int64)),
    "view": lambda x: x.view(3, 3),
    "in place": lambda x: x.add_(torch.ones(3, 8, 8)),
    "placements": lambda x: x.redistribute(P(None, None, "x")),
    "index": lambda x: x[torch.tensor([100])],
    "values": lambda x: torch.linalg.cholesky(-x @ x.mT),
}


@pytest.mark.parametrize("about", RAISES)
def test_a_caught_error_keeps_no_operand(about: str) -> None:
    assert left(RAISES[about]) == [False, False]
    assert left(RAISES[about]) == [False, False]


def test_a_first_call_keeps_nothing_of_the_program() -> None:
    """What a probe on short tensors raises has the frames of the whole program in its traceback:
    here norms of more elements than a probe has."""
    taken_dtypes._TAKEN.clear()

    def first(x: Any) -> None:
        norm = weft.distribute_module(nn.LayerNorm(8), x.device_mesh)
        F.gelu(norm(x)).sum().backward()

    assert left(first) == [False, False]


@pytest.mark.parametrize("kind", [
    "data parallel, autocast", "fully sharded, checkpoints", "tensor parallel, sequences",
    "sequences", "pipeline",
])
def test_steps_leave_no_tensor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(into: long_runs.Growth, how: long_runs.Kind) -> None:
        num = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        into.marks.setdefault("tensors", []).append(num)

    monkeypatch.setattr(long_runs, "_measure", measure)
    _, between, end = long_runs.grown(kind, (13, 25, 37)).marks["tensors"][-3:]
    assert end <= between

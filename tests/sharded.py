"""One program on plain tensors in one process and on ShardTensors on simulated ranks.

A program gets `make`, which turns a full tensor into an operand: a copy of it, or a ShardTensor
of it. What it returns (tensors, numbers, containers of them) must be the same everywhere, and
what it raises of the same type.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.cases import seed_of
from tests.effort import EFFORT
from tests.harness import held, local_part
from tests.oracle import TOLERANCE, Held, check
from weft import Layout, P, ShardTensor
from weft.core import Mesh

Make = Callable[..., Any]
Program = Callable[[Make], Any]

WAYS: dict[str, tuple[dict[str, int], Any]] = {
    "even": ({"x": 2}, P(None, "x")),
    "uneven": ({"x": 2}, P("x")),
    "replicated": ({"x": 2}, P()),
    "partial": ({"x": 2}, P(partial={"x": "sum"})),
    "empty": ({"x": 2}, (5, 0)),
    "three": ({"x": 3}, P("x")),
    "ragged": ({"x": 3}, (1, 0, 4)),
    "both": ({"dp": 2, "tp": 2}, P("dp", "tp")),
    "one dim": ({"dp": 2, "tp": 2}, P(("dp", "tp"))),
    "half partial": ({"dp": 2, "tp": 2}, P("dp", partial={"tp": "sum"})),
}
"""Name -> mesh, and a spec or the sizes of 5 rows over x."""

HARD = ("empty", "both", "half partial")
"""Those that ask most."""


def ways_of(name: str, ways: Iterable[str] = WAYS) -> list[str]:
    """The hard ones of these ways, and of the others as many as `EFFORT` says (1: all) but at least
    two, drawn by the name of a program; in their order."""
    hard = [way for way in ways if way in HARD]
    others = [way for way in ways if way not in HARD]
    count = min(len(others), max(2, math.floor(EFFORT * len(others))))
    chosen = {*hard, *random.Random(seed_of(name)).sample(others, count)}
    return [way for way in ways if way in chosen]


def in_ways(programs: Iterable[Any], ways: Sequence[str] = tuple(WAYS)) -> list[Any]:
    """Parameters `program, way` of a test: each program in its ways."""
    return [
        pytest.param(program, way, id=f"{program.__name__}-{way}")
        for program in programs for way in ways_of(program.__name__, ways)
    ]


ALONE: dict[str, tuple[dict[str, int], Any]] = {"one rank": ({"x": 1}, P("x"))}
"""The same, of a mesh on which nothing can move."""

MEANS: dict[str, tuple[dict[str, int], Any]] = {
    "mean": ({"x": 2}, P(partial={"x": "avg"})),
    "half mean": ({"dp": 2, "tp": 2}, P("dp", partial={"tp": "avg"})),
    "sum of means": ({"dp": 2, "tp": 2}, P(partial={"dp": "sum", "tp": "avg"})),
}
"""The same, of terms of a mean; integers are replicated."""


def layout_for(mesh: Mesh, shape: Sequence[int], way: Any) -> Layout:
    """The layout of one operand; a dim that it does not have is not cut."""
    if isinstance(way, tuple):
        whole = not shape or shape[0] != sum(way)
        return Layout(mesh, shape, P() if whole else P("x"), sizes={} if whole else {0: way})
    partial = dict(way.partial) if way.partial else None
    return Layout(mesh, shape, P(*way.entries[: len(shape)], partial=partial))


def agree(program: Program, name: str) -> None:
    """Run the program on plain tensors and on those laid out in the way named."""
    expected = _outcome(lambda: program(_plain))
    axes, way = (WAYS | MEANS | ALONE)[name]

    def on_rank(mesh: Any) -> Any:
        def make(full: Tensor, grad: bool = True) -> ShardTensor:
            layout = layout_for(mesh, full.shape, way)
            if "avg" in layout.partial:
                made = _mean(full, mesh, layout)
            elif layout.is_partial and full.dtype in (torch.float64, torch.int64):
                with torch.device("cpu"):
                    local = local_part(layout, full, mesh.here, seed_of(way, full.shape)).clone()
                made = ShardTensor.from_local(local, mesh, layout)  # unequal terms
            else:
                made = weft.distribute_tensor(full, mesh, layout, src_data_rank=None)
            return made.requires_grad_(grad and full.is_floating_point())

        return data(program(make))

    got = _outcome(lambda: weft.testing.run(on_rank, mesh=axes))
    if isinstance(expected, Exception):
        assert type(got) is type(expected), f"{got!r} instead of {expected!r}"
        return
    if isinstance(got, Exception):
        raise got
    compare(got, data(expected))


def compare(ranks: Sequence[Any], expected: Any, where: str = "result") -> None:
    """What the ranks hold against the result of one process: sharded tensors block by block."""
    if isinstance(expected, list):
        for rank, one in enumerate(ranks):
            assert isinstance(one, list) and len(one) == len(expected), f"{where}, {rank}: {one}"
        for place, due in enumerate(expected):
            compare([one[place] for one in ranks], due, f"{where}, {place}")
    elif isinstance(expected, Tensor) and all(isinstance(one, Held) for one in ranks):
        if 0 in expected.stride() and 0 not in ranks[0].stride:
            expected = expected.contiguous()  # an expanded result has no order in memory
        check(expected, ranks, where)
    else:
        for rank, one in enumerate(ranks):
            same(one, expected, f"{where} on rank {rank}")


def _mean(full: Tensor, mesh: Any, layout: Layout) -> ShardTensor:
    """Unequal terms: the first rank of each axis has one too many, the last one too few."""
    if not full.is_floating_point():
        return weft.distribute_tensor(full, mesh, P(), src_data_rank=None)
    term = full[tuple(slice(*side) for side in layout.box_at(mesh.here))].clone()
    for axis, kind in enumerate(layout.partial):
        size, place = mesh.axis_sizes[axis], mesh.here[axis]
        if kind == "sum":
            term = term / size
        if kind is not None:
            term = term + int(place == 0) - int(place == size - 1)
    return ShardTensor.from_local(term, mesh, layout)


def data(value: Any) -> Any:
    """The value with what this rank holds in the place of each ShardTensor."""
    if isinstance(value, ShardTensor):
        return held(value.detach())
    if isinstance(value, Tensor):
        return value.detach()  # not a copy of it: that may lie in another order in memory
    if isinstance(value, (list, tuple)):
        return [data(one) for one in value]
    return value


def same(actual: Any, expected: Any, where: str) -> None:
    """Equal, and tensors within the tolerance of their dtype; of a sharded one, the whole."""
    if isinstance(actual, Held):
        actual = actual.full
    if isinstance(expected, list):
        assert isinstance(actual, list) and len(actual) == len(expected), f"{where}: {actual}"
        for place, (one, other) in enumerate(zip(actual, expected)):
            same(one, other, f"{where}, {place}")
    elif isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {actual}"
        close = TOLERANCE.get(expected.dtype, 0.0)
        torch.testing.assert_close(
            actual, expected, rtol=close, atol=close, equal_nan=True,
            msg=lambda text: f"{where}: {text}",
        )
    elif isinstance(expected, (float, complex)):
        assert type(actual) is type(expected) and abs(actual - expected) < 1e-9, where
    else:
        assert type(actual) is type(expected) and actual == expected, f"{where}: {actual}"


def _plain(full: Tensor, grad: bool = True) -> Tensor:
    return full.clone().requires_grad_(grad and full.is_floating_point())


def _outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return error

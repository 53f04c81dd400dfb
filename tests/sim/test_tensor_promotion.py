"""Types of results: Python and numpy scalars, 0-dim tensors, plain or sharded, on either side."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.effort import drawn
from tests.sharded import Make, agree

DTYPES = (torch.bool, torch.int32, torch.bfloat16, torch.float32, torch.complex64)
SHAPES = ((5, 6), ())
NUMBERS = (True, 3, 2.5, 1 + 2j, np.float64(2.5), np.float32(2.5), np.int64(3), np.bool_(True))
WAYS = ("uneven", "partial")
OTHERS = (torch.bool, torch.int64, torch.float16, torch.float64, torch.complex64)

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "reflected +": lambda a, b: b + a, "mul": torch.mul,
    "-": lambda a, b: a - b, "reflected -": lambda a, b: b - a, "/": lambda a, b: a / b,
    "reflected /": lambda a, b: b / a, "**": lambda a, b: a**b, "reflected **": lambda a, b: b**a,
    "//": lambda a, b: a // b, "==": lambda a, b: a == b,
    "<": lambda a, b: a < b, "reflected <": lambda a, b: b < a,
    "where": lambda a, b: torch.where(a == a, a, b), "maximum": lambda a, b: torch.maximum(a, b),
    "&": lambda a, b: a & b, "result_type": lambda a, b: str(torch.result_type(a, b)),
    "add_": lambda a, b: a.clone().add_(b), "mul_": lambda a, b: a.clone().mul_(b),
    "div_": lambda a, b: a.clone().div_(b), "clamp": lambda a, b: a.clamp(max=b),
    "full_like": torch.full_like, "remainder": lambda a, b: torch.remainder(b, a),
    "copysign": torch.copysign,
    "alpha": lambda a, b: torch.add(a, a, alpha=b), "lerp": lambda a, b: torch.lerp(a, a, b),
    "index_fill": lambda a, b: a.index_fill(0, torch.tensor([0]), b),
}


def outcome(op: Any, a: Any, b: Any) -> Any:
    """The result with its dtype. Where torch has no kernel, meta tensors say so in other words."""
    try:
        out = op(a, b)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return "refused"
    if isinstance(out, Tensor) and str(out.dtype) == "torch.bcomplex32":
        return str(out.dtype)  # of bfloat16 and complex numbers from torch 2.14 on, without kernels
    return (str(out.dtype), out) if isinstance(out, Tensor) else (type(out).__name__, out)


def table(make: Make, other: Callable[[Make], Any]) -> list[Any]:
    found = []
    for dtype in DTYPES:
        for shape in SHAPES:
            numel = int(np.prod(shape))
            full = (torch.arange(1, numel + 1).view(shape) % 3).to(dtype)
            for name, op in OPS.items():
                found.append((name, str(dtype), str(shape),
                              outcome(op, make(full, False), other(make))))
    return found


# A plain 0-dim tensor where torch wants a number is read by a fallback, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::weft.WeftWarning")


@pytest.mark.parametrize(
    "way, number", drawn([*product(WAYS, NUMBERS)]), ids=lambda one: f"{type(one).__name__} {one}")
def test_numbers(number: Any, way: str) -> None:
    agree(lambda make: table(make, lambda _: number), way)


@pytest.mark.parametrize(
    "way, dtype, kind", drawn([*product(WAYS, OTHERS, ("plain", "sharded"))]), ids=str)
def test_tensors(kind: str, dtype: torch.dtype, way: str) -> None:
    full = torch.tensor(2).to(dtype)
    agree(lambda make: table(make, lambda make: (
        full if kind == "plain" else make(full, False)
    )), way)


def test_a_plain_tensor_is_divided_as_torch_divides() -> None:
    """Python asks the ShardTensor first, as a subclass; its torch method takes a reciprocal."""
    whole = torch.arange(1, 31, dtype=torch.float32).view(5, 6)

    def division(make: Make) -> Any:
        return [(torch.tensor(5.0, dtype=dtype) / make(whole, False)).tolist()
                for dtype in (torch.float32, torch.float16, torch.float64)] + [
            (whole / make(whole * 7, False)).tolist()
        ]

    for way in ("uneven", "replicated"):
        agree(division, way)

"""How many bytes a call may receive from others, per op and layout, in one table.

A bound is what the rank that receives most gets: of the call's transitions and collectives, then
of its gradient's. Operands are float64 and drawn at random; "line" is 4,096 numbers on 4 ranks
(a block is 8,192 bytes, the others' blocks 24,576), "columns" 8 rows of 512 cut along, "rows" 512
rows of 8, "square" a line cut by both axes of a mesh of 2 by 2, "ragged" a line of which one rank
has nothing and another nearly all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import P
from weft.core import Layout, Mesh

LINE, SQUARE = Mesh({"x": 4}), Mesh({"dp": 2, "tp": 2})

LAYOUTS: dict[str, Layout] = {
    "line": Layout(LINE, (4096,), P("x")),
    "ragged": Layout(LINE, (4096,), P("x"), sizes={0: (0, 3000, 1000, 96)}),
    "square": Layout(SQUARE, (4096,), P(("tp", "dp"))),
    "columns": Layout(LINE, (8, 512), P(None, "x")),
    "rows": Layout(LINE, (512, 8), P("x")),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """One op on one operand, and the bytes that it may receive, forward and backward, by layout.

    `grad`: whether the results have one.
    """

    name: str
    fn: Callable[[torch.Tensor], Any]
    nbytes: dict[str, tuple[int, int]]
    grad: bool = True


def _same(nbytes: tuple[int, int], *names: str) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(names, nbytes)


def _steps(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0.25, 0.5, 0.9], dtype=dtype)


_LINES = ("line", "ragged", "square")

BOUNDS: list[Bound] = [
    # Of each other block a number or two per row.
    Bound("cumsum", lambda a: a.cumsum(-1), _same((24, 24), *_LINES) | {"columns": (192, 192)}),
    Bound("cumprod", lambda a: a.cumprod(-1), {"line": (24, 24), "columns": (192, 192)}),
    Bound("cummax", lambda a: a.cummax(-1), {"line": (48, 24), "columns": (384, 192)}),
    Bound("logcumsumexp", lambda a: a.logcumsumexp(-1),
          {"line": (48, 48), "columns": (384, 384)}),
    Bound("max", lambda a: a.max(-1), _same((48, 24), *_LINES) | {"columns": (384, 192)}),
    Bound("argmax", lambda a: a.argmax(-1), {"line": (48, 0), "columns": (384, 0)}, False),
    Bound("argmax_flat", lambda a: a.argmax(), _same((48, 0), "line", "square", "columns", "rows"),
          False),
    Bound("var", lambda a: a.var(-1), _same((48, 48), *_LINES) | {"columns": (384, 384)}),
    Bound("std", lambda a: a.std(), _same((48, 48), "line", "columns", "rows")),
    Bound("norm", lambda a: a.norm(), _same((24, 24), *_LINES, "columns", "rows")),
    Bound("norm_3", lambda a: torch.linalg.vector_norm(a, 3, -1),
          {"line": (24, 24), "columns": (192, 192)}),
    Bound("logsumexp", lambda a: a.logsumexp(-1),
          _same((48, 48), *_LINES) | {"columns": (384, 384)}),
    Bound("renorm", lambda a: a.renorm(2, 0, 1.0), {"columns": (192, 288), "rows": (0, 0)}),
    # Each block's candidates, or its own block of all that is sorted, and samples.
    Bound("topk_8", lambda a: a.topk(8, -1),
          _same((384, 192), *_LINES) | {"columns": (3072, 1536)}),
    Bound("topk_3000", lambda a: a.topk(3000, -1), {"line": (12392, 6128)}),
    Bound("sort", lambda a: a.sort(-1), {"line": (12572, 6248), "ragged": (12884, 6456),
                                         "square": (12572, 6248), "columns": (6144, 6144)}),
    Bound("argsort", lambda a: a.argsort(-1), {"line": (12572, 0), "columns": (6144, 0)}, False),
    Bound("msort", lambda a: a.msort(), {"line": (12572, 6248), "rows": (6144, 6144)}),
    # Samples, and one element.
    Bound("kthvalue", lambda a: a.kthvalue(100, -1),
          _same((3144, 24), *_LINES) | {"columns": (6144, 6144)}),
    Bound("median", lambda a: a.median(-1), {"line": (3168, 24), "columns": (6144, 6144)}),
    Bound("median_all", lambda a: a.median(), _same((3168, 0), "line", "columns", "rows"), False),
    Bound("quantile", lambda a: a.quantile(_steps(a.dtype), -1),
          {"line": (5320, 144), "columns": (6144, 6144)}),
    Bound("mode", lambda a: a.mode(-1), {"line": (12700, 6264), "columns": (6144, 6144)}),
    # What is distinct in each block.
    Bound("unique", lambda a: a.round().unique(return_inverse=True, return_counts=True),
          _same((384, 0), "line", "square", "rows"), False),
    Bound("unique_many", lambda a: a.unique(), {"line": (25092, 0)}, False),
    Bound("unique_consecutive", lambda a: a.unique_consecutive(),
          _same((24, 0), "line", "rows"), False),
    # What torch composes of others goes by its parts.
    Bound("trapezoid", torch.trapezoid, {"line": (32, 0), "columns": (80, 96)}),
    # Counts are sums of counts; where bins begin and end is a reduction.
    Bound("bincount", lambda a: (a.abs() * 4).long().bincount(), {"line": (32, 0)}, False),
    Bound("histc_of_data", lambda a: a.histc(), _same((32, 0), "line", "rows"), False),
    Bound("searchsorted", lambda a: torch.searchsorted(a, _steps(a.dtype)), _same((0, 0), *_LINES),
          False),
    Bound("bucketize", lambda a: torch.bucketize(a, _steps(a.dtype)),
          _same((0, 0), "line", "columns"), False),
    Bound("histc", lambda a: torch.histc(a, 10, -3, 3), _same((0, 0), "line", "columns"), False),
]

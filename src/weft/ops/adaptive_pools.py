"""Adaptive means: to a length that divides that of the dim they are means of equal windows.

To length 1 they are a mean of the dim, of which shards give partial values; to another length that
divides, an average pool, whose windows a sharded dim keeps. Elsewhere positions are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Composite
from weft.ops.pools import resized
from weft.rules import Call, op, page

__all__ = ["PAGE"]

_aten: Any = torch.ops.aten


def _means(num: int) -> Callable[..., Composite | None]:
    def layouts(
        call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
    ) -> Composite | None:
        """The dims whose windows are all alike go first; a sharded one is among them."""
        x, after = layouts[0], call.results[0].shape
        even = [dim for dim in range(x.ndim - num, x.ndim)
                if after[dim] and after[dim] != x.shape[dim] and x.shape[dim] % after[dim] == 0]
        if 0 in x.shape or not any(x.dims[dim] for dim in even):
            return None
        return Composite(partial(_pooled, num=num))

    return layouts


def _pooled(x: Tensor, output_size: Sequence[int], *, num: int) -> Tensor:
    wanted = [*output_size] * (num if len(output_size) == 1 else 1)
    dims = range(x.dim() - num, x.dim())
    single = [dim for dim, length in zip(dims, wanted) if length == 1]
    if single:
        x = x.mean(single, keepdim=True)
    kernel = [before // after if after and before % after == 0 else 1
              for before, after in zip(x.shape[-num:], wanted)]
    if any(size > 1 for size in kernel):
        x = getattr(_aten, f"avg_pool{num}d")(x, kernel)
    if list(x.shape[-num:]) != wanted:
        x = getattr(_aten, f"adaptive_avg_pool{num}d")(x, wanted)
    return x


PAGE = page(
    *[op(f"adaptive_avg_pool{num}d", resized(num), layouts=_means(num)) for num in (1, 2, 3)],
)

"""torch's fused kernel on blocks of keys: it returns the result and the log of each row's sum, by
which the results of several blocks are merged.

In a block, a row sees all keys, or those up to its own position, or none. So a block consists of at
most two rectangles that every row sees whole, and a square in which row i sees keys up to i.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ATTENTION", "Part", "attend", "gradients", "parts", "serves"]


def _of_any_heads(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As torch's, of which some before version 2.13 end the process of a rank without heads."""
    if query.ndim < 3 or query.shape[-3]:
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    key, value = key.narrow(-3, 0, 0), value.narrow(-3, 0, 0)
    return query @ key.transpose(-2, -1) @ value


ATTENTION: Any = F.scaled_dot_product_attention if torch.__version__ >= "2.13" else _of_any_heads
"""`scaled_dot_product_attention` of local tensors."""

_OF_CPU = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
           torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
_KERNELS: dict[str, tuple[Any, Any]] = {"cpu": _OF_CPU, "meta": _OF_CPU}
"""Per type of device, the kernel and its gradient. They read operands whose features are adjacent
in memory, and give wrong numbers for others; empty ones end the process. Tensors without memory
take the CPU's, as everywhere."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of the queries and columns of a block, each row of which sees all of them, or those up
    to its own number."""

    rows: slice
    columns: slice
    is_causal: bool


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes the operands: samples and heads, of which keys may have fewer, or
    one for each group of them."""
    if q.device.type not in _KERNELS or not q.is_floating_point() or q.dim() not in (3, 4, 5):
        return False
    query, key = q.shape, k.shape
    return (
        len(query) == len(key) and key[:-1] == v.shape[:-1] and query[:-3] == key[:-3]
        and key[-3] in ((1,) if len(query) == 5 else (1, query[-3]))
        and query[-1] == v.shape[-1] and q.numel() > 0 and k.numel() > 0
    )


def parts(
    num_rows: int, num_columns: int, first: int, column: int, is_causal: bool
) -> Iterator[Part]:
    """The parts of keys from position `column` on that rows from position `first` on see."""
    if not is_causal:
        yield Part(slice(0, num_rows), slice(0, num_columns), False)
        return
    row = max(column - first, 0)  # the first that sees any
    before = min(first + row - column, num_columns)  # all rows from there on see these
    if before and row < num_rows:
        yield Part(slice(row, num_rows), slice(0, before), False)
    side = min(num_rows - row, num_columns - before)
    if side <= 0:
        return
    yield Part(slice(row, row + side), slice(before, before + side), True)
    if row + side < num_rows:
        yield Part(slice(row + side, num_rows), slice(before, num_columns), False)


def attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, and the logs of the sums of exp(score)."""
    kernel, _ = _KERNELS[q.device.type]
    out, logs = kernel(*map(_given, (q, k, v)), 0.0, is_causal, scale=scale)
    return out.reshape(q.shape), logs.reshape(q.shape[:-1])


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of queries, keys and values; `out` and `logs` may be of more keys than these."""
    _, kernel = _KERNELS[q.device.type]
    given = [*map(_given, (grad, q, k, v, out)), _given(logs.unsqueeze(-1)).squeeze(-1)]
    found = kernel(*given, 0.0, is_causal, scale=scale)
    return tuple([one.reshape(like.shape) for one, like in zip(found, (q, k, v))])  # type: ignore


def _given(x: Tensor) -> Tensor:
    """Samples, heads, rows and features, these adjacent."""
    if x.dim() == 5:
        x = x.flatten(-4, -3)
    elif x.dim() == 3:
        x = x.unsqueeze(0)
    return x if x.stride(-1) == 1 else x.contiguous()

"""The arithmetic of an operation on local tensors, and the memory that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from weft.tensor.trace.trees import flatten, map_tensors

__all__ = ["ATTENTION", "EMPTY", "LSTM", "flops_of", "traffic_of"]

_aten: Any = torch.ops.aten
EMPTY = (
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
)
"""Ops that make memory, and write nothing to it."""

_ROWS = (
    _aten.embedding.default, _aten.index_select.default, _aten.gather.default, _aten.index.Tensor,
)
"""Ops that read as much as they write, of an operand that may be larger."""

ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
LSTM = _aten.mkldnn_rnn_layer
_FLOPS: dict[Any, Any] = dict(flop_registry)
_FLOPS[ATTENTION] = flop_registry[_aten._scaled_dot_product_flash_attention]


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, *_: Any, **__: Any
) -> int:
    """Five products: the scores again, and the gradients of both factors of either product."""
    heads = query[0] * query[1] * query[2]
    return 2 * heads * key[2] * (3 * query[3] + 2 * value[3])


def _of_shapes(function: Any) -> Any:
    def run(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        args, kwargs = map_tensors(lambda tensor: tensor.shape, (args, kwargs))
        return function(*args, **kwargs)

    return run


_FLOPS[_aten._scaled_dot_product_flash_attention_for_cpu_backward] = _of_shapes(_attention_backward)


def _grouped_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Rows are those of one group each, where one operand is cut into groups; where both are, it is
    what they are multiplied along."""
    groups = a[0] if len(a) == 3 and len(b) == 2 else 1
    return 2 * math.prod(a) * b[-1] // groups


def _layer_of_lstm(x: Any, weight: Any, again: Any, *_: Any, **__: Any) -> int:
    """The products of each step with both weights."""
    return 2 * x[0] * x[1] * (math.prod(weight) + math.prod(again))


_FLOPS[LSTM] = _of_shapes(_layer_of_lstm)
_FLOPS[_aten.mkldnn_rnn_layer_backward] = _of_shapes(
    lambda *shapes, **_: 2 * _layer_of_lstm(*shapes))
_FLOPS[_aten._grouped_mm] = _of_shapes(_grouped_product)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of products, convolutions and attention, by torch's formulas."""
    count = _FLOPS.get(func.overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=out)


def traffic_of(func: Any, given: Sequence[torch.Tensor], out: Any) -> int | None:
    """Bytes that an operation reads and writes; None for views and for memory that is only made."""
    if func in EMPTY or func.is_view:
        return None
    results = flatten(out)
    written = sum(map(_nbytes, results))
    return 2 * written if func in _ROWS else sum(map(_nbytes, given)) + written


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of its memory, if the tensor repeats it."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())

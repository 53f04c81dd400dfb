"""Grouped matrix products: consecutive groups of rows, each multiplied by its own matrix.

`grouped_mm(a, b, offs)` serves layers of experts whose tokens are sorted by expert. A rank that
holds some of the rows computes its own offsets. Matrices that are sharded stay where they are, and
rows move to them (`weft.tensor.families.grouped`). torch's kernels need lines that begin at
multiples of 16 bytes; a shard of another length is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Local
from weft.rules import Call, rule

__all__ = ["RULE", "by_rows", "matrices_as_they_are", "product", "result"]

RULE = rule(
    "m k, e! k n, [offsets!] -> m n",
    "e m k, e k n, [offsets!] -> e m n",
    "e! m k, k n!, [e!] -> m n!",  # groups of columns
    "m k!, k! n, [e!] -> e m n",  # or groups of the factor that is summed over
    linear=[0, 1],
)


def by_rows(call: Call) -> bool:
    """Whether the groups are of rows: a matrix each, and one list of rows."""
    return len(call.tensors[0].shape) == 2 and len(call.tensors[1].shape) == 3


def matrices_as_they_are(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Local | None:
    """A rank with some of the rows has its own offsets."""
    rule = RULE.bind(call, wants_grad)
    if rule is None:
        return None
    decision = replace(propagate.decide(rule, call, layouts, wants_grad), by_form=False)
    dtype: Any = call.get("out_dtype")

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        if not by_rows(call):
            return lambda a, b, offs=None: product(a, b, offs, dtype)
        assert mesh.here is not None
        rows = decision.operands[0].box_at(mesh.here)[0]
        num_rows = call.tensors[0].shape[0]

        def local(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
            if rows != (0, num_rows):
                offs = (offs - rows[0]).clamp(0, rows[1] - rows[0])
            return product(a, b, offs, dtype)

        return local

    return Local(decision, bind)


def product(a: Tensor, b: Tensor, offs: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """grouped_mm for any lengths."""
    if b.dim() == 3 and not len(b):
        nothing = a @ b.sum(0)  # keeps both in the graph; autocast may give it another dtype
        return nothing.to(dtype or a.dtype)
    line, columns = 16 // a.element_size(), b.shape[-1]
    missing = _missing(a.shape[-1], line)
    if missing:
        a, b = functional.pad(a, (0, missing)), functional.pad(b, (0, 0, 0, missing))
    missing = _missing(columns, line)
    if missing:
        b = functional.pad(b, (0, missing))
    product = torch._grouped_mm(_laid(a, line), _laid(b, line), offs=offs, out_dtype=dtype)
    if not missing:
        return product
    return product.narrow(-1, 0, columns).clone(memory_format=torch.contiguous_format)


def _missing(length: int, line: int) -> int:
    return max(-(-length // line), 1) * line - length


def _laid(matrix: Tensor, line: int) -> Tensor:
    """The matrix as torch's kernels take it: by rows or by columns, each beginning at a whole
    line."""
    rows, columns = matrix.stride()[-2:]
    lines = rows if columns == 1 and rows >= matrix.shape[-1] else columns if rows == 1 else 1
    fits = lines % line == 0 and matrix.data_ptr() % 16 == 0
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)


def result(
    a: Tensor, b: Tensor, offs: Tensor | None = None,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """The result for all dtypes that kernels take; torch's meta kernel knows bfloat16 alone."""
    dtype, line = a.dtype, 16 // a.element_size()
    if dtype not in (torch.float32, torch.float16) or b.dtype != dtype or bias is not None:
        return None
    if out_dtype not in (None, dtype):
        raise RuntimeError("Grouped gemm output dtype must match `mat_a` dtype")

    def like(matrix: Tensor) -> Tensor:
        inner = matrix.stride()[-2:]
        if 1 in inner and max(inner) % line:
            raise RuntimeError("strides should be multiple of 16 bytes")
        shape = matrix.shape
        padded = torch.empty((*shape[:-1], shape[-1] + 8 - shape[-1] % 8), dtype=torch.bfloat16,
                             device="meta")
        return padded.narrow(-1, 0, shape[-1])

    if min(a.dim(), b.dim()) < 2:
        return None
    shape = torch.ops.aten._grouped_mm.default(like(a), like(b), offs).shape
    padded = -(-shape[-1] // line) * line if torch.version.cuda else shape[-1]
    return a.new_empty((*shape[:-1], padded)).narrow(-1, 0, shape[-1])

"""Grouped matrix products: rows in stretches, each stretch times a matrix of its own.

`grouped_mm(a, b, offs)` is what layers of experts do with tokens sorted by expert. A rank that
holds some of the rows has its own offsets; one that holds some of the matrices multiplies their
stretch alone, and the others' rows are zeros of a sum. Torch's kernels ask for lines that begin at
multiples of 16 bytes; a shard of other lengths is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Local
from weft.rules import Call, Rule
from weft.rules.notation import FactorDims

__all__ = ["grouped_lookup"]


def grouped_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """grouped_mm; a bias, which has no kernel yet, has no rule either."""
    if len(call.tensors) not in (2, 3):
        return None
    decision = replace(propagate.decide(_rule(call), call, layouts, wants_grad), by_form=False)
    by_rows = len(call.tensors[0].shape) == 2 and len(call.tensors[1].shape) == 3
    dtypes = [arg for arg in (*call.args[3:], *call.kwargs.values())
              if isinstance(arg, torch.dtype)]
    dtype = dtypes[0] if dtypes else None

    def bind(mesh: BoundMesh) -> Callable[..., Tensor]:
        if not by_rows:
            return lambda a, b, offs=None: _product(a, b, offs, dtype)
        assert mesh.here is not None
        rows = decision.operands[0].box_at(mesh.here)[0]
        groups = decision.operands[1].box_at(mesh.here)[0]
        num_rows, num_groups = call.tensors[0].shape[0], call.tensors[1].shape[0]

        def local(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
            if rows != (0, num_rows):
                offs = (offs - rows[0]).clamp(0, rows[1] - rows[0])
            if groups == (0, num_groups):
                return _product(a, b, offs, dtype)
            return _of_some(a, b, offs, groups, dtype)

        return local

    return Local(decision, bind)


def _rule(call: Call) -> Rule:
    a, b = (tensor.shape for tensor in call.tensors[:2])
    left: FactorDims = (("m",), ("k",)) if len(a) == 2 else (("e",), ("m",), ("k",))
    right: FactorDims = (("k",), ("n",)) if len(b) == 2 else (("e",), ("k",), ("n",))
    result: FactorDims = (("m",), ("n",)) if len(a) != len(b) else (("e",), ("m",), ("n",))
    sizes = {"m": a[-2], "k": a[-1], "n": b[-1], "e": call.results[0].shape[0]}
    whole: set[str] = set()
    operands: list[FactorDims] = [left, right]
    if len(call.tensors) == 3:
        sizes["e"] = sizes["offs"] = call.tensors[2].shape[0]
        whole.add("offs")
        operands.append((("offs",),))
        if len(b) == 2:  # stretches of columns, or of what is summed over
            whole |= {"n"} if len(a) == 3 else {"k"}
            whole.add("e")
    reduce = {name: "sum" for name in ("k", "e") if (name,) not in result}
    return Rule(
        tuple(operands), (result,), sizes, reduce=reduce, whole=frozenset(whole),
        linear=((0,), (1,)),
    )


def _of_some(
    a: Tensor, b: Tensor, offs: Tensor, groups: tuple[int, int], dtype: torch.dtype | None
) -> Tensor:
    """The rows of my groups; those of others are zero. Where my groups begin is read."""
    if not b.shape[0]:
        nothing = a @ b.sum(0)  # both in the graph
        return nothing if dtype is None else nothing.to(dtype)
    first, last = groups
    start, stop = ([0, *offs.clamp(0, a.shape[0]).tolist()][at] for at in (first, last))
    stop = max(start, stop)
    made = _product(a[start:stop], b, offs[first:last] - start, dtype)
    return functional.pad(made, (0, 0, start, a.shape[0] - stop))


def _product(a: Tensor, b: Tensor, offs: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """grouped_mm of any lengths."""
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
    """As torch's kernels take it: by rows or by columns, each beginning at a whole line."""
    rows, columns = matrix.stride()[-2:]
    lines = rows if columns == 1 and rows >= matrix.shape[-1] else columns if rows == 1 else 1
    fits = lines % line == 0 and matrix.data_ptr() % 16 == 0
    return matrix if fits else matrix.clone(memory_format=torch.contiguous_format)

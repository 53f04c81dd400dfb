"""Joins of several tensors: cat, stack and their kin. They only move elements, so partial values of
every kind pass where all operands have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.ops.sole_holder import STACK, stacked
from weft.rules import Call, FactorDims, Rule, op, page, rule
from weft.rules.factors import dims, names, one_dim

__all__ = ["PAGE"]


def _cat(call: Call, wants_grad: Any) -> Rule:
    """The operands' dims are consecutive parts of the result's dim."""
    result, tensors = call.results[0], call.tensors
    ndim = len(result.shape)
    dim = one_dim(call.get("dim", 0), ndim)
    kinds, factors = dims(ndim), names(ndim)
    # An operand of shape (0,) may occur among others of any shape and adds nothing.
    has_dims = [len(tensor.shape) == ndim for tensor in tensors]
    operands: list[FactorDims] = [kinds if fits else (("nothing",),) for fits in has_dims]
    lengths = [fits and tensor.shape[dim] for tensor, fits in zip(tensors, has_dims)]
    same = all(tensor.dtype == result.dtype for tensor in tensors)
    return Rule(
        tuple(operands), (kinds,), dict(zip(factors, result.shape), nothing=0),
        whole=frozenset({"nothing"}), linear=(tuple(range(len(tensors))),) if same else (),
        moves=True, offsets={factors[dim]: tuple(accumulate([0, *lengths[:-1]]))},
    )


def _block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """Blocks padded to the whole width, then a `cat` of rows: any dim may be sharded."""
    blocks = [torch.atleast_2d(one) for one in tensors]
    dtype = torch.result_type(blocks[0], blocks[0])
    for one in blocks:
        dtype = torch.promote_types(dtype, one.dtype)
    width, rows, at = sum(one.shape[1] for one in blocks), [], 0
    for one in blocks:
        pad = [at, width - at - one.shape[1]]
        rows.append(torch.constant_pad_nd(one.to(dtype), pad))
        at = at + one.shape[1]
    return torch.cat(rows, 0)


PAGE = page(
    op("cat concat concatenate", rule(_cat)),
    op("stack", STACK, layouts=stacked, floats_flow=True),
    op("block_diag", compose=_block_diag),
)

"""Linear algebra on batches: matrices are whole, batch dims broadcast from the right and pass.

Kernels and derivatives of factorizations may refuse an empty batch, so no shard is empty. The
columns of right-hand sides pass as well, because each is a system of its own. A result that was not
requested has length 0. For matrices of many rows see `weft.ops.tall_factorizations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.rules import Call, op, page, rule

__all__ = ["PAGE"]


def _by_side(left: str, right: str) -> Callable[[Call, Any], str]:
    """The string for unknowns multiplied from the left, or from the right."""
    return lambda call, wants_grad: left if call.get("left", True) else right


def _solve(call: Call, wants_grad: Any) -> str | None:
    """`linalg_solve(A, B)`; B may be a batch of vectors."""
    left, right = (tensor.shape for tensor in call.tensors)
    if len(right) == 1 or right == left[:-1]:
        return "...>0 i i, ... i! -> ... i!"
    if len(right) == len(left) - 1:
        return None  # one matrix for all: a shard of the batch may look like one vector each
    return _SOLVE(call, wants_grad)


_SOLVE = _by_side("...>0 i i, ... i! n>0 -> ... i! n", "...>0 i i, ... n>0 i! -> ... n i!")


def _solve_ex(more: str) -> Callable[[Call, Any], str | None]:
    """The other results describe A for all columns, so the columns are whole."""
    def text(call: Call, wants_grad: Any) -> str | None:
        found = _solve(call, wants_grad)
        return None if found is None else f"{found.replace('n>0', 'n!')}, {more}"

    return text


def _factors(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The factors of a matrix lie column by column; torch has no meta kernel."""
    if x.dim() < 2 or not (x.is_floating_point() or x.is_complex()):
        return None
    factors = x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2])).mT
    return factors, x.new_empty((*x.shape[:-2], min(x.shape[-2:])))


def _check_errors(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """torch's error on all ranks, about the first matrix of all that has one."""
    if info.any():
        whole = torch.tensor(info.tolist(), dtype=info.dtype)
        torch.ops.aten._linalg_check_errors(whole, api_name, is_matrix=is_matrix)


PAGE = page(
    op("det linalg_det logdet", rule("...>0 i i -> ...")),
    op("slogdet linalg_slogdet", rule("...>0 i i -> ..., ...")),
    op("_linalg_det", rule("...>0 i i -> ..., ... i i, ... i!")),
    op("_linalg_slogdet", rule("...>0 i i -> ..., ..., ... i i, ... i!")),
    op("_linalg_eigh", rule("...>0 i i -> ... i!, ... i i", "...>0 i i -> ... i!, none!")),
    op("_linalg_svd", rule("...>0 m! n! -> ... m! u!, ... k!, ... v! n!",
                           "...>0 m! n! -> none!, ... k!, none!")),
    op("linalg_cond", rule("...>0 m! n! -> ...")),
    op("linalg_matrix_rank", rule("...>0 m! n!, [...], [...] -> ...")),
    op("inverse linalg_inv cholesky linalg_cholesky cholesky_inverse matrix_exp linalg_matrix_exp",
       rule("...>0 i i -> ... i i")),
    op("matrix_power linalg_matrix_power",
       rule("...>0 i i -> ... i i", serves=lambda call: call.args[1] < 1)),
    op("linalg_inv_ex linalg_cholesky_ex", rule("...>0 i i -> ... i i, ...")),
    op("geqrf", rule("...>0 m! n! -> ... m! n!, ... k!"), result=_factors),
    op("linalg_eigh linalg_eig", rule("...>0 i i -> ... i!, ... i i")),
    op("linalg_eigvalsh linalg_eigvals", rule("...>0 i i -> ... i!")),
    op("svd", rule("...>0 m! n! -> ... m! u!, ... k!, ... n! v!")),
    op("linalg_lu", rule("...>0 m! n! -> ... m m, ... m! k!, ... k! n!",
                         "...>0 m! n! -> none!, ... m! k!, ... k! n!")),
    op("linalg_lu_factor", rule("...>0 m! n! -> ... m! n!, ... k!")),
    op("linalg_lu_factor_ex", rule("...>0 m! n! -> ... m! n!, ... k!, ...")),
    op("linalg_ldl_factor", rule("...>0 i i -> ... i i, ... i!")),
    op("linalg_ldl_factor_ex", rule("...>0 i i -> ... i i, ... i!, ...")),
    op("lu_unpack", rule("...>0 m! n!, ... k! -> ... m m, ... m! k!, ... k! n!",
                         "...>0 m! n!, ... k! -> ... m m, none!, none!",
                         "...>0 m! n!, ... k! -> none!, ... m! k!, ... k! n!",
                         "...>0 m! n!, ... k! -> none!, none!, none!")),
    op("linalg_householder_product", rule("...>0 m! n!, ... k! -> ... m! n!")),
    op("linalg_solve", rule(_solve, linear=[1])),
    op("linalg_solve_ex", rule(_solve_ex("..."))),
    # What torch's gradients and torch.func call: the factors come along.
    op("_linalg_solve_ex", rule(_solve_ex("... i i, ... i!, ..."))),
    op("_linalg_check_errors", compose=_check_errors, each_call=True),
    op("linalg_solve_triangular", rule(_SOLVE, linear=[1])),
    op("triangular_solve", rule("...>0 m! n!, ... i i -> ... m! n!, ... i i")),
    op("cholesky_solve", rule("...>0 m! n>0, ... m m -> ... m! n", linear=[0])),
    op("lu_solve", rule("...>0 m! n>0, ... m m, ... m! -> ... m! n", linear=[0])),
    op("linalg_lu_solve linalg_ldl_solve", rule(
        _by_side("...>0 i i, ... i!, ... i! n>0 -> ... i! n",
                 "...>0 i i, ... i!, ... n>0 i! -> ... n i!"), linear=[2])),
    op("ormqr", rule(_by_side("...>0 i! k!, ... t!, ... m! n>0 -> ... m! n",
                              "...>0 i! k!, ... t!, ... m>0 n! -> ... m n!"), linear=[2])),
    op("linalg_cross", rule("... s!, ... s! -> ... s", along="dim")),
)

"""Sums, means and extrema, with `keepdim`, over one dim, several or all; gradients with ties."""

from __future__ import annotations

import torch

from tests.cases import Case, bools, case, integers, reals

_NODE = torch.aminmax(torch.ones(1, requires_grad=True)).min.grad_fn
AMINMAX_HAS_GRADIENT = _NODE is not None and "NotImplemented" not in _NODE.name()
"""Torch 2.11 has none."""


def _tied(*shape: int):
    """Few different values, so that extrema are attained several times."""
    return integers(*shape, low=-2, high=2, dtype=torch.float64)


_DIMS = {
    "all": {}, "0": {"dim": 0}, "1": {"dim": 1}, "last_keep": {"dim": -1, "keepdim": True},
    "0_keep": {"dim": 0, "keepdim": True}, "01": {"dim": (0, 1)},
    "12_keep": {"dim": (1, 2), "keepdim": True},
}

CASES: list[Case] = [
    case(f"{name}_{tag}", lambda a, fn=fn, options=options: fn(a, **options), make(5, 4, 3))
    for name, fn, make in (
        ("sum", torch.sum, reals), ("mean", torch.mean, reals), ("amax", torch.amax, _tied),
        ("amin", torch.amin, _tied),
    )
    for tag, options in _DIMS.items()
] + [
    case("sum_method", lambda a: a.sum(1).sum(), reals(5, 4, 3)),
    case("mean_of_mean", lambda a: a.mean(0).mean(), reals(5, 4)),
    case("mean_square", lambda a: (a**2).mean(), reals(7, 3)),
    case("centre", lambda a: a - a.mean(0, keepdim=True), reals(7, 3)),
    case("scale_by_sum", lambda a: a / a.abs().sum(-1, keepdim=True), reals(7, 3)),
    case("sum_int", lambda a: a.sum(), integers(5, 4), grad=False),
    case("sum_int32", lambda a: a.sum(0), integers(5, 4, dtype=torch.int32), grad=False),
    case("sum_bool", lambda a: a.sum(1), bools(5, 4), grad=False),
    case("sum_dtype", lambda a: a.sum(0, dtype=torch.float64), reals(5, 4, dtype=torch.float32)),
    case("mean_dtype", lambda a: a.mean(dtype=torch.float64), integers(5, 4), grad=False),
    case("sum_no_dims", lambda a: torch.sum(a, dim=()), reals(5, 4)),
    case("sum_zero_dim", lambda a: a.sum(), reals()),
    case("sum_of_empty", lambda a: a.sum(0), reals(0, 4)),
    case("mean_of_empty", lambda a: a.mean(0), reals(0, 4)),
    case("max_all", lambda a: a.max(), _tied(5, 4)),
    case("min_all", lambda a: a.min(), _tied(5, 4)),
    case("max_dim", lambda a: tuple(a.max(0)), reals(5, 4)),
    case("max_dim_ties", lambda a: tuple(torch.max(a, 1, keepdim=True)), _tied(5, 4)),
    case("argmax", lambda a: a.argmax(1), _tied(5, 4), grad=False),
    case("argmax_all", lambda a: a.argmax(), reals(5, 4), grad=False),
    case("argmin_keep", lambda a: a.argmin(0, keepdim=True), _tied(5, 4), grad=False),
    case("any", lambda a: a.any(0), bools(5, 4), grad=False),
    case("all", lambda a: a.all(), bools(5, 4), grad=False),
    case("all_keep", lambda a: torch.all(a, 1, keepdim=True), bools(5, 4), grad=False),
    case("prod", lambda a: a.prod(1), reals(5, 4)),
    case("var", lambda a: a.var(0), reals(5, 4)),
    case("var_keep", lambda a: a.var(-1, keepdim=True, unbiased=False), reals(5, 4)),
    case("std", lambda a: a.std(), reals(5, 4)),
    case("norm", lambda a: a.norm(), reals(5, 4)),
    case("vector_norm", lambda a: torch.linalg.vector_norm(a, dim=1), reals(5, 4)),
    case("vector_norm_inf", lambda a: torch.linalg.vector_norm(a, torch.inf), reals(5, 4)),
    case("logsumexp", lambda a: torch.logsumexp(a, 1), reals(5, 4)),
    # These consist of other ops.
    case("aminmax_rows", lambda a: torch.aminmax(a, dim=0), reals(5, 4),
         grad=AMINMAX_HAS_GRADIENT),
    case("aminmax_columns", lambda a: torch.aminmax(a, dim=1), reals(5, 4),
         grad=AMINMAX_HAS_GRADIENT),
    case("aminmax_all", lambda a: torch.aminmax(a), reals(5, 4), grad=AMINMAX_HAS_GRADIENT),
    case("norm_of_largest", lambda a: torch.linalg.vector_norm(a, torch.inf, 0), reals(5, 4)),
    case("norm_of_least", lambda a: torch.linalg.vector_norm(a, -torch.inf, 1), reals(5, 4)),
    case("norm_of_rows", lambda a: torch.linalg.matrix_norm(a, torch.inf), reals(5, 4)),
    *(
        case(f"norm_of_no_{name}", lambda a, ord=ord: torch.linalg.matrix_norm(a, ord),
             reals(0, 0), grad=False)
        for name, ord in (("rows", torch.inf), ("columns", 1))
    ),
    case("mean_of_halves", lambda a: a.mean(0), reals(5, 4, dtype=torch.bfloat16)),
    case("count_nonzero", lambda a: torch.count_nonzero(a), integers(5, 4, high=2), grad=False),
    case("amax_nan", lambda a: torch.amax(torch.log(a), 0), _tied(5, 4), grad=False),
    case("sum_item", lambda a: a.sum().item(), reals(5, 4), grad=False),
    case("mean_float", lambda a: float(a.mean()), reals(5, 4), grad=False),
    case("bool_of_any", lambda a: bool((a > 1).any()), reals(5, 4), grad=False),
    case("tolist", lambda a: a.sum(0).tolist(), reals(5, 4), grad=False),
] + [
    case(f"{name}_of_{dtype}s_{tag}", lambda a, name=name, dims=dims: getattr(a, name)(*dims),
         integers(3, 4, 2, high=2, dtype=getattr(torch, dtype)), grad=False)
    for name in ("all", "any") for dtype in ("uint8", "bool")
    for tag, dims in (("all", ()), ("none", ((),)), ("some", ((0, 2),)))
] + [
    case(f"{name}_over_no_dims", lambda a, name=name: getattr(a, name)(()), reals(5, 4))
    for name in ("nansum", "nanmean")
] + [
    case("spread_of_a_number", lambda a: torch.std_mean(a.sum(), dim=0, correction=0),
         reals(5, 4)),
    case("var_of_a_number", lambda a: a.sum().var(-1, unbiased=False), reals(5, 4)),
]

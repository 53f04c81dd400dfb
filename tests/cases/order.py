"""Sorts, order statistics, places of extrema, moments, norms and counts."""

from __future__ import annotations

from typing import Any

import torch

from tests.cases import Case, bools, case, given, integers, positives, reals
from tests.cases.reduction import AMINMAX_HAS_GRADIENT

_INF, _NAN = torch.inf, torch.nan
_UNSUMMED = ("r", "s0", "s0!", "s0?", "s0%", "s0.d", "s0.dt", "s0.td", "s0.dt!", "s0.td?")
"""Values that no terms add up to: infinite ones, NaN."""


def _tied(*shape: int, dtype: torch.dtype = torch.float64, **options: Any):
    """Few different values, so that there are ties."""
    return integers(*shape, low=-2, high=3, dtype=dtype, **options)


def _wild(*values: float):
    return given(values, torch.float64)


def _pairs(name: str, *args: Any, **options: Any):
    """What the function returns, as a tuple."""
    return lambda a: tuple(getattr(torch, name)(a, *args, **options))


def _unlike(*shape: int, dtype: torch.dtype = torch.float64):
    """Numbers of which no two are equal, in an order drawn at random."""
    def make(generator: torch.Generator) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return (torch.randperm(count, generator=generator) - count // 2).view(shape).to(dtype) / 4

    found = reals(*shape)
    return type(found)(shape, make)


SORTS: list[Case] = [
    case("sort_line", _pairs("sort", dim=0, stable=True), _tied(19), per_mesh=8),
    case("sort_unlike", _pairs("sort"), _unlike(19), per_mesh=6),
    case("sort_descending", _pairs("sort", dim=0, descending=True, stable=True), _tied(11),
         per_mesh=6),
    case("sort_rows", _pairs("sort", dim=-1, stable=True), _tied(2, 13), per_mesh=8),
    case("sort_columns", _pairs("sort", dim=0, stable=True), _tied(13, 3), per_mesh=8),
    case("sort_one_column", _pairs("sort", dim=0, stable=True), _tied(13, 1), per_mesh=8),
    case("sort_middle", _pairs("sort", dim=1, stable=True), _tied(2, 7, 2), per_mesh=8),
    case("sort_wild", _pairs("sort", stable=True), _wild(1, _NAN, -_INF, 0, -0.0, _INF, _NAN, -3),
         layouts=(_UNSUMMED,), per_mesh=8),
    case("sort_wild_down", _pairs("sort", descending=True, stable=True),
         _wild(1, _NAN, -_INF, 0, -0.0, _INF, _NAN, -3), layouts=(_UNSUMMED,), per_mesh=8),
    case("sort_int", _pairs("sort", stable=True),
         given([2**62, -(2**63), 5, 2**63 - 1, 5, -1, 0]), grad=False,
         layouts=(_UNSUMMED,), per_mesh=6),
    case("sort_bool", _pairs("sort", stable=True), bools(9), grad=False),
    case("sort_float32", _pairs("sort", stable=True), _tied(9, dtype=torch.float32)),
    case("sort_bfloat16", _pairs("sort", stable=True), _tied(9, dtype=torch.bfloat16)),
    case("sort_constant", _pairs("sort", stable=True), integers(9, high=1, dtype=torch.float64),
         per_mesh=6),
    case("argsort", lambda a: a.argsort(stable=True), _tied(17), grad=False, per_mesh=6),
    case("argsort_down", lambda a: torch.argsort(a, dim=0, descending=True, stable=True),
         _tied(3, 1), grad=False),
    case("msort", torch.msort, _unlike(17), per_mesh=6),
    case("sort_of_empty", _pairs("sort"), reals(0)),
    case("sort_no_dims", _pairs("sort"), reals()),
    case("ranks", lambda a: a.argsort(stable=True).argsort(stable=True), _tied(11), grad=False),
    case("topk_1", _pairs("topk", 1, 0), _unlike(17, 2), per_mesh=6),
    case("topk_3", _pairs("topk", 3), _unlike(65), per_mesh=6),
    case("topk_many", _pairs("topk", 12), _unlike(17), per_mesh=6),
    case("topk_smallest", _pairs("topk", 4, dim=0, largest=False), _unlike(65, 2), per_mesh=6),
    case("topk_rows", _pairs("topk", 2, -1), _unlike(3, 40), per_mesh=6),
    case("topk_0", _pairs("topk", 0), _unlike(17)),
    case("topk_all", _pairs("topk", 9), _unlike(9)),
    case("topk_float32", _pairs("topk", 2), _unlike(64, dtype=torch.float32)),
    case("top_mask", lambda a: a.masked_fill(a < a.topk(3)[0].min(), 0.0), _unlike(60)),
]

STATISTICS: list[Case] = [
    case("kthvalue", _pairs("kthvalue", 5, 0), _unlike(17, 2), per_mesh=6),
    case("kthvalue_last", _pairs("kthvalue", 17, keepdim=True), _unlike(2, 17), per_mesh=6),
    case("kthvalue_line", lambda a: a.kthvalue(3)[0], _tied(17), grad=False, per_mesh=6),
    case("mode", lambda a: a.mode(0)[0], integers(17, high=5, dtype=torch.float64), grad=False,
         per_mesh=8),
    case("mode_at", lambda a: a.gather(0, a.mode(0, True)[1]), _tied(13, 1), grad=False,
         per_mesh=6),
    case("mode_of_one", _pairs("mode"), reals(1)),
    case("mode_of_few", lambda a: a.mode(-1)[0], given([3, 1, 3, 1, 2], torch.float64), per_mesh=6),
    case("median_dim", _pairs("median", 0), _unlike(17, 2), per_mesh=6),
    case("median_even", _pairs("median", -1, True), _unlike(2, 12), per_mesh=6),
    case("median_nan", _pairs("median", 0), _wild(1, 4, _NAN, 2, 9, _NAN, 3),
         layouts=(_UNSUMMED,), per_mesh=6),
    case("nanmedian", _pairs("nanmedian", 0), _wild(1, 4, _NAN, 2, 9, _NAN, 3, 7),
         layouts=(_UNSUMMED,), per_mesh=6),
    case("nanmedian_none", lambda a: a.nanmedian(0)[0], _wild(*[_NAN] * 5),
         layouts=(_UNSUMMED,), per_mesh=6, grad=False),
    case("median_all", lambda a: a.median(), _tied(5, 3), per_mesh=8),
    case("median_all_nan", lambda a: a.median(), _wild(1, 4, _NAN, 2, 9, _NAN, 3),
         layouts=(_UNSUMMED,), per_mesh=2),
    case("median_all_int", lambda a: a.median(), integers(5, 3), per_mesh=8, grad=False),
    case("nanmedian_all", lambda a: a.nanmedian(), _wild(1, 4, _NAN, 2, 9, _NAN, 3, 7),
         layouts=(_UNSUMMED,), per_mesh=6),
    *(case(f"quantile_{mode}", lambda a, mode=mode: a.quantile(0.37, 0, interpolation=mode),
           _unlike(11, 2), per_mesh=6)
      for mode in ("linear", "lower", "higher", "midpoint", "nearest")),
    case("quantiles", lambda a: torch.quantile(
        a, torch.tensor([0, 0.25, 0.4, 1], dtype=a.dtype), 0), _unlike(11, 2), per_mesh=6),
    case("quantiles_keep", lambda a: torch.quantile(
        a, torch.tensor([0.1, 0.9], dtype=a.dtype), -1, keepdim=True), _unlike(3, 9), per_mesh=6),
    case("quantile_all", lambda a: torch.quantile(a, 0.6), _unlike(3, 5), per_mesh=6),
    case("quantile_all_keep", lambda a: torch.quantile(
        a, torch.tensor([0.6], dtype=a.dtype), keepdim=True), _unlike(3, 5), per_mesh=6),
    case("quantile_nan", lambda a: torch.quantile(a, 0.3), _wild(1, 4, _NAN, 2, 9),
         layouts=(_UNSUMMED,), grad=False),
    case("nanquantile", lambda a: torch.nanquantile(a, 0.3, 0), _wild(1, 4, _NAN, 2, 9, _NAN, 8),
         layouts=(_UNSUMMED,), per_mesh=6),
    case("quantile_inf", lambda a: torch.quantile(a, 0.9), _wild(1, _INF, 4, _INF, 2),
         layouts=(_UNSUMMED,), grad=False),
]

PLACES: list[Case] = [
    case("max_rows", _pairs("max", 0), _tied(7, 3), per_mesh=8),
    case("min_rows", _pairs("min", 0, keepdim=True), _tied(7, 3), per_mesh=8),
    case("max_middle", _pairs("max", 1), _tied(2, 7, 3), per_mesh=8),
    case("max_nan", _pairs("max", 0), _wild(1, 3, _NAN, 2, _NAN, 7), layouts=(_UNSUMMED,),
         per_mesh=8),
    case("max_lowest", _pairs("max", 0), _wild(*[-_INF] * 5), layouts=(_UNSUMMED,), per_mesh=8),
    case("min_int", _pairs("min", 0), integers(9, high=3), grad=False, per_mesh=6),
    case("argmax_rows", lambda a: a.argmax(0), _tied(7, 3), grad=False, per_mesh=8),
    case("argmin_keep_rows", lambda a: a.argmin(0, keepdim=True), _tied(7, 3), grad=False,
         per_mesh=8),
    case("argmax_flat", lambda a: a.argmax(), _tied(5, 4), grad=False, per_mesh=12),
    case("argmin_flat", lambda a: a.argmin(keepdim=True), _tied(3, 4, 2), grad=False, per_mesh=12),
    case("argmax_nan", lambda a: a.argmax(), _wild(1, _NAN, 9, _NAN), layouts=(_UNSUMMED,),
         grad=False, per_mesh=8),
    case("argmax_int32", lambda a: a.argmax(0), integers(9, high=3, dtype=torch.int32),
         grad=False),
    case("aminmax", _pairs("aminmax"), _tied(5, 4), per_mesh=8,
         grad=AMINMAX_HAS_GRADIENT),
    case("aminmax_dim", _pairs("aminmax", dim=0), _tied(7, 3), per_mesh=8,
         grad=AMINMAX_HAS_GRADIENT),
]

MOMENTS: list[Case] = [
    case(f"{name}_{tag}", lambda a, name=name, options=options: (
        getattr(torch, name)(a, **options)), reals(5, 4, 3), per_mesh=4)
    for name in ("var", "std", "var_mean", "std_mean")
    for tag, options in (("all", {}), ("0", {"dim": 0}), ("02", {"dim": (0, 2), "keepdim": True}),
                         ("corrected", {"dim": 1, "correction": 0.5}))
] + [
    case("std_of_equal", lambda a: a.std(0), integers(5, high=1, dtype=torch.float64)),
    case("var_biased", lambda a: a.var(0, False), reals(7, 2), per_mesh=6),
    case("var_bfloat16", lambda a: a.var(0), _tied(8, dtype=torch.bfloat16), grad=False),
    case("var_far", lambda a: (a + 2.0**10).var(), reals(9), grad=False, per_mesh=6),
    *(case(f"norm_{order}", lambda a, order=order: torch.linalg.vector_norm(a, order, 0),
           reals(7, 3), per_mesh=6)
      for order in (0.5, 1, 2, 3, 4.5, torch.inf, -torch.inf)),
    case("norm_negative", lambda a: torch.linalg.vector_norm(a, -2, 0), positives(7, 3),
         per_mesh=6),
    case("norm_0", lambda a: torch.linalg.vector_norm(a, 0), _tied(7, 3), grad=False, per_mesh=6),
    *(case(f"norm_of_zeros_{order}", lambda a, order=order: torch.linalg.vector_norm(a, order),
           given([0, 0, 0, 0, 3, -4, 0], torch.float64), per_mesh=6)
      for order in (1, 2, 3, torch.inf)),
    case("norm_all_zeros", lambda a: a.norm(), given([0, 0, 0, 0, 0], torch.float64)),
    case("norm_old", lambda a: a.norm(3, 0, True), reals(7, 3), per_mesh=6),
    case("norm_fro", lambda a: torch.linalg.norm(a), reals(5, 4), per_mesh=6),
    case("norm_dtype", lambda a: torch.linalg.vector_norm(a, dtype=torch.float64),
         reals(9, dtype=torch.float32), per_mesh=6),
    case("norm_bfloat16", lambda a: torch.linalg.vector_norm(a, dim=0),
         _tied(16, dtype=torch.bfloat16), grad=False),
    case("normalize_rows", lambda a: torch.nn.functional.normalize(a, dim=0), reals(7, 3)),
    case("renorm", lambda a: a.renorm(2, 0, 1.5), reals(4, 5), per_mesh=6),
    case("renorm_in_place", lambda a: (a * 1).renorm_(2, 0, 1.5), reals(4, 5), per_mesh=6),
    case("logsumexp_0", lambda a: a.logsumexp(0), reals(7, 3), per_mesh=6),
    case("logsumexp_all", lambda a: a.logsumexp((0, 1), True), reals(7, 3), per_mesh=6),
    case("logsumexp_masked", lambda a: a.logsumexp(0), _wild(-_INF, -_INF, -_INF, 2, 900, 899),
         layouts=(_UNSUMMED,), per_mesh=8),
    case("logsumexp_nothing", lambda a: a.logsumexp(0), _wild(*[-_INF] * 5),
         layouts=(_UNSUMMED,), grad=False),
    case("logsumexp_inf", lambda a: a.logsumexp(0), _wild(1, _INF, 2, 3), layouts=(_UNSUMMED,),
         grad=False),
    case("logsumexp_int", lambda a: a.logsumexp(0), integers(7), grad=False),
    case("nanmean", lambda a: a.nanmean(0), _wild(1, _NAN, 4, 2, _NAN, 3), layouts=(_UNSUMMED,)),
    case("nanmean_all", lambda a: a.nanmean(), reals(5, 4), per_mesh=6),
    case("nansum", lambda a: a.nansum(0), _wild(1, _NAN, 4, 2, _NAN, 3), layouts=(_UNSUMMED,)),
    case("prod_zeros", lambda a: a.prod(0), given([2, 3, 0, 4, -1, 5], torch.float64),
         per_mesh=6),
    case("prod_two_zeros", lambda a: a.prod(), given([2, 0, 0, 4, -1, 5], torch.float64),
         per_mesh=6),
    case("count_nonzero_dim", lambda a: a.count_nonzero(0), _tied(7, 3), grad=False),
    case("any_rows", lambda a: a.any(0), bools(7, 3), grad=False, per_mesh=6),
    case("all_of_floats", lambda a: a.all(), _tied(7, 3), grad=False, per_mesh=6),
]

PARTS: list[Case] = [
    case("trapezoid", lambda a: torch.trapezoid(a, dim=0), reals(7, 3), per_mesh=4),
    case("cumulative_trapezoid", lambda a: torch.cumulative_trapezoid(a, dim=0), reals(7, 3)),
    case("matrix_norm_1", lambda a: torch.linalg.norm(a, 1), reals(7, 3), per_mesh=4),
    case("matrix_norm_fro", lambda a: torch.linalg.matrix_norm(a), reals(2, 5, 3), per_mesh=4),
    case("pairwise_distance", lambda a, b: torch.pairwise_distance(a, b), reals(5, 4),
         reals(5, 4), per_mesh=4),
    case("vecdot", lambda a, b: torch.linalg.vecdot(a, b, dim=0), reals(7, 3), reals(7, 3),
         per_mesh=4),
    case("inner", torch.inner, reals(5, 4), reals(3, 4), per_mesh=4),
]
"""Functions that torch composes of others: each part by its own rule."""

_STEPS = given([-2, -1, -1, 0, 0, 1, 1, 1.5, 2], torch.float64)

COUNTS: list[Case] = [
    case("searchsorted", lambda s, a: torch.searchsorted(s, a), _STEPS, _tied(5, 3), grad=False,
         per_mesh=8),
    case("searchsorted_right", lambda s, a: torch.searchsorted(s, a, right=True, out_int32=True),
         _STEPS, _tied(7), grad=False, per_mesh=8),
    case("searchsorted_rows", lambda s, a: torch.searchsorted(s, a, side="right"),
         given([[-2, -1, -1, 0], [-1, 0, 1, 2]], torch.float64), _tied(2, 5), grad=False,
         per_mesh=8),
    case("searchsorted_number", lambda s: torch.searchsorted(s, 1.0), _STEPS, grad=False,
         per_mesh=8),
    case("searchsorted_nan", lambda s, a: torch.searchsorted(s, a), _STEPS,
         _wild(_NAN, _INF, 0, -_INF), grad=False, layouts=(None, (*_UNSUMMED, "plain"))),
    case("searchsorted_sorter", lambda s, a: torch.searchsorted(s, a, sorter=s.argsort()),
         _tied(7), _tied(5), grad=False),
    case("bucketize", lambda a, s: torch.bucketize(a, s), _tied(5, 3), _STEPS, grad=False,
         per_mesh=8),
    case("histc_of_data", lambda a: torch.histc(a, 5), reals(17), grad=False, per_mesh=8),
    case("histc_of_equal", lambda a: a.histc(3), integers(5, high=1, dtype=torch.float64),
         grad=False),
    case("bincount", lambda a: a.bincount(minlength=3), integers(17), grad=False, per_mesh=8),
    case("bincount_weights", torch.bincount, integers(17), reals(17), grad=False, per_mesh=8),
    case("bincount_of_none", lambda a: torch.bincount(a, minlength=4), integers(0), grad=False),
    case("unique", lambda a: a.unique(), _tied(17), grad=False, per_mesh=8),
    case("unique_all", lambda a: torch.unique(a, return_inverse=True, return_counts=True),
         integers(5, 4), grad=False, per_mesh=8),
    case("unique_of_one", lambda a: torch.unique(a, return_counts=True), integers(9, high=1),
         grad=False, per_mesh=8),
    case("unique_nan", lambda a: torch.unique(a, return_inverse=True, return_counts=True),
         _wild(2, _NAN, 1, 2, _NAN, _INF), grad=False, layouts=(_UNSUMMED,)),
    case("unique_bool", lambda a: torch.unique(a, return_counts=True), bools(9), grad=False),
    case("unique_of_none", lambda a: torch.unique(a), integers(0), grad=False),
    case("unique_consecutive", lambda a: torch.unique_consecutive(
        a, return_inverse=True, return_counts=True), integers(17, high=2), grad=False, per_mesh=12),
    case("unique_consecutive_one", lambda a: a.unique_consecutive(return_counts=True),
         integers(7, high=1), grad=False, per_mesh=8),
    case("histc", lambda a: torch.histc(a, 4, -2, 2), _tied(5, 3), grad=False, per_mesh=8),
    case("row_pointers", lambda a: torch._convert_indices_from_coo_to_csr(a.sort().values, 5),
         integers(17, high=5), grad=False, per_mesh=8),
]

CASES: list[Case] = SORTS + STATISTICS + PLACES + MOMENTS + PARTS + COUNTS

"""Scans: cumsum, cumprod, cummax, cummin, logcumsumexp, linear recurrences; and what is computed
from scans."""

from __future__ import annotations

import torch

import weft
from tests.cases import Case, bools, case, given, integers, reals

_INF, _NAN = torch.inf, torch.nan


def _few(*shape: int, dtype: torch.dtype = torch.float64):
    """Few different values, so that there are ties, and zeros among factors."""
    return integers(*shape, low=-2, high=3, dtype=dtype)


_SCANS = (
    ("cumsum", torch.cumsum, reals), ("cumprod", torch.cumprod, _few),
    ("cummax", lambda a, dim: tuple(torch.cummax(a, dim)), _few),
    ("cummin", lambda a, dim: tuple(torch.cummin(a, dim)), _few),
    ("logcumsumexp", torch.logcumsumexp, reals),
)

CASES: list[Case] = [
    case(f"{name}_{tag}", lambda a, fn=fn, dim=dim: fn(a, dim), make(*shape), per_mesh=6)
    for name, fn, make in _SCANS
    for tag, dim, shape in (("rows", 0, (7, 3)), ("last", -1, (3, 7)), ("line", 0, (9,)),
                            ("middle", 1, (2, 5, 3)))
] + [
    case("cumsum_no_dims", lambda a: a.cumsum(0), reals()),
    case("cumsum_of_empty", lambda a: a.cumsum(0), reals(0, 3)),
    case("cumsum_no_rows", lambda a: a.cumsum(0), reals(5, 0)),
    case("cumsum_int32", lambda a: a.cumsum(0), integers(7, dtype=torch.int32), grad=False,
         per_mesh=6),
    case("cumsum_uint8_wraps", lambda a: a.cumsum(0, dtype=torch.uint8),
         integers(9, low=90, high=120, dtype=torch.uint8), grad=False, per_mesh=6),
    case("cumsum_bool", lambda a: a.cumsum(0), bools(7), grad=False),
    case("cumsum_float32", lambda a: a.cumsum(0), reals(9, dtype=torch.float32)),
    case("cumsum_dtype", lambda a: a.cumsum(0, dtype=torch.float64),
         reals(9, dtype=torch.float32)),
    case("cumsum_inf", lambda a: a.cumsum(0), given([1, _INF, 2, -_INF, 3, 4, 5], torch.float64),
         layouts=(("r", "s0", "s0!", "s0.dt", "s0.td"),), grad=False),
    case("cumsum_in_place", lambda a: (a * 1).cumsum_(0), reals(7, 2)),
    case("cumsum_complex", lambda a: torch.view_as_real(torch.view_as_complex(a).cumsum(0)),
         reals(7, 2), layouts=(("r", "s0", "s0!", "s0?", "s0.dt", "s0.td"),)),
    case("cumprod_zeros", lambda a: a.cumprod(0),
         given([2, 3, 0, 4, -1, 0, 5, 2], torch.float64), per_mesh=6),
    case("cumprod_int", lambda a: a.cumprod(0), _few(7, dtype=torch.int32), grad=False),
    case("cummax_nan", lambda a: tuple(a.cummax(0)),
         given([1, 3, _NAN, 4, _NAN, 2, 5], torch.float64), grad=False,
         layouts=(("r", "s0", "s0!", "s0?", "s0.d", "s0.dt", "s0.td"),), per_mesh=6),
    case("cummin_ties", lambda a: tuple(a.cummin(0)), integers(9, high=2, dtype=torch.float64)),
    case("cummax_int", lambda a: tuple(a.cummax(0)), _few(9, dtype=torch.int64), grad=False),
    case("cummax_lowest", lambda a: tuple(a.cummax(0)),
         given([-_INF, -_INF, 1, -_INF, 0, 2], torch.float64), grad=False, per_mesh=6,
         layouts=(("r", "s0", "s0!", "s0?", "s0.d", "s0.dt", "s0.td"),)),
    case("logcumsumexp_masked", lambda a: a.logcumsumexp(0),
         given([1, 2, -_INF, -_INF, -_INF, 3, 0.5, -_INF], torch.float64), per_mesh=6,
         layouts=(("r", "s0", "s0!", "s0?", "s0.d", "s0.dt", "s0.td"),)),
    case("logcumsumexp_apart", lambda a: a.logcumsumexp(0),
         given([-900, -1, 800, 790, 805, -3], torch.float64), per_mesh=6,
         layouts=(("r", "s0", "s0!", "s0?", "s0.d", "s0.dt", "s0.td"),)),
    case("linear_scan", lambda a, b: weft.linear_scan(a, b, 0), _few(7, 3), reals(7, 3),
         per_mesh=12),
    case("linear_scan_from", lambda a, b, h: weft.linear_scan(a, b, 1, h, reverse=True),
         reals(2, 9, 3), reals(2, 9, 3), reals(2, 3), per_mesh=12),
    case("linear_scan_of_one_factor", lambda a, b, h: weft.linear_scan(a, b, -2, h), reals(3),
         reals(5, 3), reals(1), per_mesh=6),
    case("linear_scan_no_rows", lambda a, b, h: weft.linear_scan(a, b, 0, h), reals(0, 3),
         reals(0, 3), reals(3)),
    case("linear_scan_complex", lambda a, b: torch.view_as_real(weft.linear_scan(
        torch.view_as_complex(a), torch.view_as_complex(b), 0)), reals(7, 2), reals(7, 2),
        per_mesh=6),
    case("cumsum_of_cumsum", lambda a: a.cumsum(0).cumsum(1), reals(7, 4), per_mesh=6),
    case("reverse_cumsum", lambda a: a + a.sum(0, keepdim=True) - a.cumsum(0), reals(7, 3)),
]

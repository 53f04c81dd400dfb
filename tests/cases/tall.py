"""Factorizations of matrices with many rows and few columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cases import Case, case, given, reals

_L: Any = torch.linalg


def _some(columns: int) -> Any:
    """Values on few different rows: blocks are singular, the matrix is not."""
    rows = [[float(row // 6 == column) + 0.25 * (row % 2) * column for column in range(columns)]
            for row in range(6 * columns)]
    return given(rows, torch.float64)


def _complex(a: Tensor) -> Tensor:
    return torch.complex(a, a.flip(0) / 2)


def _lstsq(a: Tensor, b: Tensor, driver: str | None = None) -> Any:
    """torch itself rounds these by the address that they lie at."""
    solution, *rest = _L.lstsq(a, b, driver=driver)
    fixed = solution.detach()
    return [solution + ((fixed * 2**30).round() / 2**30 - fixed), *rest]


_ROWS = ("s0", "s0!", "s0?", "s1", "s0.d", "s0.td", "s0.d+s1.t")
_BATCH = ("s0", "s0!", "s0?", "s0.d", "s0.td", "s0.d+p.t", "s0.d+s1.t")

CASES: list[Case] = [
    case("tall_qr", lambda a: tuple(_L.qr(a)), reals(25, 3), per_mesh=10),
    case("tall_qr_of_one", lambda a: tuple(_L.qr(a)), reals(9, 1), per_mesh=6),
    case("tall_qr_r", lambda a: _L.qr(a, "r")[1], reals(17, 2), grad=False,
         per_mesh=6),
    case("tall_qr_batch", lambda a: tuple(_L.qr(a)), reals(3, 17, 2), per_mesh=8),
    case("tall_qr_blocks", lambda a: tuple(_L.qr(a)), _some(3), per_mesh=8),
    case("tall_qr_complex", lambda a: [torch.view_as_real(one) for one in _L.qr(_complex(a))],
         reals(25, 3), per_mesh=6),
    case("tall_qr_singular", lambda a: _L.qr(torch.cat([a, a], 1))[1].abs().sum(1)[:2],
         reals(25, 2), grad=False, per_mesh=4),
    case("tall_svdvals", lambda a: _L.svdvals(a), reals(25, 3), per_mesh=6),
    case("tall_svd", lambda a: tuple(_L.svd(a, full_matrices=False)), reals(25, 3), per_mesh=6),
    case("tall_pinv", lambda a: _L.pinv(a), reals(25, 3), per_mesh=6),
    case("tall_pinv_singular", lambda a: _L.pinv(torch.cat([a, a], 1)), reals(33, 2), per_mesh=4),
    case("tall_lstsq", lambda a, b: _lstsq(a, b)[0], reals(25, 3), reals(25, 2),
         layouts=(_ROWS, None), per_mesh=6),
    case("tall_lstsq_of_b", lambda a, b: _lstsq(a, b)[0], reals(25, 3), reals(25),
         layouts=(("plain", "r", "s1"), ("s0", "s0!", "s0.d", "s0.dt")), per_mesh=4),
    *(case(f"tall_lstsq_{driver}", lambda a, b, driver=driver: _lstsq(a, b, driver),
        reals(25, 3), reals(25, *columns),
        layouts=(_ROWS, None), per_mesh=4)
      for driver, columns in (("gels", (2,)), ("gelsd", ()), ("gelss", (2,)))),
    case("tall_lstsq_singular", lambda a, b: _lstsq(torch.cat([a, a], 1), b, "gelsd"),
         reals(33, 2), reals(33, 2), layouts=(_ROWS, None), per_mesh=3, falls_back=True),
    case("lstsq_batch", _lstsq, reals(5, 8, 4), reals(5, 8, 2),
         layouts=(_BATCH, None), per_mesh=6),
    case("tall_rank", lambda a: _L.matrix_rank(a), reals(25, 3), grad=False, per_mesh=4),
]

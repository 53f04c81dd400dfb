"""Linear algebra on batches, and ops along one dim: batch dims pass, nothing falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import Case, case, given, integers, positives, reals

_L: Any = torch.linalg


def _good(a: Tensor) -> Tensor:
    """Positive definite, far from singular."""
    return a @ a.mT + 5 * torch.diag_embed(torch.ones_like(a[..., 0]))


_OF_ONE: dict[str, Callable[[Tensor], Any]] = {
    "det": lambda a: _L.det(a), "slogdet": lambda a: _L.slogdet(a)[1],
    "logdet": lambda a: torch.logdet(_good(a)), "inv": lambda a: _L.inv(_good(a)),
    "inv_ex": lambda a: _L.inv_ex(_good(a)).inverse, "pinv": lambda a: _L.pinv(_good(a)),
    "cholesky": lambda a: _L.cholesky(_good(a)), "qr": lambda a: _L.qr(_good(a))[1].abs(),
    "eigvalsh": lambda a: _L.eigvalsh(_good(a)), "svdvals": lambda a: _L.svdvals(_good(a)),
    "lu_factor": lambda a: _L.lu_factor(_good(a))[0], "matrix_exp": lambda a: _L.matrix_exp(a / 4),
    "matrix_power": lambda a: _L.matrix_power(a, 3), "cond": lambda a: _L.cond(_good(a)),
    "matrix_norm": lambda a: _L.matrix_norm(a), "norm_nuc": lambda a: _L.matrix_norm(a, "nuc"),
    "norm_across": lambda a: _L.matrix_norm(a, 1, (0, 2), keepdim=True),
    "linalg_diagonal": lambda a: _L.diagonal(a, offset=1),
    "vander": lambda a: _L.vander(a[..., 0]),
    "trapezoid": lambda a: torch.trapezoid(a, dim=1),
    "cumulative_trapezoid": lambda a: torch.cumulative_trapezoid(a, dim=0),
    "gradient": lambda a: torch.gradient(a, dim=1)[0],
    "gradient_two": lambda a: torch.gradient(a, dim=(0, 2)),
}
_OF_TWO: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "solve": lambda a, b: _L.solve(_good(a), b),
    "solve_vectors": lambda a, b: _L.solve(_good(a), b[..., 0]),
    "solve_triangular": lambda a, b: _L.solve_triangular(_L.cholesky(_good(a)), b, upper=False),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, _L.cholesky(_good(a))),
    "cdist": lambda a, b: torch.cdist(a, b.mT), "vecdot": lambda a, b: _L.vecdot(a.mT, b.mT[:, :1]),
    "inner": lambda a, b: torch.inner(a, b.mT),
    "cosine": lambda a, b: F.cosine_similarity(a[..., :2], b, -1),
    "pairwise": lambda a, b: F.pairwise_distance(a[..., :2], b),
    "cross": lambda a, b: torch.cross(a[..., :3], b.repeat(1, 1, 2)[..., :3], dim=-1),
    "addbmm": lambda a, b: torch.addbmm(b[0], a, b), "kron_two": lambda a, b: torch.kron(a, b),
    "multi_dot": lambda a, b: _L.multi_dot([a[0], b[0], b[1].t()]),
}

CASES: list[Case] = [
    case(f"batched_{name}", fn, reals(5, 4, 4), per_mesh=2) for name, fn in _OF_ONE.items()
] + [
    case(f"batched_{name}", fn, reals(5, 4, 4), reals(5, 4, 2), per_mesh=2)
    for name, fn in _OF_TWO.items()
] + [
    case("solve_columns", lambda a, b: _L.solve(_good(a), b), reals(3, 3), reals(3, 7),
         per_mesh=6),
    case("solve_from_right", lambda a, b: _L.solve(_good(a), b, left=False), reals(3, 3),
         reals(7, 3), per_mesh=6),
    case("solve_ex", lambda a, b: _L.solve_ex(_good(a), b)[0], reals(5, 3, 3), reals(5, 3, 2),
         per_mesh=6),
    # torch says which pivot is zero, and it is no sum over the terms of the right-hand sides.
    case("solve_ex_singular", lambda a, b: _L.solve_ex(a * 0, b)[1], reals(5, 3, 3),
         reals(5, 3, 2), grad=False, per_mesh=6),
    case("triangular_from_right", lambda a, b: _L.solve_triangular(
        _good(a).triu(), b, upper=True, left=False), reals(3, 3), reals(7, 3), per_mesh=6),
    case("lu_solve_columns", lambda a, b: _L.lu_solve(*_L.lu_factor(_good(a)), b), reals(3, 3),
         reals(3, 7), per_mesh=6),
    case("ormqr", lambda a, t, b: torch.ormqr(a, t, b), reals(4, 5, 3), reals(4, 3),
         reals(4, 5, 6), per_mesh=6),
    case("ormqr_from_right", lambda a, t, b: torch.ormqr(a, t, b, left=False), reals(5, 3),
         reals(3), reals(7, 5), per_mesh=6),
    # A block of 3 rows would look like vectors.
    case("solve_one_matrix", lambda a, b: _L.solve(_good(a), b), reals(5, 3, 3), reals(3, 3),
         falls_back=True, per_mesh=6),
    case("svdvals_of_nothing", lambda a: _L.svd(a)[1], reals(0, 3, 3), per_mesh=2),
    # Results without elements need nothing of the operands.
    case("triangular_of_no_columns", lambda a, b: _L.solve_triangular(a, b, upper=True),
         reals(3, 3), reals(3, 0)),
    case("solve_no_systems", lambda a, b: _L.solve(a, b), reals(0, 3, 3), reals(0, 3, 2)),
    case("cdist_to_no_batch", lambda a, b: torch.cdist(a, b), reals(4, 5), reals(0, 3, 5)),
    case("no_reflections", lambda a, t: _L.householder_product(a, t), reals(2, 5, 3), reals(2, 0),
         grad=False),
    case("det_of_nothing", lambda a: _L.det(a), reals(3, 0, 0)),
    case("rank_by_tolerances", lambda a, t: _L.matrix_rank(a, atol=t), reals(4, 3, 3),
         positives(4), grad=False),
    case("cosine_of_numbers", lambda a, b: F.cosine_similarity(a, b, 0), reals(), reals()),
    case("multilabel_of_number", lambda a, t: F.multilabel_margin_loss(a, t), reals(), given(0)),
    case("bilinear", lambda a, b, w, c: F.bilinear(a, b, w, c), reals(5, 3), reals(5, 4),
         reals(2, 3, 4), reals(2)),
    case("bilinear_terms", lambda a, b, w: F.bilinear(a, b, w), reals(5, 3), reals(5, 4),
         reals(2, 3, 4), per_mesh=6),
    case("one_hot_cut", lambda a: F.one_hot(a, 5), integers(7, 3, high=5), grad=False),
    case("vdot", lambda a, b: torch.vdot(a, b), reals(7), reals(7)),
    case("dist", lambda a, b: torch.dist(a, b, 3), reals(5, 4), reals(4)),
    case("fft_rows", lambda a: torch.fft.rfft(a), reals(5, 6)),
    case("fft_columns", lambda a: torch.fft.ifft(torch.fft.fft(a, dim=0), dim=0), reals(5, 6)),
    case("fft_all", lambda a: torch.fft.irfftn(torch.fft.rfftn(a), (3, 5, 4)), reals(3, 5, 4)),
    case("meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="xy"), reals(5), reals(4)),
]

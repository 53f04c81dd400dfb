"""Pairs and counts: distances, covariances, histograms, members; sequences and bags by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.cases import Case, bools, case, given, integers, positives, reals

_LENGTHS = [5, 6, 4, 6, 6]
_SIZES = [2, 0, 1, 2, 1]


def _ctc(reduction: str, **more: Any):
    lengths: Any = _LENGTHS, _SIZES

    def run(scores: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(scores.log_softmax(2), goals, *lengths, reduction=reduction, **more)

    return run


def _flat_ctc(scores: torch.Tensor, goals: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(scores.log_softmax(2), goals, torch.tensor(_LENGTHS), sizes)


def _bags(*offsets: int, **more: Any):
    places = torch.tensor(offsets) if offsets else None
    return lambda w, i: F.embedding_bag(i, w, places, mode="max", **more)


_aten: Any = torch.ops.aten


def _pooled(a: torch.Tensor) -> torch.Tensor:
    large, places = F.max_pool2d(a, 2, 1, return_indices=True)
    return _aten.max_pool2d_with_indices_backward(
        large, a, [2, 2], [1, 1], [0, 0], [1, 1], False, places)


CASES: list[Case] = [
    *(case(f"unique_{name}", lambda a, dim=dim: torch.unique(
        a, dim=dim, return_inverse=True, return_counts=True), integers(*shape, high=high),
        grad=False, per_mesh=8)
      for name, dim, shape, high in (
          ("rows", 0, (11, 2), 3), ("columns", 1, (2, 9), 2), ("blocks", 1, (2, 7, 2), 2),
          ("equal_rows", 0, (7, 3), 1), ("line", 0, (9,), 3))),
    case("unique_rows_of_reals", lambda a: a.unique(dim=0), reals(9, 2), grad=False, per_mesh=6),
    case("unique_rows_of_bools", lambda a: torch.unique(a, dim=0), bools(9, 2), grad=False),
    *(case(f"consecutive_{name}", lambda a, dim=dim: torch.unique_consecutive(
        a, dim=dim, return_inverse=True, return_counts=True), integers(*shape, high=2),
        grad=False, per_mesh=8)
      for name, dim, shape in (("rows", 0, (11, 1)), ("columns", 1, (2, 9)), ("all", None, (5, 3)),
                               ("line", 0, (9,)))),
    *(case(f"dist_{p}", lambda a, b, p=p: torch.dist(a, b, p), reals(5, 4), reals(5, 4),
           per_mesh=4) for p in (1, 2, 3.5)),
    case("dist_of_row", torch.dist, reals(5, 4), reals(4), per_mesh=4),
    case("cov", torch.cov, reals(4, 9), per_mesh=6),
    case("cov_biased", lambda a: torch.cov(a, correction=0), reals(5, 7), per_mesh=4),
    case("cov_weighed", lambda a, f, w: torch.cov(a, fweights=f, aweights=w.detach()), reals(4, 9),
         integers(9, high=4), positives(9), per_mesh=5),
    case("cov_of_weights", lambda a, w: torch.cov(a, aweights=w.abs() + 1), reals(4, 9), reals(9),
         per_mesh=8),
    case("cov_by_counts", lambda a, f: torch.cov(a, correction=0, fweights=f), reals(9),
         integers(9, high=3), per_mesh=4),
    case("cov_of_integers", lambda a, w: torch.cov(a, aweights=w.detach()), integers(3, 9),
         positives(9), grad=False, per_mesh=4),
    case("cov_of_line", torch.cov, reals(9), per_mesh=6),
    case("cov_of_one", torch.cov, reals(1, 9), per_mesh=4),
    case("corrcoef", torch.corrcoef, reals(4, 9), per_mesh=6),
    case("corrcoef_of_line", torch.corrcoef, reals(9), per_mesh=2),
    case("isin", torch.isin, integers(5, 4), integers(7), grad=False, per_mesh=8),
    case("isin_none", lambda a, b: torch.isin(a, b, invert=True), integers(5, 4), integers(3, 2),
         grad=False, per_mesh=8),
    case("isin_number", lambda a: torch.isin(a, 3), integers(9), grad=False),
    case("number_isin", lambda a: torch.isin(3, a), integers(9), grad=False, per_mesh=6),
    case("histogram", lambda a: tuple(torch.histogram(a, 4, range=(-1.0, 2.0))), reals(5, 4),
         grad=False, per_mesh=8),
    case("histogram_of_data", lambda a: tuple(torch.histogram(a, 5)), reals(17), grad=False,
         per_mesh=8),
    case("histogram_of_equal", lambda a: tuple(torch.histogram(a, 3)),
         given([2.0] * 5, torch.float64), grad=False),
    case("histogram_borders", lambda a: tuple(torch.histogram(
        a, torch.tensor([-1, 0, 0.5, 2], dtype=torch.float64))), reals(5, 4), grad=False,
         per_mesh=6),
    case("histogram_weighed", lambda a, w: tuple(a.histogram(4, weight=w, density=True)),
         reals(5, 4), positives(5, 4), grad=False, per_mesh=8),
    case("histogramdd", lambda a: torch.histogramdd(a, [3, 2]), reals(9, 2), grad=False,
         per_mesh=6),
    case("histogramdd_weighed", lambda a, w: torch.histogramdd(a, 2, weight=w, density=True),
         reals(7, 3), positives(7), grad=False, per_mesh=6),
    case("histogramdd_borders", lambda a: torch.histogramdd(
        a, (torch.tensor([-1.0, 0, 2]).double(), torch.tensor([-2.0, 2]).double())), reals(9, 2),
         grad=False),
    *(case(f"pdist_{p}", lambda a, p=p: F.pdist(a, p), reals(6, 3), per_mesh=4)
      for p in (0, 1, 2, 3)),
    *(case(f"cdist_across_{p}", lambda a, b, p=p: torch.cdist(a, b, p), reals(2, 9), reals(3, 9),
           per_mesh=6) for p in (1, 2, 3)),
    case("cdist_across_batch", lambda a, b: torch.cdist(a, b), reals(2, 2, 9), reals(3, 9),
         per_mesh=6),
    *(case(f"ctc_{reduction}", _ctc(reduction), reals(6, 5, 4), integers(5, 2, low=1, high=4),
           per_mesh=6) for reduction in ("none", "mean", "sum")),
    case("ctc_no_infinity", _ctc("none", zero_infinity=True, blank=3), reals(6, 5, 4),
         integers(5, 2, high=3)),
    case("ctc_flat", _flat_ctc, reals(6, 5, 4), integers(6, low=1, high=4), given(_SIZES),
         per_mesh=6),
    case("bags_max", _bags(), reals(7, 4), integers(5, 3, high=7), per_mesh=6),
    case("bags_max_padded", _bags(padding_idx=2), reals(7, 4), integers(5, 2, high=4), per_mesh=6),
    case("bags_max_at_offsets", _bags(0, 2, 2, 6), reals(7, 4), integers(9, high=7), per_mesh=6),
    case("bags_max_to_last", _bags(0, 2, 2, 9, include_last_offset=True, padding_idx=0),
         reals(7, 4), integers(9, high=7), per_mesh=6),
    case("any_with_grad", lambda a: (a.sum(), a.detach().any(), (a > 0).all()), reals(5, 4)),
    case("all_of_leaf", lambda a: (a.all(), a.argmax(), a.sum()), reals(5, 4)),
    case("prod_everything", lambda a: a.prod(), reals(5, 4), per_mesh=6),
    case("prod_of_rows", lambda a: (a.prod(0), a.prod(1, True)), reals(5, 4), per_mesh=6),
    case("any_rows_of_bools", lambda a: a.any(0), bools(5, 4), grad=False),
    # What torch's gradients and compositions are made of.
    *(case(name, lambda a, b, op=op: op(a, b, -1, a.dtype), reals(4, 5), reals(4, 5), per_mesh=8)
      for name, op in (("softmax_backward", _aten._softmax_backward_data),
                       ("log_softmax_backward", _aten._log_softmax_backward_data))),
    case("max_pool_backward", _pooled, reals(3, 2, 4, 5), per_mesh=8),
    case("chunk_cat", lambda a, b: _aten._chunk_cat([a, b], 0, 2), reals(5, 3), reals(3, 3),
         grad=False),
    case("masked_index", lambda a, i: _aten._unsafe_masked_index(a, i > 0, [i], 0.5), reals(7),
         integers(9, low=-3, high=9)),
    case("masked_index_put", lambda a, i, v: _aten._unsafe_masked_index_put_accumulate(
        a, i > 0, [i], v), reals(7), integers(9, low=-3, high=9), reals(9)),
    case("unravel_index", lambda i: torch.unravel_index(i, (3, 2, 4)), integers(5, 3, high=24),
         grad=False),
    case("spaced_between_tensors", lambda a, b: (
        torch.linspace(a.sum(), b.sum(), 5), torch.logspace(0, b.sum(), 3)),
         reals(4), reals(4), grad=False),
]

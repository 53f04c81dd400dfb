"""What neighbouring elements make: gradients, adaptive means, spectrograms, runs of rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import Case, case, given, positives, reals
from tests.cases.transforms import complexes

_aten: Any = torch.ops.aten


def _window(length: int) -> Tensor:
    return torch.hann_window(length, dtype=torch.float64) + 0.1


def _stft(x: Tensor, n_fft: int, **options: Any) -> Tensor:
    return torch.stft(x, n_fft, return_complex=True, **options)


def _back(x: Tensor, n_fft: int, **options: Any) -> Tensor:
    return torch.istft(x, n_fft, window=_window(n_fft), **options)


def _segments(x: Tensor, reduce: str, **options: Any) -> Tensor:
    return torch.segment_reduce(x, reduce, **options)


_LENGTHS = given([2, 0, 3, 1], dense=True)

CASES: list[Case] = [
    case("gradient_rows", lambda a: torch.gradient(a, dim=0)[0], reals(7, 3), per_mesh=6),
    case("gradient_steps", lambda a: torch.gradient(a, spacing=[2.0, 0.5], edge_order=2),
         reals(6, 5)),
    case("gradient_of_three", lambda a: torch.gradient(a, dim=-1, edge_order=2)[0], reals(4, 3)),
    case("gradient_of_two", lambda a: torch.gradient(a, dim=0)[0], reals(2, 4)),
    case("gradient_places", lambda a, p: torch.gradient(a, spacing=(p.cumsum(0),), dim=0)[0],
         reals(6, 2), positives(6, fixed=True, dense=True)),
    case("gradient_places_twice", lambda a, p: torch.gradient(
        a, spacing=(p.cumsum(0),), dim=1, edge_order=2)[0],
        reals(2, 6), positives(6, fixed=True, dense=True)),
    case("mean_of_planes", lambda a: F.adaptive_avg_pool2d(a, 1), reals(2, 3, 6, 5), per_mesh=6),
    case("means_of_windows", lambda a: F.adaptive_avg_pool2d(a, (3, 5)), reals(2, 6, 5),
         per_mesh=6),
    case("mean_of_some", lambda a: F.adaptive_avg_pool3d(a, (2, 1, 4)), reals(1, 2, 4, 6, 6)),
    case("mean_of_rows", lambda a: F.adaptive_avg_pool1d(a, 4), reals(2, 3, 8)),
    case("stft", lambda a: _stft(a, 4, window=_window(4)), reals(2, 20), per_mesh=6),
    case("stft_of_line", lambda a: _stft(a, 8, hop_length=3, win_length=6, center=False,
         normalized=True, window=_window(6)), reals(30), per_mesh=6),
    case("stft_of_complex", lambda a: _stft(a, 4, onesided=False, window=_window(4)),
         complexes(16)),
    case("stft_that_is_complex", lambda a: torch.stft(a, 4, window=_window(4)), complexes(2, 16)),
    case("stft_by_a_complex_window", lambda a: torch.stft(a, 4, window=_window(4) * 1j),
         reals(2, 16)),
    case("istft", lambda a: _back(a, 8), complexes(2, 5, 7), per_mesh=6),
    case("istft_of_line", lambda a: _back(a, 6, hop_length=4, normalized=True, length=20),
         complexes(4, 6), per_mesh=6),
    case("stft_istft", lambda a: _back(_stft(a, 8, window=_window(8)), 8, length=24),
         reals(3, 24)),
    *[case(f"segments_{reduce}", lambda a, n, r=reduce: _segments(a, r, lengths=n),
           reals(6, 3), _LENGTHS, per_mesh=5) for reduce in ("sum", "mean", "prod")],
    *[case(f"segments_{reduce}", lambda a, n, r=reduce: _segments(
        a.round(), r, offsets=n, initial=-1.0), reals(6, 2), given([0, 1, 4, 6], dense=True),
        per_mesh=5) for reduce in ("max", "min")],
    case("segments_of_batch", lambda a, n: _segments(a, "sum", lengths=n, axis=1), reals(2, 5, 2),
         given([[2, 3], [1, 4]], dense=True)),
    case("as_strided_copy", lambda a: torch.as_strided_copy(a, (3, 2), (2, 5), 1), reals(4, 6)),
    case("as_strided_columns", lambda a: torch.as_strided_copy(a.t(), (3, 2), (2, 5)),
         reals(4, 6)),
    case("as_strided_scatter", lambda a, b: torch.as_strided_scatter(a, b, (3, 2), (2, 7), 1),
         reals(4, 6), reals(3, 2), grad=False),
    case("tensorinv", lambda a: torch.linalg.tensorinv(
        a + 4 * torch.eye(6).double().reshape(2, 3, 6), ind=2), reals(2, 3, 6)),
    case("geqrf", lambda a: torch.geqrf(a), reals(3, 4, 2), grad=False),
    case("native_batch_norm", lambda a, w, b: _aten.native_batch_norm(
        a, w, b, None, None, True, 0.1, 1e-5)[0], reals(4, 3, 5), reals(3), reals(3)),
    case("native_batch_norm_statistics", lambda a: _aten._native_batch_norm_legit.no_stats(
        a, None, None, True, 0.1, 1e-5), reals(4, 3, 5), grad=False),
    case("native_group_norm", lambda a, w: _aten.native_group_norm(
        a, w, None, 3, 4, 5, 2, 1e-5)[0], reals(3, 4, 5), reals(4)),
    case("least_squares_of_wide", lambda a, b: torch.linalg.lstsq(a, b).solution, reals(3, 5),
         reals(3, 2)),
]

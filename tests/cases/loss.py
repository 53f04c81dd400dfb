"""Losses: cross entropy in all its forms, and the mean-like ones on uneven batch shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases import Case, Operand, bools, case, given, integers, positives, reals

_IGNORED_UNEVENLY = [-100, -100, -100, 4, 0, 2, -100]
"""The first ranks ignore all or most of their targets, the last ones few."""


def _logits(*shape: int) -> Operand:
    return reals(*shape)


def _cross_entropy(name: str, *operands: Operand, **options: object) -> list[Case]:
    return [
        case(
            f"cross_entropy_{name}_{reduction}",
            lambda a, t, *w, r=reduction: F.cross_entropy(
                a, t, *w, reduction=r, **options  # type: ignore[arg-type]
            ),
            *operands, per_mesh=8,
        )
        for reduction in ("mean", "sum", "none")
    ]


_WEIGHTS = positives(5, fixed=True)

CROSS_ENTROPY: list[Case] = [
    *_cross_entropy("index", _logits(7, 5), integers(7, high=5)),
    *_cross_entropy("ignore", _logits(7, 5), given(_IGNORED_UNEVENLY)),
    *_cross_entropy("ignore_other", _logits(7, 5), integers(7, high=5), ignore_index=2),
    *_cross_entropy("weight", _logits(7, 5), given(_IGNORED_UNEVENLY), _WEIGHTS),
    *_cross_entropy("smooth", _logits(7, 5), given(_IGNORED_UNEVENLY), label_smoothing=0.1),
    *_cross_entropy("weight_smooth", _logits(7, 5), given(_IGNORED_UNEVENLY), _WEIGHTS,
                    label_smoothing=0.2),
    *_cross_entropy("spatial", _logits(3, 5, 4), integers(3, 4, high=5)),
    case("cross_entropy_all_ignored_mean", F.cross_entropy, _logits(4, 5), given([-100] * 4)),
    case("cross_entropy_all_ignored_sum",
         lambda a, t: F.cross_entropy(a, t, reduction="sum"), _logits(4, 5), given([-100] * 4)),
    case("cross_entropy_one_sample", F.cross_entropy, _logits(5), given(3)),
    case("cross_entropy_probabilities", lambda a, p: F.cross_entropy(a, F.softmax(p, -1)),
         _logits(7, 5), reals(7, 5)),
    case("cross_entropy_float32", F.cross_entropy, reals(7, 5, dtype=torch.float32),
         given(_IGNORED_UNEVENLY)),
    case("cross_entropy_large", lambda a, t: F.cross_entropy(a * 1e3, t), _logits(7, 5),
         integers(7, high=5)),
    case("language_model", lambda h, w, t: F.cross_entropy(
        F.linear(h, w).flatten(0, 1), t.flatten()), reals(3, 4, 6), reals(7, 6),
        integers(3, 4, high=7), per_mesh=16),
    case("language_model_shifted", lambda a, t: F.cross_entropy(
        a[:, :-1].reshape(-1, 5), t[:, 1:].reshape(-1)), reals(3, 4, 5), integers(3, 4, high=5),
        per_mesh=8),
    case("nll_loss", lambda a, t: F.nll_loss(F.log_softmax(a, -1), t), _logits(7, 5),
         given(_IGNORED_UNEVENLY)),
    case("nll_loss_weight", lambda a, t, w: F.nll_loss(a, t, w), _logits(7, 5),
         given(_IGNORED_UNEVENLY), _WEIGHTS),
    case("cross_entropy_by_hand",
         lambda a, t: -F.log_softmax(a, -1).gather(1, t[:, None]).mean(), _logits(7, 5),
         integers(7, high=5)),
]

MEAN_LIKE: list[Case] = [
    case(f"{name}_{reduction}", lambda a, b, fn=fn, r=reduction: fn(a, b, reduction=r), *operands)
    for name, fn, operands in (
        ("mse_loss", F.mse_loss, (reals(7, 3), reals(7, 3))),
        ("l1_loss", F.l1_loss, (reals(7, 3), reals(7, 3))),
        ("huber_loss", F.huber_loss, (reals(7, 3), reals(7, 3))),
        ("smooth_l1_loss", F.smooth_l1_loss, (reals(7, 3), reals(7, 3))),
        ("soft_margin_loss", F.soft_margin_loss,
         (reals(7, 3), integers(7, 3, low=1, high=2, dtype=torch.float64, fixed=True))),
        ("binary_cross_entropy", lambda a, b, reduction: F.binary_cross_entropy(
            torch.sigmoid(a), b, reduction=reduction),
         (reals(7, 3), integers(7, 3, high=2, dtype=torch.float64, fixed=True))),
        ("bce_with_logits", F.binary_cross_entropy_with_logits,
         (reals(7, 3), integers(7, 3, high=2, dtype=torch.float64, fixed=True))),
    )
    for reduction in ("mean", "sum", "none")
] + [
    case("kl_div", lambda a, b: F.kl_div(F.log_softmax(a, -1), b, reduction="batchmean"),
         reals(7, 3), positives(7, 3, fixed=True)),
    case("l1_weight", lambda a, b, w: F.l1_loss(a, b, **{"weight": w}), reals(7, 3), reals(7, 3),
         positives(7, 3)),
    case("mse_weight", lambda a, b, w: F.mse_loss(a, b, **{"weight": w}), reals(7, 3), reals(7, 3),
         positives(7, 3)),
    case("mse_one_row", F.mse_loss, reals(1, 3), reals(1, 3)),
    case("weighted_mean", lambda a, m: (a * m).sum() / m.sum(), reals(7, 3), bools(7, 1)),
    case("mean_plus_sum", lambda a: a.mean() + a.pow(2).sum() / 10, reals(7, 3)),
]

_SIGNS = given([1, -1, 1, 1, -1, 1, -1], torch.float64, fixed=True)

MARGINS: list[Case] = [
    case(f"{name}_{reduction}", lambda *all, fn=fn, r=reduction: fn(*all, reduction=r), *operands,
         per_mesh=2)
    for name, fn, operands in (
        ("hinge_embedding", F.hinge_embedding_loss, (reals(7), _SIGNS)),
        ("margin_ranking", F.margin_ranking_loss, (reals(7), reals(7), _SIGNS)),
        ("cosine_embedding", F.cosine_embedding_loss, (reals(7, 3), reals(7, 3), _SIGNS)),
        ("triplet_margin", F.triplet_margin_loss, (reals(7, 3), reals(7, 3), reals(7, 3))),
        ("triplet_swap", lambda a, b, c, reduction: F.triplet_margin_loss(
            a, b, c, swap=True, reduction=reduction), (reals(7, 3), reals(7, 3), reals(7, 3))),
        ("multi_margin", F.multi_margin_loss, (reals(7, 4), integers(7, high=4))),
        ("multi_margin_weight", lambda a, t, w, reduction: F.multi_margin_loss(
            a, t, 2, 0.5, w, reduction=reduction),
         (reals(7, 4), integers(7, high=4), positives(4, fixed=True))),
        ("multi_margin_row", F.multi_margin_loss, (reals(4), given(2))),
        ("gaussian_nll", F.gaussian_nll_loss, (reals(7, 3), reals(7, 3), positives(7, 3))),
        ("gaussian_nll_line", F.gaussian_nll_loss, (reals(7, 3), reals(7, 3), positives(7, 1))),
        ("gaussian_nll_row", F.gaussian_nll_loss, (reals(7, 3), reals(7, 3), positives(1, 3))),
    )
    for reduction in ("mean", "sum", "none")
]

WITHOUT_META: list[Case] = [
    case(f"multilabel_margin_{reduction}",
         lambda a, t, r=reduction: F.multilabel_margin_loss(a, t, reduction=r), reals(7, 4),
         integers(7, 4, high=4))
    for reduction in ("mean", "sum", "none")
]
"""torch has no gradient of them on meta tensors, so a rank outside the mesh has none either."""

CASES = CROSS_ENTROPY + MEAN_LIKE + MARGINS

"""Softmax, log-softmax and the normalisations, the normalised dim sharded too."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.cases import Case, case, positives, reals


def _running(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor,
             var: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two steps: the statistics are results as well."""
    F.batch_norm(x, mean, var, w, b, True, 0.3)
    return F.batch_norm(x + 1, mean, var, w, b, True, 0.1), mean, var


def _running_instances(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return F.instance_norm(x, mean, var, momentum=0.3), mean, var


CASES: list[Case] = [
    case("softmax_last", lambda a: F.softmax(a, -1), reals(4, 7)),
    case("softmax_first", lambda a: a.softmax(0), reals(7, 3)),
    case("softmax_middle", lambda a: torch.softmax(a, 1), reals(2, 5, 3)),
    case("softmax_dtype", lambda a: F.softmax(a, -1, dtype=torch.float64),
         reals(4, 7, dtype=torch.float32)),
    case("softmax_large", lambda a: F.softmax(a * 1000, -1), reals(4, 7), grad=False),
    case("softmax_masked", lambda a: F.softmax(a.masked_fill(a < 0, -torch.inf), -1),
         reals(4, 7), grad=False),
    case("softmax_safe", lambda a: torch.ops.aten._safe_softmax(
        a.masked_fill(a < torch.tensor([[0.0], [9.0], [0.5], [0.0]]), -torch.inf), -1),
         reals(4, 7)),
    case("softmax_one_dim", lambda a: F.softmax(a, 0), reals(7)),
    case("softmax_empty", lambda a: F.softmax(a, -1), reals(0, 7)),
    case("log_softmax_last", lambda a: F.log_softmax(a, -1), reals(4, 7)),
    case("log_softmax_first", lambda a: a.log_softmax(0), reals(7, 3)),
    case("log_softmax_large", lambda a: F.log_softmax(a * 1000, -1), reals(4, 7)),
    case("softmax_times", lambda a, b: F.softmax(a, -1) @ b, reals(4, 7), reals(7, 3)),
    case("layer_norm", lambda a: F.layer_norm(a, (6,)), reals(5, 6)),
    case("layer_norm_affine", lambda a, w, b: F.layer_norm(a, (6,), w, b), reals(5, 6), reals(6),
         reals(6), per_mesh=16),
    case("layer_norm_weight", lambda a, w: F.layer_norm(a, (6,), w), reals(3, 2, 6), reals(6)),
    case("layer_norm_two_dims", lambda a, w, b: F.layer_norm(a, (4, 3), w, b), reals(5, 4, 3),
         reals(4, 3), reals(4, 3), per_mesh=10),
    case("layer_norm_far_mean", lambda a: F.layer_norm(a + 1e4, (6,)), reals(5, 6)),
    case("layer_norm_with_statistics", lambda a, w, b: torch.native_layer_norm(a, (6,), w, b, 1e-5),
         reals(5, 6), reals(6), reals(6), per_mesh=8),
    case("layer_norm_eps", lambda a: F.layer_norm(a * 1e-3, (7,), eps=1e-3), reals(5, 7)),
    case("layer_norm_one_row", lambda a, w: F.layer_norm(a, (6,), w), reals(1, 6), reals(6)),
    case("rms_norm", lambda a, w: F.rms_norm(a, (6,), w), reals(5, 6), reals(6)),
    case("rms_norm_by_hand",
         lambda a, w: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
         reals(5, 6), reals(6)),
    case("batch_norm", lambda a, w, b: F.batch_norm(a, None, None, w, b, True), reals(5, 4, 3, 2),
         reals(4), reals(4), per_mesh=10),
    case("batch_norm_rows", lambda a: F.batch_norm(a, None, None, training=True), reals(5, 4)),
    case("batch_norm_far_mean", lambda a: F.batch_norm(a + 1e4, None, None, training=True),
         reals(5, 4)),
    case("batch_norm_running", _running, reals(5, 4, 3), reals(4), reals(4),
         reals(4, fixed=True), positives(4, fixed=True), per_mesh=8,
         layouts=(None, None, None, ("r", "s0", "s0.d", "s0!", "plain"),
                  ("r", "s0", "s0.t", "s0?", "plain"))),
    case("batch_norm_evaluated",
         lambda a, m, v, w, b: F.batch_norm(a, m, v, w, b), reals(5, 4, 3),
         reals(4, fixed=True), positives(4, fixed=True), reals(4), reals(4), per_mesh=8),
    case("batch_norm_of_nothing_trained",
         lambda a, w, b: F.batch_norm(a, None, None, w, b, True), reals(0), reals(3), reals(3)),
    case("batch_norm_of_nothing_evaluated",
         lambda a, w, b: F.batch_norm(a, torch.zeros(0), torch.zeros(0), w, b),
         reals(0), reals(3), reals(3)),
    case("batch_norm_half",
         lambda a: F.batch_norm(a, torch.zeros(4), torch.ones(4), training=True),
         reals(5, 4, dtype=torch.bfloat16), grad=False, layouts=(("s0", "s0.d", "s1", "s0!"),),
         may_refuse=True),
    case("instance_norm", lambda a, w, b: F.instance_norm(a, None, None, w, b), reals(5, 4, 6),
         reals(4), reals(4), per_mesh=8),
    case("instance_norm_running", _running_instances, reals(5, 4, 6), reals(4, fixed=True),
         positives(4, fixed=True), layouts=(None, ("r", "s0", "plain"), ("r", "s0", "plain")),
         per_mesh=6),
    case("instance_norm_of_nothing", _running_instances, reals(5, 4, 0), reals(4, fixed=True),
         positives(4, fixed=True), layouts=(None, ("r", "s0", "plain"), ("r", "s0", "plain")),
         per_mesh=6),
    case("group_norm", lambda a, w, b: F.group_norm(a, 2, w, b), reals(5, 6, 3, 2), reals(6),
         reals(6), per_mesh=10),
    case("group_norm_rows", lambda a: F.group_norm(a, 3), reals(5, 6), per_mesh=6),
    case("group_norm_single", lambda a: F.group_norm(a, 6), reals(5, 6, 4), per_mesh=6),
    case("normalize", lambda a: F.normalize(a, dim=-1), reals(5, 6)),
    case("softmax_times_positive", lambda a, b: (F.softmax(a, 0) * b).sum(), reals(7, 3),
         positives(7, 3)),
    case("group_norm_single_values", lambda a: F.group_norm(a, 6), reals(2, 6, 1), per_mesh=6),
]

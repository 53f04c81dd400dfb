"""Convolutions, pooling, resizing and recurrent networks: batch, channels and positions sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import Case, case, integers, positives, reals

_IMAGE, _LINE = (5, 6, 7, 4), (5, 6, 7)


def _recurrent(op: Any, num_states: int, **options: Any) -> Any:
    settings = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True,
                "bidirectional": False, "batch_first": False, **options}

    def run(x: Tensor, state: Tensor, *weights: Tensor) -> Any:
        states = (state, state * 2) if num_states == 2 else state
        return op(x, states, list(weights), *settings.values())

    return run


def _weights(gates: int, inner: int = 4, hidden: int = 3) -> tuple[Any, ...]:
    rows = gates * hidden
    return reals(rows, inner), reals(rows, hidden), reals(rows), reals(rows)


CASES: list[Case] = [
    case("conv1d", lambda a, w, b: F.conv1d(a, w, b, 2, 1), reals(*_LINE), reals(4, 6, 3),
         reals(4), per_mesh=10),
    case("conv1d_points", lambda a, w, b: F.conv1d(a, w, b), reals(*_LINE), reals(4, 6, 1),
         reals(4), per_mesh=8),
    case("conv1d_same", lambda a, w: F.conv1d(a, w, padding="same", dilation=2), reals(*_LINE),
         reals(4, 6, 3), per_mesh=6),
    case("conv1d_one_sample", lambda a, w: F.conv1d(a, w), reals(6, 7), reals(4, 6, 3)),
    case("conv2d", lambda a, w, b: F.conv2d(a, w, b), reals(*_IMAGE), reals(4, 6, 3, 2),
         reals(4), per_mesh=8),
    case("conv2d_rows", lambda a, w: F.conv2d(a, w), reals(*_IMAGE), reals(4, 6, 1, 2)),
    case("conv2d_groups", lambda a, w, b: F.conv2d(a, w, b, groups=3), reals(*_IMAGE),
         reals(9, 2, 3, 2), reals(9), per_mesh=10),
    case("conv2d_by_channel", lambda a, w, b: F.conv2d(a, w, b, groups=6), reals(*_IMAGE),
         reals(6, 1, 3, 2), reals(6), per_mesh=8),
    case("conv3d", lambda a, w: F.conv3d(a, w), reals(3, 4, 3, 4, 3), reals(2, 4, 2, 2, 2)),
    case("conv_transpose1d", lambda a, w, b: F.conv_transpose1d(a, w, b, 2), reals(*_LINE),
         reals(6, 4, 3), reals(4), per_mesh=6),
    case("conv_transpose2d_groups", lambda a, w: F.conv_transpose2d(a, w, groups=3),
         reals(*_IMAGE), reals(6, 2, 3, 2), per_mesh=6),
    case("avg_pool1d", lambda a: F.avg_pool1d(a, 3, 2), reals(*_LINE)),
    case("avg_pool2d_channels", lambda a: F.avg_pool2d(a, (3, 1), 1), reals(*_LINE)),
    case("max_pool2d", lambda a: F.max_pool2d(a, 2, return_indices=True)[0], reals(*_IMAGE)),
    case("max_pool1d_places", lambda a: F.max_pool1d(a, 3, return_indices=True), reals(*_LINE)),
    case("adaptive_avg_pool2d", lambda a: F.adaptive_avg_pool2d(a, (3, 1)), reals(*_IMAGE)),
    case("adaptive_max_of_all", lambda a: tuple(F.adaptive_max_pool2d(
        a, 1, return_indices=True)), integers(*_IMAGE, low=-2, high=3, dtype=torch.float64)),
    case("adaptive_max_pool1d", lambda a: F.adaptive_max_pool1d(a, 3), reals(*_LINE)),
    case("lp_pool1d", lambda a: F.lp_pool1d(a.abs() + 1, 2, 3), reals(*_LINE)),
    case("interpolate_nearest", lambda a: F.interpolate(a, scale_factor=2), reals(*_LINE)),
    case("interpolate_bilinear", lambda a: F.interpolate(a, (5, 9), mode="bilinear"),
         reals(*_IMAGE)),
    case("unfold_image", lambda a: F.unfold(a, (2, 3)), reals(*_IMAGE)),
    case("fold", lambda a: F.fold(a, (3, 4), (2, 3)), reals(5, 12, 4)),
    case("local_response_norm", lambda a: F.local_response_norm(a, 3), reals(*_IMAGE)),
    case("lstm", _recurrent(torch.lstm, 2), reals(7, 5, 4), reals(1, 5, 3), *_weights(4),
         per_mesh=6),
    case("lstm_two_ways", _recurrent(torch.lstm, 2, bidirectional=True, batch_first=True),
         reals(5, 7, 4), reals(2, 5, 3), *_weights(4) * 2, per_mesh=4),
    case("gru", _recurrent(torch.gru, 1), reals(7, 5, 4), reals(1, 5, 3), *_weights(3),
         per_mesh=6),
    case("rnn", _recurrent(torch.rnn_tanh, 1), reals(7, 5, 4), reals(1, 5, 3), *_weights(1),
         per_mesh=4),
    *(case(f"grid_sample_{mode}",
           lambda a, g, mode=mode: F.grid_sample(a, g, mode, align_corners=False),
           reals(*_IMAGE), positives(5, 3, 6, 2), per_mesh=8)
      for mode in ("bilinear", "nearest", "bicubic")),
    case("grid_sample_3d",
         lambda a, g: F.grid_sample(a, g, padding_mode="border", align_corners=True),
         reals(3, 4, 3, 4, 3), positives(3, 2, 5, 3, 3), per_mesh=6),
]

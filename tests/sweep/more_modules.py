"""Modules that torch's database lacks, or knows only without a batch, with what they are called on.

Lengths differ from each other, and are long enough that three ranks have something of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MORE", "Given"]


@dataclass(frozen=True, slots=True)
class Given:
    """How to make a module, and the arguments of its call."""

    make: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Make = Callable[[torch.dtype], list[Given]]


def _real(*shape: int) -> Callable[[torch.dtype], Tensor]:
    def make(dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape) + sum(shape))
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return ((values * 256).round() / 256).to(dtype).requires_grad_(dtype.is_floating_point)

    return make


def _index(high: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    def make(dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(high + sum(shape))
        return torch.randint(0, high, shape, generator=generator)

    return make


def _fixed(*values: Any) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.tensor(values)


def _kept(pool: Any, *shape: int) -> Callable[[torch.dtype], Tensor]:
    """The places of what a pool of windows of two has kept."""
    return lambda dtype: pool(_real(*shape)(torch.float64), 2, return_indices=True)[1]


def _causal(length: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


def _padding(rows: int, length: int) -> Callable[[torch.dtype], Tensor]:
    def make(dtype: torch.dtype) -> Tensor:
        return torch.arange(length) >= length - torch.arange(rows).unsqueeze(1) % 3

    return make


def _on(*calls: tuple[Any, ...], **kwargs: Any) -> Make:
    """One sample per call: how to make the module, then the builders of its arguments."""
    def samples(dtype: torch.dtype) -> list[Given]:
        named = {name: value(dtype) if callable(value) else value for name, value in kwargs.items()}
        return [Given(make, tuple(arg(dtype) for arg in args), dict(named))
                for make, *args in calls]

    return samples


_IMAGE, _LINE, _VOLUME = _real(5, 6, 7, 8), _real(5, 6, 8), _real(3, 4, 5, 4, 3)


def _nets() -> list[tuple[Any, ...]]:
    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 4))

    def convolutional() -> nn.Module:
        return nn.Sequential(nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                             nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 3))

    return [(perceptron, _real(5, 6)), (convolutional, _IMAGE)]


def _embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(10, 6, **options)


def _encoder(layers: int, dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 4, 12, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, layers)


def _decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 4, 12, 0.0, batch_first=True), 2)


def _several(kind: Any) -> list[tuple[Any, ...]]:
    """A recurrent module with a batch, in its kinds."""
    return [
        (lambda: kind(4, 6), _real(3, 5, 4)),
        (lambda: kind(4, 6, batch_first=True), _real(5, 3, 4)),
        (lambda: kind(4, 6, 2, bidirectional=True, bias=False), _real(3, 5, 4)),
        (lambda: kind(4, 6, 2, batch_first=True, dropout=0.5), _real(5, 3, 4)),
    ]


MORE: dict[str, Make] = {
    # Random ones: against the same on one rank.
    "Dropout": _on((nn.Dropout, _real(5, 6)), (lambda: nn.Dropout(0.2), _real(5, 6, 7))),
    "Dropout1d": _on((nn.Dropout1d, _LINE)),
    "Dropout2d": _on((nn.Dropout2d, _IMAGE)),
    "Dropout3d": _on((nn.Dropout3d, _VOLUME)),
    "AlphaDropout": _on((nn.AlphaDropout, _real(5, 6))),
    "FeatureAlphaDropout": _on((nn.FeatureAlphaDropout, _IMAGE)),
    "RReLU": _on((nn.RReLU, _real(5, 6))),
    # With a batch, where the database has none or only short ones.
    "BatchNorm1d.batch": _on((lambda: nn.BatchNorm1d(6), _real(5, 6)),
                             (lambda: nn.BatchNorm1d(6, momentum=None), _LINE)),
    "BatchNorm2d.batch": _on((lambda: nn.BatchNorm2d(6, momentum=0.3), _IMAGE)),
    "BatchNorm3d.batch": _on((lambda: nn.BatchNorm3d(4), _VOLUME)),
    "SyncBatchNorm": _on((lambda: nn.SyncBatchNorm(6), _IMAGE)),
    "InstanceNorm1d.batch": _on((lambda: nn.InstanceNorm1d(6, affine=True), _LINE)),
    "InstanceNorm2d.batch": _on(
        (lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), _IMAGE)),
    "GroupNorm.batch": _on((lambda: nn.GroupNorm(3, 6), _IMAGE),
                           (lambda: nn.GroupNorm(2, 6), _LINE),
                           (lambda: nn.GroupNorm(2, 6), _real(5, 6)),
                           (lambda: nn.GroupNorm(6, 6, affine=False), _IMAGE)),
    "LayerNorm.batch": _on((lambda: nn.LayerNorm(7), _real(5, 6, 7)),
                           (lambda: nn.LayerNorm([6, 7]), _real(5, 6, 7))),
    "RMSNorm.batch": _on((lambda: nn.RMSNorm(7), _real(5, 6, 7))),
    "LocalResponseNorm.batch": _on((lambda: nn.LocalResponseNorm(3), _IMAGE),
                                   (lambda: nn.LocalResponseNorm(2), _LINE)),
    "Embedding.batch": _on(*[(_embedding(**options), _index(10, 5, 7)) for options in (
        {}, {"padding_idx": 2}, {"max_norm": 1.0}, {"scale_grad_by_freq": True})]),
    "EmbeddingBag": _on(
        *[(lambda mode=mode: nn.EmbeddingBag(10, 6, mode=mode), _index(10, 5, 7))
          for mode in ("sum", "mean", "max")],
        (lambda: nn.EmbeddingBag(10, 6), _index(10, 9), _fixed(0, 2, 2, 5)),
        (lambda: nn.EmbeddingBag(10, 6, mode="sum", include_last_offset=True), _index(10, 9),
         _fixed(0, 2, 5, 9)),
        (lambda: nn.EmbeddingBag(10, 6, padding_idx=3), _index(10, 5, 7)),
    ),
    "EmbeddingBag.weights": _on(
        (lambda: nn.EmbeddingBag(10, 6, mode="sum"), _index(10, 5, 7)),
        per_sample_weights=_real(5, 7),
    ),
    "LSTM.batch": _on(*_several(nn.LSTM),
                      (lambda: nn.LSTM(4, 6, proj_size=3), _real(3, 5, 4))),
    "GRU.batch": _on(*_several(nn.GRU)),
    "RNN.batch": _on(*_several(nn.RNN),
                     (lambda: nn.RNN(4, 6, nonlinearity="relu"), _real(3, 5, 4))),
    "LSTMCell.batch": _on((lambda: nn.LSTMCell(4, 6), _real(5, 4))),
    "GRUCell.batch": _on((lambda: nn.GRUCell(4, 6), _real(5, 4), _real(5, 6))),
    "RNNCell.batch": _on((lambda: nn.RNNCell(4, 6), _real(5, 4), _real(5, 6))),
    "MultiheadAttention.batch": _on(
        (lambda: nn.MultiheadAttention(8, 4, batch_first=True), *[_real(5, 6, 8)] * 3),
        (lambda: nn.MultiheadAttention(8, 4, kdim=3, vdim=4), _real(6, 5, 8), _real(7, 5, 3),
         _real(7, 5, 4)),
        (lambda: nn.MultiheadAttention(8, 2, dropout=0.3, add_bias_kv=True, batch_first=True),
         *[_real(5, 6, 8)] * 3),
    ),
    "MultiheadAttention.weightless": _on(
        (lambda: nn.MultiheadAttention(8, 4, batch_first=True), *[_real(5, 6, 8)] * 3),
        need_weights=False,
    ),
    "MultiheadAttention.causal": _on(
        (lambda: nn.MultiheadAttention(8, 4, batch_first=True), *[_real(5, 6, 8)] * 3),
        need_weights=False, is_causal=True, attn_mask=_causal(6),
    ),
    "MultiheadAttention.padded": _on(
        (lambda: nn.MultiheadAttention(8, 4, batch_first=True), *[_real(5, 6, 8)] * 3),
        average_attn_weights=False, key_padding_mask=_padding(5, 6),
    ),
    "TransformerEncoder.batch": _on(
        (lambda: _encoder(2, 0.0), _real(5, 6, 8)),
        (lambda: _encoder(1, 0.1), _real(5, 6, 8)),
    ),
    "TransformerEncoder.padded": _on(
        (lambda: _encoder(2, 0.0), _real(5, 6, 8)),
        src_key_padding_mask=_padding(5, 6),
    ),
    "TransformerDecoder": _on(
        (_decoder, _real(5, 6, 8), _real(5, 7, 8)),
        tgt_mask=_causal(6), tgt_is_causal=True,
    ),
    "Transformer.batch": _on(
        (lambda: nn.Transformer(8, 4, 1, 1, 12, 0.0, batch_first=True), _real(5, 6, 8),
         _real(5, 7, 8))),
    "Linear.batch": _on((lambda: nn.Linear(8, 7), _real(5, 6, 8)),
                        (lambda: nn.Linear(8, 7, bias=False), _real(5, 8))),
    "Bilinear.batch": _on((lambda: nn.Bilinear(6, 4, 7), _real(5, 6), _real(5, 4))),
    "Conv1d.batch": _on((lambda: nn.Conv1d(6, 4, 3), _LINE), (lambda: nn.Conv1d(6, 4, 1), _LINE),
                        (lambda: nn.Conv1d(6, 6, 3, padding="same", groups=6), _LINE),
                        (lambda: nn.Conv1d(6, 4, 3, padding=1, padding_mode="circular"), _LINE)),
    "Conv2d.batch": _on((lambda: nn.Conv2d(6, 4, 3, 2, 1), _IMAGE),
                        (lambda: nn.Conv2d(6, 9, 3, groups=3, dilation=2, bias=False), _IMAGE),
                        (lambda: nn.Conv2d(6, 6, (3, 1), groups=6), _IMAGE)),
    "Conv3d.batch": _on((lambda: nn.Conv3d(4, 5, 3, padding=1), _VOLUME)),
    "ConvTranspose2d.batch": _on(
        (lambda: nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1), _IMAGE),
        (lambda: nn.ConvTranspose2d(6, 9, 3, groups=3), _IMAGE)),
    "MaxPool2d.batch": _on((lambda: nn.MaxPool2d(2), _IMAGE),
                           (lambda: nn.MaxPool2d(3, 2, 1, return_indices=True), _IMAGE)),
    "AvgPool2d.batch": _on((lambda: nn.AvgPool2d(3, 2, 1), _IMAGE),
                           (lambda: nn.AvgPool2d((3, 1), 1), _IMAGE)),
    "AdaptiveAvgPool2d.batch": _on((lambda: nn.AdaptiveAvgPool2d(1), _IMAGE),
                                   (lambda: nn.AdaptiveAvgPool2d((3, 4)), _IMAGE)),
    "MaxUnpool1d": _on((lambda: nn.MaxUnpool1d(2), _real(5, 6, 4), _kept(F.max_pool1d, 5, 6, 8))),
    "MaxUnpool2d": _on((lambda: nn.MaxUnpool2d(2), _real(5, 6, 3, 4),
                        _kept(F.max_pool2d, 5, 6, 6, 8))),
    "MaxUnpool3d": _on((lambda: nn.MaxUnpool3d(2), _real(3, 4, 2, 2, 1),
                        _kept(F.max_pool3d, 3, 4, 4, 4, 2))),
    "FractionalMaxPool2d.batch": _on((lambda: nn.FractionalMaxPool2d(2, 3), _IMAGE)),
    "Upsample": _on(*[(lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), _IMAGE)
                      for mode in ("nearest", "bilinear", "bicubic")],
                    (lambda: nn.Upsample(size=11, mode="linear"), _LINE)),
    "UpsamplingNearest2d": _on((lambda: nn.UpsamplingNearest2d(scale_factor=2), _IMAGE)),
    "UpsamplingBilinear2d": _on((lambda: nn.UpsamplingBilinear2d(9), _IMAGE)),
    "Fold": _on((lambda: nn.Fold((4, 5), (2, 3)), _real(5, 12, 9))),
    "Unfold": _on((lambda: nn.Unfold((2, 3)), _IMAGE)),
    "PixelShuffle": _on((lambda: nn.PixelShuffle(2), _real(5, 8, 3, 4))),
    "PixelUnshuffle": _on((lambda: nn.PixelUnshuffle(2), _real(5, 3, 4, 6))),
    "ChannelShuffle": _on((lambda: nn.ChannelShuffle(3), _IMAGE)),
    "Flatten": _on((nn.Flatten, _IMAGE)),
    "Unflatten": _on((lambda: nn.Unflatten(1, (2, 3)), _IMAGE)),
    "Identity": _on((nn.Identity, _real(5, 6))),
    "Hardsigmoid": _on((nn.Hardsigmoid, _real(5, 6))),
    "Softmax2d.batch": _on((nn.Softmax2d, _IMAGE)),
    "CosineSimilarity": _on((nn.CosineSimilarity, _real(5, 6), _real(5, 6))),
    "PairwiseDistance": _on((nn.PairwiseDistance, _real(5, 6), _real(5, 6))),
    "TripletMarginLoss": _on((nn.TripletMarginLoss, *[_real(5, 6)] * 3)),
    "TripletMarginWithDistanceLoss": _on((nn.TripletMarginWithDistanceLoss, *[_real(5, 6)] * 3)),
    "AdaptiveLogSoftmaxWithLoss": _on(
        (lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8]), _real(7, 6), _index(12, 7))),
    "Sequential": _on(*_nets()),
}
"""Name -> samples of a dtype."""

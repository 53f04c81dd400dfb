"""stft: frames of a signal, each by a window, and their Fourier transforms.

Frames of a sharded signal lie with it: what a frame reads beyond a border comes from the next
shard. `istft` checks its window by data: `weft.tensor.call.spectrograms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.rules import op, page

__all__ = ["PAGE"]

_aten: Any = torch.ops.aten


def _stft(
    x: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Tensor:
    """Windows along the signal, and a transform of each."""
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    lines = x if x.dim() == 2 else x.unsqueeze(0)
    before = (n_fft - width) // 2
    if align_to_window and before:
        lines = torch.constant_pad_nd(lines, [before, before])
    frames = lines.unfold(-1, n_fft, hop)
    if window is None and width < n_fft:
        window = torch.ones(width, dtype=x.dtype, device=x.device)
    if window is not None:
        if width < n_fft:
            window = torch.constant_pad_nd(window, [before, n_fft - width - before])
        frames = frames * window
    norm = 1 if normalized else 0
    if frames.is_complex():
        out = _aten._fft_c2c(frames, [2], norm, True)
    else:
        out = _aten._fft_r2c(frames, [2], norm, onesided is not False)
    out = out.transpose(1, 2)
    out = out if x.dim() == 2 else out.squeeze(0)
    return out if return_complex else torch.view_as_real(out)


PAGE = page(
    op("stft.default", compose=_stft),
)

"""stft: frames of a signal, each by a window, and their Fourier transforms; and back.

The frames of a sharded signal are sharded alike. What a frame reads beyond a border comes from the
next shard. `istft` checks the values of its window, so it runs at each call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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
    if return_complex is None:  # torch asks for it where all is real
        return_complex = frames.is_complex()
    return out if return_complex else torch.view_as_real(out)


def _istft(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True, normalized: bool = False,
    onesided: bool | None = None, length: int | None = None, return_complex: bool = False,
) -> Tensor:
    """As torch's: frames transformed back, by their window, and added up where they overlap. Any
    dim may be sharded; frames that reach over a border are sent."""
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    if window is None:
        _warn_of_no_window()
        window = torch.ones(width, dtype=input.dtype.to_real(), device=input.device)
    start = n_fft // 2 if center else 0
    is_batch = input.dim() in (2, 3)
    whole = n_fft + hop * (input.shape[-1] - 1) if is_batch else 0
    stop = start + length if length is not None else whole - start
    if onesided is None and is_batch:
        onesided = input.shape[-2] != n_fft
    usual = (
        is_batch and input.is_complex() and 0 not in input.shape
        and 0 < hop <= width <= n_fft and 0 <= start < stop <= whole
        and input.shape[-2] == (n_fft // 2 + 1 if onesided else n_fft)
        and window.shape == (width,)
        and not (return_complex and onesided) and (return_complex or not window.is_complex())
    )
    if not usual:
        return NotImplemented
    return _inverse(input, n_fft, hop, width, window, normalized, return_complex, start, stop)


def _warn_of_no_window() -> None:
    """torch's own warning, once in a process."""
    torch.istft(torch.ones(1, 2, dtype=torch.complex64), 1, hop_length=1, center=False)


def _inverse(
    x: Tensor, n_fft: int, hop: int, width: int, window: Tensor, normalized: bool,
    return_complex: bool, start: int, stop: int,
) -> Tensor:
    """The elements from `start` to `stop`; NotImplemented if no window covers one of them."""
    before = (n_fft - width) // 2
    window = F.pad(window, [before, n_fft - width - before])
    spectra = (x if x.dim() == 3 else x.unsqueeze(0)).transpose(1, 2)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        frames = torch.fft.ifft(spectra, dim=-1, norm=norm)
    else:
        frames = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], n=n_fft, dim=-1, norm=norm)
    out = _overlapped(frames * window, hop)
    weights = _weights(out, window, hop).narrow(0, start, stop - start)
    if weights.abs().amin().item() <= 1e-11:
        return NotImplemented
    out = out.flatten(1, 2).narrow(1, start, stop - start) / weights
    return out if x.dim() == 3 else out.squeeze(0)


def _overlapped(frames: Tensor, hop: int) -> Tensor:
    """Frames added up, one every `hop` elements, as blocks of so many elements."""
    num = -(-frames.shape[2] // hop)
    blocks = F.pad(frames, [0, num * hop - frames.shape[2]]).unflatten(2, (num, hop))
    total: Any = None
    for at in range(num):
        moved = F.pad(blocks.select(2, at), [0, 0, at, num - 1 - at])
        total = moved if total is None else total + moved
    return total


def _weights(blocks: Tensor, window: Tensor, hop: int) -> Tensor:
    """What the squares of all windows add up to, at each element of the blocks."""
    num = -(-window.shape[0] // hop)
    squares = F.pad(window.square(), [0, num * hop - window.shape[0]]).unflatten(0, (num, hop))
    sums = torch.cat([torch.zeros_like(squares[:1]), squares.cumsum(0)])
    at = torch.ones_like(blocks[0, :, 0].detach(), dtype=torch.int64).cumsum(0)
    frames = blocks.shape[1] - num + 1
    # A block is reached by the frames that begin at it and at `num` - 1 blocks before.
    last, first = at.clamp(max=num), (at - frames).clamp(min=0)
    return (sums[last] - sums[first]).flatten()


PAGE = page(
    op("stft.default", compose=_stft),
    op("istft", compose=_istft, each_call=True),
)

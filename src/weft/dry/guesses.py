"""Assumed positions and counts, where unknown data would decide them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CHOOSES", "FINITE", "GUESSES", "VALUES"]

_aten: Any = torch.ops.aten
CHOOSES = (
    _aten.topk.default, _aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim,
    _aten.sort.default, _aten.sort.stable, _aten.argsort.default, _aten.argsort.stable,
    _aten.multinomial.default,
)
"""Ops whose results are positions that the values of their first operand decide."""


def _spread_evenly(x: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    """`bincount` of numbers that are equally frequent."""
    ends = torch.arange(minlength + 1, device="cpu") * x.numel() // max(minlength, 1)
    return ends.diff() if weights is None else ends.diff().double()


def _counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """`histc`, of integers too: those on accelerators, for which programs take a meta tensor."""
    return torch.histc(x.double(), *args).to(x.dtype)


def _all_alone(
    x: torch.Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[torch.Tensor, ...]:
    """`unique_consecutive` of such elements, or slices; of elements `_unique2` as well."""
    count = x.numel() if dim is None else x.shape[dim]
    shape = x.shape if dim is None else (count,)
    places = torch.empty(shape if inverse else (0,), dtype=torch.int64, device="meta")
    like = torch.empty((count if counts else 0,), dtype=torch.int64, device="meta")
    return x.new_empty(count) if dim is None else torch.empty_like(x), places, like


def _selected(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`masked_select` of all of them."""
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())


def _solved(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """`linalg_lstsq`: a solution and ranks."""
    batch, is_vector = a.shape[:-2], b.dim() == a.dim() - 1
    shape = a.shape[-1:] if is_vector else (a.shape[-1], b.shape[-1])
    ranks = torch.empty(batch, dtype=torch.int64, device="meta")
    return b.new_empty(*batch, *shape), b.new_empty(0), ranks, b.new_empty(0)


def _once_each(counts: torch.Tensor, output_size: int | None = None) -> torch.Tensor:
    """`repeat_interleave` of all positions, once."""
    return torch.arange(len(counts), device="cpu")


def _binned(x: torch.Tensor, bins: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(bins), x.new_empty(bins + 1)


def _boxes(x: torch.Tensor, bins: Any, *_: Any, **__: Any) -> torch.Tensor:
    """The counts of `histogramdd`, of so many bins or between such borders."""
    nums = [one if isinstance(one, int) else len(one) - 1 for one in bins]
    return x.new_empty(nums)


def _borders(x: torch.Tensor, bins: Any, *_: Any, **__: Any) -> list[torch.Tensor]:
    """Those of `histogramdd`."""
    return [x.new_empty(one + 1) for one in bins]


def _aligned(x: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`_ctc_loss` of samples with targets of one length."""
    length, batch = x.shape[:2]
    longest = targets.shape[1] if targets.dim() > 1 else -(-len(targets) // max(batch, 1))
    return x.new_empty(batch), x.new_empty(batch, length, 2 * longest + 1)


def _like_second(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    """What a backward gives for the operand after the gradient."""
    return torch.empty_like(x)


VALUES: dict[Any, Any] = {_aten.histc.default: _counted}
"""Op -> its result for known values that its kernel on the CPU does not take."""

GUESSES: dict[Any, Any] = {
    _aten._unique2.default: lambda x, is_sorted=True, *more: _all_alone(x, *more),
    _aten.unique_consecutive.default: _all_alone,
    _aten.bincount.default: _spread_evenly, _aten.histogram.bin_ct: _binned,
    _aten._histogramdd_from_bin_cts.default: _boxes,
    _aten._histogramdd_from_bin_tensors.default: _boxes,
    _aten._histogramdd_bin_edges.default: _borders,
    _aten.masked_select.default: _selected, _aten.repeat_interleave.Tensor: _once_each,
    _aten.linalg_lstsq.default: _solved,
    _aten.equal.default: lambda *_: True, _aten.allclose.default: lambda *_, **__: True,
    _aten._ctc_loss.default: _aligned, _aten._ctc_loss.Tensor: _aligned,
    **dict.fromkeys([
        _aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor,
        _aten.multi_margin_loss_backward.default, _aten.multilabel_margin_loss_backward.default,
        _aten.fractional_max_pool3d_backward.default], _like_second),
}
"""Op -> its result for elements of which none is zero, all are different and all are equally
frequent, and what is compared is equal."""

FINITE: dict[Any, bool] = {
    _aten.eq.Tensor: True, _aten.ne.Tensor: False, _aten.eq.Scalar: False, _aten.ne.Scalar: True,
    _aten.isinf.default: False, _aten.isnan.default: False,
}
"""Comparison -> its result for a finite number and itself, or infinity."""

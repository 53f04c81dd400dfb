"""Assumed positions and counts, where unknown data would decide them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CHOOSES", "GUESSES", "VALUES"]

_aten: Any = torch.ops.aten
CHOOSES = (
    _aten.topk.default, _aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim,
    _aten.sort.default, _aten.sort.stable, _aten.argsort.default, _aten.argsort.stable,
    _aten.multinomial.default,
)
"""Ops whose results are positions that the values of their first operand decide."""


def _all_different(
    x: torch.Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[torch.Tensor, ...]:
    """`_unique2` of such elements."""
    count = x.numel()
    like = torch.empty((count if counts else 0,), dtype=torch.int64, device="meta")
    places = torch.empty(x.shape if inverse else (0,), dtype=torch.int64, device="meta")
    return x.new_empty(count), places, like


def _spread_evenly(x: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    """`bincount` of numbers that are equally frequent."""
    ends = torch.arange(minlength + 1, device="cpu") * x.numel() // max(minlength, 1)
    return ends.diff() if weights is None else ends.diff().double()


def _counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """`histc`, of integers too: those on accelerators, for which programs take a meta tensor."""
    return torch.histc(x.double(), *args).to(x.dtype)


def _of_the_input(at: int) -> Any:
    """The gradient of an operand of which torch has no meta kernel."""
    return lambda *args: torch.empty_like(args[at], memory_format=torch.contiguous_format)


VALUES: dict[Any, Any] = {_aten.histc.default: _counted}
"""Op -> its result for known values that its kernel on the CPU does not take."""

GUESSES: dict[Any, Any] = {
    _aten._unique2.default: _all_different, _aten.bincount.default: _spread_evenly,
    _aten._ctc_loss_backward.default: _of_the_input(1),
    _aten._ctc_loss_backward.Tensor: _of_the_input(1),
    _aten.fractional_max_pool3d_backward.default: _of_the_input(1),
}
"""Op -> its result for elements of which all are different and all are equally frequent."""

"""Extrema, and their positions: amax, max, argmax, aminmax.

The extremum of the whole is the extremum of the shards' extrema. As in torch, all elements that
attain it share its gradient, the first position among equal elements counts, and NaN wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.idle import empty_summary
from weft.ops.places import apart, counted
from weft.ops.reductions import without
from weft.rules import Call, op, page, rule
from weft.rules.factors import dim_list
from weft.transport import Shards
from weft.transport.nodes import with_gradient

__all__ = ["PAGE", "extreme_text", "extremum", "identity", "shared"]


def extreme_text(largest: bool) -> Callable[[Call, Sequence[bool]], str]:
    """The kind of partial values that `s` leaves. Without a gradient: every shard's extremum. With
    one: the extremum from one rank and zeros from the others, so that every rank receives the whole
    gradient."""
    kind = "max" if largest else "min"
    return lambda call, wants_grad: (
        f"... s~:{'sum' if True in wants_grad else kind} -> ..."
    )


def extremum(
    shards: Shards, x: Tensor, dims: Sequence[int], keepdim: bool, largest: bool
) -> Tensor:
    """Partial values of the extremum, of the kind that `extreme_text` states."""
    fixed = x.detach()
    if 0 in [x.shape[dim] for dim in dims]:
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        own = x.new_full(shape, identity(x.dtype, largest))
    else:
        own = (torch.amax if largest else torch.amin)(fixed, tuple(dims), True)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return without(own, dims, keepdim)
    value = (shards.pmax if largest else shards.pmin)(own)
    return without(shared(shards, x, value, fixed == value, dims), dims, keepdim)


def shared(
    shards: Shards, x: Tensor, value: Tensor, attain: Tensor, dims: Sequence[int]
) -> Tensor:
    """Partial values of a value along some dims, whose gradient the elements of x share that
    `attain` it."""
    count = shards.psum(attain.sum(tuple(dims), keepdim=True))
    term = torch.zeros_like(value) if shards.index else value
    return with_gradient(
        x, lambda *_: term.clone(), lambda grad, attain, count: grad * attain / count,
        attain, count)


def identity(dtype: torch.dtype, largest: bool) -> Any:
    """The value of a shard without elements."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


def _extreme(largest: bool) -> Callable[..., Tensor]:
    def kernel(shards: Shards, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return extremum(shards, x, dim_list(dim, shards.layout.ndim), keepdim, largest)

    kernel.__doc__ = "Each shard's extremum; with a gradient, the elements that attain it share it."
    return kernel


def _with_place(largest: bool, alone: bool = False) -> Callable[..., Any]:
    """`alone`: the place, without the extremum."""
    find, find_all = (torch.max, torch.argmax) if largest else (torch.min, torch.argmin)

    def kernel(shards: Shards, x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        dims = dim_list(dim, shards.layout.ndim)
        if 0 in [x.shape[each] for each in dims]:
            value = empty_summary(x, dims, x.dtype)
            place = torch.zeros_like(value, dtype=torch.long)
        elif dim is not None:
            value, place = find(x, dim, keepdim=True)
            place = place + shards.starts[dim]
        else:
            flat = find_all(x)
            value = x.flatten()[flat].view([1] * x.dim())
            places = zip(apart(flat, x.shape), shards.starts)
            place = counted([at + start for at, start in places], shards.layout.shape)
            place = place.view([1] * x.dim())
        value, place = _winner(shards, value, place, largest)
        place = without(place, dims, keepdim)
        return place if alone else (without(value, dims, keepdim), place)

    kernel.__doc__ = "Each shard's extremum with its place; the first of the best ones wins."
    return kernel


def _winner(
    shards: Shards, value: Tensor, place: Tensor, largest: bool
) -> tuple[Tensor, Tensor]:
    """The extremum of the shards' extrema, and the first position that attains it."""
    values = shards.of_filled(shards.gather(value)[0])
    places = shards.of_filled(shards.gather(place)[0])
    fixed = values.detach()
    best = (fixed.amax if largest else fixed.amin)(0)
    attains = (fixed == best) | ((fixed != fixed) & (best != best))
    first, shard = torch.where(attains, places, torch.iinfo(torch.long).max).min(0)
    return values.gather(0, shard.unsqueeze(0))[0], first


_MAX, _MIN = (rule(extreme_text(largest), along="dim") for largest in (True, False))
_PLACES = rule("... s~ -> ..., ...", along="dim")
_PLACE = rule("... s~ -> ...", along="dim")


def _of_some(name: str) -> Callable[..., Tensor | None]:
    """Refuse empty tensors, which have no extremum; torch's meta kernels do not check."""
    def form(x: Tensor) -> None:
        if not x.numel():
            raise RuntimeError(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0. "
                "Specify the reduction dim with the 'dim' argument."
            )

    return form


PAGE = page(
    op("amax", _MAX, kernel=_extreme(True)),
    op("amin", _MIN, kernel=_extreme(False)),
    op("max.default", _MAX, kernel=_extreme(True), result=_of_some("max")),
    op("min.default", _MIN, kernel=_extreme(False), result=_of_some("min")),
    op("max.dim", _PLACES, kernel=_with_place(True)),
    op("min.dim", _PLACES, kernel=_with_place(False)),
    op("max.other min.other", rule("..., ... -> ...")),
    op("argmax", _PLACE, kernel=_with_place(True, alone=True)),
    op("argmin", _PLACE, kernel=_with_place(False, alone=True)),
)

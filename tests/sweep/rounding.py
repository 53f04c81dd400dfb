"""How far a result may be from the plain one, where its dtype is narrow enough to show rounding.

A dtype rounds by half its eps. What is summed over cut dims, or from terms, is rounded once by each
of g ranks and once more when it is put together; each time it is at most the sum of the absolute
values that is rounded. What the op makes of the rounding of what it is given, and of its own, is
measured: it is how far torch's plain result is from the same call in double precision, and the
ranks' parts may be as far each. One sample may be exact by chance, so where an op adds, the largest
error counts of the call on these operands and on a few that differ from them in their last bits. So
a result may be off by

    (g + 1) * (eps / 2 * size + error)

where `size` is the largest absolute value of the plain result, or, where the op adds, of the same
call on absolute values or from an absolute cotangent, and `error` the plain result's largest error.
Where such a size is beyond the dtype's largest number, a rank's part may be infinite, and of parts
of both signs the sum is NaN: such an element may also be infinite or NaN. Nothing in it is chosen.
A result wider than an operand is rounded as that operand, within the call.

An op that takes element by element rounds each by itself: there `size` is that of the element, and
`error` the largest of elements as large (up to a factor of two), so that small elements beside
large ones are looked at, too; and so for gradients of operands that are not broadcast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracle import TOLERANCE, Close

__all__ = ["NARROW", "Rounding", "rounding"]

NARROW = {
    torch.bfloat16: torch.float64, torch.float16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
"""Dtypes that show rounding, and in which their errors are measured."""

_ROUNDED = {*NARROW, *NARROW.values()}
"""Dtypes of results that may be rounded as a narrower operand is."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far each result, gradient and operand that is written to is rounded once; None where the
    dtype says enough."""

    results: list[Close]
    gradients: list[Close]
    written: list[Close]


Call = Callable[[list[Tensor], Callable[[Tensor, Tensor], Tensor]], tuple[list[Any], list[Any]]]
"""Operands, and what a cotangent becomes, to results with what is written to, and gradients."""


def rounding(
    run: Call, tensors: Sequence[Tensor], results: list[Any], gradients: list[Any], adds: bool,
    written: Sequence[Tensor | None] = (),
) -> Rounding | None:
    """The measure of a call whose plain outcome is known; None where nothing is narrow.

    `written`: per operand what it is after the call, None where it is not written to.
    """
    places = [place for place, one in enumerate(written) if one is not None]
    num_results = len(results)
    results = [*results, *(written[place] for place in places)]
    outcome = [one for one in results if isinstance(one, Tensor)]
    narrow = {one.dtype for one in (*tensors, *outcome)} & set(NARROW)
    if not narrow:
        return None
    dtype = min(narrow, key=lambda one: -torch.finfo(one).eps)
    shapes = {one.shape for one in outcome}
    none: tuple[list[Any], list[Any]] = [None] * len(results), [None] * len(gradients)

    def exactly(given: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        return _tried(run, [_wide(one) for one in given],
                      lambda one, steps: steps.to(dtype).to(steps.dtype), *none)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = exactly(tensors)
        wide = [_wide(one) for one in tensors]
        sizes = tuple([list(map(_larger, *pair)) for pair in zip(*(
            _tried(run, given, lambda one, steps: _absolute(steps), *none)
            for given in ([_absolute(one) for one in wide], wide)))])
        errors = _errors((results, gradients), exact)
        for seed in range(_OTHERS if adds else 0):
            given = [_beside(one, seed) for one in tensors]
            plain = _tried(run, given, lambda one, steps: steps, *none, integers=None)
            others = _errors(plain, exactly(given))
            errors = [list(map(max, one, other)) for one, other in zip(errors, others)]
    once = [
        _once(due, wide, size, error, not adds)
        for due, wide, size, error in zip(
            results, exact[0], sizes[0] if adds else none[0], errors[0])
    ]
    of_written = dict(zip(places, once[num_results:]))
    return Rounding(
        once[:num_results],
        [_once(due, wide, size, error, not adds and shapes == {one.shape})
         for one, due, wide, size, error in zip(
             tensors, gradients, exact[1], sizes[1], errors[1])],
        [of_written.get(place) for place in range(len(written))],
    )


_OTHERS = 16
"""How many operands beside the given ones."""


def _beside(one: Tensor, seed: int) -> Tensor:
    """Elements that differ in their last bits, those that are whole numbers excepted: they may
    count something, or be places."""
    if one.dtype not in NARROW:
        return one
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-4, 5, one.shape, generator=generator)
    one = one.detach()
    moved = one * (1 + steps * torch.finfo(one.dtype).eps).to(one.dtype.to_real())
    parts = torch.stack([one.real, one.imag]) if one.is_complex() else one.unsqueeze(0)
    whole = (parts == parts.round()).all(0)
    return torch.where(whole, one, moved.to(one.dtype))


def _errors(
    found: tuple[list[Any], list[Any]], exact: tuple[list[Any], list[Any]]
) -> list[list[float]]:
    """The largest error of each result and gradient; zero where nothing is narrow or known."""
    return [
        [_largest(_wide(due) - wide)
         if isinstance(due, Tensor) and due.dtype in _ROUNDED and _is_like(wide, due) else 0.0
         for due, wide in zip(*pair)]
        for pair in zip(found, exact)
    ]


def _tried(
    run: Call, tensors: list[Tensor], like: Callable[[Tensor, Tensor], Tensor], *none: list[Any],
    integers: torch.dtype | None = torch.float64,
) -> tuple[list[Any], list[Any]]:
    """`integers`: what they become; None: what they always do."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(integers or default)
    try:
        found = run(tensors, like)
    except Exception:  # it is not for such operands
        return none[0], none[1]
    finally:
        torch.set_default_dtype(default)
    return found if list(map(len, found)) == list(map(len, none)) else (none[0], none[1])


def _wide(one: Tensor) -> Tensor:
    return one.to(NARROW.get(one.dtype, one.dtype))


def _absolute(one: Tensor) -> Tensor:
    is_number = one.dtype.is_floating_point or one.dtype.is_complex
    return one.abs().to(one.dtype) if is_number else one


def _once(due: Any, exact: Any, size: Any, error: float, each: bool) -> Close:
    """How far one result is rounded by one rank; each of its elements by itself."""
    if not isinstance(due, Tensor) or due.dtype not in _ROUNDED:
        return None
    if due.dtype not in NARROW and error <= TOLERANCE[due.dtype]:
        return None
    if each and _is_like(exact, due):
        wide = _wide(due.detach())
        errors = (wide - exact.detach()).abs().nan_to_num(0.0, 0.0)  # not finite: the same is due
        sizes = torch.finfo(due.dtype).eps / 2 * wide.abs().nan_to_num(0.0, 0.0)
        return sizes + _among_alike(wide.abs(), errors)
    largest = max(_largest(due), _largest(size) if _is_like(size, due) else 0.0)
    most = torch.finfo(due.dtype).eps / 2 * largest + error
    if _is_like(size, due):
        size = size.detach().abs()
        beyond = (size > torch.finfo(due.dtype).max) & size.isfinite()
        if beyond.any():
            return torch.where(beyond, -most, most)
    return most


def _larger(one: Any, other: Any) -> Any:
    """The larger of two values, element by element; the one that is there."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one if isinstance(one, Tensor) else other
    if one.shape != other.shape or one.dtype is torch.bool:
        return one
    return torch.maximum(one.detach().abs(), other.detach().abs())


def _among_alike(sizes: Tensor, errors: Tensor) -> Tensor:
    """Per element the largest error of those that are as large, up to a factor of two: kernels
    round some elements by other code than others, and one alone may be exact by chance."""
    _, at = torch.frexp(sizes.flatten())[1].unique(return_inverse=True)
    largest = errors.new_zeros(errors.numel()).scatter_reduce(0, at, errors.flatten(), "amax")
    return largest[at].reshape(errors.shape)


def _is_like(one: Any, due: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == due.shape


def _largest(one: Tensor) -> float:
    values = one.detach().abs().double()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0

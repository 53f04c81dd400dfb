"""Which functions of torch.fft wait, and which dims their calls transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fft

from weft.comm import BoundMesh
from weft.core import Layout

__all__ = [
    "BACKWARD", "COMPLEX", "FLOATS", "FORWARD", "OF_ONE_DIM", "REAL", "SHIFTS", "TO_REAL", "Fields",
    "field_key", "shifts_of", "transformed_dims",
]

FORWARD = (fft.fft, fft.fft2, fft.fftn)
REAL = (fft.rfft, fft.rfft2, fft.rfftn)
BACKWARD = (fft.ifft, fft.ifft2, fft.ifftn)
TO_REAL = (fft.irfft, fft.irfft2, fft.irfftn)
OF_ONE_DIM = (fft.fft, fft.rfft, fft.ifft, fft.irfft)
_OF_TWO_DIMS = (fft.fft2, fft.rfft2, fft.ifft2, fft.irfft2)
SHIFTS = (fft.fftshift, fft.ifftshift)
FLOATS, COMPLEX = (torch.float32, torch.float64), (torch.complex64, torch.complex128)

Fields = dict[Any, Layout]
"""The layouts of fields that were transformed, by `field_key`."""


def transformed_dims(func: Any, ndim: int, s: Any, dim: Any) -> list[int] | None:
    """The dims that a function of torch.fft transforms, told in lists; None of a call that it
    refuses."""
    if func in OF_ONE_DIM:
        dim = [-1 if dim is None else dim]
    elif isinstance(dim, int) or isinstance(s, int):
        return None
    elif dim is None:
        dim = (-2, -1) if func in _OF_TWO_DIMS else range(-(ndim if s is None else len(s)), 0)
    if not all(isinstance(at, int) and -ndim <= at < ndim for at in dim) or (
        s is not None and len(s) != len(dim)
    ):
        return None
    dims = [at % ndim for at in dim]
    return dims if dims and len({*dims}) == len(dims) else None


def field_key(mesh: BoundMesh, dims: Sequence[int], shape: Sequence[int]) -> Any:
    """What finds the layout of a field: its mesh, whose ranks all know the same fields, and the
    dims that are transformed, counted from the last, with their lengths."""
    return mesh, *sorted([(dim - len(shape), shape[dim]) for dim in dims])


def shifts_of(func: Any, shape: Sequence[int], dim: Any = None) -> dict[int, int]:
    """How far fftshift or ifftshift rolls each dim."""
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    return {at % len(shape): shape[at] // 2 if func is fft.fftshift else -(shape[at] // 2)
            for at in dims}

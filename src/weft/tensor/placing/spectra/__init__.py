"""Fourier layers inside `weft.sharded_factories()` send only the modes that are read or written.

A transform of a field with sharded dims waits for slices, which say which modes are read. A dim is
transformed to few modes as a product (`dft`), whose sum over ranks is all that is sent. To
more modes than a rank has positions it is transformed by an exchange, after the modes of other dims
have been taken.

A tensor of complex zeros waits, too, and remembers the blocks that are written to it. An inverse
transform brings all ranks their modes, and each makes its own positions of them, where the field
that was transformed had them; or it exchanges the blocks, and adds the zeros where a dim is whole.

Any other use makes the whole spectrum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fft
from torch.nn.functional import pad as pad_function

from weft.tensor.placing.spectra.calls import (
    COMPLEX,
    FLOATS,
    FORWARD,
    REAL,
    Fields,
    field_key,
    transformed_dims,
)
from weft.tensor.placing.spectra.spectrum import Spectrum
from weft.tensor.placing.spectra.zeros import Zeros, waiting_for
from weft.tensor.placing.waiting import unplaced
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["STARTS", "Fields", "begun", "waiting_for"]

STARTS = frozenset((*FORWARD, *REAL, pad_function))
"""Functions of which `begun` may put off a call."""


def begun(func: Any, args: Sequence[Any], kwargs: dict[str, Any], fields: Fields) -> Tensor | None:
    """What waits in place of the result of a call on a ShardTensor; None where nothing does."""
    if func is not pad_function:
        return _spectrum(func, fields, *args, **kwargs)
    return _padded(fields, *args, **kwargs) if args[0].is_complex() else None


def _spectrum(
    func: Any, fields: Fields, input: ShardTensor, s: Any = None, dim: Any = None,
    norm: str | None = None, out: Any = None, n: Any = None,
) -> Tensor | None:
    dims = transformed_dims(func, input.ndim, s, dim)
    if s is not None or n is not None or out is not None or dims is None or 0 in input.shape:
        return None
    layout = input._meta.layout
    first, rest = [at for at in dims if not layout.dims[at]], [at for at in dims if layout.dims[at]]
    if not rest or not {*layout.partial} <= {None, "sum"}:
        return None
    real = dims[-1] if func in REAL else None
    if input.dtype not in (FLOATS if real is not None else (*FLOATS, *COMPLEX)):
        return None
    fields[field_key(input._meta.mesh, dims, input.shape)] = layout
    if first and real not in rest:
        base = (fft.fftn if real is None else fft.rfftn)(input, dim=first, norm=norm)
    else:
        base, first = input.clone(), []
    return Spectrum(base, dims, first, real, norm, fields).waiting()


def _padded(
    fields: Fields, input: ShardTensor, pad: Sequence[int], mode: str = "constant",
    value: float | None = None,
) -> Tensor | None:
    """Zeros with one block."""
    if mode != "constant" or value or min(pad, default=-1) < 0 or not (
        len(pad) % 2 == 0 and len(pad) <= 2 * input.ndim
    ):
        return None
    before = [0] * (input.ndim - len(pad) // 2) + list(pad[-2::-2])
    after = [0] * (input.ndim - len(pad) // 2) + list(pad[:: -2])
    index = tuple([slice(start, start + length) for start, length in zip(before, input.shape)])
    shape = [sum(each) for each in zip(before, input.shape, after)]
    wait = Zeros(partial(torch.constant_pad_nd, input, pad), fields)
    out = unplaced(wait, shape, input.dtype, input.device)
    return out if wait.written_at(out, index, input) else None

"""`torch.nn.init` on ShardTensors: the functions that need more than their ops.

Functions that torch passes to `__torch_function__` as a whole would be captured without the
`no_grad` around them, `sparse_` draws plain permutations, and `orthogonal_` transposes in place.
The others are ordinary calls.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from weft.core import Layout
from weft.rng import Source, samples
from weft.rules import op, page
from weft.tensor.families.draws.samplers import like
from weft.tensor.placing.draw import drawn
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["PAGE", "orthogonal_", "sparse_"]

_init: Any = init


def _kaiming(fill_: Callable[[Tensor, float, Any], Any]) -> Callable[..., Tensor]:
    def initialize(
        tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu",
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Filled by the global fan (He et al., "Delving deep into rectifiers", 2015)."""
        if 0 in tensor.shape:
            warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=2)
            return tensor
        fan = _init._calculate_correct_fan(tensor, mode)
        with torch.no_grad():
            fill_(tensor, _init.calculate_gain(nonlinearity, a) / math.sqrt(fan), generator)
        return tensor

    return initialize


def orthogonal_(
    original: Any, tensor: Tensor, gain: float = 1, generator: torch.Generator | None = None
) -> Tensor:
    """As torch: Q of a normal matrix, by signs that make it uniform (Mezzadri, 2007).

    Every rank draws and factorizes the whole, which is the same on all of them.
    """
    if type(tensor) is not ShardTensor or tensor.ndim < 2 or not tensor.numel() or tensor.is_meta:
        return original(tensor, gain, generator)
    mesh, rows = tensor._meta.mesh, tensor.shape[0]
    layout = Layout.replicated(mesh.abstract, (rows, tensor.numel() // rows))
    drawing = drawn(
        lambda source: samples.normal(source, tensor.dtype), mesh, layout, tensor.dtype, generator)
    if mesh.here is None:
        return tensor
    normal = drawing._local if rows >= layout.shape[1] else drawing._local.t()
    q, r = torch.linalg.qr(normal)
    q = q * torch.diag(r, 0).sign()
    with torch.no_grad():
        tensor.copy_((q if rows >= layout.shape[1] else q.t()).reshape(tensor.shape))
        tensor.mul_(gain)
    return tensor


def sparse_(
    original: Any, tensor: Tensor, sparsity: float, std: float = 0.01,
    generator: torch.Generator | None = None,
) -> Tensor:
    """As torch: normal, but for as many elements of each column that are zero.

    Every rank chooses them for the columns that it holds, by sorting their bits.
    """
    if type(tensor) is not ShardTensor or tensor.ndim != 2:
        return original(tensor, sparsity, std, generator)
    num_zeros = math.ceil(sparsity * tensor.shape[0])

    def kept(source: Source) -> Tensor:
        rows, columns = source.box
        whole = Source(source.key, source.shape, ((0, source.shape[0]), columns), source.device)
        ranks = whole.bits64().argsort(dim=0, stable=True).argsort(dim=0)
        return ranks[slice(*rows)] >= num_zeros

    with torch.no_grad():
        tensor.normal_(0, std, generator=generator)
        tensor.mul_(like(tensor, kept, torch.bool))
    return tensor


def _filled(fill_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def initialize(**given: Any) -> Tensor:
        """Filled without a gradient: each rank its own elements."""
        return fill_(**given)

    return initialize


PAGE = page(
    op("torch.nn.init.uniform_", compose=_filled(_init._no_grad_uniform_), each_call=True),
    op("torch.nn.init.normal_", compose=_filled(_init._no_grad_normal_), each_call=True),
    op("torch.nn.init.constant_", compose=_filled(_init._no_grad_fill_), each_call=True),
    op("torch.nn.init.kaiming_uniform_", each_call=True, compose=_kaiming(
        lambda w, std, generator: w.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std,
                                             generator=generator))),
    op("torch.nn.init.kaiming_normal_", each_call=True, compose=_kaiming(
        lambda w, std, generator: w.normal_(0, std, generator=generator))),
)

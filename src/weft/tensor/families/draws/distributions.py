"""`torch.distributions` with ShardTensors as parameters.

Most samplers of torch make plain noise of the result's shape, `torch.rand(shape)`, which a
ShardTensor's `__torch_function__` does not see. So `sample` and `rsample` of torch's distributions
are replaced: if a parameter is a ShardTensor, so is the noise, in the layout of the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributions
from torch.overrides import TorchFunctionMode

from weft.core import Layout
from weft.rng import Source, samples
from weft.tensor.placing.construct import empty
from weft.tensor.placing.draw import drawn
from weft.tensor.placing.layouts import as_sharded
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["sample"]

_HOME = distributions.__name__


def sample(original: Any, distribution: Any, *args: Any, **kwargs: Any) -> Any:
    """`original`, the `sample` or `rsample` of a distribution."""
    parameters = _parameters(distribution)
    if not parameters:
        return original(distribution, *args, **kwargs)
    if original.__qualname__ == "Dirichlet.rsample":
        original = _dirichlet
    with _Noise(parameters):
        return original(distribution, *args, **kwargs)


def _dirichlet(self: Any, sample_shape: Any = ()) -> Tensor:
    """torch's own has a Function in Python, which would be given full tensors."""
    shape = self._extended_shape(sample_shape)
    return torch._sample_dirichlet(self.concentration.expand(shape))  # type: ignore[attr-defined]


def _parameters(distribution: Any) -> list[ShardTensor]:
    """The ShardTensors that a distribution has, those of its parts included."""
    found: list[ShardTensor] = []
    for value in vars(distribution).values():
        if type(value) is ShardTensor:
            found.append(value)
        elif isinstance(value, distributions.Distribution):
            found += _parameters(value)
    return found


class _Noise(TorchFunctionMode):
    """Inside, tensors that are made from a shape alone have the layout of the parameters."""

    def __init__(self, parameters: Sequence[ShardTensor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.mesh = parameters[0]._meta.mesh

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_HOME):
            return func(*args, **kwargs)  # weft's own
        sample = _MADE.get(func)
        if sample is not None and not kwargs.get("generator"):
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self._draw(_shape_of(args or (kwargs["size"],)), dtype, sample)
        if func is torch.empty:
            return self._empty(_shape_of(args or (kwargs["size"],)), kwargs.get("dtype"))
        if func is torch.Tensor.new and len(args) > 1:
            return self._empty(_shape_of(args[1:]), args[0].dtype)
        if func in _OF_PARAMETERS:  # a part of the distribution may have plain ones alone
            args = [as_sharded(one, self.mesh) if isinstance(one, Tensor) else one for one in args]
        return func(*args, **kwargs)

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype, sample: Any) -> ShardTensor:
        layout = self._layout(shape)
        return drawn(lambda source: sample(source, dtype), self.mesh, layout, dtype)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> ShardTensor:
        return empty(shape, dtype=dtype, device_mesh=self.mesh, placements=self._layout(shape))

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        """As the parameter with most cut dims among the last dims of the shape."""
        best, most = Layout.replicated(self.mesh.abstract, shape), 0
        for parameter in self.parameters:
            have = parameter._meta.layout.without_partial()
            skip = len(shape) - have.ndim
            if skip < 0:
                continue
            grown = [at for at in range(have.ndim) if have.shape[at] != shape[skip + at]]
            layout = have.gathered(grown).replace(shape=shape[skip:])
            layout = layout.insert(0, Layout.replicated(have.mesh, shape[:skip]))
            if len(layout.sharded_axes) > most:
                best, most = layout, len(layout.sharded_axes)
        return best


_MADE: dict[Any, Callable[[Source, torch.dtype], Tensor]] = {
    torch.rand: samples.unit, torch.randn: samples.normal,
}


_OF_PARAMETERS = frozenset({
    torch.bernoulli, torch.binomial, torch.multinomial, torch.normal, torch.poisson,
    torch._sample_dirichlet, torch._standard_gamma,  # type: ignore[attr-defined]
})


def _shape_of(size: Any) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)

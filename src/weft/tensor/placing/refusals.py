"""Draws that torch refuses: dtypes and numbers out of range.

The same op runs on operands of one element, so all of torch's checks apply and the message is
torch's. Whether rates and probabilities are in range, each rank finds where it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from weft.rng import samples
from weft.tensor.trace.capture import Op
from weft.tensor.trace.trees import fill

__all__ = ["refuse", "refuse_factory"]

_OWN = torch.Generator()
"""A generator whose draws do not count."""


def refuse(op: Op, metas: Sequence[torch.Tensor]) -> None:
    """Raise what torch raises for a random op with such operands and arguments.

    `metas` are the values of its Slots. Half precision is tried as float32: torch lacks some
    half-precision samplers on the CPU, weft has them.
    """
    shape = (1,) * max([meta.ndim for meta in metas], default=0)
    shapes = [shape] * len(metas)
    if "randint_like" in str(op.overload):  # a bound may be a 0-d tensor
        shapes[1:] = [()] * (len(metas) - 1)
    tried = [
        torch.ones(each, dtype=_dtype(meta), device="cpu") for each, meta in zip(shapes, metas)
    ]
    args, kwargs = fill(op.args, tried), dict(fill(op.kwargs, tried))
    if "multinomial" in str(op.overload):
        args = (_categories(metas[op.args[0].index], args[1]), *args[1:])
    names = [each.name for each in op.overload._schema.arguments]
    at = names.index("generator") if "generator" in names else len(names)
    if at < len(args):
        args = (*args[:at], _OWN, *args[at + 1 :])
    elif at < len(names):
        kwargs["generator"] = _OWN
    before = torch.default_generator.get_state() if at == len(names) else None
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            op.overload(*args, **kwargs)
    finally:
        if before is not None:  # it has drawn from torch's own
            torch.default_generator.set_state(before)


def _categories(meta: torch.Tensor, num: int) -> torch.Tensor:
    """As many categories as show whether there are enough to draw `num` of them."""
    shape = [1] * meta.ndim
    if shape:
        shape[-1] = min(meta.shape[-1], max(num, 0) + 1)
    return torch.ones(shape, dtype=_dtype(meta), device="cpu")


def _dtype(meta: torch.Tensor) -> torch.dtype:
    return samples.wide(meta.dtype) if meta.dtype.is_floating_point else meta.dtype


@lru_cache(maxsize=1024)
def refuse_factory(factory: Callable[..., Any], *args: Any, dtype: torch.dtype) -> None:
    """Raise what torch raises for a random factory with these arguments, of which the size should
    be small, and this dtype."""
    with torch._C.DisableTorchFunction():
        factory(*args, dtype=dtype, device="cpu", generator=_OWN)

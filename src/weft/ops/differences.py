"""Differences of neighbours along sharded dims, whose borders come in one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.ops.algorithm import Composite
from weft.rules import Boxed, BoxedDim, Call, OnRank, Table, op, page, rule
from weft.rules.factors import names

__all__ = ["PAGE"]


# torch.gradient: each place reads both neighbours, and the ends two or three places.


def _gradient_dims(call: Call) -> list[int]:
    ndim, dim = len(call.tensors[0].shape), call.get("dim")
    dims = range(ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return [at % ndim for at in dims]


def _gradient_text(call: Call, wants_grad: Sequence[bool]) -> str:
    """Each result has the positions of x; places that are given are whole."""
    x, *places = call.tensors
    dims, every = _gradient_dims(call), names(len(x.shape))
    given = " ".join([f"@{name}" if at in dims else name for at, name in enumerate(every)])
    others = "".join([f", p{at}!" for at in range(len(places))])
    return f"{given}{others} -> {', '.join([' '.join(every)] * len(dims))}"


def _gradient_tables(call: Call) -> Mapping[str, Table]:
    shape, edge = call.tensors[0].shape, call.get("edge_order", 1)
    return {f"d{dim}": _neighbours(shape[dim], edge) for dim in _gradient_dims(call)}


def _neighbours(length: int, edge: int) -> Table:
    starts = [max(place - 1, 0) for place in range(length)]
    stops = [min(place + 2, length) for place in range(length)]
    if length:
        starts[-1], stops[0] = length - 1 - edge, 1 + edge
    return Table(tuple(starts), tuple(stops), length)


def _gradient_on_box(call: Call, boxed: Boxed) -> OnRank:
    """That of the box, without the places that were read for others."""
    fetched = {dim.dim: dim for dim in boxed.dims if dim.box is not None}
    if not fetched:
        return None, boxed.args, boxed.kwargs
    dims, edge = _gradient_dims(call), call.get("edge_order", 1)

    def gradient(x: Tensor, *, spacing: Any = None, **_: Any) -> list[Tensor]:
        steps = spacing if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
        found = []
        for dim, step in zip(dims, steps):
            own = x
            for at, part in fetched.items():
                if at != dim:
                    own = _outputs(own, part)
            part = fetched.get(dim)
            if part is not None and part.box is not None and isinstance(step, Tensor):
                step = step[slice(*part.box)]
            (one,) = torch.gradient(own, spacing=1 if step is None else (step,), dim=dim,
                                    edge_order=edge)
            # A copy: a view would keep the borders' places alive.
            found.append(one if part is None else _outputs(one, part).clone())
        return found

    return gradient, boxed.args, boxed.kwargs


def _outputs(x: Tensor, part: BoxedDim) -> Tensor:
    """The places of a box that the rank computes."""
    assert part.box is not None
    start, stop = part.outputs
    return x.narrow(part.dim, start - part.box[0], stop - start)


# diff: each place reads as many behind it as there are differences.


def _diff_text(call: Call, wants_grad: Sequence[bool]) -> str:
    ndim, num = len(call.tensors[0].shape), call.get("n", 1)
    dim, made = call.get("dim", -1) % ndim, names(ndim)
    given = [f"{name}+w<{num + 1}" if at == dim else name for at, name in enumerate(made)]
    return f"{' '.join(given)} -> {' '.join(made)}"


def _is_repeated(call: Call) -> bool:
    """More than one difference: of one, slices are aligned when they meet."""
    return len(call.tensors) == 1 and 1 < call.get("n", 1) < call.tensors[0].shape[
        call.get("dim", -1)]


def _between_ends(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """What stands before or behind is joined first."""
    return Composite(_joined) if len(call.tensors) > 1 and call.get("n", 1) > 1 else None


def _joined(
    x: Tensor, num: int, dim: int, prepend: Tensor | None, append: Tensor | None
) -> Tensor:
    parts = [one for one in (prepend, x, append) if one is not None]
    return torch.diff(torch.cat(parts, dim), num, dim)


PAGE = page(
    op("gradient", rule(
        _gradient_text, linear=[0], on_box=_gradient_on_box, tables=_gradient_tables)),
    op("diff", rule(_diff_text, linear=[0], serves=_is_repeated, by_size=True),
       layouts=_between_ends),
)

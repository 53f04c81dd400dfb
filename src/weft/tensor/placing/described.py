"""Facts about full tensors that ranks distribute together, compared over the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import LayoutError, WeftError
from weft.tensor.meta import contiguous_strides
from weft.tensor.placing.agreed import exchanged

__all__ = ["Facts", "Strides", "compared", "facts_of", "strides_of"]

Strides = tuple[int, ...] | None
"""Of a tensor without gaps; None is row-major."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's facts about a full tensor; `parts` are those of its layout. Of the memory order
    the source's counts, so ranks may differ in it."""

    name: str
    dtype: torch.dtype
    strides: Strides = field(compare=False)
    requires_grad: bool
    parts: tuple[Any, ...]

    def text(self, mesh: BoundMesh) -> str:
        """The layout, as it is printed."""
        layout = Layout.make(mesh.abstract, *self.parts)
        text = layout.text(str(self.dtype).removeprefix("torch."))
        return f"{self.name} {text}".strip() + (" that requires grad" if self.requires_grad else "")


def facts_of(name: str, tensor: torch.Tensor, layout: Layout) -> Facts:
    parts = layout.shape, layout.dims, layout.cuts, layout.partial
    return Facts(name, tensor.dtype, strides_of(tensor), tensor.requires_grad, parts)


def strides_of(tensor: torch.Tensor) -> Strides:
    """The strides of a copy."""
    if tensor.is_contiguous():
        return None
    strides = torch.empty_like(tensor, device="meta").stride()
    return None if strides == contiguous_strides(tensor.shape) else strides


def compared(
    call: str, mesh: BoundMesh, mine: list[Facts], fault: WeftError | None, source: int
) -> list[Facts]:
    """The facts of the source, if all ranks say the same, and there is no `fault`; else LayoutError
    on all ranks."""
    told: list[list[Facts]] = exchanged(call, mesh, mine, fault)
    truth = told[source]
    wrong, first = [], None
    for at, theirs in enumerate(told):
        pair = next((pair for pair in zip_longest(theirs, truth) if pair[0] != pair[1]), None)
        if pair is not None:
            first = first or pair[1]
            wrong.append(f"rank {mesh.rank_at(at)}: " + (
                "no more" if pair[0] is None else pair[0].text(mesh)))
    if wrong:
        has = "no more" if first is None else first.text(mesh)
        raise LayoutError(
            call, f"rank {mesh.rank_at(source)} has {has}, and {len(wrong)} ranks another",
            "all ranks pass tensors of one shape and dtype, which all or none want a "
            "gradient of, and the same placements", wrong,
            "torch.empty_like(full) on ranks whose data do not count, or "
            "scatter_tensor(full_or_None, source, mesh, placements)")
    return truth

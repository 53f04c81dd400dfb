"""Where the blocks of several parameters stand in the buffer of one collective.

A buffer is rank-major: first everything of the first rank, its block of each parameter, then
everything of the next. Nothing is padded: blocks may be uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm import BoundMesh, Communicator
from weft.core import Box, Layout
from weft.planner.geometry import coarser
from weft.tensor.meta import Meta, kept
from weft.transport.boxes import part, shape_of, within

__all__ = ["Packing", "gathered_layout", "packing_of"]


def gathered_layout(layout: Layout, axes: frozenset[int]) -> Layout | None:
    """The layout gathered over these axes; None if that is no gather of blocks, because a remaining
    axis cuts the pieces of these axes further."""
    dims = [tuple([axis for axis in mine if axis not in axes]) for mine in layout.dims]
    if any(mine[: len(left)] != left for mine, left in zip(layout.dims, dims)):
        return None
    cuts = [coarser(layout, dim, len(left))[1] for dim, left in enumerate(dims)]
    return layout.replace(dims=dims, cuts=cuts)


def packing_of(
    mesh: BoundMesh, comm: Communicator, metas: Sequence[Meta], layouts: Sequence[Layout],
    widths: Sequence[int] = (),
) -> Packing:
    """The packing of parameters; those of alike layouts share one. `widths`: per parameter, how
    many elements of the buffer one of its elements takes."""
    widths = tuple(widths) if any(width > 1 for width in widths) else ()
    key = comm.ranks, tuple([meta.layout for meta in metas]), tuple(layouts), widths

    def make() -> Packing:
        found = map(mesh.coordinate_of_rank, comm.ranks)
        coordinates = [each for each in found if each is not None]
        return Packing(metas, layouts, coordinates, comm.index, widths)

    return kept(mesh.cache.setdefault("packings", {}), key, make)


def _wider(box: Box, width: int) -> Box:
    """A box in elements of another size: the last dim is longer."""
    if width == 1:  # what has no dim is replicated, and keeps its size
        return box
    *others, (start, stop) = box
    return *others, (start * width, stop * width)


class Packing:
    """The places of parameters' blocks in buffers, over one communicator.

    Args:
        metas: of the sharded parameters.
        layouts: of the gathered parameters.
        coordinates: of the communicator's ranks, in its order.
        index: this rank's place among them.
        widths: how many elements of the buffer an element of each parameter takes; one by default.
            A parameter is given, and found, as seen in the buffer's dtype: its last dim is as many
            times as long.
    """

    def __init__(
        self, metas: Sequence[Meta], layouts: Sequence[Layout],
        coordinates: Sequence[tuple[int, ...]], index: int, widths: Sequence[int],
    ) -> None:
        self.index = index
        boxes = [[
            (_wider(meta.layout.box_at(at), width), _wider(layout.box_at(at), width))
            for meta, layout, width in zip(metas, layouts, widths or [1] * len(metas))
        ] for at in coordinates]
        self.shapes = [[shape_of(box) for box, _ in mine] for mine in boxes]
        """Per rank, those of the blocks."""
        self.parts = [[part(*ends) for ends in mine] for mine in boxes]
        """Per rank, what finds each in this rank's part of the gathered parameter."""
        self.counts = [[torch.Size(shape).numel() for shape in mine] for mine in self.shapes]
        self.sizes = tuple([sum(mine) for mine in self.counts])
        self.numel = sum(self.sizes)
        first = self.shapes[0]
        alike = all(mine == first for mine in self.shapes) and all(first)
        self.is_even = alike and 0 not in self.counts[0] and all(
            [at.start for at in within(*ends)] == [rank * shape[0], *[0] * (len(shape) - 1)]
            for rank, mine in enumerate(boxes) for ends, shape in zip(mine, first)
        )
        """Whether a buffer, seen as a matrix of a row per rank, has each gathered parameter in its
        columns."""

    def spread(self, flat: Tensor, wholes: Sequence[Tensor]) -> None:
        """Copy a buffer into gathered parameters."""
        if flat.is_meta:  # no data
            return
        if self.is_even:
            num = len(self.sizes)
            torch.split_with_sizes_copy(
                flat.view(num, -1), self.counts[0], 1,
                out=[whole.view(num, -1) for whole in wholes])
            return
        parts, blocks = self._pieces(flat, wholes)
        if parts:  # none where all of this rank's shards over other axes are empty
            torch._foreach_copy_(parts, blocks)

    def collect(self, flat: Tensor, wholes: Sequence[Tensor]) -> None:
        """Copy tensors with the shapes of gathered parameters into a buffer."""
        if flat.is_meta:
            return
        if self.is_even:
            num = len(self.sizes)
            into = flat.view(num, -1).split(self.counts[0], 1)
            torch._foreach_copy_(into, [whole.reshape(num, -1) for whole in wholes])
            return
        parts, blocks = self._pieces(flat, wholes)
        if parts:
            torch._foreach_copy_(blocks, parts)

    def _pieces(self, flat: Tensor, wholes: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The pieces of gathered parameters, and the blocks of a buffer that belong to them."""
        parts, blocks = [], []
        for rank, mine in enumerate(flat.split(self.sizes)):
            for at, block in enumerate(mine.split(self.counts[rank])):
                if block.numel():
                    parts.append(self.parts[rank][at](wholes[at]))
                    blocks.append(block.view(self.shapes[rank][at]))
        return parts, blocks

    def of(self, there: Sequence[bool]) -> Packing:
        """The packing of some of the parameters."""
        new = object.__new__(Packing)
        new.index, new.is_even = self.index, self.is_even
        for name in ("shapes", "parts", "counts"):
            setattr(new, name, [
                [one for one, is_there in zip(mine, there) if is_there]
                for mine in getattr(self, name)
            ])
        new.sizes = tuple([sum(mine) for mine in new.counts])
        new.numel = sum(new.sizes)
        return new

    def mine(self, flat: Tensor) -> list[Tensor]:
        """This rank's blocks, of a buffer of its own."""
        index = self.index
        return [
            block.view(shape)
            for block, shape in zip(flat.split(self.counts[index]), self.shapes[index])
        ]

    def own(self, whole: Tensor, at: int) -> Tensor:
        """This rank's block of a gathered parameter: a view."""
        return self.parts[self.index][at](whole)

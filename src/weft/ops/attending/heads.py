"""Attention of a sharded sequence by heads: an exchange after which each rank has whole sequences
of some heads, attention over these, and an exchange back (Jacobs et al., DeepSpeed
Ulysses, 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.transport import Transition

__all__ = ["ByHeads", "Moves"]

Moves = Callable[[Tensor, Transition], Tensor]
"""Carries out a transition of a tensor."""


class ByHeads:
    """The exchanges of one call, all of whose operands are sharded along the sequence alike.

    Args:
        layouts: of queries, keys, values and the mask, if there is one.
        axes: those that shard the sequence.
        times: how often each key head is sent, so that there are enough of them.
    """

    __slots__ = ("axes", "layouts", "mesh", "moved", "moves", "result", "times")

    def __init__(
        self, mesh: BoundMesh, layouts: tuple[Layout, ...], axes: tuple[int, ...], times: int
    ) -> None:
        self.mesh, self.layouts, self.axes, self.times = mesh, layouts, axes, times
        query, key, value = layouts[:3]
        given = [query, _repeated(key, times), _repeated(value, times), *layouts[3:]]
        self.moved = [_by_heads(one, axes) for one in given]
        self.result = _like(self.moved[0], value), _like(query, value)
        varying = frozenset(axes)
        self.moves = [
            Transition(mesh, before, after, src_varying=varying, dst_varying=varying)
            for before, after in zip((*given, self.result[0]), (*self.moved, self.result[1]))
        ]

    @classmethod
    def of(cls, mesh: BoundMesh, layouts: tuple[Layout, ...]) -> ByHeads | None:
        """None where heads cannot be shared out evenly."""
        query, key, value = layouts[:3]
        axes = query.dims[-2]
        lead = query.shape[:-3]
        if any(one.ndim != query.ndim for one in (key, value)):
            return None
        if set(axes) != set(key.dims[-2]) or any(
            one.shape[:-3] != lead or not one.shape[-3] for one in (query, key, value)
        ) or key.shape[-3] != value.shape[-3] or query.shape[-3] % key.shape[-3]:
            return None
        num = math.prod([query.mesh.axis_sizes[axis] for axis in axes])
        each = query.shape[-3] // key.shape[-3]
        for times in range(1, each + 1):
            if each % times == 0 and all(
                size * times % num == 0 for size in key.sizes_of(key.ndim - 3)
            ):
                return cls(mesh, layouts, axes, times)
        return None

    def nbytes(self, itemsize: int) -> float:
        """What a rank receives: of queries, keys, values and of the result."""
        return self._received([*self.moved[:3], self.result[0]]) * itemsize

    def nbytes_of_mask(self, itemsize: int) -> float:
        """What a rank receives of the mask, if each has some of its rows."""
        return self._received([
            after for before, after in zip(self.layouts[3:], self.moved[3:]) if before.dims[-2]
        ]) * itemsize

    def _received(self, layouts: list[Layout]) -> float:
        """Elements that a rank does not have before an exchange to these layouts."""
        num = math.prod([self.layouts[0].mesh.axis_sizes[axis] for axis in self.axes])
        return sum(map(_share, layouts)) * (1 - 1 / num)

    def attend(
        self, tensors: list[Tensor], whole: Callable[..., Tensor], moved: Moves
    ) -> Tensor:
        """The rank's part of the result; `whole` is attention of whole sequences, `moved` moves the
        mask."""
        if self.times > 1:
            tensors[1:3] = [one.repeat_interleave(self.times, -3) for one in tensors[1:3]]
        given = [move(x) for move, x in zip(self.moves, tensors[:3])]
        masks = [moved(mask, self.moves[3]) for mask in tensors[3:]]
        return self.moves[-1](whole(*given, *masks))


def _repeated(layout: Layout, times: int) -> Layout:
    """With each head so many times."""
    at = layout.ndim - 3
    return layout if times == 1 else layout.recut(
        at, layout.shape[at] * times, tuple([cut * times for cut in layout.cuts_of(at)]))


def _by_heads(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """Heads sharded by these axes as well, and the sequence by none."""
    layout, at = layout.without_partial().gathered([layout.ndim - 2]), layout.ndim - 3
    return layout.divided(at, axes) if at >= 0 and layout.shape[at] > 1 else layout


def _like(query: Layout, value: Layout) -> Layout:
    """The layout of the result, if queries and values have these layouts."""
    last = query.ndim - 1
    return query.take(range(last)).insert(last, value.take([last]))


def _share(layout: Layout) -> float:
    """Elements of one rank, on average."""
    return math.prod(layout.shape) / math.prod([
        layout.mesh.axis_sizes[axis] for axis in layout.sharded_axes
    ])

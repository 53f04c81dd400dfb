"""How attention of one call is carried out: by heads, or by blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.core.layout import Box
from weft.ops.attending.blocks import Blocks
from weft.ops.attending.fused import ATTENTION
from weft.ops.attending.heads import ByHeads, Moves
from weft.ops.attending.sequence import Keys, attend
from weft.ops.attending.stretches import Order, stretches
from weft.ops.attending.tiles import Noise, Options
from weft.rng import Key, Source, samples
from weft.transport import Shards, Transition

__all__ = ["Drops", "Attention"]


@dataclass(frozen=True, slots=True)
class Drops:
    """Which weights are dropped out, by the global index of each.

    Args:
        key: of the random call. p: the share of weights that become zero; the others grow.
        device, dtype: of the scores.
    """

    key: Key
    p: float
    device: torch.device
    dtype: torch.dtype

    def noise(self, shape: tuple[int, ...], box: Box, groups: int) -> Tensor:
        """The factors of the weights in a box, of this shape; heads are separate by groups, if
        there are several."""
        source = Source(self.key, shape, box, self.device)
        found = samples.bernoulli(source, 1.0 - self.p, self.dtype)
        if self.p < 1.0:
            found.div_(1.0 - self.p)
        return found if groups == 1 else found.unflatten(-3, (-1, groups))


class Attention:
    """Attention of operands in these layouts, by heads or by blocks of keys.

    Args:
        layouts: of queries, keys, values and the mask, if there is one.
        is_causal: whether a query sees no key of a later position.
        enable_gqa: whether several heads of queries may share one of keys.
        order: of positions in the sequence.

    `picked` are the heads of keys of which this rank's queries have one each, where those of keys
    are not sharded as those of queries are.
    """

    __slots__ = ("axes", "first_column", "groups", "heads", "is_causal", "keys", "layouts", "mesh",
                 "picked", "varying")

    def __init__(
        self, mesh: BoundMesh, layouts: tuple[Layout, ...], is_causal: bool, enable_gqa: bool,
        order: Order = None,
    ) -> None:
        assert mesh.here is not None
        query, key = layouts[:2]
        self.groups, self.picked = 1, None
        if enable_gqa and query.ndim > 2 and key.shape[-3] not in (1, query.shape[-3]):
            self.groups = query.shape[-3] // key.shape[-3]
        if self.groups > 1 and query.dims[-3] != key.dims[-3]:
            first, last = query.box_at(mesh.here)[-3]
            self.picked = torch.arange(first, last, device=mesh.device) // self.groups
            self.groups = 1
            layouts = query, *[_of_heads(one, query) for one in layouts[1:3]], *layouts[3:]
            key = layouts[1]
        self.mesh, self.layouts, self.is_causal = mesh, layouts, is_causal
        self.axes = tuple(sorted(key.dims[-2]))
        self.varying = frozenset({axis for one in layouts for axis in one.sharded_axes})
        both = tuple([axis for axis in self.axes if axis in query.dims[-2]])
        rest = tuple([axis for axis in self.axes if axis not in both])
        self.first_column = 0
        if len(layouts) > 3 and layouts[3].dims[-1]:
            self.first_column = layouts[3].box_at(mesh.here)[-1][0]
        own, blocks = [stretches(one.box_at(mesh.here)[-2], order) for one in (query, key)], None
        if both:
            there = mesh.along(both, mesh.here)  # in the order of the mesh
            queries, keys = ([stretches(one.box_at(at)[-2], order) for at in there]
                             for one in (query, key))
            blocks = Blocks(mesh.comm(both), queries, keys, is_causal)
        self.keys = Keys(
            own[0], own[1], blocks, mesh.comm(rest) if rest else None, self._gathered, order)
        self.heads = ByHeads.of(mesh, layouts) if both and not rest else None

    @classmethod
    def of(
        cls, shards: Shards, is_causal: bool, enable_gqa: bool, order: Order = None
    ) -> Attention:
        """That of a call, made once."""
        made = shards.once(lambda: cls(shards.mesh, shards.operands, is_causal, enable_gqa, order))
        if shards.check is not None and made.axes:
            shards.check(made.axes)
        return made

    def attend(
        self, tensors: Sequence[Tensor], scale: float, moved: Moves, drops: Drops | None = None
    ) -> Tensor:
        """This rank's part of the result, of its parts of the operands; `moved` moves a mask, and
        `drops` says which weights are dropped."""
        if self.picked is not None:
            keys = [one.index_select(-3, self.picked) for one in tensors[1:3]]
            tensors = [tensors[0], *keys, *tensors[3:]]
        fused = partial(
            ATTENTION, is_causal=self.is_causal, scale=scale, enable_gqa=self.groups > 1)
        order = self.keys.order
        if not (self.axes or drops or (self.is_causal and (order or self.layouts[0].dims[-2]))):
            return fused(*tensors)
        heads = self.heads
        if heads is None or not self._by_heads(heads, tensors):
            options = Options(scale, self.is_causal, first_column=self.first_column)
            if drops is not None:
                options = replace(options, noise=self._noise(drops, self.layouts[0], self.groups))
            return _tiled(self.keys, options, self.groups, *tensors)
        if drops is None and not (order and self.is_causal):
            return heads.attend(list(tensors), fused, moved)
        groups = max(self.groups // heads.times, 1)
        noise = None if drops is None else self._noise(drops, heads.moved[0], groups)
        options = Options(scale, self.is_causal, noise=noise)
        keys = Keys.alone(self.layouts[0].shape[-2], self.layouts[1].shape[-2], order)
        return heads.attend(list(tensors), partial(_tiled, keys, options, groups), moved)

    def _noise(self, drops: Drops, query: Layout, groups: int) -> Noise:
        """The noise of this rank's weights, if the queries have this layout."""
        assert self.mesh.here is not None
        lead = query.box_at(self.mesh.here)[:-2]
        shape = (*query.shape[:-1], self.layouts[1].shape[-2])
        return lambda rows, columns: drops.noise(shape, (*lead, rows, columns), groups)

    def _by_heads(self, heads: ByHeads, tensors: Sequence[Tensor]) -> bool:
        """Whether an exchange of heads sends less than blocks do."""
        assert self.keys.blocks is not None
        grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        fetched = self.keys.blocks.busiest(grad) * sum([
            math.prod(one.shape[:-2]) * one.shape[-1] * one.element_size() for one in tensors[1:3]
        ])
        exchanged = heads.nbytes(tensors[0].element_size())
        if len(tensors) > 3:
            of_mask = heads.nbytes_of_mask(tensors[3].element_size())
            if of_mask > exchanged:  # by blocks a rank needs its rows of it alone
                return False
            exchanged += of_mask
        return (2 * exchanged if grad else exchanged) <= fetched

    def _gathered(self, x: Tensor, operand: int) -> Tensor:
        """Keys, values or the mask with the keys of all ranks."""
        layout = self.layouts[operand]
        dim = layout.ndim - (1 if operand == 3 else 2)
        move = Transition(self.mesh, layout, layout.gathered([dim]), src_varying=self.varying,
                          dst_varying=self.varying)
        if x.dim() == layout.ndim:
            return move(x)
        return move(x.flatten(-4, -3)).unflatten(-3, x.shape[-4:-2])  # heads by groups


def _tiled(
    keys: Keys, options: Options, groups: int, q: Tensor, k: Tensor, v: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention tile by tile, of so many heads of queries to one of keys."""
    if groups == 1:
        return attend(keys, replace(options, mask=mask), q, k, v)
    heads = k.shape[-3], groups
    if mask is not None and mask.dim() > 2:
        mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, heads)
    options = replace(options, mask=mask)
    return attend(keys, options, q.unflatten(-3, heads), k.unsqueeze(-3), v.unsqueeze(-3)).flatten(
        -4, -3)


def _of_heads(layout: Layout, query: Layout) -> Layout:
    """Keys or values of which each head of the queries has one of its own."""
    at = layout.ndim - 3
    head = query.take([query.ndim - 3])
    return layout.take([dim for dim in range(layout.ndim) if dim != at]).insert(at, head)

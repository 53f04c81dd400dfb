"""Halos that several calls read of one tensor: one exchange serves them.

A stencil reads a tensor many times: `u[2:] - u[:-2]`, five rolls. Each call alone would be an
exchange. Two things make them one:

- A slice is a view of this rank's rows, and remembers its base (`Slice`). If a call aligns it with
  other cuts, the missing rows are read from the base, as a roll or a convolution reads them.
- The reads of one tensor are remembered, with the reads before them. In the next step of a loop a
  tensor is first read in the same way. Then the box of all its reads is fetched at once, and
  narrower reads are parts of it. The box is kept until it has been read as often as in the step
  before. In a first step each call fetches by itself.

A prediction decides only about exchanges: a call that finds no rows in the box fetches them itself.
It follows from the reads of the program, which are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.utils.weak import TensorWeakRef

from weft.core import Cover, Interval, Layout
from weft.tensor.meta import bounded_put, kept
from weft.tensor.placing.transitions import order_in_memory, transition_between
from weft.tensor.shard_tensor import ShardTensor, version_of
from weft.tensor.views.moved import Moved
from weft.transport.transition import Transition

__all__ = ["Halo", "Slice", "read", "slice_of"]

MAX_RECORDS = 4096
MEMORY = 6, 2
"""How many calls before a read tell which it is; fewer, where so many have not been seen."""

WASTE = 1.25
"""A box may have so many times the bytes of the reads that it serves: corners."""

Parts = tuple[tuple[int, int, int], ...] | None
"""(dim, start, length) of what is read of a box; None where the box does not have it."""


@dataclass(slots=True)
class Record:
    """The boxes that were read of one tensor, in order, and the number of calls that read one."""

    needs: list[Transition] = field(default_factory=list[Transition])
    count: int = 0

    def add(self, needs: Sequence[Transition]) -> None:
        """Record a read of these boxes."""
        self.count += len(needs)
        self.needs += [need for need in dict.fromkeys(needs) if need not in self.needs]


class _Reads:
    """The program's reads of others' shards, on one mesh."""

    def __init__(self) -> None:
        self.recent: tuple[Any, ...] = (None,) * MEMORY[0]
        """Per call, what it read, and of which tensor: how many were read first since that was."""
        self.begun = 0
        self.records: dict[Any, Record] = {}
        self.joint: dict[tuple[Transition, ...], Transition | None] = {}
        self.parts: dict[tuple[Transition, Transition], Parts] = {}

    def joined(self, needs: Sequence[Transition]) -> Transition | None:
        """The one transition to the boxes that serve all of these, if there is a good one."""
        key = tuple(needs)
        return kept(self.joint, key, lambda: _joint(key))

    def part(self, box: Transition, need: Transition) -> Parts:
        """What is read of a box."""
        return kept(self.parts, (box, need), lambda: _part(box, need))


@dataclass(slots=True, eq=False)
class Halo:
    """The reads of one value of a tensor.

    Args:
        state: the local tensor, its version, and whether a graph is recorded.
        record: of this value. left: how often the box will be read.
        joint: to the box that serves several reads; None where there is none.
        number: of the values that were read before it.
        box: once it was fetched, until its last read.
    """

    state: tuple[Any, ...]
    record: Record
    joint: Transition | None
    left: int
    number: int = 0
    box: Tensor | None = None

    def serve(self, reads: _Reads, need: Transition) -> Tensor | None:
        """The part of the box that is read; None where the box does not have it."""
        if self.joint is None:
            return None
        parts = reads.part(self.joint, need)
        if parts is None:
            return None
        if self.box is None:
            self.box = self.joint(self.state[0], read_only_use=True)
        out = self.box.view_as(self.box)
        for dim, start, length in parts:
            out = out.narrow(dim, start, length)
        self.left -= 1
        if self.left == 0:
            self.box = self.joint = None
        return out


def read(
    tensor: ShardTensor, local: Tensor, kept: Halo | None, needs: Sequence[Transition]
) -> tuple[Halo | None, list[Tensor | None]]:
    """The boxes that one call reads of a tensor; None for one that it has to fetch by itself.

    Args:
        local: the tensor's local tensor.
        kept: the earlier reads of the tensor.
        needs: transitions of the tensor to boxes.

    Returns:
        The state to keep with the tensor, and the boxes.
    """
    if local.is_inference():
        return None, [None] * len(needs)  # nothing tells of writes to it
    mesh = needs[0].mesh
    reads: _Reads | None = mesh.cache.get("halos")
    if reads is None:
        reads = mesh.cache["halos"] = _Reads()
    state = local, version_of(tensor), is_grad_enabled() and local.requires_grad
    halo = kept
    if halo is None or halo.state[0] is not local or halo.state[1:] != state[1:]:
        halo = _begun(reads, state, needs)
    halo.record.add(needs)
    reads.recent = (*reads.recent[1:], (tuple(needs), reads.begun - halo.number))
    out = [halo.serve(reads, need) for need in needs]
    lacking = list(dict.fromkeys([need for need, box in zip(needs, out) if box is None]))
    joint = reads.joined(lacking) if len(lacking) > 1 else None
    if joint is not None:  # of this call alone
        once = Halo(state, halo.record, joint, len(needs))
        out = [once.serve(reads, need) if box is None else box for need, box in zip(needs, out)]
    return halo, out


def _begun(reads: _Reads, state: tuple[Any, ...], needs: Sequence[Transition]) -> Halo:
    """The first read of a value: as the tensor was read that was last read first after the same
    reads."""
    reads.begun += 1
    keys = [(reads.recent[-count:], needs[0]) for count in MEMORY]
    before = next((reads.records[key] for key in keys if key in reads.records), None)
    record = Record()
    for key in keys:
        bounded_put(reads.records, key, record, MAX_RECORDS)
    if before is not None and before.count > 1:
        joint = reads.joined(before.needs)
        if joint is not None:
            return Halo(state, record, joint, before.count, reads.begun)
    return Halo(state, record, None, 0, reads.begun)


def _joint(needs: Sequence[Transition]) -> Transition | None:
    """To the boxes that have all of these; None where they do not go together, or where most of
    such a box would be read by nobody."""
    first = needs[0]
    base = first.src
    if base.is_partial or any(
        need.src != base or need.dst.dims != base.dims or need.dst.is_partial
        or need.dst_varying != first.dst_varying or need.order != first.order for need in needs
    ):
        return None
    most = WASTE * sum([need.nbytes(1) for need in needs])
    for turned in (False, True):
        cover = _covering(base, needs, turned)
        made = cover and transition_between(
            first.mesh, base, base, first.src_varying, first.dst_varying, first.order, cover)
        if made is not None and made.nbytes(1) <= most:
            return made
    return None


def _covering(base: Layout, needs: Sequence[Transition], turned: bool) -> Cover | None:
    """What has all of these; `turned`: where nothing sticks out, dims are rings, so that both ends
    are read as neighbours (`cat([u[1:], u[:1]])` is a roll)."""
    reads: list[tuple[Interval, ...] | None] = []
    rings: list[int] = []
    fills: set[float] = set()
    for dim in range(base.ndim):
        if not base.dims[dim]:
            reads.append(None)
            continue
        outside = [_cover(need) for need in needs if _sticks_out(need, dim)]
        fills |= {cover.fill for cover in outside if dim not in cover.rings}
        ring = {dim in cover.rings for cover in outside}
        if len(ring) > 1 or len(fills) > 1:
            return None
        if True in ring or (turned and not ring):
            rings.append(dim)
        length = base.shape[dim] if turned and dim in rings else 0
        reads.append(tuple([
            _hull([_interval(need, dim, at) for need in needs], base.interval(dim, at), length)
            for at in range(base.num_shards(dim))
        ]))
    return Cover.of(base, tuple(reads), next(iter(fills), 0.0), tuple(rings))


def _cover(need: Transition) -> Cover:
    """What ranks read; of nothing beside their shards, those."""
    return need.cover or Cover((None,) * need.dst.ndim)


def _interval(need: Transition, dim: int, shard: int) -> Interval:
    return _cover(need).interval(need.dst, dim, shard)


def _sticks_out(need: Transition, dim: int) -> bool:
    length = need.dst.shape[dim]
    return any(start < stop and (start < 0 or stop > length) for start, stop in [
        _interval(need, dim, shard) for shard in range(need.dst.num_shards(dim))])


def _hull(intervals: Sequence[Interval], own: Interval, length: int) -> Interval:
    """The interval that has all of these; of nothing, nothing. On a ring of some length, of each
    the copy that is nearest to what the shard owns."""
    read = [one for one in intervals if one[0] < one[1]]
    if not read:
        return own[0], own[0]
    if length:
        turns = [(sum(own) - sum(one) + length) // (2 * length) * length for one in read]
        read = [(start + turn, stop + turn) for (start, stop), turn in zip(read, turns)]
    return min([start for start, _ in read]), max([stop for _, stop in read])


def _part(box: Transition, need: Transition) -> Parts:
    """The place of the needed part in the box, if the box has it on every rank, with equal fill."""
    base, cover, here = box.src, _cover(need), box.mesh.here
    assert here is not None and box.cover is not None
    if need.src != base or need.dst.dims != base.dims or need.dst.is_partial or (
        need.dst_varying != box.dst_varying or need.order != box.order
    ):
        return None
    parts: list[tuple[int, int, int]] = []
    for dim in range(base.ndim):
        if not base.dims[dim]:
            continue
        ring = dim in box.cover.rings
        if _sticks_out(need, dim) and (
            ring != (dim in cover.rings) or (not ring and cover.fill != box.cover.fill)
        ):
            return None
        found = [
            _inside(_interval(need, dim, shard), _interval(box, dim, shard),
                    base.shape[dim] if ring else 0) for shard in range(base.num_shards(dim))
        ]
        if None in found:
            return None
        mine = found[base.shard_index(dim, here)]
        if mine is not None and mine[1] >= 0:
            parts.append((dim, *mine))
    return tuple(parts)


def _inside(read: Interval, box: Interval, length: int) -> tuple[int, int] | None:
    """Where one interval begins in another, on a ring of some length, and how long it is, -1 for
    all of it; None where it is not inside."""
    (start, stop), (first, last) = read, box
    if start >= stop:
        return 0, 0
    for turn in (0, length, -length):
        if first <= start + turn and stop + turn <= last:
            return start + turn - first, -1 if stop - start == last - first else stop - start
    return None


# Slices.


class Watch:
    """Whether the gradient of a slice itself is needed. Otherwise the gradient of the aligned slice
    goes to the base. Graphs keep it, and not the tensors.

    Args:
        mine: the local tensor of the slice. parent: of the slice of which it is a slice.
    """

    __slots__ = ("is_set", "mine", "parent")

    def __init__(self, mine: Tensor, parent: Watch | None) -> None:
        self.mine, self.parent, self.is_set = TensorWeakRef(mine), parent, False

    @property
    def asks(self) -> bool:
        """Whether the gradient of the slice, or of a slice that it was taken from, is needed."""
        mine = self.mine()
        return self.is_set or (
            mine is not None and (mine.retains_grad or bool(mine._backward_hooks))
        ) or (self.parent is not None and self.parent.asks)


class Slice:
    """The base of a ShardTensor that is a slice: a view of rows, of which other cuts may need more.

    Args:
        base: the tensor. starts: per dim, where the slice begins in it.
        mine: the local tensor of the slice. local: that of the base, at that time.
        parent: the slice of which it is a slice.
    """

    __slots__ = ("base", "local", "mine", "parent", "starts", "watch")

    def __init__(
        self, base: ShardTensor, starts: tuple[int, ...], mine: Tensor, parent: Slice | None
    ) -> None:
        self.base, self.starts, self.parent = base, starts, parent
        self.mine, self.local = mine, base._local
        self.watch = Watch(mine, None if parent is None else parent.watch)

    def need(self, tensor: ShardTensor, move: Transition) -> tuple[Transition, Parts] | None:
        """The transition of the base by which the slice comes to other cuts, and the part of its
        unsharded dims; None where it comes there by itself."""
        base, local = self.base, self.local
        if tensor._local is not self.mine or base._local is not local or (
            type(local) is Moved or local.requires_grad != self.mine.requires_grad
            # `base.data = other` leaves its slices what they were.
            or local.untyped_storage()._cdata != self.mine.untyped_storage()._cdata
        ):
            return None
        table = move.mesh.cache.setdefault("needs of slices", {})
        key = move, base._meta, self.starts
        return kept(table, key, lambda: _need(base, self.starts, move))

    def became(self, x: Tensor, part: Parts, move: Transition) -> Tensor:
        """The slice, from the box that was read of the base."""
        for dim, start, length in part or ():
            x = x.narrow(dim, start, length)
        if not (is_grad_enabled() and self.mine.requires_grad):
            return x
        return _Aligned.apply(self.mine, x, self.watch, move)  # type: ignore[no-any-return]


def slice_of(base: Any, starts: tuple[int, ...], out: ShardTensor) -> None:
    """Let `out`, which is a slice of `base` that begins at `starts`, remember that."""
    if type(base) is not ShardTensor or type(out._local) is Moved:
        return
    parent = base._slice_of
    if parent is not None and base._local is parent.mine:
        starts = tuple([one + other for one, other in zip(parent.starts, starts)])
        base = parent.base
    else:
        parent = None
    out._slice_of = Slice(base, starts, out._local, parent)


def _need(
    base: ShardTensor, starts: Sequence[int], move: Transition
) -> tuple[Transition, Parts] | None:
    layout, target = base._meta.layout, move.dst
    if layout.is_partial or target.dims != layout.dims or move.src.dims != layout.dims or (
        target.is_partial or move.src_varying != move.dst_varying or move.cover is not None
    ):
        return None
    reads: list[Any] = [None] * layout.ndim
    part: list[tuple[int, int, int]] = []
    for dim, start in enumerate(starts):
        if layout.dims[dim]:
            owned = layout.cuts_of(dim)
            reads[dim] = tuple([
                (one + start, other + start) if one < other else (own, own)
                for (one, other), own in zip(pairwise(target.cuts_of(dim)), owned)
            ])
        elif target.shape[dim] != layout.shape[dim]:
            part.append((dim, start, target.shape[dim]))
    cover = Cover.of(layout, tuple(reads))
    made = cover and transition_between(
        move.mesh, layout, layout, move.src_varying, move.dst_varying, order_in_memory(base), cover)
    return None if made is None else (made, tuple(part))


class _Aligned(torch.autograd.Function):
    """A slice in other cuts: its gradient goes to the box that was read from the base; to the slice
    only if the gradient of the slice itself is needed."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, mine: Tensor, x: Tensor, watch: Watch, move: Transition
    ) -> Tensor:
        ctx.watch, ctx.move = watch, move
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        if grad is None or not ctx.watch.asks:
            return None, grad, None, None
        return ctx.move.reverse(grad), None, None, None

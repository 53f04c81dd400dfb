"""The blocks of a sharded dim as one sequence: exchanges among them, and the place of a rank (in
the order) in each.

`split` takes rows that are sorted within every block and finds how many of each block's elements
are among the first k of all. It is selection in several sorted sequences (Varman et al., Merging
Multiple Lists on Hierarchical-Memory Multiprocessors, 1991), by samples. In each round every block
shows some of its undecided elements, evenly spaced. All ranks see the same samples, so they reach
the same conclusions without communication. Where there are many cuts, each rank handles some of
them and sends its conclusions. A round leaves about 4 undecided parts of those that samples make
(never more than 8), so four rounds suffice for a million elements. Equal elements are ordered by
block, then by position, which makes every order strict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from weft.ops.all_to_all import AllToAll
from weft.ops.sorting.unsigned import to_order
from weft.transport import Shards, collective, traffic

__all__ = ["BlockGroup", "can_key", "first_next", "keys_of", "split"]

_LARGEST = torch.iinfo(torch.long).max


class BlockGroup(AllToAll):
    """The ranks that hold the blocks of some dims, in the order of the blocks.

    `num` is their number, `mine` this rank's position, `sizes` the number of elements of each.
    """

    __slots__ = ("comm", "mine", "num", "sizes")

    what: ClassVar[str] = "elements to their places"
    of_gradient: ClassVar[str] = "gradients of elements go back to their places"

    def __init__(self, shards: Shards, sizes: Sequence[int] | None = None) -> None:
        self.comm, self.num, self.mine = shards.group(), shards.num, shards.index
        self.sizes = shards.sizes if sizes is None else tuple(sizes)

    def gather(self, own: Tensor) -> Tensor:
        """The tensors of all blocks, stacked; without gradient, all of one shape."""
        return collective(own.detach(), self.comm, "gather")

    def gather_parts(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """Flat tensors of all blocks in order, `sizes[i]` elements of block i."""
        nbytes = (sum(sizes) - sizes[self.mine]) * own.element_size()
        with traffic.sending(self.comm, "what ranks conclude", "AllGather", nbytes):
            return self.comm.all_gather(own.contiguous(), sizes)

    def tell(self, value: Any) -> list[Any]:
        """A small Python value of every block, in order."""
        return self.comm.exchange(value)

    def resized(self, sizes: Sequence[int]) -> BlockGroup:
        """The same ranks with blocks of other sizes."""
        other = object.__new__(BlockGroup)
        other.comm, other.num, other.mine = self.comm, self.num, self.mine
        other.sizes = tuple(sizes)
        return other


def can_key(dtype: str) -> bool:
    """Whether elements of a dtype have keys."""
    return not dtype.startswith("complex")


def keys_of(x: Tensor, descending: bool = False) -> Tensor:
    """Integers in the order of the elements: zeros are equal, NaNs are equal and the largest."""
    x = x.detach()
    if x.is_floating_point():
        bits = (x.double() + 0.0).contiguous().view(torch.long)
        keys = (bits >> 63).bitwise_and_(_LARGEST).bitwise_xor_(bits)
        keys = keys.masked_fill_(x.isnan(), _LARGEST)
    else:
        keys = to_order(x).long()
    return ~keys if descending else keys


def split(group: BlockGroup, in_order: Tensor, ranks: Tensor, descending: bool = False) -> Tensor:
    """How many of each block's elements are among the first `ranks` of all.

    Args:
        in_order: the elements of this block, (rows, length), each row sorted.
        ranks: (rows, cuts), the same in every block.

    Returns:
        (blocks, rows, cuts), the same in every block. Source: see the head of this file.
    """
    num_rows, num_cuts = ranks.shape
    device, keys_at = in_order.device, partial(_keys_at, in_order, descending)
    sizes = torch.tensor(group.sizes, device=device).view(-1, 1, 1)
    low = torch.zeros(group.num, num_rows, num_cuts, dtype=torch.long, device=device)
    high = sizes.expand_as(low).clone()
    first = True
    while bool((low < high).any()):
        places = _samples(low, high, min(_NUM_SAMPLES, max(group.sizes)))
        if first:  # the undecided elements are the same for every cut
            shown = group.gather(keys_at(places[group.mine, :, :1])).expand_as(places)
            low, high = _narrowed(low, high, places, shown, ranks)
        elif num_cuts > 2:
            low, high = _shared_out(group, keys_at, low, high, places, ranks)
        else:
            shown = group.gather(keys_at(places[group.mine]))
            low, high = _narrowed(low, high, places, shown, ranks)
        first = False
        if in_order.is_meta:  # no data
            return _spread_evenly(group, ranks)
    return low


def _spread_evenly(group: BlockGroup, ranks: Tensor) -> Tensor:
    """`split` of blocks whose elements are in no order."""
    ends = torch.tensor([0, *accumulate(group.sizes)], device=ranks.device).view(-1, 1, 1)
    return (ends * ranks // max(sum(group.sizes), 1)).diff(dim=0)


_NUM_SAMPLES = 64
"""Samples per cut and block in a round, which leaves at most an eighth of the undecided elements:
more rounds of fewer samples would take fewer bytes, but more time."""


def first_next(group: BlockGroup, before: Tensor, keys: Tensor) -> Tensor:
    """Which block has the element of each rank, given the counts `before` it from `split`.

    `keys` are this block's keys of the elements after the counts, (rows, cuts); where there is no
    such element, any value.
    """
    sizes = torch.tensor(group.sizes, device=keys.device).view(-1, 1, 1)
    shown, has = group.gather(keys), before < sizes
    least = torch.where(has, shown, _LARGEST).amin(0)
    return (has & (shown == least)).long().argmax(0)


def _samples(low: Tensor, high: Tensor, count: int) -> Tensor:
    steps = torch.arange(1, count + 1, device=low.device)
    width = (high - low).unsqueeze(-1)
    return low.unsqueeze(-1) + width * steps // (count + 1)


def _keys_at(in_order: Tensor, descending: bool, places: Tensor) -> Tensor:
    """The keys of sorted rows at positions (rows, ...); of a block of nothing, zeros."""
    length = in_order.shape[1]
    if not length:
        return torch.zeros_like(places)
    flat = places.reshape(places.shape[0], -1).clamp(max=length - 1)
    return keys_of(in_order.gather(1, flat), descending).view(places.shape)


def _shared_out(
    group: BlockGroup, keys_at: Callable[[Tensor], Tensor], low: Tensor, high: Tensor,
    places: Tensor, ranks: Tensor,
) -> tuple[Tensor, Tensor]:
    """`_narrowed`, with the cuts divided among the ranks: each gets the samples of its cuts and
    sends its conclusions."""
    num_rows, num_cuts, num_samples = places.shape[1:]
    starts = [block * num_cuts // group.num for block in range(group.num + 1)]
    counts = [stop - start for start, stop in pairwise(starts)]
    start, stop = starts[group.mine : group.mine + 2]
    each = num_rows * num_samples
    own = keys_at(places[group.mine]).transpose(0, 1).reshape(-1)
    got = group.send(own, [count * each for count in counts], [(stop - start) * each] * group.num)
    shown = got.view(group.num, stop - start, num_rows, num_samples).transpose(1, 2)
    mine = slice(start, stop)
    found = _narrowed(
        low[:, :, mine], high[:, :, mine], places[:, :, mine], shown, ranks[:, mine]
    )
    told = torch.stack(found).permute(3, 0, 1, 2).reshape(-1)
    sizes = [count * 2 * group.num * num_rows for count in counts]
    every = group.gather_parts(told, sizes).view(num_cuts, 2, group.num, num_rows)
    low, high = every.permute(1, 2, 3, 0)
    return low, high


def _narrowed(
    low: Tensor, high: Tensor, places: Tensor, shown: Tensor, ranks: Tensor
) -> tuple[Tensor, Tensor]:
    """What remains undecided. The rank of a sample among all elements is known within bounds: in
    each other block, at least the count of the last sample before it and at most that of the next.
    """
    live = (low < high).unsqueeze(-1)
    before = torch.cat([low.unsqueeze(-1) - 1, places[..., :-1]], -1)
    after = torch.cat([places[..., 1:], high.unsqueeze(-1)], -1)
    up = torch.where(live, places - before, 0)
    down = after - places

    def rowed(each: Tensor) -> Tensor:  # (rows, cuts, blocks * samples), by blocks
        return each.permute(1, 2, 0, 3).flatten(2)

    order = rowed(shown).argsort(dim=-1, stable=True)
    up, down = (rowed(each).gather(-1, order) for each in (up, down))
    least = low.sum(0).unsqueeze(-1) + up.cumsum(-1) - 1
    most = places[..., 0].sum(0).unsqueeze(-1) + down.cumsum(-1) - down
    wanted = ranks.unsqueeze(-1)

    def back(each: Tensor) -> Tensor:
        placed = torch.empty_like(each).scatter_(-1, order, each)
        return placed.unflatten(2, (places.shape[0], -1)).permute(2, 0, 1, 3)

    inside, outside = back(most < wanted) & live, back(least >= wanted) & live
    low = torch.maximum(low, torch.where(inside, places + 1, 0).amax(-1))
    high = torch.minimum(high, torch.where(outside, places, _LARGEST).amin(-1))
    return low, high

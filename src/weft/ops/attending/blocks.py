"""The blocks of keys and values that a rank fetches, their holders, and the rounds.

Queries and keys are sharded over the same axes. Each rank keeps its queries and receives blocks of
keys from their holders: in round j from the rank j places before it in the group. So every rank
sends and receives one block at a time (ring attention: Liu, Zaharia, Abbeel, 2023). Blocks are sent
straight to their reader, not passed on, because under a causal mask not every rank reads every
block. Small blocks travel in fewer rounds, the smallest in one, which is a gather. A large block
travels in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from weft.comm import Communicator
from weft.ops.all_to_all import AllToAll
from weft.ops.attending.stretches import Stretch

__all__ = ["Blocks", "Piece", "Round"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a block of keys: the place in the group that holds it or asks for it, its first
    row in the block, how many rows, and the position of the first in the whole sequence."""

    place: int
    row: int
    num: int
    position: int


@dataclass(frozen=True, slots=True)
class Round:
    """What this rank sends of its block, and what it receives of others, by place."""

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]


class Blocks(AllToAll):
    """The blocks of a group of ranks, of which this one is `comm.index`.

    Args:
        comm: the ranks.
        queries, keys: per place, the queries and the keys that it has.
        is_causal: whether a query sees no key of a later position.
    """

    __slots__ = ("_rounds", "comm", "is_causal", "keys", "queries")

    what: ClassVar[str] = "blocks by pairs"

    def __init__(
        self, comm: Communicator, queries: Sequence[tuple[Stretch, ...]],
        keys: Sequence[tuple[Stretch, ...]], is_causal: bool,
    ) -> None:
        self.comm, self.queries, self.keys = comm, tuple(queries), tuple(keys)
        self.is_causal = is_causal
        self._rounds: dict[int, list[Round]] = {}

    def busiest(self, grad: bool) -> int:
        """The number of keys of others, or gradients of its own, that the busiest rank receives.

        In backward (`grad`) blocks are sent once more, and their gradients go to their holders.
        """
        gets, gives = [0] * self.comm.size, [0] * self.comm.size
        for holder, found in enumerate(self.keys):
            for asker in range(self.comm.size):
                if asker != holder:
                    num = sum([one.num for one in found if self._asks(asker, one.position)])
                    gets[asker] += num
                    gives[holder] += num
        return max([2 * mine + back if grad else mine for mine, back in zip(gets, gives)])

    def _asks(self, asker: int, position: int) -> bool:
        """Whether a place needs keys from this position on."""
        stops = [one.stop for one in self.queries[asker] if one.num]
        return bool(stops) and (not self.is_causal or position < max(stops))

    def rounds(self, most: int) -> list[Round]:
        """The rounds, the same number on every rank. None brings a rank more than `most` rows, or
        a quarter of a block if these are more."""
        if most not in self._rounds:
            self._rounds[most] = self._find(most)
        return self._rounds[most]

    def _find(self, most: int) -> list[Round]:
        size = self.comm.size
        longest = max([sum([one.num for one in found]) for found in self.keys])
        if not longest:
            return []
        together, most = max(most // longest, 1), max(min(most, longest), -(-longest // 4))
        found = []
        for shift in range(1, size, together):
            shifts = range(shift, min(shift + together, size))
            for number in range(max(map(len, self.keys))):
                for row in range(0, longest, most):
                    pieces = {
                        (asker, holder): self._piece(asker, holder, number, row, most)
                        for by in shifts for asker in range(size)
                        for holder in [(asker - by) % size]
                    }
                    if any(piece.num for piece in pieces.values()):
                        found.append(self._round(pieces))
        return found

    def _piece(self, asker: int, holder: int, number: int, row: int, most: int) -> Piece:
        """Of a stretch of the holder's keys, the rows from `row` on."""
        if number >= len(self.keys[holder]):
            return Piece(holder, 0, 0, 0)
        one = self.keys[holder][number]
        num, position = max(min(most, one.num - row), 0), one.position + row
        return Piece(holder, one.row + row, num if self._asks(asker, position) else 0, position)

    def _round(self, pieces: dict[tuple[int, int], Piece]) -> Round:
        me = self.comm.index
        sends = [Piece(asker, one.row, one.num, one.position)
                 for (asker, holder), one in pieces.items() if holder == me and one.num]
        receives = [one for (asker, _), one in pieces.items() if asker == me and one.num]
        return Round(*[tuple(sorted(one, key=attrgetter("place"))) for one in (sends, receives)])

    def fetch(self, tensors: Sequence[Tensor], round_: Round) -> list[tuple[Piece, list[Tensor]]]:
        """The pieces that a round brings of some tensors, whose rows are the last dim but one."""
        parts = [one.narrow(-2, piece.row, piece.num) for piece in round_.sends for one in tensors]
        got = self._exchange(parts, round_.sends, round_.receives, tensors)
        return [(piece, found) for piece, found in zip(round_.receives, got)]

    def give_back(
        self, found: Sequence[Sequence[Tensor]], round_: Round, totals: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> None:
        """The gradients of the pieces that the round brought go to their holders, who add them to
        `totals`; they travel in `dtype`."""
        parts = [one.to(dtype) for piece in found for one in piece]
        got = self._exchange(parts, round_.receives, round_.sends, totals, dtype)
        for piece, terms in zip(round_.sends, got):
            for total, term in zip(totals, terms):
                total.narrow(-2, piece.row, piece.num).add_(term)

    def _exchange(
        self, parts: Sequence[Tensor], sends: Sequence[Piece], receives: Sequence[Piece],
        like: Sequence[Tensor], dtype: torch.dtype | None = None,
    ) -> list[list[Tensor]]:
        """One all-to-all: per piece that is received, a tensor for each of `like`."""
        comm, dtype = self.comm, dtype or like[0].dtype
        rows = [math.prod(one.shape[:-2]) * one.shape[-1] for one in like]
        send, recv = [0] * comm.size, [0] * comm.size
        for sizes, pieces in ((send, sends), (recv, receives)):
            for piece in pieces:
                sizes[piece.place] = piece.num * sum(rows)
        flat = torch.cat([one.reshape(-1) for one in parts]) if parts else like[0].new_empty(
            0, dtype=dtype)
        got = self.all_to_all(flat, send, recv)
        lengths = [piece.num * row for piece in receives for row in rows]
        out = iter(got.split(lengths))
        return [
            [next(out).view(*one.shape[:-2], piece.num, one.shape[-1]) for one in like]
            for piece in receives
        ]

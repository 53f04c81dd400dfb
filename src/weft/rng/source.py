"""The random bits of one call for one rank: a key, the global shape, the rank's box.

Every element has bits of its own, told by its global index, in each of any number of substreams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.core.layout import Box
from weft.rng.lanes import lanes, runs_of
from weft.rng.philox import Key

__all__ = ["Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where one rank draws from.

    Args:
        key: of the call. shape: of the global tensor. box: what of it is drawn.
        device: where the values come to lie.
    """

    key: Key
    shape: tuple[int, ...]
    box: Box
    device: torch.device

    @classmethod
    def whole(cls, key: Key, shape: Sequence[int], device: torch.device) -> Source:
        """All of a tensor."""
        return cls(key, tuple(shape), tuple([(0, length) for length in shape]), device)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple([stop - start for start, stop in self.box])

    def bits32(self, sub: int = 0) -> torch.Tensor:
        """32 random bits an element (int32, of the box's shape)."""
        starts, length = runs_of(self.shape, self.box)
        return lanes(self.key, sub, starts, length, self.device).reshape(self.local_shape)

    def bits64(self, sub: int = 0) -> torch.Tensor:
        """64 random bits an element (int64, of the box's shape)."""
        starts, length = runs_of(self.shape, self.box)
        found = lanes(self.key, sub, 2 * starts, 2 * length, self.device)
        return _joined(found).reshape(self.local_shape)

    def pairs(self, wide: bool, sub: int = 0) -> Pairs:
        """The bits of elements 2j and 2j + 1 together, for what makes two values of two."""
        starts, length = runs_of(self.shape, self.box)
        odd = starts % 2
        mixed = bool(len(odd)) and bool((odd != odd[0]).any())
        skip = int(odd[0]) if len(odd) and not mixed else 0
        count = (length + int(mixed) + skip + 1) // 2 * 2
        each = 2 if wide else 1
        bits = lanes(self.key, sub, each * (starts - odd), each * count, self.device)
        return Pairs(
            _joined(bits) if wide else bits, length, odd if mixed else None, skip,
            self.local_shape,
        )


def _joined(lanes: torch.Tensor) -> torch.Tensor:
    """Each two lanes as one word."""
    if not lanes.numel():
        return lanes[:, ::2].long()
    return lanes.view(torch.int64)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Bits of whole pairs, run by run, and which of their elements the box has.

    Args:
        bits: (runs, elements). length: how many elements of a run count.
        odd: per run, whether its first element is the second of a pair; None where all runs have
            `skip` elements to leave out.
    """

    bits: torch.Tensor
    length: int
    odd: np.ndarray | None
    skip: int
    local_shape: tuple[int, ...]

    def taken(self, values: torch.Tensor) -> torch.Tensor:
        """Of values made of `bits`, those of the box."""
        if self.odd is None:
            found = values[:, self.skip : self.skip + self.length]
        else:
            odd = torch.from_numpy(self.odd).to(values.device).bool()[:, None]
            found = torch.where(odd, values[:, 1 : 1 + self.length], values[:, : self.length])
        return found.reshape(self.local_shape)

"""The random bits of one call for one rank: a key, the global shape, the rank's box.

Every element has its own bits, determined by its global index, in any number of substreams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.core.layout import Box
from weft.rng.lanes import lanes
from weft.rng.philox import Key
from weft.rng.runs import runs_of

__all__ = ["Make", "Source"]

Make = Callable[[torch.Tensor], torch.Tensor]
"""From bits to values, both (runs, elements)."""

_CHUNK_LANES = {"cpu": 1 << 17}
"""How many lanes are converted to values at a time: intermediate results stay in the
cache, instead of fresh memory each time (which takes longer than the bits)."""

_CHUNK_LANES_OF_DEVICES = 1 << 25


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one rank's draws.

    Args:
        key: the key of the call.
        shape: the shape of the global tensor.
        box: the part of it to draw.
        device: where the values are placed.
        out: may receive the values, with the box's shape.
    """

    key: Key
    shape: tuple[int, ...]
    box: Box
    device: torch.device
    out: torch.Tensor | None = None

    @classmethod
    def whole(cls, key: Key, shape: Sequence[int], device: torch.device) -> Source:
        """All of a tensor."""
        return cls(key, tuple(shape), tuple([(0, length) for length in shape]), device)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple([stop - start for start, stop in self.box])

    def bits32(self, sub: int = 0) -> torch.Tensor:
        """32 random bits per element (int32, of the box's shape)."""
        return self._fill(self._empty(torch.int32), lambda bits: bits, False, sub)

    def bits64(self, sub: int = 0) -> torch.Tensor:
        """64 random bits per element (int64, of the box's shape)."""
        return self._fill(self._empty(torch.int64), lambda bits: bits, True, sub)

    def values(
        self, dtype: torch.dtype, make: Make, wide: bool = False, sub: int = 0
    ) -> torch.Tensor:
        """The values that `make` computes from the bits, converted to a dtype; in `out`, if it
        fits.

        Args:
            make: element by element, any number at a time. It may write to the bits.
            wide: whether an element has 64 bits, not 32.
            sub: the substream.
        """
        out = self.out
        if out is None or out.dtype is not dtype or not out.is_contiguous():
            out = self._empty(dtype)
        return self._fill(out, make, wide, sub)

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.local_shape, dtype=dtype, device=self.device)

    def _fill(self, out: torch.Tensor, make: Make, wide: bool, sub: int) -> torch.Tensor:
        runs, each = runs_of(self.shape, self.box), 2 if wide else 1
        limit = _CHUNK_LANES.get(self.device.type, _CHUNK_LANES_OF_DEVICES) // each
        table = out.view(runs.num, runs.length)
        for piece in runs.pieces(limit):
            count = piece.stop - piece.start
            bits = lanes(self.key, sub, each * piece.starts, each * count, self.device)
            if wide:
                bits = bits.contiguous().view(torch.int64)
            table[piece.rows, piece.start : piece.stop] = make(bits)
        return out

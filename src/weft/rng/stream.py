"""The state of weft's random numbers: a seed, and the number of calls since.

It belongs to the process, like torch's default generator; each simulated rank has its own. It is
the same on all ranks because they use the same seed and make the same calls. Plain draws of torch
do not count here, because they may differ between ranks. `torch.manual_seed` seeds it (torch's
functions for this are replaced in `weft.tensor.placing.seeding`). A default generator
that was seeded in another way is noticed by its different seed.

Calls on a mesh that is only a part of another, or of the ranks, may be made by its members alone.
So they do not count among the calls of all ranks: such a `Part` has its own numbers and count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.errors import ShardTypeError, UnsupportedOpError
from weft.rng.philox import Key

__all__ = [
    "STREAM", "Part", "Stream", "digest_of", "fork_rng", "from_torch", "into_torch", "manual_seed",
    "rng_state", "set_rng_state",
]

_WORD = (1 << 64) - 1


class Part(NamedTuple):
    """Draws that not all ranks need to make.

    Attributes:
        name: the numbers depend on it, with the seed.
        counter: calls with the same one are counted together; a number of 64 bits.
    """

    name: str
    counter: int


@lru_cache(maxsize=1024)
def _seed_of(seed: int, name: str) -> int:
    return digest_of(f"{seed} {name}")


def digest_of(text: str) -> int:
    """A number of 64 bits for a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Stream:
    """`seed`, `calls`, and `parts`: counter -> calls. `token` identifies one seeding, on which the
    ranks of a mesh agree."""

    __slots__ = ("calls", "parts", "seed", "token", "torch_seed")

    parts: Mapping[int, int]

    def __init__(self) -> None:
        self.reseed(torch.default_generator.initial_seed())

    def reseed(self, seed: int) -> None:
        """Start anew."""
        self.seed, self.calls, self.token = seed & _WORD, 0, object()
        self.parts = {}
        self.torch_seed = torch.default_generator.initial_seed()

    def key(self, part: Part | None = None) -> Key:
        """The key of the next call."""
        self.follow()
        if part is None:
            return self.seed, self.calls
        return _seed_of(self.seed, part.name), self.parts.get(part.counter, 0)

    def next_key(self, part: Part | None = None) -> Key:
        """The key of the next call, which is thereby counted."""
        key = self.key(part)
        if part is None:
            self.calls += 1
        else:  # a new map: the old one belongs to a saved state
            self.parts = {**self.parts, part.counter: key[1] + 1}
        return key

    def follow(self) -> None:
        """Take the default generator's seed, if it has changed."""
        if torch.default_generator.initial_seed() != self.torch_seed:
            self.reseed(torch.default_generator.initial_seed())

    # The interface of torch.Generator: what simulated ranks save and restore.

    def get_state(self) -> Any:
        self.follow()
        return self.seed, self.calls, self.parts, self.token, self.torch_seed

    def set_state(self, state: Any) -> None:
        self.seed, self.calls, self.parts, self.token, self.torch_seed = state


STREAM = Stream()


def manual_seed(seed: int) -> None:
    """Seed only weft's random numbers; `torch.manual_seed` seeds them together with torch's.

    Call it on all ranks, which may have seeded torch's generator differently.

    Args:
        seed: a whole number, as in torch.manual_seed.

    Raises:
        ValueError: torch does not accept such a seed.
    """
    seed = int(seed)
    _TRIED.manual_seed(seed)
    STREAM.reseed(seed)


_TRIED = torch.Generator()
"""Tells whether a seed is valid."""


def rng_state() -> tuple[Any, ...]:
    """The seed, and the number of random calls since: the whole state.

    Returns:
        `(seed, calls)`. After calls on parts of a mesh, a third entry has their counts: pairs of
        numbers.
    """
    STREAM.follow()
    if not STREAM.parts:
        return STREAM.seed, STREAM.calls
    return STREAM.seed, STREAM.calls, tuple(STREAM.parts.items())


def set_rng_state(state: Sequence[Any]) -> None:
    """Restore what `rng_state` returned.

    Args:
        state: that value, or a list with the same content (as from JSON).

    Raises:
        ShardTypeError: it is something else.
    """
    seed, calls, parts = _checked(state)
    STREAM.follow()
    STREAM.seed, STREAM.calls, STREAM.parts = seed, calls, parts


def _checked(state: Any) -> tuple[int, int, dict[int, int]]:
    entries = list(state) if isinstance(state, (tuple, list)) else []
    more = entries.pop() if len(entries) == 3 else ()
    pairs: list[Any] = list(more) if isinstance(more, (tuple, list)) else [None]
    if len(entries) != 2 or not all(_is_pair(one) for one in [entries, *pairs]):
        raise ShardTypeError(
            "weft.set_rng_state(state)", f"state is {type(state).__name__}",
            "the state is a pair of whole numbers of 64 bits: the seed, and the number of "
            "calls since (and where there were calls on parts of a mesh, pairs of them)",
            [type(state).__name__],
            "state = weft.rng_state() before; torch's own goes to torch.set_rng_state")
    return entries[0], entries[1], dict(pairs)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 2 and all(
        isinstance(one, int) and 0 <= one <= _WORD for one in entry
    )


@contextmanager
def fork_rng(enabled: bool = True) -> Iterator[None]:
    """Restore the state of random numbers at the end of the block.

    Args:
        enabled: False does nothing, as in torch.random.fork_rng.
    """
    STREAM.follow()
    before = STREAM.get_state()
    try:
        yield
    finally:
        if enabled:
            STREAM.set_state(before)


_SEED_AT = 0
_SPARE = 8 + 4 + 4 + 8 + 624 * 8
"""Where torch's CPU state, after the twister's, has three doubles and a flag of older versions:
`normal_x`, `normal_y`, `normal_rho`, `normal_is_valid`. torch writes zeros to the first and the
third, and does not read them."""

_X, _RHO = _SPARE, _SPARE + 16


_WORDS = slice(24, _SPARE)
"""The twister's 624 numbers of 32 bits, each in 64 bits whose upper half torch does not read."""


def into_torch(state: torch.Tensor) -> torch.Tensor:
    """torch's state of the default generator, with weft's state in the parts that torch ignores, if
    there is room for it.

    If nothing has been drawn since torch was seeded, torch's seed says everything, and the state is
    unchanged.
    """
    STREAM.follow()
    if STREAM.calls or STREAM.parts or STREAM.seed != STREAM.torch_seed:
        packed = state.numpy()
        packed[_X : _X + 8] = bytearray(struct.pack("<Q", STREAM.seed))
        packed[_RHO : _RHO + 8] = bytearray(struct.pack("<Q", STREAM.calls + 1))
    if STREAM.parts:
        numbers = [number for pair in STREAM.parts.items() for number in pair]
        halves = _upper_halves(state)
        if 2 * len(numbers) >= len(halves):
            raise UnsupportedOpError(
                "torch.get_rng_state", f"random calls were made on {len(STREAM.parts)} "
                "parts of meshes since the seeding", "torch's state has room for "
                f"{len(halves) // 4} counts", [f"{len(STREAM.parts)} parts"],
                "state = weft.rng_state(), beside torch's; weft.set_rng_state(state)")
        halves[0] = len(numbers)
        halves[1 : 1 + 2 * len(numbers)] = np.array(numbers, "<u8").view("<u4")
    return state


def _upper_halves(state: torch.Tensor) -> Any:
    return state.numpy()[_WORDS].view("<u4")[1::2]


def from_torch(state: torch.Tensor) -> None:
    """Take what `into_torch` has put into the state that the default generator now has."""
    state = state.cpu().contiguous()
    packed = state.numpy().tobytes()
    (torch_seed,) = struct.unpack_from("<Q", packed, _SEED_AT)
    (seed,) = struct.unpack_from("<Q", packed, _X)
    (calls,) = struct.unpack_from("<Q", packed, _RHO)
    STREAM.seed, STREAM.calls = (seed, calls - 1) if calls else (torch_seed, 0)
    halves = _upper_halves(state)
    numbers = halves[1 : 1 + 2 * int(halves[0])].copy().view("<u8").tolist()
    STREAM.parts = dict(zip(numbers[::2], numbers[1::2]))
    STREAM.torch_seed = torch.default_generator.initial_seed()

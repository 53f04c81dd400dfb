"""The state of weft's random numbers: a seed, and how many calls have been made since.

It is one of a process, as torch's default generator is, and each simulated rank's own. What makes
it the same on all ranks is that they seed it alike and make the same calls, which is why no plain
draw of torch's counts here: those may differ between ranks. `torch.manual_seed` seeds it (the
functions of torch that do are taken over in `weft.tensor.placing.seeding`); a default generator
that was seeded past them shows by another seed.

Calls on a mesh that is only a part of another, or of the ranks, may be made by its members alone.
So they are not among the calls of all ranks: such a `Part` has numbers and a count of its own.
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

from weft.errors import ShardTypeError, UnsupportedOpError, message
from weft.rng.philox import Key

__all__ = [
    "STREAM", "Part", "Stream", "digest_of", "fork_rng", "from_torch", "into_torch", "manual_seed",
    "rng_state", "set_rng_state",
]

_WORD = (1 << 64) - 1


class Part(NamedTuple):
    """Draws that not all ranks need to make.

    Attributes:
        name: with the seed, what the numbers depend on. counter: whose calls are counted together,
            a number of 64 bits.
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
    """`seed`, `calls`, and `parts`: counter -> calls. `token` stands for one seeding, on which the
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
        """The key of the next call, which has been made now."""
        key = self.key(part)
        if part is None:
            self.calls += 1
        else:  # another map: what others hold is a state of before
            self.parts = {**self.parts, part.counter: key[1] + 1}
        return key

    def follow(self) -> None:
        """Take the default generator's seed, if it has got another one."""
        if torch.default_generator.initial_seed() != self.torch_seed:
            self.reseed(torch.default_generator.initial_seed())

    # As a torch.Generator: what simulated ranks put away and restore.

    def get_state(self) -> Any:
        self.follow()
        return self.seed, self.calls, self.parts, self.token, self.torch_seed

    def set_state(self, state: Any) -> None:
        self.seed, self.calls, self.parts, self.token, self.torch_seed = state


STREAM = Stream()


def manual_seed(seed: int) -> None:
    """Seed weft's random numbers alone; `torch.manual_seed` seeds them with torch's.

    To be called on all ranks, which may have seeded torch's generator each in its own way.

    Args:
        seed: a whole number, as in torch.manual_seed.

    Raises:
        ValueError: torch takes no such seed.
    """
    seed = int(seed)
    _TRIED.manual_seed(seed)
    STREAM.reseed(seed)


_TRIED = torch.Generator()
"""What says whether a seed is one."""


def rng_state() -> tuple[Any, ...]:
    """The seed, and the number of random calls since: all the state that there is.

    Where there were calls on parts of a mesh, a third entry counts them: pairs of numbers.
    """
    STREAM.follow()
    if not STREAM.parts:
        return STREAM.seed, STREAM.calls
    return STREAM.seed, STREAM.calls, tuple(STREAM.parts.items())


def set_rng_state(state: Sequence[Any]) -> None:
    """Go back to what `rng_state` gave.

    Args:
        state: it, or a list of the same (as JSON gives).

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
            message("weft.set_rng_state(state)", f"state is {type(state).__name__}",
                    "the state is a pair of whole numbers of 64 bits: the seed, and the number of "
                    "calls since (and where there were calls on parts of a mesh, pairs of them)",
                    [type(state).__name__],
                    "state = weft.rng_state() before; torch's own goes to torch.set_rng_state")
        )
    return entries[0], entries[1], dict(pairs)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 2 and all(
        isinstance(one, int) and 0 <= one <= _WORD for one in entry
    )


@contextmanager
def fork_rng(enabled: bool = True) -> Iterator[None]:
    """Inside, random calls count on; afterwards they go on as if none had been.

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
`normal_x`, `normal_y`, `normal_rho`, `normal_is_valid`. It writes zeros to the first and the third,
and does not read them."""

_X, _RHO = _SPARE, _SPARE + 16


_WORDS = slice(24, _SPARE)
"""The twister's 624 numbers of 32 bits, each in 64 of which torch does not read the upper half."""


def into_torch(state: torch.Tensor) -> torch.Tensor:
    """torch's state of the default generator, with weft's in what torch does not use of it.

    Where nothing has been drawn since torch was seeded, all that there is to say is torch's seed,
    and the state stays as it is.

    Raises:
        UnsupportedOpError: calls on too many parts of meshes have been counted.
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
                message("torch.get_rng_state", f"random calls were made on {len(STREAM.parts)} "
                        "parts of meshes since the seeding", "torch's state has room for "
                        f"{len(halves) // 4} counts", [f"{len(STREAM.parts)} parts"],
                        "state = weft.rng_state(), beside torch's; weft.set_rng_state(state)")
            )
        halves[0] = len(numbers)
        halves[1 : 1 + 2 * len(numbers)] = np.array(numbers, "<u8").view("<u4")
    return state


def _upper_halves(state: torch.Tensor) -> Any:
    return state.numpy()[_WORDS].view("<u4")[1::2]


def from_torch(state: torch.Tensor) -> None:
    """Take what `into_torch` has put into a state that the default generator now has."""
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

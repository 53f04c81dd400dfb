"""The state of weft's random numbers: a seed, and how many calls have been made since.

It is one of a process, as torch's default generator is, and each simulated rank's own. What makes
it the same on all ranks is that they seed it alike and make the same calls, which is why no plain
draw of torch's counts here: those may differ between ranks. `torch.manual_seed` seeds it (the
functions of torch that do are taken over in `weft.tensor.placing.seeding`); a default generator
that was seeded past them shows by another seed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.errors import ShardTypeError, message
from weft.rng.philox import Key

__all__ = [
    "STREAM", "Stream", "fork_rng", "from_torch", "into_torch", "manual_seed", "rng_state",
    "set_rng_state",
]

_WORD = (1 << 64) - 1


class Stream:
    """`seed` and `calls`; `token` stands for one seeding, on which the ranks of a mesh agree."""

    __slots__ = ("calls", "seed", "token", "torch_seed")

    def __init__(self) -> None:
        self.reseed(torch.default_generator.initial_seed())

    def reseed(self, seed: int) -> None:
        """Start anew."""
        self.seed, self.calls, self.token = seed & _WORD, 0, object()
        self.torch_seed = torch.default_generator.initial_seed()

    def next_key(self) -> Key:
        """The key of the next call."""
        self.follow()
        key = self.seed, self.calls
        self.calls += 1
        return key

    def follow(self) -> None:
        """Take the default generator's seed, if it has got another one."""
        if torch.default_generator.initial_seed() != self.torch_seed:
            self.reseed(torch.default_generator.initial_seed())

    # As a torch.Generator: what simulated ranks put away and restore.

    def get_state(self) -> Any:
        self.follow()
        return self.seed, self.calls, self.token, self.torch_seed

    def set_state(self, state: Any) -> None:
        self.seed, self.calls, self.token, self.torch_seed = state


STREAM = Stream()


def manual_seed(seed: int) -> None:
    """Seed weft's random numbers alone; `torch.manual_seed` seeds them with torch's.

    To be called on all ranks, which may have seeded torch's generator each in its own way.

    Raises:
        ValueError: torch takes no such seed.
    """
    seed = int(seed)
    _TRIED.manual_seed(seed)
    STREAM.reseed(seed)


_TRIED = torch.Generator()
"""What says whether a seed is one."""


def rng_state() -> tuple[int, int]:
    """The seed, and the number of random calls since: all the state that there is."""
    STREAM.follow()
    return STREAM.seed, STREAM.calls


def set_rng_state(state: Sequence[int]) -> None:
    """Go back to what `rng_state` gave.

    Raises:
        ShardTypeError: it is something else.
    """
    pair = list(state) if isinstance(state, (tuple, list)) else []
    if len(pair) != 2 or not all(isinstance(one, int) and 0 <= one <= _WORD for one in pair):
        raise ShardTypeError(
            message("weft.set_rng_state(state)", f"state is {type(state).__name__}",
                    "the state is a pair of whole numbers of 64 bits: the seed, and the number of "
                    "calls since",
                    [type(state).__name__],
                    "state = weft.rng_state() before; torch's own goes to torch.set_rng_state")
        )
    STREAM.follow()
    STREAM.seed, STREAM.calls = pair


@contextmanager
def fork_rng(enabled: bool = True) -> Iterator[None]:
    """Inside, random calls count on; afterwards they go on as if none had been."""
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


def into_torch(state: torch.Tensor) -> torch.Tensor:
    """torch's state of the default generator, with weft's in its two unused numbers.

    Where nothing has been drawn since torch was seeded, all that there is to say is torch's seed,
    and the state stays as it is.
    """
    STREAM.follow()
    if STREAM.calls or STREAM.seed != STREAM.torch_seed:
        packed = state.numpy()
        packed[_X : _X + 8] = bytearray(struct.pack("<Q", STREAM.seed))
        packed[_RHO : _RHO + 8] = bytearray(struct.pack("<Q", STREAM.calls + 1))
    return state


def from_torch(state: torch.Tensor) -> None:
    """Take what `into_torch` has put into a state that the default generator now has."""
    packed = state.cpu().contiguous().numpy().tobytes()
    (torch_seed,) = struct.unpack_from("<Q", packed, _SEED_AT)
    (seed,) = struct.unpack_from("<Q", packed, _X)
    (calls,) = struct.unpack_from("<Q", packed, _RHO)
    STREAM.seed, STREAM.calls = (seed, calls - 1) if calls else (torch_seed, 0)
    STREAM.torch_seed = torch.default_generator.initial_seed()

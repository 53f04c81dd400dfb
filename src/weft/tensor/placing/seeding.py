"""torch's functions that seed, save and restore the default generator do so for weft's stream too.

`torch.manual_seed` and `torch.seed` seed it. What `torch.get_rng_state` gives carries it, so that
`torch.set_rng_state`, `torch.random.fork_rng` and checkpointing take it back. A generator's own
methods, written in C, cannot be taken over: another seed is noticed, a restored state is not.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.comm import CARRIED
from weft.rng import STREAM, from_torch, into_torch
from weft.tensor.takeover import take_over, twin_of

__all__ = ["install"]

_SEED, _SET = twin_of(torch.random.seed), twin_of(torch.random.set_rng_state)  # type: ignore
_MANUAL_SEED: Any = twin_of(torch.random.manual_seed)  # type: ignore[arg-type]
_GET: Any = twin_of(torch.random.get_rng_state)  # type: ignore[arg-type]


def install() -> None:
    """Take them over. Once per process."""
    taken: list[tuple[Any, Any]] = [
        (torch.random.manual_seed, _manual_seed), (torch.random.seed, _seed),
        (torch.random.get_rng_state, _get_state), (torch.random.set_rng_state, _set_state),
    ]
    for function, answer in taken:
        take_over(function, answer)
    CARRIED.append(STREAM)


def _manual_seed(seed: Any) -> torch.Generator:
    generator = _MANUAL_SEED(seed)
    STREAM.reseed(torch.default_generator.initial_seed())
    return generator


def _seed() -> int:
    seed = _SEED()
    STREAM.reseed(torch.default_generator.initial_seed())
    return seed


def _get_state() -> torch.Tensor:
    return into_torch(_GET())


def _set_state(new_state: torch.Tensor) -> None:
    STREAM.follow()
    _SET(new_state)
    from_torch(new_state)

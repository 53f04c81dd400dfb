"""torch's functions that seed, save and restore the default generator also do so for weft's stream.

`torch.manual_seed` and `torch.seed` seed it. The result of `torch.get_rng_state` includes it, so
`torch.set_rng_state`, `torch.random.fork_rng` and checkpointing restore it. A generator's own
methods are written in C and cannot be replaced: a different seed is noticed, a restored state is
not.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.rng import STREAM, from_torch, into_torch

__all__ = ["get_rng_state", "seed", "set_rng_state"]


def seed(original: Any, *given: Any) -> Any:
    """`torch.manual_seed` and `torch.seed`."""
    made = original(*given)
    STREAM.reseed(torch.default_generator.initial_seed())
    return made


def get_rng_state(original: Any) -> torch.Tensor:
    return into_torch(original())


def set_rng_state(original: Any, new_state: torch.Tensor) -> None:
    STREAM.follow()
    original(new_state)
    from_torch(new_state)

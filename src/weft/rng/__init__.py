"""Random numbers that depend only on seed, call and global index: bits, values, state."""

from weft.rng import rejection, samples
from weft.rng.philox import Key
from weft.rng.source import Source
from weft.rng.stream import (
    STREAM,
    Part,
    Stream,
    digest_of,
    fork_rng,
    from_torch,
    into_torch,
    manual_seed,
    rng_state,
    set_rng_state,
)

__all__ = [
    "STREAM", "Key", "Part", "Source", "Stream", "digest_of", "fork_rng", "from_torch",
    "into_torch", "manual_seed", "rejection", "rng_state", "samples", "set_rng_state",
]

"""The random stream of ShardTensors: its seed, its state, and a block that restores it."""

from weft.core.counterparts import names_elsewhere
from weft.rng import fork_rng, manual_seed, rng_state, set_rng_state

__all__ = ["fork_rng", "manual_seed", "rng_state", "set_rng_state"]

__getattr__ = names_elsewhere("weft.random")

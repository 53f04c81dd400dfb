"""From a rule over one axis to the layouts of one call on many axes. No torch."""

from weft.propagate.choose import Slices
from weft.propagate.expand import can_be_sharded, decide
from weft.propagate.factor_cuts import fairest, sole_shard

__all__ = ["Slices", "can_be_sharded", "decide", "fairest", "sole_shard"]

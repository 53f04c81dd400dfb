"""torch's DTensor in and out, its checkpoints, and its collectives and wrappers, which refuse
ShardTensors."""

from weft.interop import checkpoint, dtensor
from weft.interop.dtensor import from_dtensor, to_dtensor

__all__ = ["from_dtensor", "to_dtensor"]

checkpoint.install()
dtensor.install()

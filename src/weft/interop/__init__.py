"""torch's DTensor in and out, torch's checkpoints, and torch's collectives, which refuse."""

from weft.interop import checkpoint, collectives, dtensor
from weft.interop.dtensor import from_dtensor, to_dtensor

__all__ = ["from_dtensor", "to_dtensor"]

checkpoint.install()
collectives.install()
dtensor.install()

"""torch's DTensor in and out."""

from weft.interop import dtensor
from weft.interop.dtensor import from_dtensor, to_dtensor

__all__ = ["from_dtensor", "to_dtensor"]

dtensor.install()

"""Regions of a program on local tensors, with explicit collectives."""

from weft.local import collectives
from weft.local.local_map import local_map

__all__ = ["collectives", "local_map"]

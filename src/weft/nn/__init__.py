"""Modules on a mesh."""

from weft.nn.distribute import distribute_module

__all__ = ["distribute_module"]

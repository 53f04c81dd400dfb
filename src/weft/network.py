"""The speed of the network: the figures that plans assume, and their measurement (which alone needs
torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft.planner import Link, Links, set_links

if TYPE_CHECKING:
    from weft.transport import measure_links

__all__ = ["Link", "Links", "measure_links", "set_links"]


def __getattr__(name: str) -> Any:
    if name == "measure_links":
        return importlib.import_module("weft.transport").measure_links
    raise AttributeError(f"module 'weft.network' has no attribute {name!r}")

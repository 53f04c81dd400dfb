"""Programs about life, writes, keys and modes, on whatever ranks there are."""

from __future__ import annotations

import warnings
from typing import Any

from tests.cases.autograd import WAYS, difference
from tests.sim import (
    test_tensor_attributes,
    test_tensor_cache,
    test_tensor_foreign_modes,
    test_tensor_inplace,
    test_tensor_life,
    test_tensor_out,
    test_tensor_writes,
)

PROGRAMS: dict[str, list[Any]] = {
    "life": [*test_tensor_life.PROGRAMS, *test_tensor_attributes.PROGRAMS],
    "writes": [
        *test_tensor_writes.PROGRAMS, *test_tensor_writes.MOVED, *test_tensor_inplace.PROGRAMS,
        *test_tensor_out.PROGRAMS,
    ],
    "keys and modes": [
        *test_tensor_cache.PROGRAMS,
        # An empty shard takes no operations.
        *(one for one in test_tensor_foreign_modes.PROGRAMS if one.__name__ != "counted_flops"),
    ],
}


def corners(mesh: Any, kind: str, way: str) -> list[str]:
    """Which programs do not do on these ranks what they do on plain tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch and weft warn of is tested elsewhere
        said = [(one.__name__, difference(mesh, one, WAYS[way])) for one in PROGRAMS[kind]]
    return [f"{name}: {text}" for name, text in said if text]

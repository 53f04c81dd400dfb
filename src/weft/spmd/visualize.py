"""Pictures of shardings, from tensors and from XLA's text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from weft.core import Layout, Mesh, P
from weft.errors import PlacementError, message
from weft.show import Drawing, show
from weft.tensor import ShardTensor

__all__ = ["visualize_sharding", "visualize_tensor_sharding"]

_FORM = re.compile(
    r"\{\s*devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<reshape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<devices>[\d,]+))"
    r"(?P<last>\s+last_tile_dim_replicate)?\s*\}"
)


def visualize_tensor_sharding(t: ShardTensor, *, width: int = 80) -> Drawing:
    """Which rank holds which block of a tensor, of any number of dims; print it."""
    return show(t, width=width)


def visualize_sharding(
    sharding: str, shape: Sequence[int] | None = None, *, width: int = 80
) -> Drawing:
    """Which device holds which tile, of an op-sharding string; print it.

    Args:
        sharding: as `sharding_spec` and XLA write it, version 1 or 2.
        shape: the tensor's shape; None draws tiles of length 1.
        width: columns of characters.

    Raises:
        PlacementError: a string that is no tiling. MeshError: another number of devices.
    """
    form = _FORM.fullmatch(sharding.strip())
    if form is None and sharding.strip() != "{replicated}":
        raise PlacementError(
            message("visualize_sharding(sharding)", f"{sharding!r} is no tiling",
                    "a tiling is {replicated}, or {devices=[tiles]<=[reshape]T(order)} with "
                    "last_tile_dim_replicate where tiles have replicas", [repr(sharding)],
                    "spmd.sharding_spec(t)")
        )
    if form is None:
        return show(Layout(Mesh((1,)), shape or ()), width=width)
    tiles = _numbers(form["tiles"])
    counts = tiles[:-1] if form["last"] else tiles
    devices = _numbers(form["devices"]) if form["devices"] else _iota(form)
    mesh = Mesh(tiles, ranks=devices)  # an axis for each dim, and one for replicas
    spec = P(*(axis if count > 1 else None for axis, count in enumerate(counts)))
    return show(Layout(mesh, counts if shape is None else shape, spec), width=width)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _iota(form: re.Match[str]) -> list[int]:
    """Devices 0, 1, ... in the order of permuted axes."""
    sizes = _numbers(form["reshape"])
    order = _numbers(form["order"]) if form["order"] else range(len(sizes))
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    places = [0]
    for axis in order:
        places = [place + at * strides[axis] for place in places for at in range(sizes[axis])]
    return places

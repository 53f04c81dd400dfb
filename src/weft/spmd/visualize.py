"""Pictures of shardings, from tensors and from XLA's text."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core import Layout, Mesh, P
from weft.core.hlo import read_sizes, read_tiles
from weft.core.names import also_called
from weft.drawing import Drawing, show
from weft.tensor import ShardTensor

__all__ = ["visualize_sharding", "visualize_tensor_sharding"]

_takes_widths = also_called(
    dict.fromkeys(("use_color", "scale", "min_width"), "width=; characters have no colors"),
    max_width="width")


@_takes_widths
def visualize_tensor_sharding(t: ShardTensor, *, width: int = 80) -> Drawing:
    """Draw which rank holds which block of a tensor with any number of dims; print the result.

    Args:
        t: a ShardTensor.
        width: the maximum number of characters per line.

    Raises:
        ShardTypeError: a tensor without a layout.
    """
    return show(t, width=width)


@_takes_widths
def visualize_sharding(
    sharding: str, shape: Sequence[int] | None = None, *, width: int = 80
) -> Drawing:
    """Draw which device holds which tile of an op-sharding string; print the result.

    Args:
        sharding: as `sharding_spec` and XLA write it, version 1 or 2.
        shape: the tensor's shape; None draws tiles of length 1.
        width: the maximum number of characters per line.

    Raises:
        PlacementError: a string that is not a tiling.
        MeshError: a different number of devices.
    """
    call = "visualize_sharding(sharding)"
    known = read_sizes(sharding, call)
    if known is not None:  # any number of devices, which need not be listed
        tiles, sizes = known
        layout = Layout.from_hlo(sharding, Mesh(sizes), tiles if shape is None else shape)
        return show(layout, width=width)
    found = read_tiles(sharding, call)
    if found is None:
        return show(Layout(Mesh((1,)), shape or ()), width=width)
    counts, grid, devices = found
    mesh = Mesh(grid, ranks=devices)  # an axis for each dim, and one for replicas
    spec = P(*(axis if count > 1 else None for axis, count in enumerate(counts)))
    return show(Layout(mesh, counts if shape is None else shape, spec), width=width)

"""Pictures of sharded fields. matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional as F

from weft.errors import ShardTypeError, UnsupportedOpError
from weft.tensor import ShardTensor

__all__ = ["plot"]


def plot(
    x: torch.Tensor, axes: Any = None, *, pixels: int = 512, borders: str | None = "black",
    **options: Any,
) -> Any:
    """Draw a field as an image with the borders of its shards; no rank gathers the field.

    All ranks of the mesh call it together. Each averages its own shard to the pixels of the
    picture, and only these are gathered, so that every rank can write it:

        axes = weft.plot(height, cmap="RdBu_r")
        if mesh.get_rank() == 0:
            axes.figure.savefig("height.png")

    Args:
        x: rows and columns, of real numbers or truth values, in any layout. A plain tensor is
            drawn without borders.
        axes: matplotlib's axes to draw on; None makes a figure, with a bar of its colours.
        pixels: the most rows and columns of the picture. A larger field is averaged over boxes of
            k rows and l columns, the smallest numbers that suffice.
        borders: the colour of the borders; None draws none.
        options: of matplotlib's `imshow`, such as `cmap`, `vmin`, `vmax`.

    Returns:
        The axes, whose units are the rows and columns of `x`. A rank outside the mesh draws
        nothing on them.

    Raises:
        ShardTypeError: `x` has not two dims, or is complex or empty; `pixels` is less than 1.
        UnsupportedOpError: matplotlib is not installed.
    """
    _check(x, pixels)
    alone = axes is None
    axes = _figure().add_subplot() if alone else axes
    if type(x) is ShardTensor and x._meta.mesh.here is None:
        return axes
    steps = [-(-length // pixels) for length in x.shape]
    values = _averaged(x.detach(), steps)
    height, width = [step * length for step, length in zip(steps, values.shape)]
    options = {"interpolation": "nearest", **options, "origin": "upper",
               "extent": (-0.5, width - 0.5, height - 0.5, -0.5)}
    image = axes.imshow(values.cpu().numpy(), **options)
    axes.set(xlim=(-0.5, x.shape[1] - 0.5), ylim=(x.shape[0] - 0.5, -0.5))
    if alone:
        axes.figure.colorbar(image)
    if borders is not None and type(x) is ShardTensor:
        for dim, line in enumerate((axes.axhline, axes.axvline)):
            for cut in sorted({*x.sharding.cuts_of(dim)} - {0, x.shape[dim]}):
                line(cut - 0.5, color=borders, linewidth=0.8)
    return axes


def _averaged(x: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """The means of boxes, on every rank."""
    if not x.is_floating_point() or x.dtype.itemsize < 4:
        x = x.float()
    if steps != [1, 1]:
        x = F.avg_pool2d(x[None, None], steps, ceil_mode=True)[0, 0]
    return x.full_tensor() if isinstance(x, ShardTensor) else x


def _figure() -> Any:
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedOpError(
            "weft.plot(x)", f"matplotlib cannot be imported ({error})",
            "matplotlib draws the picture; weft itself does not need it",
            ["matplotlib"], "pip install matplotlib") from error
    return figures.Figure(layout="constrained")


def _check(x: torch.Tensor, pixels: int) -> None:
    if not isinstance(x, torch.Tensor) or x.ndim != 2 or x.is_complex() or not x.numel():
        facts = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else (
            f"a {type(x).__name__}")
        ndim = getattr(x, "ndim", 4)
        shown = "x[None]" if ndim == 1 else f"x[{', '.join('0' * (ndim - 2))}]" if ndim > 2 else "x"
        shown += ".abs()" if isinstance(x, torch.Tensor) and x.is_complex() else ""
        raise ShardTypeError(
            "weft.plot(x)", f"x is {facts}", "a picture shows rows and columns of real "
            "numbers", [facts], f"weft.plot({shown})")
    if not isinstance(pixels, int) or pixels < 1:
        raise ShardTypeError(
            "weft.plot(x, pixels=)", f"pixels={pixels!r}", "a picture has at least one row "
            "and column", [repr(pixels)], "weft.plot(x, pixels=512)")

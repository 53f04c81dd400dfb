"""`weft.plot`: a picture of a sharded field, for which no rank gathers it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import Layout, Mesh, P, ShardTypeError, UnsupportedOpError
from weft.testing import peak_memory

ROWS, COLUMNS = 70, 33
FIELD = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "rows": (P("x"), {0: {35}, 1: set()}), "both": (P("x", "y"), {0: {35}, 1: {17}}),
    "replicated": (P(), {0: set(), 1: set()}),
    "ragged": (Layout(Mesh({"x": 2, "y": 2}), (ROWS, COLUMNS), P(("y", "x")),
                      sizes={0: (11, 0, 40, 19)}), {0: {11, 51}, 1: set()}),
}


def means(pixels: int) -> np.ndarray:
    rows, columns = -(-ROWS // pixels), -(-COLUMNS // pixels)
    return np.array([[FIELD[i:i + rows, j:j + columns].mean() for j in range(0, COLUMNS, columns)]
                     for i in range(0, ROWS, rows)])


@pytest.mark.parametrize("pixels", [512, 16])
@pytest.mark.parametrize("placements, cuts", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_has_the_picture(placements: Any, cuts: Any, pixels: int) -> None:
    def on_rank(mesh: Any) -> Any:
        x: Any = weft.distribute_tensor(FIELD.clone(), mesh, placements)
        return weft.plot(x.requires_grad_(), pixels=pixels, cmap="gray")

    for axes in weft.testing.run(on_rank, mesh={"x": 2, "y": 2}):
        [image] = axes.images
        np.testing.assert_allclose(image.get_array(), means(pixels), rtol=1e-5, atol=1e-6)
        assert axes.get_xlim() == (-0.5, COLUMNS - 0.5) and axes.get_ylim() == (ROWS - 0.5, -0.5)
        lines = [np.asarray(line.get_xydata()) for line in axes.lines]
        assert {line[0, 1] + 0.5 for line in lines if line[0, 1] == line[1, 1]} == cuts[0]
        assert {line[0, 0] + 0.5 for line in lines if line[0, 0] == line[1, 0]} == cuts[1]
        left, right, bottom, top = image.get_extent()
        rows, columns = -(-ROWS // pixels), -(-COLUMNS // pixels)
        shape = image.get_array().shape
        assert (right - left, bottom - top) == (columns * shape[1], rows * shape[0])


def test_no_rank_gathers_the_field() -> None:
    size, pixels = 256, 16

    def on_rank(mesh: Any) -> tuple[int, int]:
        x: Any = weft.randn(size, size, mesh=mesh, spec=P("x"))
        with weft.explain() as log, peak_memory(x) as memory:
            weft.plot(x, pixels=pixels)
        return log.nbytes, memory.peak

    for nbytes, peak in weft.testing.run(on_rank, mesh={"x": 4}):
        assert nbytes <= 4 * pixels * pixels
        assert peak <= 1.1 * 4 * size * size / 4


def test_other_tensors_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for plain in (FIELD, FIELD > 0, FIELD.bfloat16(), (100 * FIELD).int()):
        axes = weft.plot(plain, pixels=10)
        assert not axes.lines and axes.images[0].get_array().shape == (10, 9)
    again = weft.plot(FIELD, axes, borders=None)
    assert again is axes and len(axes.images) == 2
    wrongs: list[Any] = [FIELD[None], FIELD.to(torch.complex64), FIELD[:0], FIELD.numpy()]
    for wrong in wrongs:
        with pytest.raises(ShardTypeError, match="rows and columns of real numbers"):
            weft.plot(wrong)
    with pytest.raises(ShardTypeError, match="pixels=0"):
        weft.plot(FIELD, pixels=0)

    def outside(mesh: Any) -> int:
        return len(weft.plot(weft.ones(4, 2, mesh=mesh, spec=P("x"))).images)

    assert weft.testing.run(outside, 3, {"x": 2}) == [1, 1, 0]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedOpError, match="pip install matplotlib"):
        weft.plot(FIELD)

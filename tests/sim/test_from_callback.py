"""`weft.from_callback`: each rank makes its own block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests import oracle
from weft import Layout, LayoutError, Mesh, P, Partial, Shard

FIELD = torch.arange(7 * 5 * 3, dtype=torch.float64).view(7, 5, 3)
LAYOUTS = {
    "replicated": P(), "rows": P("x"), "both": P("x", "y"), "one dim": P(("y", "x")),
    "ragged": Layout(Mesh({"x": 2, "y": 2}), (7, 5, 3), P("x", "y"), sizes={0: (6, 1), 1: (0, 5)}),
}


@pytest.mark.parametrize("placements", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_are_those_of_the_layout(placements: Any) -> None:
    def on_rank(mesh: Any) -> tuple[Any, Any, torch.Tensor]:
        asked = []

        def block(index: tuple[slice, ...]) -> torch.Tensor:
            asked.append(index)
            return FIELD[index]

        x = weft.from_callback(FIELD.shape, mesh, placements, block, requires_grad=True)
        assert x.is_leaf and x.requires_grad and x.dtype == torch.float64
        assert x.to_local().untyped_storage().nbytes() == x.to_local().nbytes  # not the whole's
        return asked, x.sharding, x.full_tensor().detach()

    for rank, (asked, layout, full) in enumerate(
        weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
    ):
        index = tuple(slice(*one) for one in layout.box(rank))
        assert asked == [index]
        assert torch.equal(FIELD[index], oracle.block(layout, FIELD, divmod(rank, 2)))
        assert torch.equal(full, FIELD)


def test_a_file_mapped_into_memory_is_read_block_by_block(tmp_path: Path) -> None:
    np.save(tmp_path / "field.npy", FIELD.numpy())

    def on_rank(mesh: Any) -> bool:
        data = np.load(tmp_path / "field.npy", mmap_mode="r")
        x = weft.from_callback(data.shape, mesh, [Shard(0)], lambda index: data[index])
        x += 1
        return torch.equal(x.full_tensor(), FIELD + 1)

    assert weft.testing.run(on_rank, 3) == [True] * 3


def test_lists_and_numbers_of_ranks_outside_the_mesh() -> None:
    def on_rank(mesh: Any) -> Any:
        x = weft.from_callback((4,), mesh, P("x"), lambda index: list(range(4))[index[0]])
        return x.dtype, x.to_local().tolist()

    found = weft.testing.run(on_rank, 3, {"x": 2})
    assert found == [(torch.int64, [0, 1]), (torch.int64, [2, 3]), (torch.float32, [])]


def failing(fn: Any) -> list[str]:
    def on_rank(mesh: Any) -> str:
        with pytest.raises(LayoutError) as caught:
            weft.from_callback((4, 3), mesh, P("x"), fn)
        return str(caught.value)

    return weft.testing.run(on_rank, mesh={"x": 2})


def test_what_is_wrong_on_one_rank_is_raised_on_all() -> None:
    def no_file(index: tuple[slice, ...]) -> torch.Tensor:
        if index[0].start:
            raise OSError("no such file")
        return torch.ones(2, 3)

    for texts, fact in (
        (failing(no_file), "fn(2:4, 0:3) raises OSError: no such file"),
        (failing(lambda index: torch.ones(2 + index[0].start, 3)),
         "fn(2:4, 0:3) gives shape (4, 3), the index has (2, 3)"),
        (failing(lambda index: torch.ones(2, 3, dtype=torch.int32 if index[0].start else None)),
         "rank 1: torch.int32"),
    ):
        assert all(fact in text for text in texts), texts


def test_partial_values_are_refused() -> None:
    def on_rank(mesh: Any) -> None:
        with pytest.raises(LayoutError, match="no partial ones"):
            weft.from_callback((4,), mesh, [Partial()], lambda index: torch.ones(4))

    weft.testing.run(on_rank, 2)

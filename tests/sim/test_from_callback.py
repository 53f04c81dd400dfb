"""`weft.from_callback`, `weft.to_callback`: each rank makes, and writes, its own block."""

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


def test_a_function_in_the_place_of_the_shape() -> None:
    with pytest.raises(weft.ShardTypeError, match=r"(?s)^weft.from_callback.*are no lengths"):
        weft.from_callback(lambda _: 1, (5, 6), weft.init_mesh({"x": 1}), P())  # type: ignore[arg-type]


def test_partial_values_are_refused() -> None:
    def on_rank(mesh: Any) -> None:
        with pytest.raises(LayoutError, match="no partial ones"):
            weft.from_callback((4,), mesh, [Partial()], lambda index: torch.ones(4))

    weft.testing.run(on_rank, 2)


def test_a_dtype_is_known_where_nothing_is_read() -> None:
    def on_rank(mesh: Any) -> Any:
        asked = []

        def block(index: tuple[slice, ...]) -> list[float]:
            asked.append(index)
            return [1.0] * (index[0].stop - index[0].start)

        x = weft.from_callback((2,), mesh, P("x"), block, dtype=torch.float64)
        return x.dtype, x.to_local().tolist(), len(asked)

    of = torch.float64
    assert weft.testing.run(on_rank, 4, {"x": 3}) == [
        (of, [1.0], 1), (of, [1.0], 1), (of, [], 0), (of, [], 0)]


@pytest.mark.parametrize("chunks", [None, (4, 2, 3)], ids=["any cuts", "whole chunks"])
@pytest.mark.parametrize("placements", LAYOUTS.values(), ids=LAYOUTS)
def test_each_element_is_written_once(placements: Any, chunks: Any) -> None:
    written = torch.full((7, 5, 3), -1.0, dtype=torch.float64)
    writers: dict[tuple[int, ...], set[int]] = {}

    def on_rank(mesh: Any) -> Any:
        def write(index: tuple[slice, ...], block: torch.Tensor) -> None:
            assert (written[index] == -1).all() and block.numel() and not block.requires_grad
            written[index] = block
            for at in np.ndindex(*block.shape):
                chunk = [(one.start + i) // n for one, i, n in zip(index, at, chunks or (1, 1, 1))]
                writers.setdefault(tuple(chunk), set()).add(mesh.get_rank())

        x: Any = weft.from_callback(
            FIELD.shape, mesh, placements, FIELD.__getitem__, chunks=chunks)
        before = x.sharding
        weft.to_callback(x.requires_grad_() * 2, write, chunks=chunks)
        assert torch.equal(written, 2 * FIELD)  # on every rank, when the call returns
        return before

    layouts = weft.testing.run(on_rank, mesh={"x": 2, "y": 2})
    assert {len(ranks) for ranks in writers.values()} == {1}
    if chunks is not None:
        cuts = [layouts[0].cuts_of(dim)[1:-1] for dim in range(3)]
        assert all(at % n == 0 or at == size
                   for cut, n, size in zip(cuts, chunks, FIELD.shape) for at in cut)


def test_ranks_write_in_turns_after_all_have_come() -> None:
    events: list[Any] = []

    def on_rank(mesh: Any) -> None:
        if mesh.here is not None:
            events.append("made")

        def write(index: tuple[slice, ...], block: torch.Tensor) -> None:
            events.append((index[0].start, block.tolist()))

        terms = P("x", partial={"y": "sum"})
        x = weft.ShardTensor.from_local(torch.ones(1), mesh, terms, shape=(2,))
        weft.to_callback(x, write, in_turns=True)

    weft.testing.run(on_rank, 5, {"x": 2, "y": 2})
    made = events.index((0, [2.0]))
    assert events[made:] == [(0, [2.0]), (1, [2.0])] and events.count("made") == 4


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_block_that_cannot_be_written_is_known_to_all(in_turns: bool) -> None:
    def full_disk(index: tuple[slice, ...], block: torch.Tensor) -> None:
        if index[0].start == 2:
            raise OSError("no space left")

    def on_rank(mesh: Any) -> str:
        with pytest.raises(LayoutError) as caught:
            weft.to_callback(weft.ones(6, mesh=mesh, spec=P("x")), full_disk, in_turns=in_turns)
        return str(caught.value)

    texts = weft.testing.run(on_rank, mesh={"x": 3})
    assert all("fn(2:4) raises OSError: no space left" in text for text in texts), texts


def test_what_to_callback_refuses() -> None:
    def on_rank(mesh: Any) -> str:
        x = weft.ones(6, 2, mesh=mesh, spec=P("x"))
        for chunks in ((2,), (0, 1), (2, 1, 1)):
            with pytest.raises(LayoutError, match="chunks are one length of at least 1 per dim"):
                weft.to_callback(x, print, chunks=chunks)
        with pytest.raises(weft.ShardTypeError, match="takes a ShardTensor"):
            weft.to_callback(torch.ones(2), print)  # type: ignore[arg-type]
        with pytest.raises(LayoutError) as caught:
            weft.to_callback(x, print, chunks=(1 + mesh.get_rank(), 1))
        return str(caught.value)

    for text in weft.testing.run(on_rank, mesh={"x": 2}):
        assert "rank 0: [6@x, 2], in_turns=False, rank 1: [6@x{4,2}, 2]" in text, text

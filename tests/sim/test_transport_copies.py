"""What lies in memory without gaps is sent as it lies, and received where it has to lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.execute import execute
from tests.oracle import block
from tests.sim.test_transport_execute import by_pieces
from weft.comm import BoundMesh, Communicator, run_simulated
from weft.core import Layout, Mesh, P
from weft.planner import plan
from weft.transport.boxes import stretch

MESH = Mesh({"a": 2, "b": 2})


@dataclass
class Handed:
    """What one rank hands to its communicators: tensors to send, tensors to receive into."""

    sent: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    swaps: bool = False


@contextmanager
def watched(comm: Communicator) -> Iterator[Handed]:
    """Record what goes through one communicator."""
    seen, kind = Handed(), type(comm)

    class Watching(kind):  # type: ignore[misc, valid-type]
        """It has the memory layout of what it watches."""

        __slots__ = ()

        def _swap(self, send, recv, dtype):
            seen.swaps = True
            seen.sent += [piece for _, piece in send]
            seen.received += [piece for _, piece in recv]
            return super()._swap(send, recv, dtype)

        def _all_to_all(self, x, send, recv):
            if not seen.swaps:  # they are simulated by this
                seen.sent.append(x)
            return super()._all_to_all(x, send, recv)  # type: ignore[misc]

        def _all_gather(self, x, sizes):
            seen.sent.append(x)
            return super()._all_gather(x, sizes)  # type: ignore[misc]

    comm.__class__ = Watching
    try:
        yield seen
    finally:
        comm.__class__ = kind


def lies_in(piece: Tensor, whole: Tensor) -> bool:
    """Whether a piece is memory of `whole`, not a copy of it."""
    return piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def ragged(*sizes: int) -> Layout:
    return Layout(MESH, (8, 6), P("b"), sizes={0: sizes})


ROWS, COLUMNS = Layout(MESH, (8, 6), P("b")), Layout(MESH, (8, 6), P(None, "b"))
WHOLE = Layout(MESH, (8, 6))
CASES = [
    # from, to, sent as it lies, received where it has to lie
    (ROWS, WHOLE, True, True),
    (COLUMNS, WHOLE, True, False),
    (ROWS, COLUMNS, False, True),
    (COLUMNS, ROWS, True, False),
    (ROWS, ragged(1, 7), True, True),
    (ragged(7, 1), ragged(2, 6), True, True),
    (Layout(MESH, (8, 6), P("b", "a")), Layout(MESH, (8, 6), P("a", "b")), True, True),
    (Layout(MESH, (8, 6), P(("b", "a"))), Layout(MESH, (8, 6), P(("a", "b"))), True, True),
    (Layout(MESH, (8, 6), P("a")), Layout(MESH, (8, 6), P("b")), True, True),
]


@pytest.mark.parametrize(("src", "dst", "sent", "received"), CASES, ids=str)
def test_pieces(src: Layout, dst: Layout, sent: bool, received: bool) -> None:
    found = plan(src, dst)
    (step,) = found.steps

    def on_rank(mesh: BoundMesh) -> int:
        by_pieces(mesh)
        assert mesh.here is not None
        x = torch.ones(src.local_shape_at(mesh.here))
        with watched(mesh.comm(step.axes)) as seen:
            out = execute(found, x, mesh)
        assert [lies_in(piece, x) for piece in seen.sent] == [sent] * len(seen.sent)
        assert [lies_in(piece, out) for piece in seen.received] == [received] * len(seen.received)
        return sum(piece.numel() for piece in seen.received)

    received_by = run_simulated(on_rank, 4, MESH)
    assert received_by == [found.bytes_received(rank) // 4 for rank in range(4)]
    assert sum(received_by) > 0


@pytest.mark.parametrize(
    ("src", "dst"), [(CASES[at][0], CASES[at][1]) for at in (0, 1, 3, 4, 5, 6, 7)], ids=str
)
def test_one_buffer(src: Layout, dst: Layout) -> None:
    """A tensor whose pieces follow one another is the buffer."""
    found = plan(src, dst)
    (step,) = found.steps

    def on_rank(mesh: BoundMesh) -> None:
        assert mesh.here is not None
        x = torch.ones(src.local_shape_at(mesh.here))
        with watched(mesh.comm(step.axes)) as seen:
            execute(found, x, mesh)
        assert [lies_in(piece, x) for piece in seen.sent if piece.numel()] in ([True], [])

    run_simulated(on_rank, 4, MESH)


LINE = Mesh({"x": 4})
WAYS = [
    # mesh, from, to, bytes that a rank receives of 4 x 8 float32 per rank, from so many by messages
    (LINE, P("x"), P(None, "x"), 96, 8 * 128),
    (LINE, P("x"), P(), 384, 8),
    (MESH, P("a", "b"), P("b", "a"), 64, 0),
    (MESH, P("a"), P("b"), 128, 0),
]


@pytest.mark.parametrize(("mesh", "src", "dst", "nbytes", "limit"), WAYS, ids=str)
@pytest.mark.parametrize("factor", [1, 4, 16])
def test_which_way_pieces_travel(
    mesh: Mesh, src: P, dst: P, nbytes: int, limit: int, factor: int
) -> None:
    """By messages from some size on, at once where few ranks have something for each other."""
    before, after = (Layout(mesh, (16, 8 * factor), spec) for spec in (src, dst))
    found = plan(before, after)
    (step,) = found.steps
    assert found.total_bytes == 4 * nbytes * factor

    def on_rank(bound: BoundMesh) -> list[bool]:
        ways = []
        for preferred in (8, math.inf):
            bound.cache.clear()
            bound.comm(step.axes).swaps_from_nbytes = preferred
            with watched(bound.comm(step.axes)) as seen:
                execute(found, torch.ones(before.local_shape_at(bound.here or ())), bound)
            ways.append(seen.swaps)
        return ways

    assert run_simulated(on_rank, 4, mesh) == [[nbytes * factor >= limit, False]] * 4


def test_a_strided_tensor_is_copied_only_where_it_is_sent() -> None:
    src, dst = ragged(7, 1), ragged(6, 2)
    found = plan(src, dst)

    def on_rank(mesh: BoundMesh) -> None:
        by_pieces(mesh)
        assert mesh.here is not None
        x = torch.ones(*reversed(src.local_shape_at(mesh.here))).t()
        with watched(mesh.comm((1,))) as seen:
            execute(found, x, mesh)
        assert [piece.untyped_storage().nbytes() // 4 for piece in seen.sent] == (
            [] if mesh.here[1] else [6]
        )

    run_simulated(on_rank, 4, MESH)


def test_stretches() -> None:
    whole = ((2, 6), (0, 5), (0, 3))
    assert stretch([whole], whole) == (0, math.prod((4, 5, 3)))
    assert stretch([], whole) == (0, 0)
    assert stretch([((3, 5), (0, 5), (0, 3))], whole) == (15, 45)
    assert stretch([((3, 4), (1, 3), (0, 3))], whole) == (18, 24)
    assert stretch([((3, 4), (1, 2), (1, 3))], whole) == (19, 21)
    assert stretch([((3, 4), (1, 3), (1, 3))], whole) is None
    assert stretch([((3, 5), (0, 4), (0, 3))], whole) is None
    one, two = ((3, 4), (0, 5), (0, 3)), ((4, 5), (0, 5), (0, 3))
    assert stretch([one, two], whole) == (15, 45)
    assert stretch([two, one], whole) is None
    assert stretch([((0, 4),), ((4, 6),)], ((0, 8),)) == (0, 6)
    assert stretch([((0, 1), (0, 1)), ((0, 1), (1, 2))], ((0, 2), (0, 2))) == (0, 2)


@pytest.mark.parametrize("dst", [P(None, None, "a"), P(None, None, None, "a")], ids=str)
def test_blocks_with_channels_last(dst: P) -> None:
    """Of which `cat` makes one that has channels last, too."""
    full = torch.arange(48.0).view(4, 2, 2, 3).to(memory_format=torch.channels_last)
    mesh, shape = Mesh({"a": 3}), tuple(full.shape)
    src, target = Layout(mesh, shape, P("a")), Layout(mesh, shape, dst)

    def on_rank(bound: BoundMesh) -> Tensor:
        local = block(src, full, bound.here or ()).contiguous(memory_format=torch.channels_last)
        return execute(plan(src, target), local, bound)

    for rank, got in enumerate(run_simulated(on_rank, mesh=mesh)):
        assert torch.equal(got, block(target, full, (rank,)))

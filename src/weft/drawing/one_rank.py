"""What one rank does in a plan: the boxes that it keeps, receives from others and sends to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import assert_never

from weft.core import Box, Layout
from weft.core.units import nbytes_text
from weft.drawing.facts import mesh_text
from weft.drawing.ranks import ranks_text
from weft.errors import LayoutError
from weft.planner import (
    AllGather,
    AllReduce,
    Exchange,
    Fetch,
    Fold,
    MakePartial,
    Plan,
    ReduceScatter,
    Slice,
    Step,
    Transfer,
    step_nbytes_at,
)

__all__ = ["rank_lines"]

_LISTED = 8
"""Boxes that are listed for a step in each direction."""

_Row = tuple[str, Sequence[int], Box]
"""What is done, with which ranks (none: alone), and the box."""


def rank_lines(plan: Plan, rank: int, call: str = "rank_lines(plan, rank)") -> list[str]:
    """The steps of a plan as one rank sees them.

    Raises:
        LayoutError: `rank` is in neither mesh.
    """
    sides = [_held(layout, rank) for layout in (plan.src, plan.dst)]
    if sides == [None, None]:
        meshes = dict.fromkeys((plan.src.mesh, plan.dst.mesh))
        raise LayoutError(
            call, f"rank {rank} is not among those of "
            + " or ".join(mesh_text(mesh) for mesh in meshes),
            "only a rank of a mesh takes part", [rank],
            f"{'--rank' if call == '--rank' else 'rank'} {plan.src.mesh.rank_at(0)}")
    before, after = (box_text(side) if side else "nothing" for side in sides)
    out = [f"Rank {rank} holds {before}, then {after}"]
    for number, step in enumerate(plan.steps, 1):
        at = step.dst.mesh.coordinate_of_rank(rank)
        received = 0 if at is None else step_nbytes_at(step, at, plan.itemsize)
        what = f"{type(step).__name__}{step.over}"
        out.append(f"  {number}. {what}: receives {nbytes_text(received)}")
        out += [f"     {line}" for line in _listed(list(_rows(step, rank)))]
    return out


def box_text(box: Box) -> str:
    """A box, written as an index: `[0:2, 4:8]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _held(layout: Layout, rank: int) -> Box | None:
    at = layout.mesh.coordinate_of_rank(rank)
    return None if at is None else layout.box_at(at)


def _rows(step: Step, rank: int) -> Iterator[_Row]:
    if isinstance(step, Transfer):
        yield from _blocks("from", "keeps", rank, step.receives(rank))
        yield from _blocks("to", "", rank, step.sends(rank))
        return
    mesh = step.src.mesh
    at = mesh.coordinate_of_rank(rank)
    if at is None:
        return

    def named(blocks: Sequence[tuple[tuple[int, ...], Box]]) -> list[tuple[int, Box]]:
        return [(mesh.rank_at(mesh.position(peer)), box) for peer, box in blocks]

    match step:
        case Slice():
            yield "keeps", (), step.dst.box_at(at)
        case MakePartial():
            yield "holds as partial", (), step.src.box_at(at)
        case Exchange() | Fetch():
            yield from _blocks("from", "keeps", rank, named(step.receives(at)))
            yield from _blocks("to", "", rank, named(step.sends(at)))
        case Fold():
            yield from _blocks("a partial from", "its own", rank, named(step.receives(at)))
            yield from _blocks("a partial to", "", rank, named(step.sends(at)))
        case AllGather():
            peers = named(step.receives(at))
            yield from _blocks("from", "keeps", rank, peers)
            yield "to", [peer for peer, _ in peers if peer != rank], step.src.box_at(at)
        case ReduceScatter():
            peers = named(step.sends(at))
            others = [peer for peer, _ in peers if peer != rank]
            yield "its own", (), step.dst.box_at(at)
            yield "partials from", others, step.dst.box_at(at)
            yield from _blocks("a partial to", "", rank, peers)
        case AllReduce():
            members = [mesh.rank_at(mesh.position(peer)) for peer in mesh.along(step.axes, at)]
            yield "reduces with", [peer for peer in members if peer != rank], step.dst.box_at(at)
        case _:
            assert_never(step)


def _blocks(
    word: str, own: str, rank: int, blocks: Sequence[tuple[int, Box]]
) -> Iterator[_Row]:
    """One row per block, ranks of the same block together; this rank's own first, if it counts."""
    for peer, box in blocks:
        if peer == rank and own:
            yield own, (), box
    others = sorted((box, peer) for peer, box in blocks if peer != rank)
    rows = [(word, [peer for _, peer in same], box)
            for box, same in groupby(others, key=lambda item: item[0])]
    yield from sorted(rows, key=lambda row: row[1])


def _listed(rows: Sequence[_Row]) -> list[str]:
    texts = [(word if not ranks else f"{word} {ranks_text(ranks)}", word, box)
             for word, ranks, box in rows]
    margin = max((len(text) for text, _, _ in texts), default=0)
    out: list[str] = []
    for _, same in groupby(texts, key=lambda item: item[1]):
        found = list(same)
        out += [f"{text:{margin}}  {box_text(box)}" for text, _, box in found[:_LISTED]]
        if len(found) > _LISTED:
            out.append(f"… {len(found) - _LISTED:,} more")
    return out

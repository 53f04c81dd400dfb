"""A plan as text: its steps, what each rank receives, the lower bound, memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.core.mesh import Mesh
from weft.core.units import nbytes_text, seconds_text
from weft.planner.cost import step_nbytes, step_seconds

if TYPE_CHECKING:
    from weft.planner.plan import Plan

__all__ = ["plan_text"]

_LISTED = 16
"""The number of ranks up to which each has its own figure."""

_SAMPLED = 256
"""Ranks that a summary looks at, evenly spaced."""


def plan_text(plan: Plan) -> str:
    """Layouts, steps, and their cost, one item per line."""
    src, dst = plan.src, plan.dst
    alone = src.mesh == dst.mesh
    places = f" on {src.mesh}" if alone else f", from {src.mesh} to {dst.mesh}"
    lines = [f"{src} -> {dst}{places}"]
    for number, step in enumerate(plan.steps, 1):
        nbytes = step_nbytes(step, plan.itemsize)
        seconds = step_seconds(step, plan.itemsize, plan.links)
        cost = f"{nbytes_text(nbytes)}, {seconds_text(seconds)}" if nbytes else "nothing is sent"
        lines.append(f"  {number}. {step}: {cost}")
    if not plan.steps:
        lines.append("  nothing to do")
    total, bound = plan.total_bytes, plan.lower_bound
    ratio = f", {total / bound:.2f}x" if bound else ""
    lines += [
        f"  received: {nbytes_text(total)}; lower bound {nbytes_text(bound)}{ratio}",
        f"  per rank: {_by_rank(plan)}",
        f"  memory:   {nbytes_text(plan.peak_elements * plan.itemsize)} at once, at most",
        f"  time:     {seconds_text(plan.seconds)}, estimated",
    ]
    return "\n".join(lines)


def _by_rank(plan: Plan) -> str:
    meshes = [plan.src.mesh] + [plan.dst.mesh] * (plan.dst.mesh != plan.src.mesh)
    count = sum(mesh.size() for mesh in meshes)
    ranks = sorted({rank for mesh in meshes for rank in _some(mesh, _SAMPLED // len(meshes))})
    nbytes = [plan.bytes_received(rank) for rank in ranks]
    if len(ranks) <= _LISTED:
        return _listed(ranks, nbytes)
    of = f"{len(ranks)} of {count} ranks" if count > _SAMPLED else f"{len(ranks)} ranks"
    nbytes.sort()
    least, median, most = map(
        nbytes_text, (nbytes[0], nbytes[(len(nbytes) - 1) // 2], nbytes[-1]))
    return f"min {least}, median {median}, max {most} ({of})"


def _some(mesh: Mesh, most: int) -> list[int]:
    size = mesh.size()
    count = min(size, most)
    return [mesh.rank_at(place * size // count) for place in range(count)]


def _listed(ranks: Sequence[int], nbytes: Sequence[int]) -> str:
    """Ranks that receive equal amounts are listed together."""
    groups: dict[str, list[int]] = {}
    for count, rank in sorted(zip(nbytes, ranks)):
        groups.setdefault(nbytes_text(count), []).append(rank)
    if len(groups) == 1:
        return f"{nbytes_text(nbytes[0])} each"
    return "; ".join(f"{text} on {','.join(map(str, sorted(its)))}" for text, its in groups.items())

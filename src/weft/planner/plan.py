"""A plan: the steps from one layout to another, and what they cost.

`plan(src, dst)` finds them; equal arguments give the same plan object.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from weft.core.layout import Layout
from weft.errors import LayoutError, message
from weft.planner.check import check
from weft.planner.cost import (
    missing_elements,
    peak_elements,
    step_nbytes,
    step_nbytes_at,
    step_seconds,
)
from weft.planner.geometry import strip
from weft.planner.search import move, search
from weft.planner.steps import AllGather, AllReduce, Slice, Step, Term

__all__ = ["Plan", "gradient_layout", "naive", "plan", "transpose"]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Steps that lead from `src` to `dst`; `itemsize` is the bytes of one element.

    A plan is a value of its own: two plans are equal only when they are one object.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    itemsize: int = 4

    def bytes_received(self, rank: int) -> int:
        """Bytes that device id `rank` receives from others.

        Raises:
            LayoutError: `rank` is not in the mesh.
        """
        mesh = self.src.mesh
        position = mesh.position_of_rank(rank)
        if position is None:
            raise LayoutError(
                message("plan.bytes_received(rank)", f"rank {rank} is not among the "
                        f"{mesh.size()} devices of {mesh}", "only a rank of the mesh takes part",
                        [rank], f"plan.bytes_received({mesh.rank_at(0)})")
            )
        at = mesh.coordinate(position)
        return sum(step_nbytes_at(step, at, self.itemsize) for step in self.steps)

    @property
    def total_bytes(self) -> int:
        """Bytes received by all ranks together."""
        return sum(step_nbytes(step, self.itemsize) for step in self.steps)

    @property
    def lower_bound(self) -> int:
        """Fewest bytes, over all ranks, that any plan needs.

        Without partial axes: the bytes of the target boxes that the ranks lack. With them: those
        of the plan itself, which is the best of its family.
        """
        if self.src.is_partial or self.dst.is_partial:
            return min(plan(self.src, self.dst, self.itemsize).total_bytes, self.total_bytes)
        return self.itemsize * missing_elements(self.src, self.dst)

    @property
    def seconds(self) -> float:
        """Estimated time over the default links."""
        return sum(step_seconds(step, self.itemsize) for step in self.steps)

    @property
    def peak_elements(self) -> int:
        """At most this many elements does a rank hold at once, source and target included."""
        return peak_elements(self.src, self.steps)

    def transpose(self) -> Plan:
        """The plan of the gradient, from the target's side back to the source's."""
        return transpose(self)

    def __str__(self) -> str:
        total, bound = self.total_bytes, self.lower_bound
        ratio = f", {total / bound:.2f}x the minimum" if bound else ""
        lines = [
            f"{self.src} -> {self.dst} on {self.src.mesh}",
            f"  {total} bytes received by {self.src.mesh.size()} ranks{ratio}; at most "
            f"{self.peak_elements} elements at once",
        ]
        lines += [f"  {number}. {step}, {step_nbytes(step, self.itemsize)} bytes"
                  for number, step in enumerate(self.steps, 1)]
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


@lru_cache(maxsize=16384)
def plan(src: Layout, dst: Layout, itemsize: int = 4) -> Plan:
    """The steps from one layout to another of the same global shape, on one mesh.

    Args:
        src, dst: the layouts. itemsize: bytes of one element.

    Raises:
        LayoutError: other meshes or shapes, or a row that the table of transitions lacks.
    """
    check(src, dst)
    return Plan(src, dst, tuple(search(strip(src), strip(dst))), itemsize)


def naive(src: Layout, dst: Layout, itemsize: int = 4) -> Plan:
    """Gather all, reduce all, then cut: the reference that every plan is compared with."""
    check(src, dst)
    src_, dst_ = strip(src), strip(dst)
    if 0 in src.shape:
        return plan(src, dst, itemsize)
    whole = src_.replace(dims=((),) * src.ndim)
    full = whole.replace(partial=(None,) * src.mesh.ndim)
    cut = dst_.replace(cuts=dst_.cuts, partial=full.partial)
    terms = tuple(axis for axis, kind in enumerate(whole.partial) if kind)
    steps: list[Step] = []
    if src_ != whole:
        steps.append(AllGather(src_, whole, src_.sharded_axes))
    if terms:
        steps.append(AllReduce(whole, full, terms))
    if cut != full:
        steps.append(Slice(full, cut))
    if dst_ != cut:
        made = tuple(axis for axis, kind in enumerate(dst_.partial) if kind)
        steps.append(Term(cut, dst_, made))
    return Plan(src, dst, tuple(steps), itemsize)


def gradient_layout(layout: Layout, varying: frozenset[int] = frozenset()) -> Layout:
    """The layout of a gradient: S for S, I for I and P, and P(sum) for a varying axis."""
    if not varying and not layout.is_partial:
        return layout
    kinds = ["sum" if axis in varying else None for axis in range(layout.mesh.ndim)]
    return layout.replace(cuts=layout.cuts, partial=kinds)


def transpose(forward: Plan) -> Plan:
    """The plan of the gradient, each step reversed; a value that was replicated stays so.

    Slice and all-gather are each other's reverse, an exchange is its own, a reduce-scatter turns
    into an all-gather, and what was reduced or made partial as a whole needs nothing.
    """
    src, dst = gradient_layout(forward.dst), gradient_layout(forward.src)
    steps: list[Step] = []
    for step in reversed(forward.steps):
        steps += move(gradient_layout(step.dst), gradient_layout(step.src))
    return Plan(src, dst, tuple(steps), forward.itemsize)

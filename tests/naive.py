"""The plan that anybody would write: the reference that others are compared with."""

from __future__ import annotations

from weft.core import Layout
from weft.planner import (
    AllGather,
    AllReduce,
    MakePartial,
    Plan,
    Slice,
    Step,
    Transfer,
    check,
    kept_partials,
    plan,
)
from weft.planner.geometry import strip

_NOT_MADE = frozenset({"avg", "bxor"})
"""Kinds of partial values that a plan cannot make from a value, so it must keep them."""


def naive(src: Layout, dst: Layout, itemsize: int = 4) -> Plan:
    """Gather all, reduce all, cross, then slice."""
    check(src, dst)
    src_, dst_ = strip(src), strip(dst)
    if 0 in src.shape:
        return plan(src, dst, itemsize)
    kept = {s: d for s, d in kept_partials(src_, dst_).items() if src_.partial[s] in _NOT_MADE}
    whole = src_.gathered(range(src.ndim))
    terms = tuple(axis for axis, kind in enumerate(whole.partial) if kind and axis not in kept)
    full = whole.without_partial(terms)
    steps: list[Step] = []
    if src_ != whole:
        steps.append(AllGather(src_, whole, src_.sharded_axes))
    if terms:
        steps.append(AllReduce(whole, full, terms))
    cut = dst_.without_partial(set(range(dst_.mesh.ndim)) - set(kept.values()))
    there = cut.gathered(range(src.ndim))
    if there.mesh != full.mesh:
        steps.append(Transfer(full, there))
    if cut != there:
        steps.append(Slice(there, cut))
    if dst_ != cut:
        made = [axis for axis, kind in enumerate(dst_.partial) if kind != cut.partial[axis]]
        steps.append(MakePartial(cut, dst_, tuple(made)))
    return Plan(src, dst, tuple(steps), itemsize)

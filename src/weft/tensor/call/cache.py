"""`weft.cache_info()` and `weft.cache_clear()`: the caches between calls.

All cached values follow from facts that all ranks share, and can be made again: clearing costs only
time, on the ranks that clear.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.comm import live_meshes
from weft.planner import forget_plans, kept_plans
from weft.tensor.call.build import MAX_TRACES
from weft.tensor.call.build import TRACES as traces
from weft.tensor.call.sizes import MAX_STRUCTURES
from weft.tensor.counts import (
    AGAIN,
    CALLS,
    METAS,
    MISSES,
    STRUCTURES,
    TRACES,
    TRANSITIONS,
    Hits,
)
from weft.tensor.meta import MAX_METAS, MAX_RECIPES_OF_MESH, alive, forget_recipes, forget_unused
from weft.tensor.placing.transitions import MAX_TRANSITIONS
from weft.tensor.trace.derivatives import EDGES

__all__ = ["CacheInfo", "KindInfo", "cache_clear", "cache_info"]


class KindInfo(NamedTuple):
    """As functools' cache_info; `maxsize` is that of one mesh (of the process, for plans and
    traces)."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class CacheInfo(dict[str, KindInfo]):
    """Kind -> hits, misses, maxsize, currsize. Printed as a table."""

    def __repr__(self) -> str:
        rows = [("kind", *KindInfo._fields), *(
            (kind, *map(str, info)) for kind, info in self.items())]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(
                cell.rjust(width) for cell, width in zip(row[1:], widths[1:])
            )]) for row in rows
        )


def cache_info() -> CacheInfo:
    """Hits and misses of the caches since the last `cache_clear`, and the numbers of their entries.

    Counted over the process: all its threads, simulated ranks and live meshes.

    - `recipes`: how a call is carried out; a hit is one look-up.
    - `structures`: recipes of calls that differ in lengths alone. Looked up where a recipe misses.
    - `traces`: which ops a function of torch consists of, the same for all ranks of the process.
    - `metas`: layout, dtype and flags of a tensor, one object for all that agree.
    - `transitions`: from one layout to another, compiled for this rank.
    - `plans`: the steps of such a transition, the same on every rank.
    """
    tables = [mesh.cache for mesh in live_meshes()]

    def size(name: str) -> int:
        return sum(len(table.get(name, ())) for table in tables)

    def info(counts: Hits, maxsize: int, name: str) -> KindInfo:
        return KindInfo(counts.hits.value, counts.misses.value, maxsize, size(name))

    misses = MISSES.value
    return CacheInfo({
        "recipes": KindInfo(
            max(CALLS.value - AGAIN.value - misses, 0), misses, MAX_RECIPES_OF_MESH,
            sum(len(meta.recipes) for meta in alive()),
        ),
        "structures": info(STRUCTURES, MAX_STRUCTURES, "structures"),
        "traces": KindInfo(TRACES.hits.value, TRACES.misses.value, MAX_TRACES, len(traces)),
        "metas": info(METAS, MAX_METAS, "metas"),
        "transitions": info(TRANSITIONS, MAX_TRANSITIONS, "transitions"),
        "plans": KindInfo(*kept_plans()),  # type: ignore[arg-type]
    })


def cache_clear() -> None:
    """Drop what calls have cached, and count from zero.

    Tensors and graphs are not touched. Metas that they use stay, because tensors share them.
    """
    forget_recipes()
    for meta in alive():
        meta.to_replicated, meta.of_grad = False, None
    for mesh in live_meshes():
        for name in ("structures", "transitions", "moves", "num_recipes", "transport.programs"):
            mesh.cache.pop(name, None)
        forget_unused(mesh)
    forget_plans()
    traces.clear()
    EDGES.clear()
    for counter in (CALLS, AGAIN, MISSES):
        counter.reset()
    for counts in (STRUCTURES, TRACES, METAS, TRANSITIONS):
        counts.hits.reset()
        counts.misses.reset()

"""Dry runs of ranks that may differ: one for each class of equal ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.comm import BoundMesh
from weft.core import Mesh
from weft.dry.report import DryRun
from weft.dry.run import dry_run
from weft.planner import Links

__all__ = ["dry_classes"]


def dry_classes(
    fn: Callable[[BoundMesh], Any], mesh: Mapping[str, int] | Sequence[int] | Mesh,
    links: Links | str | None = None, *, ranks: Sequence[int] | None = None, **options: Any,
) -> list[DryRun]:
    """Dry runs of several ranks, one for each class of ranks with equal reports.

    Ranks differ where shards are uneven, and in the stages of a pipeline.

    Args:
        fn: the program, as for `weft.dry_run`.
        mesh: the mesh, as for `weft.dry_run`.
        links: the network, as for `weft.dry_run`.
        ranks: which ranks; None: those that are first, in the middle or last along each axis. The
            first hold the most with default sizes, and those in the middle have neighbours on both
            sides. Stages of a pipeline have to be named.
        options: the other arguments of `weft.dry_run`, except `rank`.

    Returns:
        The first of each class, the highest peak of memory first, then the most bytes received.

    Raises:
        MeshError: no such rank.
        Exception: whatever `weft.dry_run` raises.
    """
    value = mesh.abstract if isinstance(mesh, Mesh) else Mesh(mesh)
    if ranks is None:
        ends = [sorted({0, size // 2, size - 1}) for size in value.axis_sizes]
        steps = [math.prod(value.axis_sizes[axis + 1:]) for axis in range(value.ndim)]
        ranks = [sum(map(math.prod, zip(at, steps))) for at in itertools.product(*ends)]
    found: dict[Any, DryRun] = {}
    for rank in ranks:
        one = dry_run(fn, value, links, rank=rank, **options)
        found.setdefault((one.memory, one.flops, tuple(one.log.events)), one)
    return sorted(found.values(), key=lambda one: (-one.memory.peak, -one.nbytes))

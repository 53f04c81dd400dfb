"""What torch's `_StridedShard` denotes. torch shards from left to right, and a strided placement
first chunks its input `split_factor` times, then gives each coordinate its part of every
chunk. This is some order of axes for one shape and no order for another (a flattened dim), so
weft compares the two before it accepts such a placement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from weft.core.cuts import default_interval
from weft.core.mesh import Mesh
from weft.core.placement import Placement, StridedShard
from weft.errors import PlacementError

__all__ = ["check_torch_strided"]

Interval = tuple[int, int]


def check_torch_strided(
    mesh: Mesh,
    shape: Sequence[int],
    dims: Sequence[Sequence[int]],
    placements: Sequence[Placement],
) -> None:
    """Raise PlacementError, which names every dim where torch's boxes differ from those of the
    order of axes."""
    wrong = [
        f"dim {dim} of length {length}: {[str(placements[axis]) for axis in sorted(axes)]}"
        for dim, (length, axes) in enumerate(zip(shape, dims))
        if not _is_order(mesh, length, axes, placements)
    ]
    if wrong:
        raise PlacementError(
            "placements", f"torch's _StridedShard cuts {len(wrong)} dims of shape "
            f"{tuple(shape)} into parts that are no boxes of an order of axes",
            "a torch _StridedShard is accepted where both mean the same boxes", wrong,
            "weft's own StridedShard, or a partition spec, says an order of axes")


def _is_order(
    mesh: Mesh, length: int, axes: Sequence[int], placements: Sequence[Placement]
) -> bool:
    if length % math.prod(mesh.axis_sizes[axis] for axis in axes) == 0:
        return True  # every chunk is whole at every level, so both have the same offsets
    left_to_right = sorted(axes)
    for digits in product(*(range(mesh.axis_sizes[axis]) for axis in left_to_right)):
        digit = dict(zip(left_to_right, digits))
        ours = default_interval(length, [(mesh.axis_sizes[axis], digit[axis]) for axis in axes])
        runs = [(0, length)]
        for axis in left_to_right:
            runs = _torch_shard(runs, placements[axis], mesh.axis_sizes[axis], digit[axis])
        # Runs ascend and do not overlap: as many elements between the same ends are the same ones.
        if sum(stop - start for start, stop in runs) != ours[1] - ours[0]:
            return False
        if runs and (runs[0][0], runs[-1][1]) != ours:
            return False
    return True


def _torch_shard(
    runs: Sequence[Interval], placement: Placement, size: int, digit: int
) -> list[Interval]:
    factor = placement.split_factor if isinstance(placement, StridedShard) else 1
    total = sum(stop - start for start, stop in runs)
    kept: list[Interval] = []
    for index in range(factor):
        part = default_interval(total, [(factor, index), (size, digit)])
        kept += _slice(runs, *part)
    return kept


def _slice(runs: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    # Elements start..stop of a list of runs, counted along the runs.
    kept: list[Interval] = []
    before = 0
    for low, high in runs:
        first, last = max(start - before, 0), min(stop - before, high - low)
        if first < last:
            kept.append((low + first, low + last))
        before += high - low
    return kept

"""Measures the network, for the planner's cost function.

Every collective that plans use is timed over each axis of a mesh, and over all axes together, at
several sizes. `Links.seconds_over` is linear in the unknowns: the
start, a rank's time for each other member, the latency and the seconds per byte of each axis. They
are therefore the non-negative least squares of relative errors: a small message counts as much as a
large one. Over several axes the slowest counts; which one it is follows from the axes alone.

Ranks must agree on their assumptions. So all of them get the result of the first rank, which is
computed from the times of all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.comm import BoundMesh, Communicator, as_bound_mesh
from weft.core.arguments import MeshLike
from weft.core.mesh import Mesh
from weft.errors import MeshError, ShardTypeError
from weft.planner import Link, Links
from weft.planner.links import NODE_SIZE, is_near

__all__ = ["Sample", "fit", "measure_links", "relative_error", "samples", "settle"]

SIZES_NBYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
_CALLS, _TURN_NBYTES = 5, 1 << 22
"""Calls per turn, fewer for large ones."""

_PASSES = {"all_to_all": 1, "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of a collective over some axes in which a rank receives `nbytes` bytes."""

    axes: tuple[int, ...]
    passes: int
    nbytes: float
    seconds: float


def measure_links(
    mesh: MeshLike | None = None, *, sizes: Sequence[int] = SIZES_NBYTES, num_rounds: int = 9,
    node_size: int = NODE_SIZE,
) -> Links:
    """Measure the networks of a mesh for the planner; the same value on every rank.

    A collective: all ranks of the mesh call it. Pass the result to `weft.set_links`, or keep it
    for later runs with `links.save(path)`.

    Args:
        mesh: a bound mesh, a torch DeviceMesh, or None for the default one.
        sizes: bytes that a rank receives per collective.
        num_rounds: turns of each collective, of which the best counts.
        node_size: devices per node.

    Returns:
        The fitted networks, in seconds and seconds per byte.

    Raises:
        MeshError: None without a default mesh, a rank outside the mesh, or a mesh of one rank.
        ShardTypeError: invalid sizes, or no rounds.
    """
    bound = as_bound_mesh(mesh, "measure_links(mesh)")
    links = fit(bound.abstract, samples(bound, sizes, num_rounds), node_size)
    found = bound.everyone().exchange(links)[0]
    assert isinstance(found, Links)
    return found


def _check(mesh: BoundMesh, sizes: Sequence[int], num_rounds: int) -> None:
    if mesh.size() == 1:
        raise MeshError(
            "measure_links(mesh)", f"{mesh} has one rank", "a network is measured between "
            "ranks", [str(mesh)], 'weft.init_mesh({"dp": 2}), by two processes')
    wrong = [size for size in sizes if not isinstance(size, int) or size < 1]
    if wrong or not sizes or num_rounds < 1:
        raise ShardTypeError(
            "measure_links(sizes, num_rounds)", f"sizes are {list(sizes)!r}, num_rounds is "
            f"{num_rounds!r}", "sizes are whole numbers of bytes, at least 1; there is a "
            "round or more", wrong or [list(sizes), num_rounds],
            f"measure_links(mesh, sizes={SIZES_NBYTES})")


def samples(mesh: BoundMesh, sizes: Sequence[int], num_rounds: int) -> list[Sample]:
    """The times of the collectives, each on its slowest rank; raises as `measure_links` does."""
    _check(mesh, sizes, num_rounds)
    axes = [axis for axis, size in enumerate(mesh.axis_sizes) if size > 1]
    groups = [(axis,) for axis in axes] + ([tuple(axes)] if len(axes) > 1 else [])
    world = mesh.everyone()
    out = []
    for group in groups:
        comm = mesh.comm(group)
        for nbytes in sizes:
            runs = _runs(comm, nbytes)
            calls = max(1, min(_CALLS, _TURN_NBYTES // nbytes))
            turns: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(1 + num_rounds):  # the first warms up
                for name, (run, _) in runs.items():
                    world.exchange(None)
                    turns[name].append(_turn(run, calls, mesh.device))
            for name, (_, received) in runs.items():
                told = [one for one in world.exchange(turns[name][1:]) if isinstance(one, list)]
                # Of the slowest rank, in the round that other processes disturbed least.
                seconds = min(max(turn) for turn in zip(*told))
                out.append(Sample(group, _PASSES[name], received, seconds))
    return out


def _runs(comm: Communicator, nbytes: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Name -> the collective in which a rank receives about `nbytes` bytes, and its exact bytes."""
    g = comm.size
    each = max(1, nbytes // 4 // (g - 1))
    whole = max(g, nbytes // 8 * g // (g - 1))
    part, parts, full = (torch.ones(numel, device=comm.device) for numel in (each, each * g, whole))
    sizes, received = [each] * g, 4.0 * each * (g - 1)
    return {
        "all_to_all": (lambda: comm.all_to_all(parts, sizes, sizes), received),
        "all_gather": (lambda: comm.all_gather(part, sizes), received),
        "reduce_scatter": (lambda: comm.reduce_scatter(parts, sizes, "sum"), received),
        "all_reduce": (lambda: comm.all_reduce(full, "sum"), 8.0 * whole * (g - 1) / g),
    }


def _turn(run: Callable[[], object], calls: int, device: torch.device) -> float:
    settle(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    settle(device)
    return (time.perf_counter() - start) / calls


def settle(device: torch.device) -> None:
    """Wait until an accelerator has done what was issued to it."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device.type).synchronize(device)


# Least squares.


def fit(mesh: Mesh, seen: Sequence[Sample], node_size: int = NODE_SIZE) -> Links:
    """The links for which `Links.seconds_over` comes closest to the samples."""
    axes = sorted({axis for sample in seen for axis in sample.axes})
    sizes = {math.prod(mesh.axis_sizes[axis] for axis in sample.axes) for sample in seen}
    columns: list[tuple[str, int]] = [("start", 0)]
    columns += [("member", 0)] if len(sizes) > 1 else []  # else the latency includes it
    columns += [(name, axis) for name in ("latency", "byte") for axis in axes]
    alone = _least_squares(mesh, [it for it in seen if len(it.axes) == 1], columns)
    found = _least_squares(mesh, seen, columns, alone)
    of_axis = {
        axis: Link(found.get(("latency", axis), 0.0), found.get(("byte", axis), 0.0))
        for axis in axes
    }
    near = [axis for axis in axes if is_near(mesh, axis, node_size)]
    far = [axis for axis in axes if axis not in near]
    return Links(
        near=_slowest([of_axis[axis] for axis in near or far]),
        far=_slowest([of_axis[axis] for axis in far or near]),
        start_s=found.get(("start", 0), 0.0), member_s=found.get(("member", 0), 0.0),
        node_size=node_size,
        axes={mesh.axis_names[axis]: link for axis, link in of_axis.items()},
    )


def _least_squares(
    mesh: Mesh, seen: Sequence[Sample], columns: list[tuple[str, int]],
    known: dict[tuple[str, int], float] | None = None,
) -> dict[tuple[str, int], float]:
    """Non-negative: values below zero are set to zero, the lowest first."""
    rows = [[_factor(mesh, it, column, known or {}) / it.seconds for column in columns]
            for it in seen]
    matrix = torch.tensor(rows, dtype=torch.float64)
    scale = matrix.norm(dim=0).clamp_min(1e-300)  # bytes and starts differ by many magnitudes
    used = list(range(len(columns)))
    ones = torch.ones(len(seen), 1, dtype=torch.float64)
    while used:
        scaled = (matrix / scale)[:, used]
        solved = torch.linalg.lstsq(scaled, ones, driver="gelsd").solution[:, 0] / scale[used]
        if (solved >= 0).all():
            return {columns[place]: float(it) for place, it in zip(used, solved)}
        used.remove(used[int((solved * scale[used]).argmin())])
    return {}


def _factor(
    mesh: Mesh, it: Sample, column: tuple[str, int], known: dict[tuple[str, int], float]
) -> float:
    """The coefficient of one unknown in the time of a sample, as in `Links.seconds_over`."""
    name, axis = column
    others = math.prod(mesh.axis_sizes[axis] for axis in it.axes) - 1
    if name == "start":
        return 1.0
    if name == "member":
        return float(it.passes * others)
    if axis != max(it.axes, key=lambda axis: (known.get((name, axis), 0.0), -axis)):
        return 0.0
    return float(it.passes * others.bit_length()) if name == "latency" else it.nbytes


def _slowest(links: Sequence[Link]) -> Link:
    return Link(max(link.latency_s for link in links), max(link.seconds_per_byte for link in links))


def relative_error(mesh: Mesh, seen: Sequence[Sample], links: Links) -> float:
    """The median relative difference between the links and the samples."""
    return statistics.median(
        abs(links.seconds_over(mesh, it.axes, it.nbytes, it.passes) / it.seconds - 1)
        for it in seen
    )

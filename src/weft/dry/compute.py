"""How fast a device computes, as a dry run sees it: its measurement, and devices by name.

An operation takes the time of its arithmetic or that of its memory traffic, whichever is more
(Williams et al., Roofline, 2009), and a little for the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from weft.comm import BoundMesh, as_bound_mesh
from weft.core.arguments import MeshLike
from weft.errors import ShardTypeError
from weft.transport.network import settle

__all__ = ["DEVICES", "Compute", "Device", "device_named", "measure_compute", "rates_by"]

_SIDE, _NUMEL = 768, 1 << 20
"""What is timed: products of squares, and sums of vectors, which stay, as activations do."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The rates of one device.

    Args:
        flops_per_s: floating-point operations of products in a second, in the dtype of the program.
        bytes_per_s: bytes that other operations read and write in a second.
        call_s: seconds for the call of an operation, whatever it computes.

    Raises:
        ShardTypeError: rates that are not positive, or a negative time.
    """

    flops_per_s: float
    bytes_per_s: float
    call_s: float = 0.0

    def __post_init__(self) -> None:
        wrong = {}
        for one in fields(self):
            given = getattr(self, one.name)
            is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
            least = 0 if one.name == "call_s" else 1
            if not is_number or not given >= least:
                wrong[one.name] = given
        if wrong:
            raise ShardTypeError(
                "Compute", ", ".join(f"{name} is {it!r}" for name, it in wrong.items()),
                "rates are at least 1 in a second, and a call takes no less than 0 s",
                list(wrong), "weft.Compute(4e14, 2e12), weft.measure_compute(mesh)")

    def seconds_of(self, flops: float, nbytes: float) -> float:
        return self.call_s + max(flops / self.flops_per_s, nbytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device. The network between such devices has the same name in `weft.Links`.

    Args:
        name: the name in texts.
        compute: its rates.
        nbytes: bytes of its memory.
    """

    name: str
    compute: Compute
    nbytes: int


DEVICES = {
    name: Device(name, Compute(flops, memory, 5e-6), nbytes * 10**9)
    for name, flops, memory, nbytes in (
        ("a100", 312e12, 2.0e12, 80), ("h100", 989e12, 3.35e12, 80), ("b200", 2.25e15, 8e12, 180),
        ("gb200", 2.5e15, 8e12, 186))
}
"""By NVIDIA's data sheets of A100 80GB, H100 SXM, HGX B200 and GB200 NVL72: dense products in
bfloat16, and the bandwidth and size of the memory. These are peaks: training reaches about half of
the arithmetic. 5 us for a call is an order of magnitude."""


def device_named(name: str | None) -> Device | None:
    """The device of this name; None for None."""
    if name is not None and name not in DEVICES:
        raise ShardTypeError(
            "dry_run(device)", f"{name!r} is no device",
            f"a device is one of {', '.join(DEVICES)}", [name],
            'device="h100", or links= and compute= with figures of your own')
    return None if name is None else DEVICES[name]


def measure_compute(
    mesh: MeshLike | None = None, *, dtype: torch.dtype = torch.float32, num_rounds: int = 9
) -> Compute:
    """Measure how fast the devices of a mesh compute, all at once; the same value on every rank.

    A collective: all ranks of the mesh call it. Ranks that share a machine slow each other down, so
    the rates are those of a machine on which all of them work.

    Args:
        mesh: a bound mesh, a torch DeviceMesh, or None for the default one.
        dtype: the dtype of the products.
        num_rounds: turns, of which the best counts.

    Returns:
        The rates of the slowest rank.

    Raises:
        MeshError: None without a default mesh, or a rank outside the mesh.
        ShardTypeError: no rounds.
    """
    bound = as_bound_mesh(mesh, "measure_compute(mesh)")
    if num_rounds < 1:
        raise ShardTypeError(
            "measure_compute(num_rounds)", f"num_rounds is {num_rounds!r}",
            "there is a round or more", [num_rounds], "num_rounds=9")
    return rates_by(time.perf_counter, bound, dtype, num_rounds)


def rates_by(
    clock: Callable[[], float], mesh: BoundMesh, dtype: torch.dtype, num_rounds: int
) -> Compute:
    """`measure_compute` by a clock."""
    world, timed = mesh.everyone(), _work(mesh, dtype)
    turns: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(1 + num_rounds):  # the first warms up
        for name, run in timed.items():
            world.exchange(None)
            turns[name].append(_seconds(run, mesh.device, clock))
    told = [one for one in world.exchange(turns) if isinstance(one, dict)]
    product, total, call = (
        # Of the slowest rank, in the round that other processes disturbed least.
        min(map(max, zip(*[one[name][1:] for one in told]))) for name in ("mm", "add", "call")
    )
    nbytes = 3 * _NUMEL * dtype.itemsize
    return Compute(2 * _SIDE**3 / product, nbytes / total, call)


def _work(mesh: BoundMesh, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> what is timed, and how often in a turn."""
    square = torch.ones(_SIDE, _SIDE, dtype=dtype, device=mesh.device)
    line = torch.ones(_NUMEL, dtype=dtype, device=mesh.device)
    few = torch.ones(8, dtype=dtype, device=mesh.device)
    return {"mm": (lambda: square @ square, 4), "add": (lambda: line + line, 16),
            "call": (lambda: few + few, 10_000)}


def _seconds(
    work: tuple[Callable[[], object], int], device: torch.device, clock: Callable[[], float]
) -> float:
    run, calls = work
    settle(device)
    start = clock()
    kept = [run() for _ in range(calls)]
    settle(device)
    took = clock() - start
    del kept
    return took / calls

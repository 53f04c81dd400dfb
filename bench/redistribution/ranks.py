"""One rank of `weft bench redistribute`: every row by every system, interleaved, in one run.

Started as `weft run -n N ranks.py ASKED`, ASKED as JSON; rank 0 writes one JSON object per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from bench.by_turns import Times, anywhere, as_rank, by_turns
from bench.collectives import Collectives
from bench.redistribution.by_hand import ByHand, Way, hand_written
from bench.redistribution.rows import ROWS, Row, layouts_of
from weft.core import Layout
from weft.planner import plan

__all__ = ["measure"]

Call = Callable[[], Any]

_TURN_NBYTES, _TURN_CALLS = 1 << 22, 5
"""About so many bytes are moved in a turn, so that turns take about as long at every size; by so
many calls at most."""


@dataclass(frozen=True, slots=True)
class _System:
    """One way to do a row: forward, forward and backward, and bytes received (None: not counted).

    `fault` is what was wrong, on any rank; it is not timed then.
    """

    forward: Call
    both: Call
    received: int | None
    fault: str | None = None


def _rows(asked: Any) -> Iterator[Mapping[str, Any]]:
    for row in ROWS:
        if row.mesh.size() == asked["num_ranks"] and row.name in asked["rows"]:
            for nbytes in asked["sizes"]:
                yield measure(row, nbytes, asked["num_rounds"])


def measure(row: Row, nbytes: int, num_rounds: int) -> dict[str, Any]:
    """What the systems received and how long they took, on every rank alike."""
    mesh = weft.init_mesh(row.mesh)
    src, dst = layouts_of(row, nbytes, mesh)
    before, due = _blocks(src, dst, mesh.rank)
    systems = {"weft": _weft(src, dst, before, due, mesh)}
    for name, ways in hand_written(src, dst, mesh.rank).items():
        systems[name] = _by_hand(ways, before, due, counts=not src.is_partial)
    if not row.parts:
        systems["DTensor"] = _dtensor(src, dst, before, due, mesh)
    timed = {name: system for name, system in systems.items() if not system.fault}
    calls = max(1, min(_TURN_CALLS, _TURN_NBYTES // nbytes))
    return {
        "row": row.name, "num_ranks": mesh.size(), "nbytes": 4 * src.shape[0] * src.shape[1],
        "minimum": None if src.is_partial else plan(src, dst, 4).lower_bound,
        "received": {name: system.received for name, system in systems.items()},
        "faults": {name: system.fault for name, system in systems.items() if system.fault},
        "forward": _times({name: it.forward for name, it in timed.items()}, num_rounds, calls),
        "both": _times({name: it.both for name, it in timed.items()}, num_rounds, calls),
    }


def _blocks(src: Layout, dst: Layout, rank: int) -> tuple[Tensor, Tensor]:
    """What this rank holds before and after; terms differ from rank to rank, sums are exact."""
    full = torch.arange(src.shape[0] * src.shape[1]).remainder_(1024).float().view(src.shape)
    held, wanted = (full[tuple(slice(*ends) for ends in it.box(rank))].clone() for it in (src, dst))
    size = src.mesh.size()
    return (held * (rank + 1), wanted * (size * (size + 1) // 2)) if src.is_partial else (
        held, wanted
    )


def _weft(src: Layout, dst: Layout, before: Tensor, due: Tensor, mesh: Any) -> _System:
    x = weft.ShardTensor.from_local(before.clone(), mesh, src).requires_grad_()
    cotangent = x.detach().redistribute(placements=dst)

    def both() -> None:
        x.redistribute(placements=dst).backward(gradient=cotangent)
        x.grad = None

    def forward() -> Any:
        with torch.no_grad():
            return x.redistribute(placements=dst)

    with Collectives() as seen:
        got = forward().to_local()
    fault = anywhere(None if torch.equal(got, due) else "wrong")
    return _System(forward, both, _sum(seen.received), fault)


def _by_hand(ways: tuple[Way, Way], before: Tensor, due: Tensor, counts: bool) -> _System:
    there, back = ways
    x, cotangent = before.clone().requires_grad_(), due.clone()

    def both() -> None:
        ByHand.apply(x, there, back).backward(cotangent)
        x.grad = None

    def forward() -> Tensor:
        with torch.no_grad():
            return there(x)

    with Collectives() if counts else nullcontext() as seen:
        got = forward()
    fault = anywhere(None if torch.equal(got, due) else "wrong")
    return _System(forward, both, _sum(seen.received) if seen else None, fault)


def _dtensor(src: Layout, dst: Layout, before: Tensor, due: Tensor, mesh: Any) -> _System:
    x, wanted = (weft.ShardTensor.from_local(local.clone(), mesh, layout).to_dtensor()
                 for local, layout in ((before, src), (due, dst)))
    target, seen = wanted.placements, Collectives()
    x.requires_grad_()
    try:
        with torch.no_grad(), seen:
            cotangent = x.redistribute(placements=target)
            got = cotangent.to_local()
        fault = None if torch.equal(got, due) else "wrong"
    except (RuntimeError, ValueError, NotImplementedError):
        fault = "refused"
    fault = anywhere(fault)
    if fault is not None:
        return _System(int, int, None, fault)

    def both() -> None:
        x.redistribute(placements=target).backward(cotangent)
        x.grad = None

    def forward() -> Tensor:
        with torch.no_grad():
            return x.redistribute(placements=target).to_local()  # which waits

    return _System(forward, both, None if src.is_partial else _sum(seen.received))


def _sum(mine: int) -> int:
    total = torch.tensor([mine])
    dist.all_reduce(total)
    return int(total)


def _times(systems: Mapping[str, Call], num_rounds: int, calls: int) -> Times:
    for call in systems.values():
        call()  # the first takes longer
    return by_turns(systems, num_rounds, calls)


if __name__ == "__main__":
    as_rank(_rows)

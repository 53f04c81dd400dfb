"""Anomaly mode in a backward of ShardTensors: a NaN that any rank finds is raised on all.

torch checks what each node of the graph returns, and raises where a NaN is, in the middle of the
backward. A NaN may be in one rank's block alone: that rank would leave the others waiting in their
next collective. So weft looks for it in torch's place, lets the backward run to its end, and has
the ranks exchange what they have found. Then all raise, in torch's words.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.trees import local_of
from weft.transport.transition import Transition

__all__ = ["nans_told"]


Found = tuple[str, int, bool]
"""A node's name, which of its results is NaN, and whether the node only moves what it gets."""


class _OfThread(threading.local):
    on = False


_LOOKS = _OfThread()
"""Whether a backward looks for NaNs on this thread, torch's own check being off."""


def nans_told(outputs: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Around the engine's run from these outputs.

    Raises:
        RuntimeError: on all ranks, where a node of some rank's graph has returned NaN.
    """
    if torch.is_anomaly_enabled() and (torch.is_anomaly_check_nan_enabled() or _LOOKS.on):
        return _told(outputs)
    return _UNTOLD


_UNTOLD = nullcontext()


@contextmanager
def _told(outputs: Sequence[Tensor]) -> Iterator[None]:
    nodes = _nodes(outputs)
    meshes = _meshes(outputs, nodes)
    if not meshes:
        yield
        return
    found: list[Found] = []
    handles = [node.register_hook(_look(node, found)) for node in nodes]
    before = torch.is_anomaly_check_nan_enabled(), _LOOKS.on
    torch.set_anomaly_enabled(True, False)
    _LOOKS.on = True
    try:
        yield
    finally:
        torch.set_anomaly_enabled(True, before[0])
        _LOOKS.on = before[1]
        for handle in handles:
            handle.remove()
    for mesh in meshes:
        _tell(mesh, found)


def _nodes(outputs: Sequence[Tensor]) -> list[Any]:
    """All nodes of the graph, so that they are looked at in the engine's order."""
    seen: dict[Any, None] = {}
    line = [local_of(output).grad_fn for output in outputs]
    while line:
        node = line.pop()
        if node is not None and node not in seen:
            seen[node] = None
            line += [following for following, _ in node.next_functions]
    return list(seen)


def _look(node: Any, found: list[Found]) -> Callable[[Any, Any], None]:
    def look(results: Sequence[Tensor | None], _: Any) -> None:
        if found:
            return
        for place, one in enumerate(results):
            if one is not None and one.isnan().any():
                found.append((node.name(), place, bool(_moves(node))))
                made = "".join(node.metadata.get("traceback_", ()))
                warnings.warn(
                    f"Error detected in {node.name()}. Traceback of forward call that caused the "
                    f"error:\n{made}", stacklevel=2,
                )
                return

    return look


def _meshes(outputs: Sequence[Tensor], nodes: Sequence[Any]) -> list[BoundMesh]:
    """Whose ranks run this backward: those of the outputs, and of transitions on the way."""
    meshes = [one._meta.mesh for one in outputs if type(one) is ShardTensor]
    for node in nodes:
        meshes += [move.mesh for move in _moves(node)]
    return [mesh for mesh in dict.fromkeys(meshes) if mesh.here is not None]


def _moves(node: Any) -> list[Transition]:
    """The transitions of a node."""
    known = [*getattr(node, "transitions", ()), getattr(node, "transition", None),
             getattr(node, "back", None)]
    return [move for move in known if type(move) is Transition]


def _tell(mesh: BoundMesh, found: Sequence[Found]) -> None:
    comm = mesh.comm(tuple(range(mesh.ndim)))
    asked: list[Any] = comm.exchange(found[0] if found else None)
    told = [(rank, first) for rank, first in zip(comm.ranks, asked) if first is not None]
    if not told:
        return
    sources = [one for one in told if not one[1][2]] or told  # others got it by communication
    ranks: dict[Found, list[int]] = {}
    for rank, first in sources:
        ranks.setdefault(first, []).append(rank)
    raise RuntimeError("; ".join(
        f"Function '{name}' returned nan values in its {place}th output, on rank"
        f"{'s' * (len(mine) > 1)} {', '.join(map(str, mine))}"
        for (name, place, _), mine in ranks.items()
    ) + ".")

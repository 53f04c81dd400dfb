"""Communication inside one op, reported to `weft.strict()` and to the traffic log; and the kernels
of the book, bound to a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops import Kernel, Local
from weft.rules import Decision
from weft.tensor import modes
from weft.tensor.placing.draw import next_key
from weft.tensor.trace.capture import as_autocast
from weft.tensor.versions import version_of
from weft.transport import Shards, traffic
from weft.transport.transition import Transition

__all__ = ["BoundKernel", "bound", "folding"]

_REASON = "what ranks need of each other's blocks"


def bound(
    name: str, algorithm: Local, bind: Callable[[BoundMesh], Any], mesh: BoundMesh
) -> Callable[..., Any]:
    """What `bind` gives for local tensors, reported to the modes as the op `name` where it
    communicates."""
    local, axes = bind(mesh), algorithm.communicates
    if not axes:
        return local
    return _labelled(name, local, algorithm.decision, axes, mesh, why=algorithm.why)


def _labelled(
    name: str, local: Callable[..., Any], decision: Decision, axes: tuple[int, ...],
    mesh: BoundMesh, checks: bool = True, why: str = "",
) -> Callable[..., Any]:
    if mesh.comm(axes).size == 1:
        return local

    def run(*args: Any, **kwargs: Any) -> Any:
        if checks and modes.STRICT.on:
            modes.check_summaries(name, decision.operands, axes)
        with traffic.label(name, why or _REASON):
            return local(*args, **kwargs)

    return run


def folding(
    name: str, local: Callable[..., Any], decision: Decision, mesh: BoundMesh
) -> Callable[..., Any]:
    """`local`, followed by a sum over ranks: its one result is a box of partial values."""
    (layout,), (cover,) = decision.results, decision.folds
    assert cover is not None
    fold = Transition(mesh, layout, layout, folds=cover)
    axes = [axis for dim, its in enumerate(layout.dims) if cover.reads[dim] for axis in its]
    return _labelled(
        name, lambda *args, **kwargs: fold(local(*args, **kwargs)), decision, tuple(axes), mesh)


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A kernel of the book on one rank: for layouts of the op's operands, a function of its
    arguments, tensors being local.

    Args:
        name: the op, for messages.
        slots: the tensors of the operands.
        cast: the dtype that autocast gives the op, where it is on: a kernel runs without.
    """

    name: str
    kernel: Kernel
    mesh: BoundMesh
    slots: tuple[int, ...]
    cast: torch.dtype | None

    def local(self, operands: Sequence[Layout]) -> Callable[..., Any]:
        """The function for local tensors, if the operands have these layouts."""
        decision = self.kernel.decision
        operand, _ = decision.finish[0]
        dims = [dim for at, dim in decision.finish if at == operand]
        operands = tuple(operands)
        shards = Shards(
            self.mesh, operands[operand], dims, partial(self._check, operands), operands,
            partial(next_key, self.mesh), version_of)
        local = partial(self.kernel.function, shards)
        if self.cast is not None:
            local = as_autocast(local, self.cast, self.mesh.kernel_type, results=False)
        return _labelled(self.name, local, decision, self.kernel.axes, self.mesh, checks=False)

    def _check(self, operands: tuple[Layout, ...], axes: tuple[int, ...]) -> None:
        """Raise in strict mode, before the kernel communicates over these axes."""
        if modes.STRICT.on and self.mesh.comm(axes).size > 1:
            modes.check_summaries(self.name, operands, axes)

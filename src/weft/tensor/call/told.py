"""Algorithms that communicate by themselves, told to `weft.strict()` and to the traffic log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.comm import BoundMesh
from weft.ops import Local
from weft.tensor import modes
from weft.transport import traffic

__all__ = ["told"]


def told(name: str, algorithm: Local) -> Local:
    """`algorithm`, of which the modes learn what it does: the op `name`, between blocks."""
    axes = algorithm.communicates
    reason = "what ranks need of each other's blocks"

    def with_word(bind: Callable[[BoundMesh], Any]) -> Callable[[BoundMesh], Any]:
        def bound(mesh: BoundMesh) -> Callable[..., Any]:
            local = bind(mesh)
            if mesh.comm(axes).size == 1:
                return local

            def run(*args: Any) -> Any:
                if not (traffic.STATE.on or modes.STRICT.on):
                    return local(*args)
                modes.check_summaries(name, algorithm.decision.operands, axes)
                with traffic.label(name, modes.source_line(), reason):
                    return local(*args)

            return run

        return bound

    writes = None if algorithm.writes is None else with_word(algorithm.writes)
    return replace(algorithm, bind=with_word(algorithm.bind), writes=writes)

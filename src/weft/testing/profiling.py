"""torch's profiler in simulated ranks: refused, because a process has one.

Each rank would start it in a thread of its own, which ends the process by a signal.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler import profile

from weft.comm import this_world
from weft.comm.simulated import current_simulated_world
from weft.errors import UnsupportedOpError, message
from weft.tensor.takeover import take_over, twin_of

__all__ = ["install"]

_PREPARE: Any = twin_of(profile._prepare_trace)  # type: ignore[arg-type]


def install() -> None:
    """Look whether it starts in one of several simulated ranks. Once per process."""
    take_over(profile._prepare_trace, _prepare)  # type: ignore[arg-type]


def _prepare(profiler: Any, *args: Any, **kwargs: Any) -> Any:
    if current_simulated_world() is not None and this_world().size > 1:
        raise UnsupportedOpError(
            message("torch.profiler.profile()", f"simulated rank {this_world().rank} of "
                    f"{this_world().size} starts it", "a process has one profiler, and simulated "
                    "ranks are threads of one process", [f"rank {this_world().rank}"],
                    "weft.testing.run(fn, num_ranks=1), or processes: weft run -n 2 script.py\n"
                    "Python's own, of one rank: cProfile.Profile()")
        )
    return _PREPARE(profiler, *args, **kwargs)

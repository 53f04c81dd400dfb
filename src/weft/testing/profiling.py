"""torch's profiler in simulated ranks: refused, because a process has one.

Each rank would start it in a thread of its own, which ends the process by a signal.
"""

from __future__ import annotations

from typing import Any

from weft.comm import this_world
from weft.comm.simulated import current_simulated_world
from weft.errors import UnsupportedOpError

__all__ = ["prepare_trace"]


def prepare_trace(original: Any, profiler: Any, *args: Any, **kwargs: Any) -> Any:
    if current_simulated_world() is not None and this_world().size > 1:
        raise UnsupportedOpError(
            "torch.profiler.profile()", f"simulated rank {this_world().rank} of "
            f"{this_world().size} starts it", "a process has one profiler, and simulated "
            "ranks are threads of one process", [f"rank {this_world().rank}"],
            "weft.testing.run(fn, num_ranks=1), or processes: weft run -n 2 script.py\n"
            "Python's own, of one rank: cProfile.Profile()")
    return original(profiler, *args, **kwargs)

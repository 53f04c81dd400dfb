"""Buffers that a backend still holds, and waiting for them before the interpreter ends.

gloo runs a collective on a thread of its own, which may be the last to release the
buffers, some time after `wait` has returned. If Python made the tensor, the release takes
Python's lock. A thread that requests the lock while the interpreter is being torn down is ended by
force inside a C++ destructor. This aborts the whole process after all of its work is done
("terminate called without an active exception", SIGABRT; pytorch issue 190489). Destroying the
process groups first joins those threads, but only if nothing else refers to a group, which no
library can promise.

So a backend gets aliases that no other code keeps. The Python object of an alias ends when the
backend's thread has had the lock and released it, and the process waits for that at exit. (The use
count of the tensor does not help: it falls before the thread requests the lock.)
"""

from __future__ import annotations

import time
import weakref

from torch import Tensor

__all__ = ["lend", "settle"]

_lent: set[weakref.ref[Tensor]] = set()


def lend(x: Tensor) -> Tensor:
    """An alias of `x` to pass to a backend; the caller keeps no reference to it."""
    alias = x.detach()
    _lent.add(weakref.ref(alias, _lent.discard))
    return alias


def settle(limit_s: float) -> None:
    """Wait until backends have released every lent buffer, or for `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while _lent and time.monotonic() < end:
        time.sleep(0.001)  # without Python's lock, so that a backend's thread can take it

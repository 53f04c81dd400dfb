"""Buffers that a backend still holds, and waiting for them before the interpreter ends.

gloo carries a collective out on a thread of its own, which may be the last to let go of the
buffers, some time after `wait` has returned. Where Python made the tensor, letting go takes
Python's lock. A thread that asks for it while the interpreter is being torn down is ended by
force inside a C++ destructor, and that aborts the whole process, all of its work done ("terminate
called without an active exception", SIGABRT; pytorch issue 190489). Destroying the process groups
first joins those threads, but only where nothing else refers to a group, which no library can
promise.

So a backend is handed aliases that nobody else keeps. The Python object of an alias ends when the
backend's thread has had the lock and let go, and the process waits for that at exit. (The use count
of the tensor tells nothing: it falls before the thread asks for the lock.)
"""

from __future__ import annotations

import time
import weakref

from torch import Tensor

__all__ = ["lend", "settle"]

_lent: set[weakref.ref[Tensor]] = set()


def lend(x: Tensor) -> Tensor:
    """An alias of `x` to hand to a backend; the caller keeps no reference to it."""
    alias = x.detach()
    _lent.add(weakref.ref(alias, _lent.discard))
    return alias


def settle(limit_s: float) -> None:
    """Wait until backends have let go of every buffer lent, or for `limit_s`."""
    end = time.monotonic() + limit_s
    while _lent and time.monotonic() < end:
        time.sleep(0.001)  # without Python's lock, so that a backend's thread can have it

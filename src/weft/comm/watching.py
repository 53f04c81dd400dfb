"""Watching the collectives of this process as they are carried out, by whichever communicator.

Inside `watching`, the public methods of all communicators are timed; otherwise this costs nothing.
A collective that consists of others is seen once.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft.comm.collective_call import PROVIDER
from weft.comm.communicator import Communicator
from weft.core import AxisName
from weft.core.scopes import Inside

__all__ = ["Seen", "received_nbytes", "watching"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One collective of one rank, with the bytes that it received and who asked for it.

    `start_ns` and `stop_ns` are of `time.time_ns`. One that was only started is `under_way` from
    the call until the rank has its result.
    """

    op: str
    rank: int
    axes: tuple[AxisName, ...]
    nbytes: int
    start_ns: int
    stop_ns: int
    under_way: bool
    call: str
    line: str
    transition: str


def received_nbytes(comm: Communicator, op: str, args: Any) -> int:
    """Bytes that the rank receives from others, by the volumes of bandwidth-optimal algorithms."""
    g, index, x = comm.size, comm.index, args[0]
    if g == 1:
        return 0
    match op.removeprefix("start_"):
        case "all_reduce":
            return 2 * x.nbytes * (g - 1) // g
        case "all_gather":
            return (sum(args[1]) - x.numel()) * x.element_size()
        case "reduce_scatter":
            return (g - 1) * args[1][index] * x.element_size()
        case "all_to_all":
            return (sum(args[2]) - args[2][index]) * x.element_size()
        case "broadcast":
            return 0 if args[1] == index else x.nbytes
        case "swap":
            return sum(piece.nbytes for _, piece in args[1])
        case _:
            return (g - 1) * len(pickle.dumps(x))


_OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange",
    "start_all_reduce", "start_all_gather", "start_reduce_scatter", "swap",
)
"""The methods that are wrapped."""

Listener = Callable[[Seen], None]


class _Thread(threading.local):
    depth = 0


_thread = _Thread()
_watched = Inside()
_listeners: list[Listener] = []
_originals: list[tuple[type, str, Any]] = []


@contextmanager
def watching(listener: Listener) -> Iterator[None]:
    """Inside, the listener is called with every collective of this process when it is over."""
    _listeners.append(listener)
    try:
        with _watched.counted():
            yield
    finally:
        _listeners.remove(listener)


def _replace() -> None:
    """While anybody watches, the methods are clocked."""
    if _watched.on and not _originals:
        _install(Communicator)
    while not _watched.on and _originals:
        setattr(*_originals.pop())


_watched.changed = _replace


def _install(kind: type) -> None:
    for name in _OPS:
        original = kind.__dict__.get(name)
        if original is not None:
            _originals.append((kind, name, original))
            setattr(kind, name, _clocked(original, name))
    for inner in kind.__subclasses__():
        _install(inner)


def _clocked(original: Callable[..., Any], op: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        if _thread.depth or self.size == 1:
            return original(self, *args, **kwargs)
        asks = PROVIDER.asks()
        nbytes = received_nbytes(self, op, args)
        start = time.time_ns()
        _thread.depth += 1
        try:
            out = original(self, *args, **kwargs)
        finally:
            _thread.depth -= 1

        def over(under_way: bool) -> None:
            seen = Seen(op.removeprefix("start_"), self.ranks[self.index], self.axes, nbytes, start,
                        time.time_ns(), under_way, *asks)
            for listener in [*_listeners]:
                listener(seen)

        if op != "swap" and not op.startswith("start_"):
            over(False)
            return out

        def finish() -> Any:
            result = out()
            over(True)
            return result

        return finish

    return run

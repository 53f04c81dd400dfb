"""Sends and receives between two ranks of a process group, and those that are not finished.

Backends need what they send and receive to stay alive until it is done, also if nobody waits for
it. So the world keeps what has been started. It waits for the oldest before there are too many,
and briefly for all before its groups end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from weft.comm.communicator import Pieces

__all__ = ["Started", "UnderWay"]

_TAG = 0x77656674
"""Distinguishes weft's messages from those that a user sends over the same group."""

_LIMIT = 256
_AT_THE_END = timedelta(seconds=5)


class Started:
    """Messages that have been started; `wait` may be called repeatedly."""

    __slots__ = ("buffers", "works")

    def __init__(self, group: Any, places: Sequence[int], send: Pieces, recv: Pieces) -> None:
        # Receives first, so that arriving data finds its place.
        self.works: list[Any] = []
        self.buffers: list[Tensor] = []
        for place, piece in recv:
            self._keep(group.recv, piece, places[place])
        for place, piece in send:
            if piece.is_conj() or piece.is_neg():  # what is sent are the bytes in memory
                piece = piece.resolve_conj().resolve_neg()
            self._keep(group.send, piece, places[place])

    def _keep(self, start: Any, buffer: Tensor, place: int) -> None:
        self.buffers.append(buffer)
        self.works.append(start([buffer], place, _TAG))

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until all are done.

        Raises:
            RuntimeError: from the backend, if another rank does not come.
        """
        while self.works:
            work = self.works[-1]
            work.wait() if limit is None else work.wait(limit)
            self.works.pop()
        self.buffers.clear()


class UnderWay:
    """What has been started and not yet waited for, oldest first."""

    __slots__ = ("_started",)

    def __init__(self) -> None:
        self._started: deque[Started] = deque()

    def add(self, started: Started) -> None:
        """Keep it until it is done."""
        self._started.append(started)
        while self._started and not self._started[0].works:
            self._started.popleft()
        if len(self._started) > _LIMIT:  # all ranks have started it: it ends
            self._started.popleft().wait()

    def end(self) -> None:
        """Before the groups end: messages to living ranks still arrive."""
        while self._started:
            try:
                self._started.popleft().wait(_AT_THE_END)
            except RuntimeError:  # they do not
                self._started.clear()

"""Ranks of a recorded program that receive messages from each other: those that are needed run too.

A recording takes what others have from what this rank has. A message from rank to rank says what
only its sender knows (the stages of a pipeline have other shapes), so a rank that another one waits
for runs as well, in a thread, as far as the message. One rank runs at a time, and global state is
that of each (`global_state`), as in a simulated run. The first rank goes on as soon as it can; when
it ends, the others are unwound.
"""

from __future__ import annotations

import contextvars
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weft.comm.collective_call import lines
from weft.comm.global_state import GlobalState
from weft.errors import CommunicationError, message

__all__ = ["Crew", "Route"]


class Route(NamedTuple):
    """Messages arrive in the order in which they are sent, those of each route for itself."""

    group: tuple[int, ...]
    source: int
    target: int
    tag: int


class _Unwound(BaseException):
    """Ends a rank that nobody needs any more. Not an Exception, so that user code passes it on."""


class _Member:
    """One rank and what it is doing."""

    def __init__(self, rank: int, state: GlobalState) -> None:
        self.rank, self.state = rank, state
        self.gate = threading.Lock()
        self.gate.acquire()
        self.waits: tuple[Route, int] | None = None
        self.error: BaseException | None = None  # raised in it when it runs next
        self.ended = ""
        self.thread: threading.Thread | None = None


class Crew:
    """The ranks that run, at first this thread's.

    Args:
        rank: the first.
        program: runs another rank, in its own thread.
        carried: objects with a generator's `get_state` and `set_state`, whose state each rank has
            for itself.
    """

    def __init__(
        self, rank: int, program: Callable[[int], Any], carried: Sequence[Any] = ()
    ) -> None:
        self.program = program
        self.carried: Any = (torch.default_generator, *carried)
        self.outer = GlobalState(self.carried)
        self.first = _Member(rank, self.outer)
        self.members = {rank: self.first}
        self.sent: dict[Route, list[Any]] = defaultdict(list)
        self.asked: dict[Route, int] = defaultdict(int)
        self.over = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the first rank runs; at the end no other one is left."""
        try:
            yield
        finally:
            self.over = True
            others = [one for one in self.members.values() if one.thread is not None]
            for one in others:
                assert one.thread is not None
                one.gate.release()
                one.thread.join()
            if others:
                self.outer.restore()

    def send(self, route: Route, what: Any) -> None:
        """Leave a message; nobody waits for who takes it."""
        self.sent[route].append(what)

    def ask(self, route: Route) -> Callable[[], Any]:
        """A message to come, the next of its route; the result waits for it."""
        place = self.asked[route]
        self.asked[route] += 1

        def take() -> Any:
            me = self.members[route.target]
            me.waits = route, place
            if not self._has_come(me):
                self._pass(me)
            me.waits = None
            found, self.sent[route][place] = self.sent[route][place], None
            return found

        return take

    def _has_come(self, one: _Member) -> bool:
        return one.waits is None or len(self.sent[one.waits[0]]) > one.waits[1]

    def _pass(self, me: _Member) -> None:
        """Let another rank run, and wait until it is this one's turn."""
        if self.over:
            raise _Unwound
        follower = self._next()
        if follower is not me:
            me.state = GlobalState(self.carried)
            follower.gate.release()
            me.gate.acquire()
            if self.over:
                raise _Unwound
            me.state.restore()
        if me.error is not None:
            error, me.error = me.error, None
            raise error

    def _next(self) -> _Member:
        """Who runs next: a rank whose message has come, else one that a rank waits for."""
        going = [one for one in self.members.values() if not one.ended]
        for one in going:
            if one.error is not None or self._has_come(one):
                return one
        for one in going:
            assert one.waits is not None
            source = one.waits[0].source
            if source not in self.members:
                return self._started(source)
        self.first.error = CommunicationError(self._nobody_sends())
        return self.first

    def _started(self, rank: int) -> _Member:
        made = self.members[rank] = _Member(rank, self.outer)
        context = contextvars.copy_context()
        made.thread = threading.Thread(
            target=context.run, args=(self._run, made), name=f"rank {rank}", daemon=True)
        made.thread.start()
        return made

    def _run(self, me: _Member) -> None:
        me.gate.acquire()
        me.ended = "has been unwound"
        try:
            if not self.over:
                me.ended = ""
                me.state.restore()
                with torch.autograd.set_multithreading_enabled(False):
                    self.program(me.rank)
                me.ended = "has returned"
        except (_Unwound, SystemExit):
            me.ended = "has ended"
        except BaseException as error:
            me.ended = f"has raised {type(error).__name__}"
            error.add_note(f"on rank {me.rank}, for whose message rank {self.first.rank} waits")
            self.first.error = error
        if not self.over:
            self._next().gate.release()

    def _nobody_sends(self) -> str:
        """Who waits for whom, where no rank can run on."""
        said = [
            f"rank {one.rank} " + (
                f"waits for rank {one.waits[0].source}" if one.waits and not one.ended
                else one.ended)
            for one in self.members.values()
        ]
        return message(
            "messages of a dry run", f"of {len(said)} ranks that run, none can run on",
            "a rank that receives waits for what another one sends", lines(said),
            "send in the group, with the tag and in the order in which it is received")

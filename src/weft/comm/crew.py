"""Ranks of a recorded program that receive messages from each other: those that are needed run too.

A recording takes what others have from what this rank has. But a message from rank to rank says
what only its sender knows: the stages of a pipeline have other shapes. So a rank that another one
waits for runs as well, as far as the message. The ranks take turns (`turns`). The first goes on as
soon as it can; when it ends, the others are unwound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weft.comm.global_state import GlobalState
from weft.comm.turns import Runner, Turns, Unwound
from weft.errors import CommunicationError

__all__ = ["Crew", "Route"]


class Route(NamedTuple):
    """Messages arrive in the order in which they are sent, those of each route for itself."""

    group: tuple[int, ...]
    source: int
    target: int
    tag: int


class Crew(Turns):
    """The ranks that run, at first this thread's.

    Args:
        rank: the first.
        program: runs another rank, in its own thread.
        carried: objects with a generator's `get_state` and `set_state`, whose state each rank has
            for itself.
    """

    def __init__(self, rank: int, program: Callable[[int], Any], carried: Sequence[Any]) -> None:
        super().__init__([rank], (torch.default_generator, *carried))
        self.program, self.first = program, self.runners[rank]
        self.outer = GlobalState(self.generators)
        self.sent: dict[Route, list[Any]] = defaultdict(list)
        self.asked: dict[Route, int] = defaultdict(int)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the first rank runs; at the end no other one is left."""
        try:
            yield
        finally:
            self.stopped = True
            for one in [*self.runners.values()][1:]:
                one.error = Unwound()
                one.gate.release()
                one.thread.join()
            if len(self.runners) > 1:
                self.outer.restore()

    def send(self, route: Route, what: Any) -> None:
        """Leave a message; nobody waits for who takes it."""
        self.sent[route].append(what)

    def ask(self, route: Route) -> Callable[[], Any]:
        """A message to come, the next of its route; the result waits for it."""
        place = self.asked[route]
        self.asked[route] += 1

        def take() -> Any:
            me = self.runners[route.target]
            me.waits = route, place
            if not self._has_come(me):
                if self.stopped:
                    raise Unwound
                self._pass(me)
            me.waits = None
            found, self.sent[route][place] = self.sent[route][place], None
            return found

        return take

    def _has_come(self, one: Runner) -> bool:
        return one.waits is None or len(self.sent[one.waits[0]]) > one.waits[1]

    def _next(self) -> Runner | None:
        """A rank whose message has come, else one that a rank waits for."""
        if self.stopped:
            return None
        going = [one for one in self.runners.values() if not one.ended]
        for one in going:
            if one.error is not None or self._has_come(one):
                return one
        for one in going:
            source = one.waits[0].source
            if source not in self.runners:
                made = self.runners[source] = Runner(source)
                self._start(made, lambda one: self.program(one.rank), self.outer)
                return made
        self.first.error = CommunicationError(
            "messages of a dry run", f"of {len(self.runners)} ranks that run, none can run on",
            "a rank that receives waits for what another one sends",
            self._doing(lambda one: f"waits for rank {one.waits[0].source}"),
            "send in the group, with the tag and in the order in which it is received")
        return self.first

    def _fail(self, runner: Runner, error: BaseException) -> None:
        if not isinstance(error, SystemExit):  # its program may end so
            error.add_note(f"on rank {runner.rank}, for whose message rank {self.first.rank} waits")
            self.first.error = error

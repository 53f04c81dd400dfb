"""Simulated ranks take turns under a baton, which only a meeting passes on.

A *meeting* is a collective: every member of a group deposits its data and waits. The last
to arrive computes what each member gets and continues; the others queue for the baton in rank
order. So a run is deterministic. If no rank can run although some wait, the ranks
disagree: all waiting ranks raise an error that lists who waits where, down to the line of the
program.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from weft.comm.collective_call import FIX, RULE, CollectiveCall, timeout, told_apart
from weft.comm.global_state import GlobalState
from weft.comm.shared import note_on
from weft.comm.turns import Runner, Turns, Unwound
from weft.errors import CommunicationError, message

__all__ = ["Baton", "Finish", "current_runner"]

Finish = Callable[[list[Any]], Sequence[Any]]
"""From the deposits, in group order, to what each member gets."""


SIGNALS_S = 0.2
"""For how many seconds a run may fail to notice a signal such as Ctrl-C."""


STOP_S = 5.0
"""For how many seconds an interrupted run waits for the rank that computes."""


class _Runs:
    """The current outermost run has the lock. Global state is that of one run at a time, so the
    runs of several threads take place one after the other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.baton: Baton | None = None


_RUNS = _Runs()
if hasattr(os, "register_at_fork"):  # a forked process has none of the other threads
    os.register_at_fork(after_in_child=_RUNS.__init__)


class _Local(threading.local):
    runner: Runner | None = None


_local = _Local()


def current_runner() -> Runner | None:
    """The rank of this thread, or None."""
    return _local.runner


class Baton(Turns):
    """Runs of `num_ranks` ranks in this process, one after the other.

    With `lasting` a run begins with the global state that each rank had at the end of the last one.
    """

    def __init__(
        self, num_ranks: int, generators: Sequence[torch.Generator], lasting: bool
    ) -> None:
        super().__init__(range(num_ranks), generators)
        self.lasting = lasting
        self.queue: deque[Runner] = deque()
        self.meetings: dict[Hashable, dict[int, Any]] = {}
        self.caller = Runner(-1)  # goes on when all ranks have ended
        self.failure: BaseException | None = None
        self.is_stuck = False  # a rank of an interrupted run still computes
        self.num_meetings = 0  # so far

    def run(self, body: Callable[[Runner], Any]) -> list[Any]:
        """Call `body(runner)` as each rank; the results in rank order.

        Raises:
            The exception of the first rank that fails; the others are unwound.
            CommunicationError: the run of another thread, which has the lock, makes no progress.
        """
        if current_runner() is not None:
            return self._run(body)
        runs = _RUNS
        seen, since = (None, 0), time.monotonic()
        while not runs.lock.acquire(timeout=SIGNALS_S):  # between two tries signals are handled
            now = runs.baton, runs.baton.num_meetings if runs.baton else 0
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > timeout().total_seconds():
                raise CommunicationError(_never_ends(seen[0]))
        try:
            runs.baton = self
            return self._run(body)
        finally:
            runs.baton = None
            runs.lock.release()

    def _run(self, body: Callable[[Runner], Any]) -> list[Any]:
        def main(runner: Runner) -> Any:
            _local.runner = runner
            try:
                return body(runner)
            finally:
                if self.lasting:
                    runner.state = GlobalState(self.generators)

        outer = GlobalState(self.generators)
        runners = self.runners.values()
        self.queue.extend(runners)
        self.failure, self.stopped = None, False
        for runner in runners:
            self._start(runner, main, (self.lasting and runner.state) or outer)
        try:
            self._hand_over()
            # A signal just before the wait does not end it: look again now and then.
            while not self.caller.gate.acquire(timeout=SIGNALS_S):
                pass
        except BaseException:  # KeyboardInterrupt: the running rank stops at its next meeting
            self.stopped = True
            self.is_stuck = not self.caller.gate.acquire(timeout=STOP_S)
            raise
        finally:
            outer.restore()
        if self.failure is not None:
            raise self.failure
        return [runner.result for runner in runners]

    def meet(
        self, runner: Runner, members: tuple[int, ...], place: int, what: Hashable,
        deposit: Any, finish: Finish,
    ) -> Any:
        """Bring `deposit` to the meeting `what` of `members`; returns this rank's part of `finish`.

        `place` is this rank's position among the members. Ranks meet if members and `what` are
        equal.

        Raises:
            CommunicationError: in every waiting rank, if no rank can run.
        """
        if _local.runner is not runner or runner.ended is not None:
            raise CommunicationError(_elsewhere(runner, what))
        if self.stopped:
            raise Unwound
        self.num_meetings += 1
        key = (members, what)
        here = self.meetings.setdefault(key, {})
        here[place] = deposit
        if len(here) < len(members):
            runner.waits = key
            self._pass(runner)
            taken, runner.taken = runner.taken, None
            return taken
        del self.meetings[key]
        results = finish([here[i] for i in range(len(members))])
        here.clear()  # ranks that have yet to go on would keep what others have given
        for i, rank in enumerate(members):
            if i != place:
                other = self.runners[rank]
                other.waits, other.taken = None, results[i]
                self.queue.append(other)
        return results[place]

    def _next(self) -> Runner:
        if not self.queue:
            self.queue.extend(one for one in self.runners.values() if one.waits is not None)
            text = "" if self.stopped or not self.queue else self._disagreement()
            self.meetings.clear()
            for one in self.queue:
                one.waits, one.error = None, Unwound() if self.stopped else CommunicationError(text)
        return self.queue.popleft() if self.queue else self.caller

    def _disagreement(self) -> str:
        """Who waits where, when all ranks that have not ended wait."""
        waiting = [one for one in self.runners.values() if one.waits]
        waits = {one.rank: one.waits[1] for one in waiting}
        asks = {rank: what for rank, what in waits.items() if isinstance(what, CollectiveCall)}
        waits.update(zip(asks, told_apart([*asks.values()])))
        num, num_places = len(self.runners), len({one.waits for one in waiting})
        return message(
            "collectives of simulated ranks",
            f"no rank can run on: of {num} ranks {len(waits)} wait, at {num_places} "
            f"collectives, and {num - len(waits)} have ended", RULE,
            self._doing(lambda one: f"waits at {waits[one.rank]}{waits[one.rank].reason}"), FIX,
        )

    def _fail(self, runner: Runner, error: BaseException) -> None:
        error.add_note(f"on simulated rank {runner.rank} of {len(self.runners)}")
        note = note_on(error, len(self.runners))
        if note is not None:
            error.add_note(note)
        self.failure = self.failure or error
        self.stopped = True


def _elsewhere(runner: Runner, what: Hashable) -> str:
    """The message of a rank whose mesh is used in another thread, or too late."""
    mine = current_runner()
    return message(
        str(what), f"the mesh of simulated rank {runner.rank} is used "
        + (f"by rank {mine.rank}" if mine else "outside its run"),
        "each simulated rank uses the mesh that it was given, in its own thread, until it returns",
        [f"rank {runner.rank}"], "weft.testing.run(lambda mesh: ..., num_ranks=4)",
    )


def _never_ends(baton: Baton | None) -> str:
    """The message of a run that has waited too long for the run of another thread."""
    ranks, patience = len(baton.runners) if baton else 0, timeout().total_seconds()
    return message(
        "a run of simulated ranks", f"the run of another thread, of {ranks} ranks, holds the "
        f"simulation, and none of its ranks has come to a collective for {patience:g} s",
        "runs of several threads come one after the other; so a thread that a rank has started "
        "and waits for starts no run", ["this thread"],
        "start the run in the rank's own thread; if the other run merely needs longer, "
        "WEFT_TIMEOUT=600",
    )

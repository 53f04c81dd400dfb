"""Ranks as threads under a baton: one runs at a time, and only a meeting passes it on.

A *meeting* is a collective: every member of a group deposits its data and waits. The last
to arrive computes what each member gets and continues; the others queue for the baton in rank
order. So a run is deterministic. If no rank can run although some wait, the ranks
disagree: all waiting ranks raise an error that lists who waits where, down to the line of the
program.

The global state of torch and Python (default dtype, generators, flags, filters of warnings) is
separate for each rank: it is saved when the baton leaves a rank and restored when it returns
(`global_state`). Thread-local state (grad mode, autocast, default device) starts from torch's
defaults, because every rank is a new thread, as a new process would.

Backward must stay in the thread that called it. On the CPU it does. For accelerators torch
would use threads of its own, so the rank's thread turns multithreaded backward off.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from weft.comm.collective_call import FIX, RULE, CollectiveCall, lines, timeout, told_apart, who
from weft.comm.global_state import GlobalState
from weft.comm.shared import note_on
from weft.errors import CommunicationError, message

__all__ = ["Baton", "Runner", "current_runner"]

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


def _renew() -> None:
    """A new lock for a forked process, which has none of the other threads."""
    global _RUNS
    _RUNS = _Runs()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _Unwound(BaseException):
    """Ends a rank because another one failed. Not an Exception, so that user code passes it on."""


class Runner:
    """One rank's thread and what it is doing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gate = threading.Lock()
        self.gate.acquire()
        self.state: GlobalState | None = None
        self.waits: Any = None  # (members, CollectiveCall) of the meeting it waits for
        self.taken: Any = None  # what it gets from the meeting
        self.error: BaseException | None = None  # raised in it when it runs next
        self.ended: str | None = None  # "has returned" or "has raised ..."
        self.result: Any = None
        self.world: Any = None  # the rank's world, kept here for the layer above


class _Local(threading.local):
    runner: Runner | None = None


_local = _Local()


def current_runner() -> Runner | None:
    """The rank of this thread, or None."""
    return _local.runner


class Baton:
    """Runs of `num_ranks` ranks in this process, one after the other.

    With `lasting` a run begins with the global state that each rank had at the end of the last one.
    """

    def __init__(
        self, num_ranks: int, generators: Sequence[torch.Generator], lasting: bool = False
    ) -> None:
        self.generators, self.lasting = generators, lasting
        self.runners = [Runner(rank) for rank in range(num_ranks)]
        self.queue: deque[Runner] = deque()
        self.meetings: dict[Hashable, dict[int, Any]] = {}
        self.finished = threading.Lock()
        self.finished.acquire()
        self.failure: BaseException | None = None
        self.stopped = False
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
        outer = GlobalState(self.generators)
        self.queue.extend(self.runners)
        self.failure, self.stopped = None, False
        for runner in self.runners:
            runner.ended, runner.result = None, None
            runner.state = runner.state or outer
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._main, runner, body),
                name=f"rank {runner.rank}", daemon=True,
            ).start()
        try:
            self._hand_over(self._next())
            # A signal just before the wait does not end it: look again now and then.
            while not self.finished.acquire(timeout=SIGNALS_S):
                pass
        except BaseException:  # KeyboardInterrupt: the running rank stops at its next meeting
            self.stopped = True
            self.is_stuck = not self.finished.acquire(timeout=STOP_S)
            raise
        finally:
            outer.restore()
        if self.failure is not None:
            raise self.failure
        return [runner.result for runner in self.runners]

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
        self._check_thread(runner, what)
        if self.stopped:
            raise _Unwound
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

    def _check_thread(self, runner: Runner, what: Hashable) -> None:
        if _local.runner is not runner or runner.ended is not None:
            mine = current_runner()
            raise CommunicationError(
                message(
                    str(what), f"the mesh of simulated rank {runner.rank} is used "
                    + (f"by rank {mine.rank}" if mine else "outside its run"),
                    "each simulated rank uses the mesh that it was given, in its own thread, "
                    "until it returns", [f"rank {runner.rank}"],
                    "weft.testing.run(lambda mesh: ..., num_ranks=4)",
                )
            )

    def _main(self, runner: Runner, body: Callable[[Runner], Any]) -> None:
        runner.gate.acquire()
        _local.runner = runner
        try:
            if not self.stopped:
                assert runner.state is not None
                runner.state.restore()
                with torch.autograd.set_multithreading_enabled(False):
                    runner.result = body(runner)
            runner.ended = "has returned"
        except _Unwound:
            runner.ended = "was unwound"
        except BaseException as error:
            runner.ended = f"has raised {type(error).__name__}"
            error.add_note(f"on simulated rank {runner.rank} of {len(self.runners)}")
            note = note_on(error, len(self.runners))
            if note is not None:
                error.add_note(note)
            self._stop(error)
        finally:
            runner.state = GlobalState(self.generators) if self.lasting else None
            _local.runner = None
            self._hand_over(self._next())

    def _pass(self, runner: Runner) -> None:
        """Give the baton to the next rank in line and wait until it comes back."""
        follower = self._next()
        if follower is not runner:
            runner.state = GlobalState(self.generators, runner.state)
            self._hand_over(follower)
            runner.gate.acquire()
            runner.state.restore()
        if runner.error is not None:
            error, runner.error = runner.error, None
            raise error

    def _hand_over(self, follower: Runner | None) -> None:
        (self.finished if follower is None else follower.gate).release()

    def _next(self) -> Runner | None:
        """The rank that runs next; None when all have ended."""
        if not self.queue:
            waiting = [runner for runner in self.runners if runner.waits is not None]
            if self.stopped:
                errors: list[BaseException] = [_Unwound() for _ in waiting]
            else:
                text = self._disagreement() if waiting else ""
                errors = [CommunicationError(text) for _ in waiting]
            self.meetings.clear()
            for runner, error in zip(waiting, errors):
                runner.waits, runner.error = None, error
                self.queue.append(runner)
        return self.queue.popleft() if self.queue else None

    def _disagreement(self) -> str:
        """Who waits where, when all ranks that have not ended wait."""
        waits = {runner.rank: runner.waits[1] for runner in self.runners if runner.waits}
        asks = {rank: what for rank, what in waits.items() if isinstance(what, CollectiveCall)}
        waits.update(zip(asks, told_apart([*asks.values()])))
        whose = [
            (rank, runner.ended or f"waits at {waits[rank]}{waits[rank].reason}")
            for rank, runner in enumerate(self.runners)
        ]
        num_places = len({runner.waits for runner in self.runners} - {None})
        return message(
            "collectives of simulated ranks",
            f"no rank can run on: of {len(whose)} ranks {len(waits)} wait, at {num_places} "
            f"collectives, and {len(whose) - len(waits)} have ended",
            RULE, lines(who(whose)), FIX,
        )

    def _stop(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.stopped = True


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

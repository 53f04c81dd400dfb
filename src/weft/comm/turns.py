"""Ranks as threads that take turns: one runs at a time, until it passes the turn to another.

The global state of torch, Python and numpy (default dtype, generators, flags, warnings) is
separate for each rank: it is saved when a rank passes the turn and restored when it gets it back
(`global_state`). Thread-local state (grad mode, autocast, default device) starts from torch's
defaults, because every rank is a new thread, as a new process would.

Backward must stay in the thread that called it. On the CPU it does. For accelerators torch
would use threads of its own, so the rank's thread turns multithreaded backward off.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weft.comm.collective_call import lines, who
from weft.comm.global_state import GlobalState

__all__ = ["Runner", "Turns", "Unwound"]


class Unwound(BaseException):
    """Ends a rank that is not needed any more. Not an Exception, so that user code passes it on."""


@functools.cache
def _stand_in_for_cuda() -> None:
    """A build of torch for CUDA makes a stand-in for a driver that is missing, when it first needs
    one, and frees it with the thread that did: so it must not be a rank's."""
    if torch.version.cuda and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


class Runner:
    """One rank's thread and what it is doing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread: Any = None
        self.state: Any = None  # the GlobalState with which it runs next
        self.waits: Any = None  # what it waits for
        self.taken: Any = None  # what it gets when it runs next
        self.error: BaseException | None = None  # raised in it when it runs next
        self.ended: str | None = None  # "has returned" or "has raised ..."
        self.result: Any = None
        self.world: Any = None  # the rank's world, kept here for the layer above


class Turns(ABC):
    """The ranks of which one runs at a time. `generators` have a state for each of them."""

    def __init__(self, ranks: Iterable[int], generators: Sequence[Any]) -> None:
        _stand_in_for_cuda()
        self.runners = {rank: Runner(rank) for rank in ranks}
        self.generators = generators
        self.stopped = False  # no rank begins any more, and those that wait are unwound

    @abstractmethod
    def _next(self) -> Runner | None:
        """The rank that runs next: one that need not wait any more; None when nobody is to run."""

    @abstractmethod
    def _fail(self, runner: Runner, error: BaseException) -> None:
        """What a rank's exception means for the others."""

    def _start(self, runner: Runner, body: Callable[[Runner], Any], state: GlobalState) -> None:
        """Make the rank's thread, which calls `body(runner)` when it gets its first turn."""
        runner.ended, runner.result, runner.state = None, None, state
        runner.thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._main, runner, body),
            name=f"rank {runner.rank}", daemon=True)
        runner.thread.start()

    def _main(self, runner: Runner, body: Callable[[Runner], Any]) -> None:
        runner.gate.acquire()
        try:
            if not self.stopped:
                runner.state.restore()
                with torch.autograd.set_multithreading_enabled(False):
                    runner.result = body(runner)
            runner.ended = "has returned"
        except Unwound:
            runner.ended = "was unwound"
        except BaseException as error:
            runner.ended = f"has raised {type(error).__name__}"
            self._fail(runner, error)
        finally:
            self._hand_over()

    def _hand_over(self) -> None:
        follower = self._next()
        if follower is not None:
            follower.gate.release()

    def _pass(self, runner: Runner) -> None:
        """Pass the turn to the next rank and wait until it comes back."""
        follower = self._next()
        if follower is not runner:
            runner.state = GlobalState(self.generators, runner.state)
            follower.gate.release()  # type: ignore[union-attr]  # `runner` at least is to run
            runner.gate.acquire()
            runner.state.restore()
        if runner.error is not None:
            error, runner.error = runner.error, None
            raise error

    def _doing(self, waits: Callable[[Runner], str]) -> list[str]:
        """What all ranks do, for a message: what those wait for that have not ended."""
        return lines(who((one.rank, one.ended or waits(one)) for one in self.runners.values()))

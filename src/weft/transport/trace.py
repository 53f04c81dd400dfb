"""`weft.trace`: when a run's collectives and modules ran, as a file that trace viewers open.

The format is Chrome's trace events (JSON), which Perfetto reads as well. A rank is a process of the
file, with two threads: modules, with the collectives that their calls wait for, and what is under
way meanwhile.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from weft.comm import Seen, this_world, watching
from weft.transport import traffic
from weft.transport.modules import current_module, following_modules

__all__ = ["merge_traces", "trace", "trace_events", "write_trace"]

Event = dict[str, Any]


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write a file that says when collectives, modules and optimizer steps of the block ran.

    Around `weft.testing.run` the file has all simulated ranks. Where each rank is a process, each
    writes a file of its own, `run.rank3.json` for `run.json`; `weft trace` merges them.

    Args:
        path: the path of the file, for ui.perfetto.dev or chrome://tracing.
    """
    recorder = _Recorder()
    try:
        named = traffic.STATE.counted()  # calls say who they are, as for `weft.explain`
        with recorder.hooks(), watching(recorder.seen), following_modules(), named:
            yield
    finally:
        world, path = this_world(), Path(path)
        if world.size > 1:
            path = path.with_suffix(f".rank{world.rank}{path.suffix}")
        write_trace(path, recorder.events)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.begun: list[int] = []


class _Recorder:
    """Events of all ranks of this process, as they end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.thread = _Thread()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end_module, always_call=True),
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end_step),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: Any) -> None:
        self.thread.begun.append(time.time_ns())

    def _end_module(self, module: nn.Module, *_: Any) -> None:
        self._end(current_module() or type(module).__name__, "module")

    def _end_step(self, optimizer: Any, *_: Any) -> None:
        self._end(f"{type(optimizer).__name__}.step", "optimizer")

    def _end(self, name: str, kind: str) -> None:
        if self.thread.begun:  # else it began before the trace
            start = self.thread.begun.pop()
            self.events.append(slice_event(
                name, kind, this_world().rank, start / 1e3, (time.time_ns() - start) / 1e3, {}))

    def seen(self, one: Seen) -> None:
        over = ",".join(map(str, one.axes))
        about = {"over": over, "bytes received": one.nbytes, "op": one.call, "line": one.line,
                 "transition": one.transition, "module": current_module()}
        name, start, stop = f"{one.op} over {over}", one.start_ns / 1e3, one.stop_ns / 1e3
        if not one.under_way:
            self.events.append(
                slice_event(name, "collective", one.rank, start, stop - start, about))
            return
        shared = {"name": name, "cat": "collective", "pid": one.rank, "tid": 1,
                  "id": len(self.events)}
        self.events += [{**shared, "ph": "b", "ts": start, "args": about},
                        {**shared, "ph": "e", "ts": stop}]


def slice_event(
    name: str, kind: str, rank: int, start_us: float, took_us: float, about: Event
) -> Event:
    """Something that a rank waits for."""
    return {"name": name, "cat": kind, "ph": "X", "pid": rank, "tid": 0, "ts": start_us,
            "dur": took_us, "args": about}


def trace_events(log: traffic.Log, rank: int) -> list[Event]:
    """The collectives of a log, one after the other, for the seconds that each takes."""
    events, now = [], 0.0
    for one in log.events:
        took = 1e6 * (one.seconds or 0.0)
        over = ",".join(one.axes)
        events.append(slice_event(f"{one.collective} over {over}", "collective", rank, now, took, {
            "over": over, "bytes received": one.nbytes, "op": one.op, "line": one.line,
            "transition": one.transition, "module": one.module, "direction": one.direction}))
        now += took
    return events


def write_trace(path: str | os.PathLike[str], events: Sequence[Event]) -> None:
    """Write events with the names of their ranks."""
    named: list[Event] = []
    for rank in sorted({event["pid"] for event in events}):
        named += [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
            {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
        ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": [*named, *events], "displayTimeUnit": "ms"}, file)


def merge_traces(paths: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> int:
    """Write one file of several, if any has an event; the number of its ranks."""
    events: list[Event] = []
    for one in paths:
        with open(one, encoding="utf-8") as file:
            events += [each for each in json.load(file)["traceEvents"] if each["ph"] != "M"]
    if events:
        write_trace(path, events)
    return len({event["pid"] for event in events})

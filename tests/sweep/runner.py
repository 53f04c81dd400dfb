"""Processes that run samples: one that hangs or dies is replaced, and its call noted so."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.sweep import dtensor, judge, modules
from tests.sweep.journal import Found, Journal
from tests.sweep.samples import DTYPES, LeftOut, Sample, samples_of
from tests.sweep.ways import ways_of

__all__ = ["CALL_SECONDS", "JUDGES", "Job", "expected_of", "run"]

JUDGES = {"weft": judge.judge, "DTensor": dtensor.judge}

CALL_SECONDS = 60.0
"""How long one call may take, with those on plain tensors before it."""

_START_SECONDS = 120.0

_MOST_BROKEN = {"weft": 4, "DTensor": 2}
"""After so many calls that hang or die, an op is left."""

_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Job:
    """All samples of an entry in one dtype and variant, up to `most`.

    Variants are "", "inplace", "out", and for modules those of `modules`.
    """

    system: str
    op: str
    dtype: str
    variant: str
    most: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.system, self.op, self.dtype, self.variant


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None
    at: tuple[str, str] = ("", "")
    deadline: float = 0.0
    broken: set[tuple[str, str]] = field(default_factory=set)


def run(jobs: Iterable[Job], journal: Journal, num_workers: int, seconds: float) -> int:
    """Run the jobs until the time is over; how many were left."""
    todo, end = deque(jobs), time.monotonic() + seconds
    workers = [_start() for _ in range(min(num_workers, len(todo)))] if seconds > 0 else []
    try:
        while any(worker.job for worker in workers) or (todo and time.monotonic() < end):
            for place, worker in enumerate(workers):
                if worker.job is None and todo and time.monotonic() < end:
                    _give(worker, todo.popleft(), _START_SECONDS)
                elif worker.job is not None and not _heard(worker, journal):
                    workers[place] = _replaced(worker, journal)
            wait([worker.pipe for worker in workers if worker.job], timeout=0.5)
    finally:
        for worker in workers:
            worker.process.kill()
    return len(todo)


def _start() -> _Worker:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give(worker: _Worker, job: Job, seconds: float) -> None:
    worker.job, worker.at = job, ("", "")
    worker.deadline = time.monotonic() + seconds
    worker.pipe.send((job, worker.broken))


def _heard(worker: _Worker, journal: Journal) -> bool:
    """Take what a worker says; whether it lives."""
    job = worker.job
    assert job is not None
    try:
        while worker.pipe.poll():
            said, *rest = worker.pipe.recv()
            worker.deadline = time.monotonic() + CALL_SECONDS
            if said == "at":
                worker.at = tuple(rest)
            elif said == "found" and rest[0] == "hang":
                return False  # its threads still hold what others want: the process goes
            elif said == "found":
                journal.add(Found(*job.key, *worker.at, *rest))
            elif said == "left out":
                journal.leave_out(job.key, *rest)
            else:
                journal.finish(job.key)
                worker.job = None
                worker.broken = set()
                return True
    except (EOFError, ConnectionResetError):
        return False
    return worker.process.is_alive() and time.monotonic() < worker.deadline


def _replaced(worker: _Worker, journal: Journal) -> _Worker:
    """Another process, that goes on with the same job after the call that broke the first."""
    job = worker.job
    assert job is not None
    kind = "hang" if worker.process.is_alive() else "crash"
    worker.process.kill()
    worker.process.join()
    journal.add(Found(*job.key, *worker.at, kind, f"exit code {worker.process.exitcode}"))
    fresh = _start()
    fresh.broken = {*worker.broken, worker.at}
    if worker.at[0] and len(fresh.broken) < _MOST_BROKEN[job.system]:
        _give(fresh, job, _START_SECONDS)
    else:
        journal.finish(job.key)
        fresh.broken = set()
    return fresh


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        job, broken = pipe.recv()
        try:
            _samples(job, broken, pipe)
        except Exception:
            pipe.send(("at", "", ""))
            pipe.send(("found", "crash", traceback.format_exc(limit=-4)[-600:]))
        pipe.send(("done",))


def _samples(job: Job, broken: set[tuple[str, str]], pipe: Connection) -> None:
    make = modules.samples_of if job.variant in modules.VARIANTS else samples_of
    left_out: list[str] = []
    for sample in make(job.op, DTYPES[job.dtype], job.most, job.variant, left_out=left_out):
        pipe.send(("at", sample.name, ""))
        try:
            expected = expected_of(sample)
        except LeftOut as reason:
            left_out.append(str(reason))
            continue
        for way in ways_of(sample.roles):
            if (sample.name, way) in broken:
                continue
            pipe.send(("at", sample.name, way))
            what = f"{job.op} {job.dtype} {job.variant} {sample.name} {way}"
            verdict = JUDGES[job.system](sample, expected, way, what)
            if verdict is not None:
                pipe.send(("found", verdict.kind, verdict.detail, verdict.nbytes, verdict.most,
                           verdict.whole))
    for reason in dict.fromkeys(left_out):
        pipe.send(("left out", reason))


def expected_of(sample: Sample) -> judge.Dense:
    """What a sample gives on plain tensors, or, of a module that draws, on one rank.

    Raises:
        LeftOut: neither tells what is due.
    """
    try:
        return judge.dense(sample)
    except LeftOut:
        drawn = modules.drawn(sample) if sample.roles else None
        if drawn is None:
            raise
        return drawn

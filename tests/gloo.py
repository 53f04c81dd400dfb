"""A world of gloo processes that runs functions on all its ranks and brings back what came out.

The processes are forked from one that has imported what most calls need, once, and serve one call
after the other. A function is sent by name, so it stands at the top level of a module. After an
exception the ranks may be out of step: the world is then ended, and the next call starts a fresh
one.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import weft.comm
from tests import memory_order
from weft.core import Mesh
from weft.errors import CommunicationError

Axes = Mapping[str, int] | Sequence[int] | Mesh


PRELOADED = [
    "torch", "weft", "tests.gloo", "tests.cases.corners", "torch._dynamo",
    "torch.distributed.tensor", "tests.models.training",
]
"""The last three take a rank a second and more, at its first call that needs them."""


def forkserver() -> Any:
    """What makes processes, each forked from the one that has imported these."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankDied(RuntimeError):
    """A rank's process ended without an answer."""


class GlooWorld:
    """`size` processes under torch.distributed with gloo.

    Args:
        timeout: seconds that a collective waits for other ranks.
        patience: seconds that one call may take before its ranks are ended.
    """

    def __init__(self, size: int = 4, timeout: float = 30, patience: float = 120) -> None:
        self.size, self.timeout, self.patience = size, timeout, patience
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, fn: Callable[..., Any], mesh: Axes, *args: Any) -> list[Any]:
        """The results of `fn(mesh, *args)` on every rank; raises what a rank raised."""
        outcomes = self.outcomes(fn, mesh, *args)
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        if errors:
            # Where one rank failed, the others report that they stopped waiting: say the cause.
            causes = [error for error in errors if not isinstance(error, CommunicationError)]
            raise (causes or errors)[0]
        return outcomes

    def outcomes(self, fn: Callable[..., Any], mesh: Axes, *args: Any) -> list[Any]:
        """Per rank, the result of `fn(mesh, *args)` or the exception that it raised."""
        if not self._processes:
            self._start()
        value = mesh.abstract if isinstance(mesh, Mesh) else Mesh(mesh)
        request = (list(sys.path), pickle.dumps((fn, value, args)))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has died: its answer will say so
                pipe.send(request)
        deadline = time.monotonic() + self.patience
        outcomes = [self._answer(rank, pipe, deadline) for rank, pipe in enumerate(self._pipes)]
        if any(isinstance(one, BaseException) for one in outcomes):
            self.close()
        return outcomes

    def _answer(self, rank: int, pipe: Connection, deadline: float) -> Any:
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                return TimeoutError(f"rank {rank} gave no answer in {self.patience} s")
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return RankDied(f"rank {rank} ended without an answer")
        except Exception as error:
            error.add_note(f"in reading the answer of rank {rank}")
            return error

    def _start(self) -> None:
        context = forkserver()
        with tempfile.NamedTemporaryFile(prefix="weft-gloo-") as file:
            store = file.name
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, store, self.timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Connection) -> None:
    os.environ["WEFT_TIMEOUT"] = str(timeout)
    torch.set_num_threads(1)
    memory_order.watch()
    gc.freeze()  # a collection looks at all that is imported, for 0.2 s
    gc.set_threshold(10_000, 20, 100)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            path, request = pipe.recv()
        except (EOFError, OSError):  # the caller is gone
            return
        sys.path[:] = path
        pipe.send_bytes(_attempt(rank, request))


def _attempt(rank: int, request: bytes) -> bytes:
    try:
        fn, value, args = pickle.loads(request)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return pickle.dumps(fn(weft.comm.init_mesh(value), *args))
    except BaseException as error:
        text = f"on gloo rank {rank}:\n{traceback.format_exc()}"
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(repr(error))
        error.add_note(text)
        return pickle.dumps(error)

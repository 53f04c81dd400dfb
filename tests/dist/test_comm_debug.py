"""Debug mode over gloo: the words of simulated ranks, ranks that do not come, nothing when off."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

import weft
from tests.cases import Trial, trials_of
from tests.cases.disagreements import DISAGREEMENTS, MESH, Disagreement, said_on_rank, world
from tests.cases.program import CASES
from tests.cases.replicas import SAID, said, texts
from tests.gloo import GlooWorld
from tests.harness import Outcome, on_rank, verify
from weft.comm import debug_compare
from weft.comm.collective_call import CollectiveCall
from weft.comm.debug_compare import DebugCompare

TIMEOUT = 1.5
TRIALS = [trial for trial in trials_of(CASES) if dict(trial.axes) == MESH][::4]


@pytest.mark.parametrize("case", DISAGREEMENTS, ids=str)
def test_the_words_are_those_of_simulated_ranks(gloo: GlooWorld, case: Disagreement) -> None:
    """On all ranks, and the world is whole afterwards: the next case runs in it."""
    assert gloo.run(said_on_rank, MESH, case.program) == case.texts


@pytest.mark.parametrize(("program", "expected"), [(one, rest) for one, *rest in SAID])
def test_replicas_that_differ_are_named(gloo: GlooWorld, program: Any, expected: Any) -> None:
    assert gloo.run(said, MESH, program) == texts(*expected)


def run_trials(mesh: Any) -> list[Outcome]:
    with weft.debug():
        return [on_rank(trial, mesh) for trial in TRIALS]


def test_correct_programs_run_unchanged(gloo: GlooWorld) -> None:
    of_ranks = gloo.run(run_trials, MESH)
    assert len(TRIALS) > 5
    for place, trial in enumerate(TRIALS):
        assert isinstance(trial, Trial)
        verify(trial, [outcomes[place] for outcomes in of_ranks])


def keys_in_the_store(mesh: Any) -> list[int]:
    """How many there are: before anything, after collectives outside debug mode, and inside."""
    store = distributed_c10d._get_default_store()
    comms = [world(mesh), mesh.comm((0,)), mesh.comm((1,))]

    def collectives(turns: int) -> int:
        for _ in range(turns):
            for comm in comms:
                comm.all_reduce(torch.ones(3), "sum")
                comm.exchange(None)
        torch.distributed.barrier()
        mine = store.num_keys()
        torch.distributed.barrier()
        return mine

    collectives(1)  # groups are made
    before, call = collectives(0), DebugCompare.call
    DebugCompare.call = None  # type: ignore[assignment]
    off = collectives(3)
    DebugCompare.call = call
    with weft.debug():
        return [before, off, collectives(1), collectives(20)]


def test_the_store_is_untouched_when_it_is_off_and_does_not_fill_when_it_is_on(
    gloo: GlooWorld,
) -> None:
    for before, off, first, later in gloo.run(keys_in_the_store, MESH):
        assert before == off <= first == later


# Ranks that do not come. Each program ends with the same number of calls on every rank, so that
# the world is in step for the next.


@contextmanager
def hurry(timeout: float) -> Iterator[None]:
    before, os.environ["WEFT_TIMEOUT"] = os.environ["WEFT_TIMEOUT"], str(timeout)
    try:
        yield
    finally:
        os.environ["WEFT_TIMEOUT"] = before


def refusal(call: Callable[[], Any], timeout: float = TIMEOUT) -> tuple[float, str]:
    """How long a rank has waited, and what it said then."""
    start = time.monotonic()
    with hurry(timeout), weft.debug(), pytest.raises(weft.CommunicationError) as caught:
        call()
    return time.monotonic() - start, str(caught.value)


def one_is_late(mesh: Any, run: str) -> tuple[float, str]:
    with weft.debug():
        world(mesh).broadcast(torch.ones(3), 0)
    timeout = wait_for_the_others(mesh, run) if mesh.rank == 2 else TIMEOUT
    refused = refusal(lambda: world(mesh).all_reduce(torch.ones(3), "sum"), timeout)
    distributed_c10d._get_default_store().set(f"{run}/{mesh.rank}", "")
    return refused


def wait_for_the_others(mesh: Any, run: str) -> float:
    """Until they have given up; then the timeout of a rank that has no need to wait for it."""
    others = [f"{run}/{rank}" for rank in range(mesh.size()) if rank != mesh.rank]
    distributed_c10d._get_default_store().wait(others, timedelta(seconds=60))
    return 90


def other_groups(mesh: Any) -> tuple[str, str]:
    """0 waits for 1 over tp, 1 for 3 over dp, 3 for 2 over tp, 2 for 0 over dp."""
    axes = (0, 1) if mesh.rank in (1, 2) else (1, 0)
    comms = [mesh.comm((axis,)) for axis in axes]
    for axis in (0, 1):  # a group is made by all of its ranks, and they are in step
        mesh.comm((axis,)).exchange(None)
    first = refusal(lambda: comms[0].exchange(None))[1]
    world(mesh).exchange(None)  # all have given up
    return first, refusal(lambda: comms[1].exchange(None))[1]


def one_has_it_off(mesh: Any) -> str:
    if mesh.rank == 1:
        time.sleep(2 * TIMEOUT)
    return refusal(lambda: mesh.comm((0,)).all_reduce(torch.ones(3), "sum"))[1]


def line_of(fn: Any, after: int) -> str:
    return f"{__file__}:{fn.__code__.co_firstlineno + after}"


def test_a_rank_that_does_not_come_is_named_and_hears_of_it(gloo: GlooWorld) -> None:
    outcomes = gloo.run(one_is_late, MESH, uuid4().hex)
    (_, text), took = outcomes[0], [seconds for seconds, _ in outcomes]
    assert [said for _, said in outcomes] == [text] * 4
    assert all(TIMEOUT <= took[rank] < 60 for rank in (0, 1, 3)) and took[2] < 60
    number = int(text.split("(number ")[1].split()[0])
    assert text.splitlines() == [
        f"all_reduce(sum, float32, (3,)) over axes (dp, tp): 3 of 4 ranks came within {TIMEOUT} s.",
        "  Rule: all ranks of a group issue the same collectives in the same order, at the same "
        f"line, with the same kind, dtype and sizes, each within the timeout ({TIMEOUT} s).",
        "  Offenders: ranks 0, 1, 3 wait at all_reduce(sum, float32, (3,)) over axes (dp, tp) of "
        f"ranks 0, 1, 2, 3, at {line_of(one_is_late, 4)} (number {number} of these ranks)",
        "             rank 2 did not come; the last it asked for is broadcast(float32, (3,), 0) "
        f"over axes (dp, tp) of ranks 0, 1, 2, 3, at {line_of(one_is_late, 2)} "
        f"(number {number - 1} of these ranks)",
        "  Fix: call on every rank of the group what any of them calls: no `if rank == 0:` around "
        "it; if ranks merely need longer, WEFT_TIMEOUT=600",
    ]


def test_ranks_that_wait_in_other_groups_are_named(gloo: GlooWorld) -> None:
    outcomes = gloo.run(other_groups, MESH)
    tp, dp = "exchange() over axes (tp): 1 of 2", "exchange() over axes (dp): 1 of 2"
    for (first, second), mine, other in zip(outcomes, (tp, dp, dp, tp), (dp, tp, tp, dp)):
        assert first.startswith(mine) and second.startswith(other)
    *_, waits, missing, _ = outcomes[0][0].splitlines()
    assert waits.startswith("  Offenders: rank 0 waits at exchange() over axes (tp) of ranks 0, 1")
    assert missing.strip().startswith(
        "rank 1 did not come; the last it asked for is exchange() over axes (dp) of ranks 1, 3, at "
    )


def test_a_rank_outside_debug_mode_is_named() -> None:
    pair = GlooWorld(2)
    try:
        text, heard = pair.run(one_has_it_off, (2,))
    finally:
        pair.close()
    assert text == heard
    assert text.splitlines()[3] == (
        "             rank 1 did not come; it asked for nothing in debug mode, which all ranks "
        "enter together"
    )


SCRIPT = """
import time, torch, weft
from weft.comm import debug_compare
mesh = weft.init_mesh({"x": 3})
comm = mesh.comm((0,))
comm.exchange(None)
if mesh.rank == 1:
    debug_compare._LONGEST_PAUSE = 0.5  # as if slow: it reads the outcome after rank 0
if mesh.rank < 2:
    start = time.monotonic()
    try:
        comm.all_reduce(torch.ones(2), "sum")
    except weft.CommunicationError as error:
        print(time.monotonic() - start < 30, error.args[0].splitlines()[-2].strip())
if mesh.rank == 1:
    while True:
        time.sleep(1)
        try:
            comm.exchange(None)
        except weft.CommunicationError as error:
            text = error.args[0].splitlines()
            if "cannot reach" in text[0]:
                print(text[1].strip())
                break
"""


def test_a_rank_that_ends_without_a_collective_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first collective of a program may stand in an `if rank == 0`."""
    store = HashStore()
    monkeypatch.setattr(debug_compare, "_store", lambda: store)
    DebugCompare(1).end(False)
    assert not store.check(["ended/1"])
    DebugCompare(1).end(True)
    ask = CollectiveCall("exchange", ("dp",), (0, 1), ())
    said = DebugCompare(0).call(ask, 60).splitlines()
    assert said[0].startswith("exchange() over axes (dp): 1 of 2 ranks came within 0.")
    assert said[3].strip() == "rank 1 has ended; it asked for nothing in debug mode"


def test_ranks_that_have_ended_are_not_waited_for() -> None:
    """Not even the one whose process has the store."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3",
              "WEFT_TIMEOUT": "60", "WEFT_DEBUG": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SCRIPT], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    first, second, third = (out for out, _ in outputs)
    said = (
        "True rank 2 has ended; the last it asked for is exchange() over axes (x) of ranks 0, 1, "
        "2, at <string>:6 (number 1 of these ranks)\n"
    )
    assert first == said and third == "", outputs
    assert second.startswith(said), outputs
    assert second.removeprefix(said) == (
        "Rule: debug mode compares what ranks ask for through that store, which lives in the "
        "process that hosts it (rank 0, or the launcher).\n"
    )

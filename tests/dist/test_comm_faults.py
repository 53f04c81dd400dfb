"""Ranks that die, hang or go another way: the others end with an error in time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from tests.gloo import GlooWorld, RankDied
from weft.errors import CommunicationError

TIMEOUT = 3


@pytest.fixture(scope="module")
def short() -> Iterator[GlooWorld]:
    world = GlooWorld(2, timeout=TIMEOUT, patience=8 * TIMEOUT)
    yield world
    world.close()


def dies(mesh):
    mesh.comm((0,)).exchange(None)
    if mesh.rank == 1:
        os._exit(3)
    mesh.comm((0,)).all_reduce(torch.ones(3), "sum")


def stays_away(mesh):
    mesh.comm((0,)).exchange(None)
    if mesh.rank == 1:
        time.sleep(2.5 * TIMEOUT)
    else:
        mesh.comm((0,)).all_gather(torch.ones(3), (3, 3))


def raises(mesh):
    mesh.comm((0,)).exchange(None)
    if mesh.rank == 1:
        raise ValueError("only here")
    mesh.comm((0,)).broadcast(torch.ones(3), 1)


@pytest.mark.parametrize(
    ("fn", "op", "other"),
    [(dies, "all_to_all", RankDied), (stays_away, "all_to_all", type(None)),
     (raises, "broadcast", ValueError)],
)
def test_the_others_stop_waiting_in_time(short: GlooWorld, fn, op, other) -> None:
    short.run(abs_of_rank, (2,))  # a fresh world is up
    start = time.monotonic()
    stopped, cause = short.outcomes(fn, (2,))
    assert time.monotonic() - start < 6 * TIMEOUT
    assert isinstance(cause, other)
    assert isinstance(stopped, CommunicationError)
    first, rule, mine, theirs, fix = str(stopped).splitlines()
    assert first.startswith(f"{op} over axes (0), ranks 0, 1: rank 0 stopped waiting")
    assert rule == (
        "  Rule: every rank of a group issues the same collectives, each within the timeout "
        f"({TIMEOUT} s), and lives until all are done."
    )
    assert mine == (
        f"  Offenders: rank 0 stopped at {op} (number 2 of its group), at {last_line_of(fn)}"
    )
    assert theirs == (
        "             rank 1 has not been heard of: it did not come here, has ended, or waits "
        "elsewhere"
    )
    assert fix.endswith("WEFT_TIMEOUT=600")


def last_line_of(fn) -> str:
    return f"{__file__}:{max(line for *_, line in fn.__code__.co_lines() if line)}"


def part_ways(mesh):
    mesh.comm((0,)).exchange(None)
    with pytest.raises(CommunicationError) as caught:
        if mesh.rank == 0:
            mesh.comm((0,)).all_gather(torch.ones(3), (3, 3))
        else:
            mesh.comm((0,)).broadcast(torch.ones(3), 0)
    return str(caught.value).splitlines()


def test_ranks_that_fail_together_hear_of_each_other(short: GlooWorld) -> None:
    short.run(abs_of_rank, (2,))
    first = part_ways.__code__.co_firstlineno
    for said in short.run(part_ways, (2,)):
        assert said[2:4] == [
            "  Offenders: rank 0 stopped at all_to_all (number 2 of its group), at "
            f"{__file__}:{first + 4}",
            "             rank 1 stopped at broadcast (number 2 of its group), at "
            f"{__file__}:{first + 6}",
        ]
    short.close()


def abs_of_rank(mesh):
    return abs(mesh.rank)


def test_a_world_runs_on_after_a_fault(short: GlooWorld) -> None:
    assert isinstance(short.outcomes(raises, (2,))[1], ValueError)
    assert short.run(abs_of_rank, (2,)) == [0, 1]
    with pytest.raises(ValueError, match="only here") as caught:
        short.run(raises, (2,))
    assert caught.value.__notes__[0].startswith("on gloo rank 1:\nTraceback")

"""Ranks that die, hang or go another way: the others end with an error in time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d

import weft
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
    store = distributed_c10d._get_default_store()
    if mesh.rank == 1:
        return store.wait(["stopped"], timedelta(seconds=4 * TIMEOUT))
    with ExitStack() as at_last:
        at_last.callback(store.set, "stopped", "")
        mesh.comm((0,)).all_gather(torch.ones(3), (3, 3))


def raises(mesh):
    mesh.comm((0,)).exchange(None)
    if mesh.rank == 1:
        raise ValueError("only here")
    mesh.comm((0,)).broadcast(torch.ones(3), 1)


@pytest.mark.parametrize(
    ("fn", "op", "other"),
    [(dies, "all_reduce", RankDied), (stays_away, "all_to_all", type(None)),
     (raises, "broadcast", ValueError)],
)
def test_the_others_stop_waiting_in_time(short: GlooWorld, fn, op, other) -> None:
    short.run(abs_of_rank, (2,))  # a fresh world is up
    stopped, cause = short.outcomes(fn, (2,))  # a TimeoutError where the world's patience ends
    assert isinstance(cause, other)
    assert isinstance(stopped, CommunicationError)
    first, rule, mine, theirs, fix = str(stopped).splitlines()
    assert first.startswith(f"{op} over axes (0), ranks 0, 1: rank 0 stopped waiting")
    assert rule == (
        "  Rule: every rank of a group issues the same collectives, each within the timeout "
        f"({TIMEOUT} s), and lives until all are done."
    )
    assert mine == (
        f"  Offenders: rank 0 stopped at {op} (number 2 of its group) over axes (0), ranks 0, 1, "
        f"at {last_line_of(fn)}"
    )
    assert theirs == (
        "             rank 1 was not heard of: it did not come here, ended, or waits "
        "elsewhere"
    )
    assert "(without it, numbers read before this error may be wrong, too)" in fix
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
            "  Offenders: rank 0 stopped at all_to_all (number 2 of its group) over axes (0), "
            f"ranks 0, 1, at {__file__}:{first + 4}",
            "             rank 1 stopped at broadcast (number 2 of its group) over axes (0), "
            f"ranks 0, 1, at {__file__}:{first + 6}",
        ]
    short.close()


def names_no_row(mesh):
    """The indices of rank 1 alone are out of bounds, and a local op finds out."""
    places = weft.distribute_tensor(torch.tensor([0, 1, 2, 7]), mesh, weft.P("x"))
    found = torch.nn.functional.embedding(places, torch.zeros(3, 2))
    return found.sum().item()


def test_an_error_of_one_ranks_data_is_what_the_others_hear_of(short: GlooWorld) -> None:
    short.run(abs_of_rank, {"x": 2})
    waited, cause = short.outcomes(names_no_row, {"x": 2})
    short.close()
    assert isinstance(cause, IndexError)
    line = names_no_row.__code__.co_firstlineno + 3
    assert str(waited).splitlines()[3].strip() == (
        f"rank 1 raised IndexError: {cause}, in embedding, at {__file__}:{line}"
    )


def wait_in_a_ring(mesh):
    """0 waits for 1 over b, 1 for 3 over a, 3 for 2 over b, 2 for 0 over a: in new groups."""
    mesh.comm((0, 1)).exchange(None)
    with pytest.raises(CommunicationError) as caught:
        mesh.comm((1 if mesh.rank in (0, 3) else 0,))
    return str(caught.value).splitlines()


def test_ranks_that_wait_in_other_groups_are_heard_of() -> None:
    four = GlooWorld(4, timeout=TIMEOUT, patience=8 * TIMEOUT)
    try:
        said = four.run(wait_in_a_ring, {"a": 2, "b": 2})
    finally:
        four.close()
    line = f"{__file__}:{wait_in_a_ring.__code__.co_firstlineno + 4}"
    waits = [
        f"rank {rank} stopped at new_group over axes ({axis}), ranks {ranks}, at {line}"
        for rank, axis, ranks in
        ((0, "b", "0, 1"), (1, "a", "1, 3"), (2, "a", "0, 2"), (3, "b", "2, 3"))
    ]
    for rank, members in enumerate(((0, 1), (1, 3), (0, 2), (2, 3))):
        assert [text.split(maxsplit=1)[1] if text.startswith("  Off") else text.strip()
                for text in said[rank][2:4]] == [waits[member] for member in members]


def abs_of_rank(mesh):
    return abs(mesh.rank)


def test_a_world_runs_on_after_a_fault(short: GlooWorld) -> None:
    assert isinstance(short.outcomes(raises, (2,))[1], ValueError)
    assert short.run(abs_of_rank, (2,)) == [0, 1]
    with pytest.raises(ValueError, match="only here") as caught:
        short.run(raises, (2,))
    assert caught.value.__notes__[0].startswith("on gloo rank 1:\nTraceback")

"""Debug mode over simulated ranks: what it finds, what it says, and that it is off when off."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import weft
from tests.cases import Trial, trials_of
from tests.cases.disagreements import DISAGREEMENTS, MESH, Disagreement, said_on_rank, world
from tests.cases.program import CASES
from tests.harness import check_trial
from weft import P
from weft.comm import PROCESS, Communicator, run_simulated
from weft.comm.baton import Baton
from weft.comm.collective_call import CollectiveCall, Digest, agree, digest
from weft.comm.simulated import SimulatedCommunicator


@pytest.mark.parametrize("case", DISAGREEMENTS, ids=str)
def test_all_ranks_say_the_same(case: Disagreement) -> None:
    assert run_simulated(lambda mesh: said_on_rank(mesh, case.program), mesh=MESH) == case.texts


def ask(rank: int, op: str = "all_to_all", **other: Any) -> Digest:
    """The digest of one of three ranks, each of which sends r + 1 elements to every rank r."""
    facts = {"send": (1, 2, 3), "recv": (rank + 1,) * 3, **other}
    return digest(CollectiveCall(op, ("x",), (0, 1, 2), (torch.float32,), **facts), rank)


def test_digests() -> None:
    same = [ask(rank) for rank in range(3)]
    assert agree(same)
    assert not agree([*same[:2], ask(2, "exchange")])
    assert not agree([*same[:2], ask(2, send=(1, 2, 4))])
    assert not agree([*same[:2], ask(2, recv=(3, 3, 2))])
    assert not agree([*same[:2], ask(2, send=(2, 1, 3))])  # the same elements in all
    assert not agree([ask(1, recv=(1, 1, 1)), *same[1:]])


def test_what_one_rank_does_not_know_is_no_difference() -> None:
    named = [ask(rank, call="sum", transition="a -> b") for rank in range(3)]
    assert agree(named) and agree([ask(0), *named[1:]]) and agree([ask(0, call="sum"), *named[1:]])
    assert not agree([ask(0, call="mean"), *named[1:]])
    assert not agree([ask(0, transition="b -> a"), *named[1:]])


def test_a_collective_more_is_said_at_once() -> None:
    def fn(mesh: Any) -> str | None:
        return said_on_rank(mesh, lambda mesh: None if mesh.rank == 1 else world(mesh).exchange(0))

    texts = run_simulated(fn, mesh=MESH)
    assert texts[1] is None and len({*texts} - {None}) == 1
    first, _, waits, ended, _ = texts[0].splitlines()
    assert first.endswith("of 4 ranks 3 wait, at 1 collectives, and 1 have ended.")
    assert waits == (
        "  Offenders: ranks 0, 2, 3 wait at the comparison before exchange() over axes (dp, tp) of "
        f"ranks 0, 1, 2, 3, at {__file__}:{fn.__code__.co_firstlineno + 1}"
    )
    assert ended == "             rank 1 has returned"


def test_a_mode_of_one_rank_alone_is_said_at_once() -> None:
    def fn(mesh: Any) -> None:
        with weft.debug(mesh.rank == 1):
            world(mesh).exchange(None)

    with pytest.raises(weft.CommunicationError, match="rank 1 waits at the comparison before"):
        run_simulated(fn, mesh=MESH)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks meet for."""
    met, meet = [], Baton.meet
    monkeypatch.setattr(
        Baton, "meet",
        lambda self, runner, members, place, what, *rest:
        met.append(str(what)) or meet(self, runner, members, place, what, *rest),
    )
    return met


def program(mesh: Any) -> float:
    x = weft.ones(7, 4, mesh=mesh, spec=P("dp", "tp")).requires_grad_()
    loss = (x @ x.mT).exp().mean()
    loss.backward()
    return loss.item()


def test_nothing_is_exchanged_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "_agree", None)
    met = counted(monkeypatch)
    off = run_simulated(program, mesh=MESH)
    assert met and not any(what.startswith("the comparison") for what in met)
    monkeypatch.undo()
    met_on = counted(monkeypatch)
    with weft.debug():
        assert run_simulated(program, mesh=MESH) == off
    compared = [what for what in met_on if what.startswith("the comparison before ")]
    rest = [what for what in met_on if not what.startswith("the comparison before ")]
    assert sorted(rest) == sorted(met)
    assert sorted(what.removeprefix("the comparison before ") for what in compared) == sorted(met)


def test_it_is_the_rank_s_own_and_ends_with_its_block() -> None:
    def fn(mesh: Any) -> list[bool]:
        seen = [world(mesh).debug.on]
        with weft.debug():
            seen.append(world(mesh).debug.on)
            with weft.debug(False):
                seen.append(world(mesh).debug.on)
            seen.append(world(mesh).debug.on)
        return [*seen, world(mesh).debug.on, PROCESS.on]

    assert run_simulated(fn, mesh=MESH) == [[False, True, False, True, False, False]] * 4
    with weft.debug():
        assert PROCESS.on
        assert run_simulated(fn, mesh=MESH) == [[True, True, False, True, True, True]] * 4
    assert not PROCESS.on


def test_the_environment_turns_it_on() -> None:
    script = (
        "import weft\n"
        "from weft.transport.traffic import STATE\n"
        "print(weft.testing.run(lambda mesh: mesh.comm((0,)).debug.on, 2), STATE.on)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"WEFT_DEBUG": "1"},
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout
    assert shown == "[True, True] 1\n"


@pytest.mark.parametrize("trial", trials_of(CASES)[::5], ids=lambda trial: trial.id)
def test_correct_programs_run_unchanged(trial: Trial) -> None:
    with weft.debug():
        check_trial(trial)


def test_collectives_of_other_threads_than_the_rank_s_are_refused_alike() -> None:
    """As outside debug mode: a mesh is used in its own thread."""
    def fn(mesh: Any) -> str:
        caught: list[BaseException] = []

        def elsewhere() -> None:
            try:
                world(mesh).exchange(None)
            except weft.CommunicationError as error:
                caught.append(error)

        thread = threading.Thread(target=elsewhere)
        with weft.debug():
            thread.start()
            thread.join()
        return str(caught[0])

    assert all("is used outside its run" in text for text in run_simulated(fn, mesh=MESH))


def test_groups_of_one_rank_compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    met = counted(monkeypatch)
    with weft.debug():
        run_simulated(program, mesh={"dp": 1, "tp": 1})
    assert met == []


def test_empty_collectives_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    met = counted(monkeypatch)
    with weft.debug():
        run_simulated(lambda mesh: world(mesh).all_reduce(torch.ones(0), "sum"), mesh=MESH)
    assert met == ["the comparison before all_reduce(sum, float32, (0,)) over axes (dp, tp) of "
                   "ranks 0, 1, 2, 3"] * 4


def test_a_joint_reduction_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    met = counted(monkeypatch)

    def fn(mesh: Any) -> None:
        assert isinstance(world(mesh), SimulatedCommunicator)
        world(mesh).all_reduce_together([torch.ones(2), torch.ones(3)], "sum")

    with weft.debug():
        run_simulated(fn, mesh=MESH)
    assert len(met) == 8

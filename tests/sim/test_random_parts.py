"""Random calls on parts of a mesh, by all ranks or by members alone: no replica ever drifts."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.harness import ranks
from weft import CommunicationError, P, ShardTensor, ShardTypeError, UnsupportedOpError

MESH = {"dp": 2, "tp": 2}


def draw(mesh: Any, spec: P | None = None) -> list[float]:
    """The whole of one draw, on ranks outside the mesh nothing."""
    made = weft.rand(6, mesh=mesh, spec=spec)
    return [] if mesh.here is None else made.full_tensor().tolist()


def alike(found: list[Any]) -> Any:
    """What all ranks found that found something."""
    found = [one for one in found if one != []]
    assert found and all(one == found[0] for one in found), found
    return found[0]


PARTS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda mesh: mesh["tp"],
    "a column": lambda mesh: mesh["dp"],
    "some ranks": lambda mesh: weft.init_mesh({"x": 2}, ranks=(3, 1)),
    "three ranks": lambda mesh: weft.init_mesh({"x": 3}, ranks=(0, 1, 2)),
    "a slice of some": lambda mesh: weft.init_mesh({"a": 1, "b": 2}, ranks=(2, 0))["b"],
}


@pytest.mark.parametrize("who", ["all", "members", "some of them"])
@pytest.mark.parametrize("part", PARTS)
def test_draws_on_a_part_leave_those_of_all_ranks_in_step(part: str, who: str) -> None:
    def program(mesh: Any) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(3)
        inside = PARTS[part](mesh)
        whole, parts = [draw(mesh)], []
        for _ in range(3):
            takes = who == "all" or inside.here is not None
            if who == "some of them":  # one row, one column
                takes = takes and inside.comm((inside.ndim - 1,)).ranks[0] in (0, 2, 3)
                takes = takes and not (part == "a row" and mesh.rank in (0, 1))
            if takes:
                parts.append(draw(inside, P(0)))
            whole.append(draw(mesh, P("tp")))
        return whole, parts

    def without(mesh: Any) -> list[Any]:
        torch.manual_seed(3)
        return [draw(mesh) for _ in range(4)]

    found = weft.testing.run(program, mesh=MESH)
    whole = alike([whole for whole, _ in found])
    assert whole == weft.testing.run(without, 1, mesh={"tp": 1})[0]
    parts = alike([[one for one in parts if one] for _, parts in found])
    assert len(parts) == 3
    drawn = [tuple(one) for one in (*whole, *parts)]
    assert len(set(drawn)) == 7  # and no draw is another once more


def test_overlapping_parts_never_drift_whoever_calls() -> None:
    """Every order of calls by members alone, on parts of which none holds the other."""
    sets = [(0, 1), (1, 2), (0, 1, 2, 3), (1, 2, 3)]

    def program(mesh: Any) -> list[Any]:
        meshes = [weft.init_mesh({"x": len(ranks)}, ranks=ranks) for ranks in sets]
        out = []
        for order in itertools.permutations([0, 1, 2, 3, 0, 1], 4):
            torch.manual_seed(5)
            seen = []
            for one in (meshes[at] for at in order):
                seen.append(draw(one) if one.here is not None else [])
            out.append(seen)
        return out

    for per_rank in zip(*weft.testing.run(program, 4)):
        numbers = [tuple(alike(list(one))) for one in zip(*per_rank)]
        assert len(set(numbers)) == len(numbers)


def test_stages_draw_other_numbers_and_rows_the_same() -> None:
    """Stages are meshes of their own, with ranks outside; rows are one slice, replicated."""
    def program(mesh: Any) -> Any:
        torch.manual_seed(3)
        stages = [weft.init_mesh({"x": 2}, ranks=(2 * at, 2 * at + 1)) for at in range(2)]
        first, second = [draw(one) for one in stages]
        rows = weft.init_mesh({"a": 2, "b": 2}, ranks=(0, 2, 1, 3))["b"]
        return first, second, draw(rows), draw(rows)

    columns = list(zip(*weft.testing.run(program, mesh=MESH)))
    numbers = [tuple(alike(list(column))) for column in columns]
    assert len(set(numbers)) == 4


@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 1}, {"dp": 3, "tp": 1}, {"dp": 1, "tp": 4}, MESH])
def test_a_slice_draws_the_same_on_any_number_of_ranks(mesh: Any) -> None:
    def program(mesh: Any) -> Any:
        torch.manual_seed(9)
        row = mesh["tp"]
        x = weft.ones(4, 3, mesh=row, spec=P("tp"))
        found = [weft.randint(100, (5,), mesh=row, spec=P("tp")), F.dropout(x, 0.5),
                 weft.rand(3, mesh=mesh["tp", "dp"]), weft.rand(3, mesh=mesh),
                 weft.zeros(4, mesh=row, spec=P("tp")).uniform_()]
        return [one.full_tensor().tolist() for one in found]

    expected = weft.testing.run(program, mesh={"dp": 1, "tp": 1})[0]
    assert weft.testing.run(program, mesh=mesh) == [expected] * len(
        weft.testing.run(lambda mesh: 0, mesh=mesh))


def test_a_program_of_all_ranks_means_what_it_meant() -> None:
    """Draws on meshes of all ranks do not depend on the parts that there are."""
    def program(mesh: Any, parts: bool) -> list[Any]:
        torch.manual_seed(3)
        if parts:
            for one in PARTS.values():
                draw(one(mesh))
        other = weft.init_mesh({"x": 4}, ranks=(3, 2, 0, 1))
        return [draw(mesh), draw(other), draw(mesh["tp", "dp"])]

    due = alike(weft.testing.run(lambda mesh: program(mesh, False), mesh=MESH))
    assert alike(weft.testing.run(lambda mesh: program(mesh, True), mesh=MESH)) == due


@ranks(**MESH)
def test_seeds_states_and_forks_count_parts_too(mesh: Any) -> None:
    row, pair = mesh["tp"], weft.init_mesh({"x": 2}, ranks=(0, 3))
    torch.manual_seed(3)
    assert weft.rng_state() == (3, 0)
    fresh = [draw(row), draw(pair)]
    for seeds in (lambda: torch.manual_seed(3), lambda: weft.manual_seed(3)):
        seeds()
        assert [draw(row), draw(pair)] == fresh
    weft.set_rng_state((3, 0))
    assert [draw(row), draw(pair)] == fresh
    state, packed = weft.rng_state(), torch.get_rng_state()
    assert len(state) == 3 and state[:2] == (3, 0)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    due = [draw(row), draw(pair), draw(mesh)]
    for back in (
        lambda: weft.set_rng_state(state),
        lambda: weft.set_rng_state([3, 0, [list(pair) for pair in state[2]]]),
        lambda: torch.set_rng_state(packed), lambda: torch.set_rng_state(torch.load(file)),
    ):
        torch.manual_seed(11)
        draw(pair)
        back()
        assert weft.rng_state() == state
        assert [draw(row), draw(pair), draw(mesh)] == due
    for forks in (weft.fork_rng, torch.random.fork_rng):
        weft.set_rng_state(state)
        with forks():
            draw(row)
            draw(pair)
        assert [draw(row), draw(pair), draw(mesh)] == due


def test_the_state_of_one_rank_serves_all() -> None:
    """Where all ranks made the calls, rank 0's checkpoint is everyone's."""
    def program(mesh: Any) -> Any:
        parts = [one(mesh) for one in PARTS.values()]
        torch.manual_seed(3)
        for one in parts:
            draw(one)
        states = mesh.comm((0, 1)).exchange((weft.rng_state(), torch.get_rng_state().tolist()))
        due = [draw(one) for one in parts]
        (state, packed), *_ = states
        weft.set_rng_state(state)
        assert [draw(one) for one in parts] == due
        torch.set_rng_state(torch.tensor(packed, dtype=torch.uint8))
        assert [draw(one) for one in parts] == due
        return due

    weft.testing.run(program, mesh=MESH)


@ranks(**MESH)
def test_torch_reads_a_state_that_counts_parts(mesh: Any) -> None:
    torch.manual_seed(5)
    draw(mesh["tp"])
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    expected = torch.Generator().manual_seed(5)
    numbers = [torch.randn(1000, generator=one) for one in (generator, expected)]
    assert torch.equal(*numbers)
    assert torch.equal(generator.get_state(), expected.get_state())


def test_members_take_a_seed_of_their_own_for_a_while() -> None:
    def program(mesh: Any) -> Any:
        torch.manual_seed(3)
        pair = weft.init_mesh({"x": 2}, ranks=(0, 2))
        seen: list[Any] = [draw(mesh)]
        if pair.here is not None:
            for _ in range(2):
                with weft.fork_rng():
                    weft.manual_seed(1)
                    seen.append(draw(pair))
            assert seen.pop() == seen.pop() != draw(pair)
        return [*seen, draw(mesh), draw(mesh)]

    def without(mesh: Any) -> list[Any]:
        torch.manual_seed(3)
        return [draw(mesh) for _ in range(3)]

    assert alike(weft.testing.run(program, mesh=MESH)) == alike(
        weft.testing.run(without, mesh=MESH))


def test_what_torchs_state_cannot_hold_is_told() -> None:
    def program(mesh: Any) -> str:
        torch.manual_seed(5)
        weft.set_rng_state((5, 0, [(at, 1 << 40) for at in range(155)]))
        packed = torch.get_rng_state()
        state = weft.rng_state()
        torch.manual_seed(6)
        torch.set_rng_state(packed)
        assert weft.rng_state() == state
        draw(mesh["tp"])
        with pytest.raises(UnsupportedOpError) as told:
            torch.get_rng_state()
        return str(told.value)

    assert "156 parts" in alike(weft.testing.run(program, mesh=MESH))


@pytest.mark.parametrize("state", [(1, 2, 3), (1, 2, [3]), (1, 2, [(3, -1)]), (1, 2, (), ()),
                                   (1, 2, {3: 4})])
def test_a_state_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(ShardTypeError, match="pair of whole numbers"):
        weft.set_rng_state(state)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_on_a_part_replays_its_masks(reentrant: bool) -> None:
    def step(x: ShardTensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.5).tanh(), 0.5)

    def program(mesh: Any) -> None:
        stage = weft.init_mesh({"x": 3}, ranks=(3, 0, 1))
        torch.manual_seed(4)
        if stage.here is not None:
            grads, state = [], weft.rng_state()
            for once in (step, lambda x: checkpoint(step, x, use_reentrant=reentrant)):
                weft.set_rng_state(state)
                x = weft.ones(8, mesh=stage, spec=P("x"), requires_grad=True)
                once(x).sum().backward()
                grads.append(x.grad.full_tensor())
            assert torch.equal(*grads) and 0 < grads[0].count_nonzero() < 8
        assert len(draw(mesh)) == 6

    weft.testing.run(program, mesh=MESH)


def sums_to_one(x: Tensor) -> Tensor:
    """A function without a rule, which draws by torch."""
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    return Noisy.apply(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
def test_functions_that_draw_by_torch_count_with_their_mesh() -> None:
    def program(mesh: Any) -> Any:
        torch.manual_seed(3)
        pair = weft.init_mesh({"x": 2}, ranks=(1, 2))
        seen: list[Any] = []
        if pair.here is not None:
            x = weft.zeros(4, mesh=pair, spec=P("x"))
            seen = [sums_to_one(x).full_tensor().tolist() for _ in range(2)]
            assert seen[0] != seen[1]
        return seen, draw(mesh)

    found = weft.testing.run(program, mesh=MESH)
    alike([seen for seen, _ in found])
    alike([whole for _, whole in found])


def test_members_that_differ_are_told_of_which_draws() -> None:
    def program(mesh: Any) -> None:
        pair = weft.init_mesh({"x": 2}, ranks=(1, 2))
        torch.manual_seed(5)
        if pair.here is not None:
            draw(pair)
            with weft.debug():
                if mesh.rank == 2:
                    weft.set_rng_state((5, 0))
                draw(pair)

    with pytest.raises(CommunicationError) as told:
        weft.testing.run(program, mesh=MESH)
    assert "rank 1: seed 5, call 1 of ranks 1, 2" in str(told.value)
    assert "rank 2: seed 5, call 0 of ranks 1, 2" in str(told.value)


def test_a_part_that_ranks_know_by_other_names_is_told() -> None:
    def program(mesh: Any) -> None:
        if mesh.rank == 0:
            mesh["tp"]
        pair = weft.init_mesh({"tp": 2})
        if pair.here is not None:
            draw(pair)

    with pytest.raises(CommunicationError) as told:
        weft.testing.run(program, mesh=MESH)
    assert "of axes tp" in str(told.value) and "of ranks 0, 1" in str(told.value)

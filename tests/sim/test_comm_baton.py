"""Ranks under a baton: order, state of their own, disagreements, failures, backward."""

from __future__ import annotations

import contextlib
import contextvars
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import weft.testing
from weft.comm import init_mesh, run_simulated
from weft.errors import CommunicationError, MeshError


class Summed(torch.autograd.Function):
    """An all-reduce whose gradient is all-reduced."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.all_reduce(x, "sum")

    @staticmethod
    def backward(ctx, grad):
        return Summed.apply(grad, ctx.comm), None


def world(mesh):
    return mesh.comm(tuple(range(mesh.ndim)))


def test_results_come_in_rank_order() -> None:
    assert weft.testing.run(lambda mesh: mesh.rank, 5) == [0, 1, 2, 3, 4]
    assert weft.testing.run(lambda mesh: mesh.here, mesh={"dp": 2, "tp": 2}) == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]
    assert weft.testing.run(lambda mesh: mesh.axis_names, {"x": 2}) == [("x",)] * 2
    with pytest.raises(weft.MeshError, match="num_ranks is the mesh"):
        weft.testing.run(world, {"x": 2}, {"y": 2})


def test_one_rank_runs_at_a_time_and_only_a_collective_passes_the_baton() -> None:
    trace = []

    def fn(mesh):
        for step in range(3):
            trace.append((mesh.rank, step, "a"))
            time.sleep(0.002)
            trace.append((mesh.rank, step, "b"))
            world(mesh).exchange(None)

    run_simulated(fn, 3)
    first = list(trace)
    assert all(
        (a[0], a[1]) == (b[0], b[1]) and (a[2], b[2]) == ("a", "b")
        for a, b in zip(first[::2], first[1::2])
    )
    trace.clear()
    run_simulated(fn, 3)
    assert trace == first


def test_groups_that_do_not_meet_run_apart() -> None:
    def fn(mesh):
        rows = [mesh.comm((1,)).exchange((mesh.rank, turn)) for turn in range(1 + mesh.here[0])]
        return rows[-1], world(mesh).exchange("done")

    assert [row for row, _ in run_simulated(fn, mesh={"dp": 2, "tp": 2})] == [
        [(0, 0), (1, 0)], [(0, 0), (1, 0)], [(2, 1), (3, 1)], [(2, 1), (3, 1)],
    ]


def test_each_rank_has_its_own_generator_and_default_dtype() -> None:
    def fn(mesh):
        torch.manual_seed(mesh.rank)
        torch.set_default_dtype((torch.float32, torch.float64)[mesh.rank % 2])
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(1).item())
            world(mesh).exchange(None)
            assert torch.zeros(1).dtype is (torch.float32, torch.float64)[mesh.rank % 2]
        return drawn

    before = torch.get_rng_state()
    outcomes = run_simulated(fn, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    for rank, drawn in enumerate(outcomes):
        generator = torch.Generator().manual_seed(rank)
        dtype = (torch.float32, torch.float64)[rank % 2]
        alone = [torch.rand(1, generator=generator, dtype=dtype).item() for _ in range(3)]
        assert drawn == alone


def test_ranks_start_from_the_state_of_the_caller() -> None:
    torch.manual_seed(7)
    drawn = run_simulated(lambda mesh: torch.rand(2).tolist(), 3)
    assert drawn == [torch.rand(2).tolist()] * 3


def test_ranks_start_with_torch_defaults_for_the_thread() -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        flags = run_simulated(
            lambda mesh: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")), 2
        )
    assert flags == [(True, False)] * 2


def test_context_variables_are_copied() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(1)

    def fn(mesh):
        seen = variable.get()
        variable.set(10 + mesh.rank)
        world(mesh).exchange(None)
        return seen, variable.get()

    assert run_simulated(fn, 3) == [(1, 10), (1, 11), (1, 12)]
    assert variable.get() == 1


def test_ranks_that_wait_for_different_collectives_are_named() -> None:
    def fn(mesh):
        comm = world(mesh)
        if mesh.rank == 3:
            return None
        with pytest.raises(CommunicationError) as caught:
            if mesh.rank == 0:
                comm.all_reduce(torch.zeros(2, 3), "sum")
            else:
                comm.all_gather(torch.zeros(2, dtype=torch.int64), (2, 2, 2, 2))
        return str(caught.value)

    texts = run_simulated(fn, 4)
    line = fn.__code__.co_firstlineno + 6
    assert texts[3] is None
    assert texts[:3] == [
        "collectives of simulated ranks: no rank can run on: of 4 ranks 3 wait, at 2 "
        "collectives, and 1 have ended.\n"
        "  Rule: all ranks of a group issue the same collectives in the same order, at the same "
        "line, with the same kind, dtype and sizes.\n"
        "  Offenders: rank 0 waits at all_reduce(sum, float32, (2, 3)) over axes (0) of "
        f"ranks 0, 1, 2, 3, at {__file__}:{line}\n"
        "             ranks 1, 2 wait at all_gather(int64, (2, 2, 2, 2)) over axes (0) of "
        f"ranks 0, 1, 2, 3, at {__file__}:{line + 2}\n"
        "             rank 3 has returned\n"
        "  Fix: call on every rank of the group what any of them calls: no `if rank == 0:` "
        "around it"
    ] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda c: c.all_reduce(torch.ones(2), "sum"),
         lambda c: c.all_reduce(torch.ones(2), "max")),
        (lambda c: c.all_reduce(torch.ones(2), "sum"),
         lambda c: c.all_reduce(torch.ones(3), "sum")),
        (lambda c: c.all_reduce(torch.ones(2), "sum"),
         lambda c: c.all_reduce(torch.ones(2, dtype=torch.float64), "sum")),
        (lambda c: c.all_reduce(torch.ones(2), "sum"),
         lambda c: c.reduce_scatter(torch.ones(2), (1, 1), "sum")),
        (lambda c: c.broadcast(torch.ones(2), 0), lambda c: c.broadcast(torch.ones(2), 1)),
        (lambda c: c.all_gather(torch.ones(c.index), (0, 1)),
         lambda c: c.all_gather(torch.ones(1), (1, 1))),
        (lambda c: c.exchange(0), lambda c: None),
        (lambda c: c.all_to_all(torch.ones(2), (1, 1), (1, 1)),
         lambda c: c.all_to_all(torch.ones(3), (2, 1), (2, 1))),
    ],
    ids=["kind", "shape", "dtype", "op", "source", "sizes", "absent", "splits"],
)
def test_any_difference_is_an_error_at_once(one, other) -> None:
    with pytest.raises(CommunicationError, match=r"disagree|no rank can run on"):
        run_simulated(lambda mesh: (one, other)[mesh.rank](world(mesh)), 2)


def branches(mesh):
    x = weft.ones(6, mesh=mesh, spec=weft.P(0))
    if mesh.rank == 0:
        return x.sum().item()
    return (x * 2).mean().item()


def branches_of_one_line(mesh):
    x = weft.ones(6, mesh=mesh, spec=weft.P(0))
    return x.sum().item() if mesh.rank == 0 else (x * 2).mean().item()


def test_collectives_that_look_alike_do_not_meet() -> None:
    """They would give both ranks the sum of one's term and the other's."""
    for fn, first, second in (
        (branches, "3", "4"), (branches_of_one_line, "2 (columns 12 to 25)", "2 (columns 50 to 70)")
    ):
        with pytest.raises(CommunicationError) as caught:
            run_simulated(fn, 2)
        start = fn.__code__.co_firstlineno
        lines = [f"{__file__}:{start + int(text[0])}{text[1:]}" for text in (first, second)]
        what = "waits at all_reduce(sum, float32, ()) over axes (0) of ranks 0, 1"
        facts, _, *offenders, _ = str(caught.value).splitlines()
        assert facts.endswith("of 2 ranks 2 wait, at 2 collectives, and 0 have ended.")
        assert offenders == [
            f"  Offenders: rank 0 {what}, at {lines[0]}",
            f"             rank 1 {what}, at {lines[1]}",
        ]


def test_programs_from_other_folders_and_generated_code_are_the_same_program() -> None:
    def fn(mesh):
        names: dict = {"comm": world(mesh)}
        for file in (f"/home/rank{mesh.rank}/train.py", f"<eval_with_key>.{mesh.rank}"):
            exec(compile("def call(x): return comm.exchange(x)", file, "exec"), names)
            for turn in range(2):
                assert names["call"](turn) == [turn] * 3
        return True

    assert run_simulated(fn, 3) == [True] * 3


def test_ranks_of_different_groups_are_named() -> None:
    def fn(mesh):
        mesh.comm((1 if mesh.rank in (1, 2) else 0,)).exchange(None)

    with pytest.raises(CommunicationError, match=r"rank 3 waits at .* \(dp\) of ranks 1, 3"):
        run_simulated(fn, mesh={"dp": 2, "tp": 2})


def test_a_rank_that_raises_ends_the_run_with_its_exception() -> None:
    ended = []

    def fn(mesh):
        try:
            if mesh.rank == 2:
                raise KeyError("mine")
            world(mesh).exchange(None)
        finally:
            ended.append(mesh.rank)

    with pytest.raises(KeyError, match="mine") as caught:
        run_simulated(fn, 4)
    assert caught.value.__notes__ == ["on simulated rank 2 of 4"]
    assert sorted(ended) == [0, 1, 2]  # rank 3 had not begun


def test_a_rank_that_swallows_exceptions_does_not_hang_the_others() -> None:
    def fn(mesh):
        if mesh.rank == 1:
            raise ValueError("one")
        for _ in range(3):
            with contextlib.suppress(Exception):  # what careless user code does
                world(mesh).exchange(None)

    with pytest.raises(ValueError, match="one"):
        run_simulated(fn, 3)


def test_ranks_that_wait_in_backward_are_unwound() -> None:
    reached = []

    def fn(mesh):
        y = Summed.apply(torch.ones(1, requires_grad=True), world(mesh))
        if mesh.rank == 1:
            raise ValueError("before backward")
        try:
            y.backward()
        finally:
            reached.append(mesh.rank)

    with pytest.raises(ValueError, match="before backward"):
        run_simulated(fn, 3)
    assert reached == [0, 2]


def test_no_thread_is_left_behind() -> None:
    def fn(mesh):
        world(mesh).exchange(None)
        if mesh.rank == 1:
            raise ValueError

    before = threading.active_count()
    with pytest.raises(ValueError):
        run_simulated(fn, 4)
    run_simulated(lambda mesh: world(mesh).exchange(None), 4)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


def test_runs_of_several_threads_come_one_after_the_other() -> None:
    """What is global in torch would else be that of ranks of several runs at once."""
    def fn(mesh):
        torch.manual_seed(mesh.size())
        drawn = []
        for _ in range(5):
            drawn.append(torch.rand(1).item() + sum(world(mesh).exchange(mesh.rank)))
            torch.set_default_dtype(torch.float64 if mesh.size() % 2 else torch.float32)
            drawn.append(str(torch.ones(1).dtype))
        return drawn

    expected = {num: run_simulated(fn, num) for num in (2, 3, 4, 5)}
    found: dict[int, list[bool]] = {num: [] for num in expected}

    def runs(num: int) -> None:
        found[num] += [run_simulated(fn, num) == expected[num] for _ in range(10)]

    threads = [threading.Thread(target=runs, args=(num,), daemon=True) for num in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(each == [True] * 10 for each in found.values()), found


def test_a_run_in_a_thread_of_a_rank_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank waits for its thread, and the thread for the rank's run."""
    monkeypatch.setenv("WEFT_TIMEOUT", "0.5")
    said = []

    def run() -> None:
        with pytest.raises(CommunicationError, match="of 2 ranks, holds the simulation") as error:
            run_simulated(lambda mesh: mesh.rank, 3)
        said.append(str(error.value))

    def fn(mesh):
        if mesh.rank == 1:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(30)
        return world(mesh).exchange(mesh.rank)

    assert run_simulated(fn, 2) == [[0, 1]] * 2
    assert len(said) == 1 and "starts no run" in said[0] and "for 0.5 s" in said[0]


def test_a_run_inside_a_run() -> None:
    def fn(mesh):
        inner = run_simulated(lambda inside: world(inside).exchange(inside.rank), 3)
        return inner, world(mesh).exchange(mesh.rank), init_mesh({"x": 2}).size()

    assert run_simulated(fn, 2) == [([[0, 1, 2]] * 3, [0, 1], 2)] * 2


def test_the_mesh_of_another_rank_is_refused() -> None:
    meshes = []

    def fn(mesh):
        meshes.append(mesh)
        world(mesh).exchange(None)
        world(meshes[0]).exchange(None)

    with pytest.raises(CommunicationError, match="mesh of simulated rank 0 is used by rank 1"):
        run_simulated(fn, 2)
    with pytest.raises(CommunicationError, match="mesh of simulated rank 0 is used outside"):
        world(meshes[0]).exchange(None)


def test_a_mesh_that_needs_more_ranks_is_refused() -> None:
    with pytest.raises(MeshError) as caught:
        run_simulated(lambda mesh: None, 3, {"dp": 2, "tp": 2})
    assert str(caught.value) == (
        "run(fn, num_ranks, mesh): Mesh({'dp': 2, 'tp': 2}) needs 4 ranks, num_ranks is 3.\n"
        "  Rule: a mesh lies within the world.\n"
        "  Offenders: 3\n"
        "  Fix: run(fn, num_ranks=4, mesh=...)"
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_collectives_in_backward_and_in_its_backward(num_ranks: int) -> None:
    def fn(mesh):
        x = torch.tensor([mesh.rank + 1.0], dtype=torch.float64, requires_grad=True)
        y = Summed.apply(Summed.apply(x**3, world(mesh)), world(mesh))
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(grad, x)
        return y.item(), grad.item(), second.item()

    n = num_ranks
    total = sum((rank + 1) ** 3 for rank in range(n))
    assert run_simulated(fn, n) == [
        (n * total, n**2 * 3 * (rank + 1) ** 2, n**2 * 6 * (rank + 1)) for rank in range(n)
    ]


def test_collectives_in_reentrant_backward() -> None:
    def fn(mesh):
        x = torch.tensor([1.0 + mesh.rank], requires_grad=True)
        y = checkpoint(lambda x: Summed.apply(x * x, world(mesh)), x, use_reentrant=True)
        checkpoint(lambda y: Summed.apply(y * 3, world(mesh)), y, use_reentrant=True).backward()
        assert x.grad is not None
        return x.grad.item()

    assert run_simulated(fn, 4) == [4 * 4 * 3 * 2 * (1.0 + rank) for rank in range(4)]


def test_keyboard_interrupt_ends_a_run() -> None:
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it\n"
        "import weft.testing\n"
        "def fn(mesh):\n"
        "    print('runs', flush=True)\n"
        "    while True: mesh.comm((0,)).exchange(None)\n"
        "weft.testing.run(fn, 2)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")

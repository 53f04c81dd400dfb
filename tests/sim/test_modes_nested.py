"""strict and explain within each other, in hooks, in recomputed forwards, and over threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import weft
from weft import P, StrictError
from weft.tensor import modes
from weft.transport import traffic

X = torch.arange(30.0, dtype=torch.float64).view(5, 6) / 8
W = torch.ones(6, 5, dtype=torch.float64)


def on_two(fn: Any) -> Any:
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(X, mesh, P("x")).requires_grad_()
        return fn(x, weft.distribute_tensor(W, mesh, P("x")))

    before = modes.STRICT.on, traffic.STATE.on
    first, other = weft.testing.run(on_rank, mesh={"x": 2})
    assert (modes.STRICT.on, traffic.STATE.on) == before
    assert first == other
    return first


def refuses(call: Any) -> bool:
    try:
        call()
    except StrictError:
        return True
    return False


def transitions(log: Any) -> list[tuple[str, str]]:
    return [(event.op, event.direction) for event in log.events]


def test_strict_in_a_hook_is_that_of_the_backward() -> None:
    def program(x: Any, w: Any) -> list[bool]:
        seen: list[bool] = []
        x.register_hook(lambda _: seen.append(refuses(lambda: x.detach() @ w)))
        (x * 2).sum().backward()
        with weft.strict():
            loss = (x * 2).sum()
            loss.backward()
            loss = (x * 2).sum()
        loss.backward()
        with weft.strict(), weft.strict(False):
            (x * 2).sum().backward()
        return seen

    assert on_two(program) == [False, True, False, False]


def test_strict_that_raises_in_a_hook_ends_with_the_backward() -> None:
    def program(x: Any, w: Any) -> list[bool]:
        handle = x.register_hook(lambda _: x.detach() @ w)
        with weft.strict():
            first = refuses((x * 2).sum().backward)
        handle.remove()
        x.grad = None
        (x * 2).sum().backward()
        return [first, torch.equal(x.grad.full_tensor(), torch.full_like(X, 2))]

    assert on_two(program) == [True, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_strict_of_a_forward_that_runs_again(reentrant: bool) -> None:
    """The second time it is the backward's mode that counts."""
    def program(x: Any, w: Any) -> list[bool]:
        def block(a: Any) -> Any:
            return (a @ w).tanh().sum()

        out = checkpoint(block, x, use_reentrant=reentrant)
        with weft.strict():
            first = refuses(lambda: checkpoint(block, x, use_reentrant=reentrant))
            again = refuses(out.backward)
        out = checkpoint(block, x, use_reentrant=reentrant)
        return [first, again, refuses(out.backward)]

    assert on_two(program) == [True, True, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_explain_lists_what_runs_again(reentrant: bool) -> None:
    def program(x: Any, w: Any) -> Any:
        with weft.explain() as forward:
            out = checkpoint(lambda a: (a @ w).tanh().sum(), x, use_reentrant=reentrant)
        with weft.explain() as backward:
            out.backward()
        return transitions(forward), transitions(backward)

    forward, backward = on_two(program)
    assert forward == [("aten.matmul.default", "forward")]
    assert backward[0] == ("aten.matmul.default", "forward")  # it runs again
    # The loss, for every rank; of a backward within the backward, too.
    assert backward[1:] == [("backward", "backward")] * (1 + reentrant)


def test_logs_within_logs_in_hooks() -> None:
    """Each log gets what moves while it is open, those around it too; strict does not hide it."""
    def program(x: Any, w: Any) -> Any:
        inner = []

        def hook(_: Any) -> None:
            with weft.explain() as log:
                x.detach().redistribute(placements=P()).sum()
            inner.append(transitions(log))

        x.register_hook(hook)
        with weft.explain() as outer:
            loss = (x * 2).sum()
            with weft.strict(), weft.explain() as middle:
                loss.backward()
            x.full_tensor()
        with pytest.raises(ZeroDivisionError), weft.explain() as failed:
            x.full_tensor()
            raise ZeroDivisionError
        return transitions(outer), transitions(middle), inner, transitions(failed), outer.open

    outer, middle, inner, failed, is_open = on_two(program)
    assert inner == [[("redistribute", "forward")]]
    assert middle == [*inner[0], ("backward", "backward")]
    assert outer == [*middle, ("full_tensor", "forward")]
    assert failed == [("full_tensor", "forward")] and not is_open


def test_a_thread_has_its_own_modes() -> None:
    """Those of the thread that starts it are not its, nor the reverse; exits in any order."""
    found: dict[str, Any] = {}
    both_in, may_leave = threading.Barrier(2), threading.Event()

    def other() -> None:
        found["strict at first"] = modes.is_strict()
        with weft.explain() as log, weft.strict():
            both_in.wait()
            traffic.emit("t", ("x",), "AllReduce", 1)
            may_leave.wait()
            found["strict"] = modes.is_strict()
        found["other"] = len(log.events)
        found["strict after"] = modes.is_strict()

    before = modes.STRICT.on, traffic.STATE.on
    with weft.strict(), weft.explain() as log:
        thread = threading.Thread(target=other)
        thread.start()
        both_in.wait()
        with weft.strict(False):
            found["mine"] = modes.is_strict()
    assert (modes.STRICT.on, traffic.STATE.on) == (before[0] + 1, before[1] + 1)  # the other's
    may_leave.set()
    thread.join()
    assert not log.events and (modes.STRICT.on, traffic.STATE.on) == before
    assert found == {"strict at first": False, "strict": True, "mine": False, "other": 1,
                     "strict after": False}


def test_a_backward_in_another_thread_writes_to_the_log_of_its_forward() -> None:
    """As autograd's own threads do on accelerators; where it has a log, to that alone."""
    found = []
    with weft.explain() as log, traffic.label("op"):
        kept = traffic.note()

        def backward() -> None:
            with traffic.resume(kept, "gradient"):
                traffic.emit("t", ("x",), "AllReduce", 8)
            with weft.explain() as own, traffic.resume(kept, "gradient"):
                traffic.emit("t", ("x",), "AllReduce", 8)
            found.extend([len(own.events), modes.is_strict()])

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    thread = threading.Thread(target=backward)  # the log is closed
    thread.start()
    thread.join()
    assert [(e.op, e.direction, e.reason) for e in log.events] == [("op", "backward", "gradient")]
    assert found == [1, False, 1, False]

"""weft.strict() and weft.explain(): what they refuse and what they write down."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft import P, Replicate, Shard, ShardTypeError, StrictError
from weft.tensor import modes
from weft.tensor.placing import left_whole

X = torch.arange(30.0, dtype=torch.float64).view(5, 6) / 8
HERE = __file__


def on_two(fn: Callable[..., Any]) -> list[Any]:
    return weft.testing.run(
        lambda mesh: fn(weft.distribute_tensor(X, mesh, P("x"))), mesh={"x": 2}
    )


def refusal(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(StrictError) as caught:
        call()
    return str(caught.value).splitlines()


def test_strict_names_the_redistribute() -> None:
    def program(x: Any) -> Any:
        w = weft.distribute_tensor(torch.ones(6, 5), x.device_mesh, P("x")).double()
        with weft.strict():
            first = refusal(lambda: x @ w)
        x @ w
        with weft.strict():
            return first, refusal(lambda: x @ w)  # from the cache, too

    (first, again), other = on_two(program)
    assert other == (first, again)
    source = Path(HERE).read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "    first = refusal" in text)
    assert first == [
        "aten.matmul.default: an operand is [6@x, 5] and has to be [6, 5].",
        "  Rule: under weft.strict() no op communicates implicitly.",
        f"  Offenders: {HERE}:{line}",
        "  Fix: x.redistribute(placements=[Replicate()])",
    ]
    assert [first[0], first[3]] == [again[0], again[3]]


def test_strict_lets_a_kernel_be_that_sends_nothing() -> None:
    def program(x: Any) -> Any:
        index = weft.distribute_tensor(torch.tensor([4, 0]), x.device_mesh, P())
        with weft.strict():
            return torch.nn.functional.embedding(index, x).sharding

    assert [str(one) for one in on_two(program)] == ["[2, 6] partial(sum@x)"] * 2


def test_strict_names_plain_operands() -> None:
    def program(x: Any) -> Any:
        x * torch.ones(6)
        with weft.strict():
            said = refusal(lambda: torch.where(x > 1, torch.ones(5, 6), torch.ones(6)))
            refusal(lambda: x * torch.ones(6))
            refusal(lambda: x * torch.ones((), requires_grad=True))
            refusal(lambda: torch.cat([x, torch.ones(1, 6)]))
            x * torch.tensor(2.0)  # a number
            with weft.strict(False):
                x * torch.ones(6)
        return said

    for said in on_two(program):
        assert said[0].startswith(f"where: at {HERE}:")
        assert said[0].endswith(" 2 plain tensors are taken as replicated.")
        assert said[1:] == [
            "  Rule: under weft.strict() every operand is a ShardTensor.",
            "  Offenders: shape (5, 6), shape (6,)",
            "  Fix: weft.distribute_tensor(t, mesh, placements)",
        ]


def test_strict_refuses_fallback() -> None:
    def program(x: Any) -> list[str]:
        with weft.strict():
            return refusal(lambda: torch.linalg.svdvals(x))

    for said in on_two(program):
        assert said[0].startswith("linalg_svdvals: ") or said[0].startswith("aten.linalg_svd")
        assert said[1] == "  Rule: under weft.strict() no op communicates implicitly."


def test_a_number_that_is_gathered_is_not_worth_a_warning() -> None:
    def program(mesh: Any) -> int:
        sums = [weft.ShardTensor.from_local(one, mesh, P(partial={"x": "sum"}))
                for one in (torch.ones(()), torch.ones(2))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for one in sums:
                left_whole.tell("no op of torch", "it has no rule", [one], "a rule")
        left_whole._WARNED.discard("no op of torch")
        return len(caught)

    assert weft.testing.run(program, 1, mesh={"x": 1}) == [1]


def test_strict_lets_what_is_written_pass() -> None:
    def program(x: Any) -> float:
        with weft.strict():
            w = weft.distribute_tensor(torch.ones(6, 3).double(), x.device_mesh, [Replicate()])
            w.requires_grad_(), x.requires_grad_()
            loss = ((x @ w) ** 2).mean()
            loss.backward()
            x.grad = torch.ones(5, 6, dtype=X.dtype)
            assert torch.equal(x.detach().redistribute(placements=[Shard(1)]).full_tensor(), X)
            assert x.tolist() == X.tolist() and torch.equal(x, x)
            return loss.item()

    due = ((X @ torch.ones(6, 3).double()) ** 2).mean().item()
    assert on_two(program) == pytest.approx([due] * 2)


def test_strict_is_per_thread_and_nests() -> None:
    def other_thread() -> bool:
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(modes.is_strict()))
        thread.start()
        thread.join()
        return seen[0]

    assert not modes.is_strict()
    with weft.strict():
        assert modes.is_strict() and not other_thread()
        with weft.strict(False):
            assert not modes.is_strict()
        with pytest.raises(ZeroDivisionError), weft.strict():
            raise ZeroDivisionError
        assert modes.is_strict()
    assert not modes.is_strict() and modes.STRICT.on == 0


def test_explain_lists_forward_and_backward() -> None:
    def program(x: Any) -> Any:
        x.requires_grad_()
        w = torch.ones(6, 3, dtype=X.dtype, requires_grad=True)
        with weft.explain() as log:
            y = (x @ w).softmax(0)
            y.square().sum().backward()
            x.redistribute(placements=[Shard(1)])
        x.full_tensor()
        facts = [
            (e.op, e.transition, e.axes, e.collective, e.nbytes, e.direction) for e in log.events
        ]
        lines = [int(e.line.removeprefix(f"{HERE}:")) for e in log.events]
        reasons = [e.reason for e in log.events]
        return facts, [line - lines[0] for line in lines], reasons, str(log), log.nbytes

    facts, lines, reasons, text, nbytes = on_two(program)[0]
    assert facts == [
        ("aten.softmax.int", "P(max)->R", ("x",), "AllReduce", 24, "forward"),
        ("aten.softmax.int", "P(sum)->R", ("x",), "AllReduce", 24, "forward"),
        ("aten.softmax.int", "P(sum)->R", ("x",), "AllReduce", 24, "backward"),
        ("aten.matmul.default", "P(sum)->I on x", ("x",), "AllReduce", 144, "backward"),
        ("backward", "P(sum)->I on x", ("x",), "AllReduce", 8, "backward"),
        ("redistribute", "S(0)->S(1) on x", ("x",), "Exchange", 48, "forward"),
    ]
    assert lines == [0, 0, 0, 0, 1, 2]
    assert all(reasons) and reasons[-1] == "asked for"
    table = text.splitlines()
    assert table[0].split() == [
        "op", "line", "transition", "over", "collective", "bytes", "direction", "reason",
    ]
    assert len(table) == 9 and table[-2] == f"6 collectives, {nbytes} bytes received"
    assert table[-1].startswith("S: sharded")
    assert nbytes == sum(fact[4] for fact in facts)


def test_explain_nests_and_is_per_rank() -> None:
    def program(x: Any) -> tuple[int, int]:
        with weft.explain() as outer:
            x.full_tensor()
            with weft.explain() as inner:
                x.full_tensor()
        x.full_tensor()
        return len(outer.events), len(inner.events)

    assert on_two(program) == [(2, 1)] * 2


def inverses(nbytes: int | None) -> list[str]:
    """What an op of whole matrices warns of, called in two lines, the second twice."""
    def program(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(torch.eye(4).expand(2, 4, 4).clone(), mesh, P(None, "x"))
        y = weft.distribute_tensor(torch.eye(5), mesh, P("x"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            torch.linalg.inv(x)  # the batch can be sharded
            for _ in range(2):
                torch.linalg.inv(y)
        return [str(one.message) for one in caught]

    before = weft.warn_if_whole(nbytes)
    try:
        (first, *_) = weft.testing.run(program, mesh={"x": 2})
    finally:
        weft.warn_if_whole(before)
    return first


def test_a_call_that_leaves_a_sharded_value_whole_warns_once_per_line() -> None:
    assert weft.warn_if_whole(2**20) == 2**20
    with pytest.raises(ShardTypeError, match="nbytes is '1MB'"):
        weft.warn_if_whole("1MB")  # type: ignore[arg-type]
    [found] = inverses(100)
    assert "[5@x, 5] is gathered over 'x'" in found and "left whole there: 100 bytes" in found
    assert not inverses(101)
    assert not inverses(None)


def test_a_partial_value_that_is_left_whole_warns() -> None:
    """Where the op could have had it sharded, whatever it was that cost decided, it does not."""
    def program(mesh: Any) -> list[str]:
        x, y = (weft.distribute_tensor(torch.eye(4), mesh, spec) for spec in (P(None, "x"), P("x")))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            torch.linalg.inv(x @ y)
            assert ((x @ y) + torch.ones(4, 4)).sharding.spec == P("x")
            (x @ y).redistribute(placements=[weft.Replicate()]).relu()
        with weft.strict():
            caught_in = refusal(lambda: torch.linalg.inv(x @ y))
        return [*[str(one.message) for one in caught], *caught_in]

    before = weft.warn_if_whole(64)
    try:
        (found, *refused), *_ = weft.testing.run(program, mesh={"x": 2})
    finally:
        weft.warn_if_whole(before)
    assert "[4, 4] partial(sum@x) is reduced over 'x'" in found
    assert "left whole there: 64 bytes" in found
    assert "is reduced over 'x'" in refused[0]


def test_indices_that_are_gathered_for_a_write_to_a_whole_tensor_warn() -> None:
    def program(mesh: Any) -> None:
        codes = weft.distribute_tensor(torch.arange(6).view(6, 1), mesh, P("x"))
        one_hot = torch.zeros(6, 8)
        one_hot.scatter_(1, codes, 1)
        assert torch.equal(one_hot, torch.eye(6, 8))

    before = weft.warn_if_whole(24)
    try:
        with pytest.warns(UserWarning, match=r"scatter_.*operand \[6@x, 1\] is gathered over 'x'"):
            weft.testing.run(program, mesh={"x": 2})
    finally:
        weft.warn_if_whole(before)


def test_a_write_that_gathers_into_a_whole_tensor_warns() -> None:
    def program(mesh: Any) -> list[str]:
        x = weft.distribute_tensor(torch.ones(4, 4), mesh, P("x"))
        whole, sharded = weft.zeros(4, 4, mesh=mesh, placements=P()), torch.zeros_like(x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            whole.copy_(x)
            whole += x
            sharded.copy_(x)
            sharded += x
        assert torch.equal(whole.full_tensor(), torch.full((4, 4), 2.0))
        return [str(one.message) for one in caught]

    before = weft.warn_if_whole(64)
    try:
        found, *_ = weft.testing.run(program, mesh={"x": 2})
    finally:
        weft.warn_if_whole(before)
    assert [one.split(":")[0] for one in found] == ["aten.copy_.default", "aten.add_.Tensor"]
    for one in found:
        assert "[4@x, 4] is gathered over 'x', and the result [4, 4] is left whole there" in one
        assert one.endswith("Fix: write into a tensor that 'x' shards: redistribute it before")


def test_strict_does_not_advise_to_replicate() -> None:
    def program(mesh: Any) -> list[list[str]]:
        x = weft.distribute_tensor(torch.eye(4).expand(1, 4, 4).clone(), mesh, P(None, "x"))
        with weft.strict():
            return [refusal(lambda: torch.linalg.det(x)), refusal(lambda: torch.linalg.inv(x))]

    for first, *_, fix in weft.testing.run(program, mesh={"x": 2})[0]:
        assert "is gathered over 'x'" in first and "left whole" in first
        assert fix == "  Fix: a layout of which the op needs no sharded dim whole"

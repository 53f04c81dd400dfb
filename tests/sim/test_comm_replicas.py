"""Debug mode compares what is replicated, at its first use: what it finds, and what it lets be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.cases.replicas import MESH, SAID, Net, batch, by_rank, said, texts
from weft import P
from weft.comm.simulated import SimulatedWorld
from weft.tensor import ShardTensor


@pytest.mark.parametrize(
    ("program", "expected"), [(one, rest) for one, *rest in SAID],
    ids=[one.__name__ for one, *_ in SAID],
)
def test_all_ranks_name_what_differs(program: Callable[[Any], None], expected: Any) -> None:
    assert weft.testing.run(lambda mesh: said(mesh, program), mesh=MESH) == texts(*expected)


def test_other_shapes_are_told_as_well() -> None:
    def program(mesh: Any) -> None:
        batch(mesh) * torch.ones((3,) if mesh.rank else (1, 3))

    text = weft.testing.run(lambda mesh: said(mesh, program), mesh=MESH)[0]
    assert text is not None and (
        "the list of tensors is operand 2, float32 (1, 3) on rank 0 and operand 2, float32 (3,) on "
        "ranks 1, 2, 3." in text
    )


def test_local_tensors_that_are_to_be_replicas_are_compared() -> None:
    def program(mesh: Any) -> None:
        with weft.debug(), pytest.raises(weft.LayoutError, match="other values than its replica"):
            ShardTensor.from_local(by_rank(mesh, 2), mesh, P())
        with weft.debug():
            ShardTensor.from_local(by_rank(mesh, 2), mesh, P("tp"))
            ShardTensor.from_local(by_rank(mesh, 2), mesh, P(), sync=True)

    weft.testing.run(program, mesh=MESH)


def rolls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rank 0 has compared, of replicas alone."""
    asked: list[str] = []
    call_roll = SimulatedWorld.call_roll

    def noted(self: Any, ask: Any) -> str:
        if ask.op == "replicas" and self.rank == 0:
            asked.extend(ask.facts[0])
        return call_roll(self, ask)

    monkeypatch.setattr(SimulatedWorld, "call_roll", noted)
    return asked


def test_each_is_compared_at_its_first_use_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = rolls(monkeypatch)

    def program(mesh: Any) -> list[float]:
        net, plain = weft.distribute_module(Net(), mesh), torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(plain.weight)
        optimizer = torch.optim.SGD([*net.parameters(), *plain.parameters()], lr=0.01)
        losses = []
        with weft.debug():
            for _ in range(3):
                loss = plain(net.scaled(net(batch(mesh)))).mean() * plain.weight.t().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    on = weft.testing.run(program, mesh=MESH)
    assert asked == [
        "layers.0.weight of Net, float32 (4, 3)", "layers.0.bias of Net, float32 (4,)",
        "layers.1.weight of Net, float32 (2, 4)", "layers.1.bias of Net, float32 (2,)",
        "weight of Linear, float32 (1, 2)",
        *["operand 2, float32 ()"] * 3,  # a sum of the weight: another tensor at each step
    ]
    monkeypatch.setattr(weft, "debug", lambda: weft.strict(False))
    asked.clear()
    assert weft.testing.run(program, mesh=MESH) == on and not asked


def test_what_is_written_to_or_merely_asked_about_is_not_compared() -> None:
    """Ranks may do the latter alone."""
    def program(mesh: Any) -> float:
        x = batch(mesh)
        w = weft.ones(3, 3, mesh=mesh, spec=P()).requires_grad_()
        with weft.debug():
            target, rows = by_rank(mesh, 4, 3), by_rank(mesh, 4, 3)
            torch.add(x, x, out=target)
            rows.copy_(x)
            if mesh.rank == 1:
                assert w.shape == (3, 3) and w.requires_grad and not w.is_sparse and repr(w)
                assert w.stride() == (3, 1) and w.detach().dim() == 2 and w.grad is None
            return (x @ w + target + rows).sum().item()

    assert weft.testing.run(program, mesh=MESH) == [72.0] * 4


def test_a_plain_call_is_untouched_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    intercept = ShardTensor.__torch_function__.__func__  # type: ignore[attr-defined]
    before = intercept.__code__
    with weft.debug():
        assert intercept.__code__ is not before
        with weft.debug():
            pass
        assert intercept.__code__ is not before
    assert intercept.__code__ is before
    assert intercept.__defaults__ == ((), None) and not hasattr(intercept, "__signature__")


def test_ranks_outside_of_the_mesh_compare_nothing() -> None:
    def program(mesh: Any) -> None:
        with weft.debug():
            Net(float(mesh.rank > 1))(batch(mesh)).sum().backward()

    weft.testing.run(program, num_ranks=4, mesh={"dp": 2})


def test_what_is_filled_need_not_be_alike_before() -> None:
    """Memory that nobody has written to yet holds something else on each rank."""
    def program(mesh: Any) -> float:
        w = weft.ShardTensor.from_local(by_rank(mesh, 3, 4), mesh, P(), shape=(3, 4))
        w.requires_grad_()
        with weft.debug(), torch.no_grad():
            torch.nn.init.normal_(w)
            torch.nn.init.constant_(w, 2.0)
            return w.mul_(0.5).sum().item()

    assert weft.testing.run(program, mesh=MESH) == [12.0] * 4

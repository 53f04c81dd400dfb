"""The two passes of zero-bubble schedules: gradients are those of one process, and move once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import weft
from weft import P, ShardTensor
from weft.interop.wrappers import make_stage


class Tied(nn.Module):
    """One weight is used twice, and a hook changes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 2 * grad)
        return x + self.b(torch.relu(self.norm(y)))


class Laid(nn.Module):
    """The inner module gets its input in a layout."""

    def __init__(self, inner: nn.Module, mesh: Any = None, spec: P = P()) -> None:  # noqa: B008
        super().__init__()
        self.inner, self.mesh, self.spec = inner, mesh, spec

    def forward(self, x: Tensor) -> Any:
        if self.mesh is not None:
            x = ShardTensor.from_local(x, self.mesh, P()).redistribute(placements=self.spec)
        return self.inner(x)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 6, bias=False), nn.Tanh())


def made(inner: Any) -> nn.Module:
    torch.manual_seed(0)
    return inner().double()


def inputs() -> list[tuple[Tensor, Tensor]]:
    """Two microbatches, and the gradients of their outputs."""
    torch.manual_seed(1)
    return [tuple(torch.randn(2, 5, 6).double().unbind()) for _ in range(2)]  # type: ignore


def at_once(module: nn.Module) -> list[Any]:
    """The gradients of inputs and weights, by backwards of plain torch or weft."""
    found = []
    for x, grad in inputs():
        module(x.requires_grad_()).backward(grad)
        found.append(x.grad)
    return [*found, *(one.grad for one in module.parameters())]


def in_passes(module: nn.Module, splits: bool) -> list[Any]:
    """The same by first passes, and then second ones."""
    given = [(x.requires_grad_(), grad) for x, grad in inputs()]
    outputs = [module(x) for x, _ in given]
    kept, found = [], []
    for (x, grad), out in zip(given, outputs):
        [dx], groups = stage_backward_input([out], [grad], [x], module.parameters())
        kept.append(groups)
        found.append(dx)
        assert out.grad_fn is None or not splits
    assert all((one.grad is None) == splits for one in module.parameters())
    for groups in kept:
        stage_backward_weight(module.parameters(), groups)
    return [*found, *(one.grad for one in module.parameters())]


HALVES = {"0.weight": P("tp"), "0.bias": P("tp"), "3.weight": P(None, "tp")}
CASES: dict[str, tuple[Any, dict[str, int], Any, P]] = {
    "tensor parallel": (net, {"tp": 2}, HALVES, P()),
    "a rank without weights": (net, {"tp": 3}, HALVES, P()),
    "both": (net, {"dp": 2, "tp": 2}, HALVES, P("dp")),
    "plain weights": (net, {"dp": 2}, None, P("dp")),
    "a rank without rows": (net, {"dp": 4}, {}, P("dp")),
    "a tied weight": (Tied, {"dp": 4}, {}, P("dp")),
}
GATHERED = {"gathered, a rank without rows": (Tied, {"dp": 4}, {"*": P("dp")}, P("dp"))}


@pytest.mark.parametrize("case", [*CASES, *GATHERED])
def test_gradients_are_those_of_one_process(case: str) -> None:
    inner, axes, table, spec = (CASES | GATHERED)[case]
    due = at_once(Laid(made(inner)))

    def stage(mesh: Any) -> nn.Module:
        module = made(inner)
        if table is not None:
            module = weft.distribute_module(module, mesh, shardings=table)
        module = Laid(module, mesh, spec)
        make_stage(lambda *_: None, None, module)
        return module

    def rank(mesh: Any) -> None:
        with weft.explain() as once:
            at_once(stage(mesh))
        with weft.explain() as split:
            found = in_passes(stage(mesh), case in CASES)
        for mine, full in zip(found, due, strict=True):
            torch.testing.assert_close(getattr(mine, "full_tensor", lambda mine=mine: mine)(), full)
        assert sorted((one.op, one.nbytes) for one in split.events) == sorted(
            (one.op, one.nbytes) for one in once.events)

    weft.testing.run(rank, axes)


def test_an_output_that_depends_on_no_input() -> None:
    """Its backward is part of the first pass."""
    def rank(mesh: Any) -> None:
        module = weft.distribute_module(
            nn.Linear(3, 4), mesh, shardings={"weight": P("x"), "bias": P()})
        (x, _), *_ = inputs()
        x = x[:, :3].float().requires_grad_()
        outputs = [module(x).full_tensor().relu(), (module.bias * 3).full_tensor().neg()]
        found = stage_backward_input(
            outputs, [torch.ones(5, 4), torch.ones(4)], [x], module.parameters())
        assert found[1] == [] and found[0][0] is x.grad and x.grad is not None
        stage_backward_weight(module.parameters(), found[1])
        used = (outputs[0].detach() > 0).float()
        torch.testing.assert_close(module.bias.grad.full_tensor(), used.sum(0) - 3)  # type: ignore

    weft.testing.run(rank, {"x": 2})


def test_stages_without_shard_tensors_are_torchs() -> None:
    plain = net()
    x = torch.ones(2, 6, requires_grad=True)
    _, [group, *_] = stage_backward_input(
        [plain(x)], [torch.ones(2, 6)], [x], plain.parameters())
    assert {"params", "intermediates", "grads"} <= set(group)


def test_stages_in_a_v() -> None:
    """Two stages on each rank, in a dry run; no sum is taken twice."""
    def program(_: Any) -> None:
        mesh = weft.init_mesh({"pp": 2, "tp": 2})
        here = mesh.get_local_rank("pp")
        stages: list[Any] = [
            PipelineStage(
                weft.distribute_module(
                    nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6, bias=False)), mesh["tp"],
                    shardings={"0.*": P("tp"), "1.weight": P(None, "tp")}),
                number, 4, torch.device("cpu"), group=mesh.get_group("pp"))
            for number in (here, 3 - here)
        ]
        run = ScheduleZBVZeroBubble(stages, n_microbatches=4, loss_fn=nn.MSELoss())
        run.step(*[torch.ones(4, 6)] * (here == 0), target=torch.ones(4, 6))

    found = weft.dry_run(program, {"pp": 2, "tp": 2})
    counts = Counter(
        one.op for one in found.log.events if not one.op.startswith("torch.distributed"))
    tries = 4 + 1  # one to learn shapes; the input of stage 0 has no gradient
    assert counts == {"full_tensor": 2 * tries, "aten.linear.default": tries}

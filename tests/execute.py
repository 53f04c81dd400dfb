"""A plan carried out by itself, without autograd: what a `Transition` does inside."""

from __future__ import annotations

from torch import Tensor
from torch._C import _DisableAutocast  # type: ignore[attr-defined]

from weft.comm import BoundMesh
from weft.planner import Plan
from weft.transport import traffic
from weft.transport.execute import compile_plan, unshared


def execute(
    plan: Plan, local: Tensor, mesh: BoundMesh, target: BoundMesh | None = None, *,
    copy: bool = False,
) -> Tensor:
    """This rank's part at `plan.src` becomes its part at `plan.dst`.

    A rank outside the mesh gets its (empty) argument back. Between two meshes, a rank outside the
    target's mesh gets an empty tensor. `copy`: never share memory with `local`.
    """
    program, local = compile_plan(plan, mesh, target or mesh), local.detach()
    text = f"{plan.src} -> {plan.dst}"
    with _DisableAutocast(), traffic.moving(text):
        program.report(text, local.element_size())
        out = program.run(local)
    return unshared(out, local) if copy and program.aliases else out

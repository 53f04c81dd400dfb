"""Autograd programs with operands that are terms of a mean: their gradient is a g-th of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.cases.autograd import PROGRAMS
from tests.sharded import MEANS, agree, in_ways
from weft import LayoutError, P, ShardTensor, UnsupportedOpError

ALL = [one for kind in ("autograd", "corners", "functions", "hooks") for one in PROGRAMS[kind]]

REFUSED = {
    "optimizer_in_a_hook", "writes_through_data", "detached_and_cloned", "checked_gradients",
    "gradient_set_by_hand", "second_order_optimizer", "leaves_are_written_without_grad",
    "gradients_set_to_zero", "accumulated_and_scaled", "hooks_that_write",
    "accumulation_hooks_that_write", "saved_and_written_to",
    "function_that_writes", "clipped_norm",
    "clipped_values", "optimizers_in_hooks",
}
"""They write to operands, which cannot become terms of a mean again, or to their gradients."""

RAISE = {
    "in_place_on_a_leaf", "module_with_hooks_that_writes", "function_with_a_wrong_gradient",
    "function_that_writes_to_a_leaf",
}
"""So do these, and raise on plain tensors as well."""


@pytest.mark.filterwarnings("ignore:.*no rule covers it.*:weft.WeftWarning")
@pytest.mark.parametrize("program, way", in_ways(
    [one for one in ALL if one.__name__ not in REFUSED | RAISE], [*MEANS]))
def test_means(program: Any, way: str) -> None:
    agree(program, way)


@pytest.mark.parametrize(
    "program", [one for one in ALL if one.__name__ in REFUSED],
    ids=lambda program: program.__name__,
)
def test_writes_to_means_are_refused(program: Any) -> None:
    with pytest.raises((LayoutError, UnsupportedOpError)):
        agree(program, "mean")


@pytest.mark.parametrize("kind", ["avg", "max", "sum"])
def test_terms_beside_operands_that_cannot_become_such(kind: str) -> None:
    """No candidate asks for a transition that the table lacks."""
    def on_rank(mesh: Any) -> list[tuple[str, list[float]]]:
        terms = torch.arange(6.0).view(2, 3) * (mesh.rank + 1)
        x = ShardTensor.from_local(terms, mesh, P(partial={"x": kind}))
        cut, whole = (weft.ones(2, 3, mesh=mesh, spec=spec) for spec in (P("x"), P()))
        plain = torch.ones(3)
        found = [x + plain, x + whole, x + cut, torch.cat([x, cut]), torch.cat([whole[:1], x]),
                 torch.where(cut > 0, x, whole), torch.nn.functional.linear(x, torch.eye(3), plain)]
        return [one.full_tensor().flatten().tolist() for one in found]

    full = torch.arange(6.0).view(2, 3) * {"avg": 1.5, "max": 2.0, "sum": 3.0}[kind]
    ones = torch.ones(2, 3)
    due = [full + 1, full + 1, full + 1, torch.cat([full, ones]), torch.cat([ones[:1], full]),
           full, full + 1]
    assert weft.testing.run(on_rank, mesh={"x": 2}) == [[one.flatten().tolist() for one in due]] * 2

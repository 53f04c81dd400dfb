"""Recurrent networks along a sharded sequence: the state goes from rank to rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft import Layout, P

SIZES = (2, 0, 5, 1)


def modules(name: str) -> nn.Module:
    torch.manual_seed(0)
    made = {"lstm": nn.LSTM(3, 4, bidirectional=True), "gru": nn.GRU(3, 4, 2, batch_first=True),
            "projected": nn.LSTM(3, 4, proj_size=2)}
    return made[name].double()


def used(mesh: Any, name: str, only_state: bool) -> list[Tensor]:
    module = modules(name)
    at = 1 if name == "gru" else 0
    shape = (2, 8, 3) if at else (8, 2, 3)
    x = torch.randn(shape, dtype=torch.float64)
    if mesh is not None:
        weft.distribute_module(module, mesh)
        sizes = {at: SIZES}
        x = weft.distribute_tensor(x, mesh, P()).redistribute(
            Layout(mesh, shape, P(*[None] * at, "x"), sizes=sizes))
    x.requires_grad_()
    out, state = module(x)
    state = state[0] if isinstance(state, tuple) else state
    (state if only_state else out).sin().sum().backward()
    found = [out, state, x.grad, *[one.grad for one in module.parameters()]]
    return [one.detach() if mesh is None else one.detach().full_tensor() for one in found]


@pytest.mark.parametrize("only_state", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru", "projected"])
def test_a_ragged_sequence_with_an_empty_shard(name: str, only_state: bool) -> None:
    expected = used(None, name, only_state)
    for found in weft.testing.run(lambda mesh: used(mesh, name, only_state), mesh={"x": 4}):
        for mine, due in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, due)


def test_what_is_sent_does_not_depend_on_the_length() -> None:
    def sent(mesh: Any, length: int) -> tuple[int, str]:
        module = nn.LSTM(3, 4)
        weft.distribute_module(module, mesh)
        x = weft.ones(length, 2, 3, mesh=mesh, spec=P("x"))
        with weft.explain() as log:
            out = module(x)[0]
        return log.nbytes, str(out.sharding)

    def both(mesh: Any) -> tuple[tuple[int, str], ...]:
        return sent(mesh, 16), sent(mesh, 64)

    for short, long in weft.testing.run(both, mesh={"x": 4}):
        assert short[0] == long[0] > 0
        assert long[1] == "[64@x, 2, 4]"

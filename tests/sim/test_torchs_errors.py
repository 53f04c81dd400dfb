"""What torch refuses is refused in torch's words, with layouts and without weft's frames."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from weft import P

X = torch.ones(4, 6)

CALLS: dict[str, tuple[Any, str]] = {
    "matmul": (lambda x, y: x @ y, "__matmul__ of f32[4@x, 6], f32[4, 6]"),
    "linear": (lambda x, y: F.linear(x, torch.ones(3, 5)),
               "linear of f32[4@x, 6], plain f32[3, 5]"),
    "add": (lambda x, y: x + y[:3], "__add__ of f32[4@x, 6], f32[3, 6]"),
    "cat": (lambda x, y: torch.cat([x, y[:, :2]]), "cat of f32[4@x, 6], f32[4, 2]"),
    "view": (lambda x, y: x.view(5, 5), "view of f32[4@x, 6]"),
    "layer_norm": (lambda x, y: F.layer_norm(x, (5,)), "layer_norm of f32[4@x, 6]"),
    "conv": (lambda x, y: F.conv1d(x[None], torch.ones(2, 3, 1)),
             "conv1d of f32[1, 4@x, 6], plain f32[2, 3, 1]"),
    "sum": (lambda x, y: x.sum(3), "sum of f32[4@x, 6]"),
    "many": (lambda x, y: torch.stack([x] * 9 + [y[0]]),
             f"stack of {', '.join(['f32[4@x, 6]'] * 8)}, ..."),
}


@pytest.mark.parametrize("name", CALLS)
def test_layouts_are_shown_and_inner_frames_are_not(name: str) -> None:
    call, said = CALLS[name]
    with pytest.raises((RuntimeError, IndexError)) as plain:
        call(X, X)

    def on_rank(mesh: Any) -> None:
        x, y = weft.distribute_tensor(X, mesh, P("x")), weft.distribute_tensor(X, mesh, P())
        for _ in range(2):
            with pytest.raises(plain.type) as told:
                call(x, y)
            assert not isinstance(told.value, weft.WeftError)
            assert told.value.__notes__ == [f"  in {said} on Mesh({{'x': 2}})"]
            files = [frame.filename for frame in traceback.extract_tb(told.tb)]
            inner = [file for file in files if "/weft/" in file]
            assert len(inner) <= 4
            assert "_meta_registrations" not in "".join(files)
            assert told.value.__suppress_context__

    weft.testing.run(on_rank, mesh={"x": 2})


def test_frames_of_a_users_own_function_stay() -> None:
    def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
        return deeper(x) * by

    def deeper(x: torch.Tensor) -> torch.Tensor:
        return x.view(5, 5)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with pytest.raises(RuntimeError) as told:
            scaled(x, 2)
        assert "deeper" in [frame.name for frame in traceback.extract_tb(told.tb)]

    weft.register_rule(scaled, "a b! -> a b!")
    try:
        weft.testing.run(on_rank, mesh={"x": 2})
    finally:
        weft.unregister_rule(scaled)


def test_debug_mode_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.comm.PROCESS.on", True)

    def on_rank(mesh: Any) -> None:
        x = weft.distribute_tensor(X, mesh, P("x"))
        with pytest.raises(RuntimeError) as told:
            x @ x
        assert any("trace/capture" in f.filename for f in traceback.extract_tb(told.tb))

    weft.testing.run(on_rank, mesh={"x": 1})

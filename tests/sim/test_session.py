"""Simulated ranks that stay between calls, and what notebooks show of weft's values."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft import Layout, Mesh, P
from weft.errors import CommunicationError

GRID = {"dp": 2, "tp": 2}


def test_ranks_keep_variables_tensors_and_random_numbers() -> None:
    def once(mesh: Any) -> list[Any]:
        torch.manual_seed(5)
        x = weft.randn(5, 3, mesh=mesh, spec=P("dp")).requires_grad_()
        y = torch.rand_like(x) * x
        y.sum().backward()
        return [y.full_tensor().tolist(), x.grad.full_tensor().tolist()]  # type: ignore[union-attr]

    ranks = weft.testing.session(GRID)
    ranks.exec("torch.manual_seed(5)\nx = weft.randn(5, 3, spec=P('dp')).requires_grad_()")
    before = torch.get_rng_state()
    assert weft.testing.run(lambda mesh: mesh.here, 2) == [(0,), (1,)]
    ranks.exec("y = torch.rand_like(x) * x\ny.sum().backward()")
    found = ranks.exec("[y.full_tensor().tolist(), x.grad.full_tensor().tolist()]")
    assert found == weft.testing.run(once, mesh=GRID)
    assert torch.get_rng_state().equal(before)
    assert repr(ranks) == "session(Mesh({'dp': 2, 'tp': 2}), x, y)"
    assert ranks["x"][2].to_local().shape == (2, 3)
    assert ranks.run(lambda mesh: mesh.here[1]) == [0, 1, 0, 1]


def test_what_ranks_print_is_shown_together(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = weft.testing.session(GRID)
    assert ranks.exec("print('a', rank % 2)\nmesh.size()\nprint('b')") is None
    assert capsys.readouterr().out == "ranks 0,2:\na 0\nb\nranks 1,3:\na 1\nb\n"
    assert repr(ranks.exec("width + (rank > 2)", {"width": 7})) == "ranks 0-2: 7\nrank 3: 8"
    assert repr(ranks.exec("mesh.size()")) == "4"


def test_names_that_are_given_may_change_and_own_ones_stay() -> None:
    ranks = weft.testing.session({"x": 2})
    ranks.exec("n = m + rank", {"m": 1})
    assert ranks.exec("n, m", {"m": 5, "n": 9}) == [(1, 5), (2, 5)]
    assert repr(ranks) == "session(Mesh({'x': 2}), n)"


def test_ranks_go_on_after_an_error() -> None:
    ranks = weft.testing.session(GRID)
    with pytest.raises(ZeroDivisionError) as error:
        ranks.exec("a = 1\nx = weft.ones(4, spec=P(('dp', 'tp')))\nx.sum().item()\na / (rank - 2)")
    assert error.value.__notes__ == ["on simulated rank 2 of 4"]
    with pytest.raises(CommunicationError, match=r"at ranks\[2\]:1"):
        ranks.exec("x.full_tensor() if rank else x.sum().item()")
    assert ranks.exec("a, x.sum().item()") == [(1, 4.0)] * 4
    with pytest.raises(SyntaxError):
        ranks.exec("a +")


def test_a_rank_that_still_computes_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = weft.testing.session({"x": 2})
    release = threading.Event()
    monkeypatch.setattr("weft.comm.baton.STOP_S", 0.05)

    def waits(mesh: Any) -> None:
        baton.caller.gate = _Interrupted(baton.caller.gate)
        release.wait()

    baton = ranks._ranks.baton
    with pytest.raises(KeyboardInterrupt):
        ranks.run(waits)
    with pytest.raises(CommunicationError, match="still computes"):
        ranks.run(lambda mesh: mesh.size())
    release.set()


class _Interrupted:
    """A lock whose first wait is interrupted, as by Ctrl-C."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.waits = lock, 0

    def acquire(self, **options: Any) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        return self.lock.acquire(**options)

    def release(self) -> None:
        self.lock.release()


def test_notebooks_show_pictures_and_columns() -> None:
    def program(mesh: Any) -> list[str]:
        x = weft.ones(4, 6, mesh=mesh, spec=P("dp"))
        with weft.explain() as log:
            x.sum().item()
        module = weft.distribute_module(nn.Linear(3, 4), mesh, shardings={"weight": P("tp")})
        report = weft.nn.report(module)
        assert repr(log) == "Log(1 collective, 4 bytes received)"
        assert repr(report) == "Report(2 tensors on Mesh(dp=2, tp=2), 64 bytes)"
        return [each._repr_html_() for each in (x, log, report)]  # type: ignore[attr-defined]

    tensor, log, report = weft.testing.run(program, mesh=GRID)[2]
    assert "rank 2 holds [2:4, 0:6]" in tensor and "f32[4@dp, 6]" in tensor.partition("<svg")[2]
    assert log.startswith("<pre>op ") and "P(sum)-&gt;I" in log
    assert report.startswith("<pre>2 parameters") and report.endswith("</pre>")
    found = weft.dry_run(program, mesh=GRID)
    assert found._repr_html_().startswith("<pre>rank 0 of 4 (dp=2, tp=2), the program\n")
    mesh = Mesh(GRID)
    layout = Layout(mesh, (5, 6), P("dp"))
    plan = weft.plan(layout, Layout(mesh, (5, 6), P("tp")), itemsize=4)
    assert repr(plan) == "Plan([5@dp, 6] -> [5@tp, 6], 1 step, 120 bytes)"
    assert layout._repr_html_().startswith("<svg")
    assert plan._repr_html_().startswith("<pre>[5@dp, 6] -&gt;") and "<svg" in plan._repr_html_()

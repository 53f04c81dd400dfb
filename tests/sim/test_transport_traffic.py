"""The traffic log: what moved, for which call, forward and backward."""

from __future__ import annotations

import threading

import torch

from tests.execute import execute
from weft.comm import BoundMesh, run_simulated
from weft.core import Layout, Mesh, P
from weft.planner import plan
from weft.transport import Transition, traffic
from weft.transport.traffic import Event, Log

MESH = Mesh({"dp": 2, "tp": 2})
WHOLE = Layout(MESH, (4, 2))
CUT = Layout(MESH, (4, 2), P("dp"))


def gather_and_back(mesh: BoundMesh) -> Log:
    move = Transition(mesh, CUT, WHOLE, dst_varying=frozenset({0}))
    x = torch.ones(2, 2, requires_grad=True)
    with traffic.record() as log:
        with traffic.label("aten.mm.default", "operand 0 of a contraction", "train.py:7"):
            out = move(x)
        out.sum().backward()
    move(x.detach())
    return log


def test_events_name_the_call_both_ways() -> None:
    for log in run_simulated(gather_and_back, 4, MESH):
        assert log.events == [
            Event("aten.mm.default", "train.py:7", "S(0)->R on dp", ("dp",), "AllGather", 16,
                  "forward", "operand 0 of a contraction"),
            Event("aten.mm.default", "train.py:7", "P(sum)->S(0) on dp", ("dp",),
                  "ReduceScatter", 16, "backward", "gradient of S(0)->R on dp"),
        ]
        assert log.by_axis_and_op() == {(("dp",), "aten.mm.default"): 32}


def test_a_log_prints_as_a_table() -> None:
    text = str(run_simulated(gather_and_back, 4, MESH)[0])
    assert text == "\n".join([
        "op               line        transition          over  collective        bytes  direction"
        "  reason",
        "aten.mm.default  train.py:7  S(0)->R on dp       dp    AllGather      16 bytes  forward  "
        "  operand 0 of a contraction",
        "aten.mm.default  train.py:7  P(sum)->S(0) on dp  dp    ReduceScatter  16 bytes  backward "
        "  gradient of S(0)->R on dp",
        "2 collectives, 32 bytes received",
        "S: sharded, S(0) along dim 0; I: replicated, with its gradient; R: replicated, its "
        "gradient partial; P: partial",
    ])
    assert str(Log()).endswith("\n0 collectives, 0 bytes received")


def test_nothing_is_recorded_by_others_or_after() -> None:
    def fn(mesh: BoundMesh) -> int:
        move = Transition(mesh, CUT, WHOLE)
        if mesh.here[1] == 0:  # some ranks record, the others do not
            with traffic.record() as log:
                move(torch.ones(2, 2))
        else:
            log = Log()
            move(torch.ones(2, 2))
        move(torch.ones(2, 2))
        return len(log.events)

    assert run_simulated(fn, 4, MESH) == [1, 0, 1, 0]
    assert not traffic.STATE.on


def test_logs_nest_and_local_steps_are_not_in_them() -> None:
    def fn(mesh: BoundMesh) -> tuple[int, int]:
        with traffic.record() as outer:
            execute(plan(CUT, WHOLE), torch.ones(2, 2), mesh)
            with traffic.record() as inner:
                execute(plan(WHOLE, CUT), torch.ones(4, 2), mesh)
                execute(plan(CUT, WHOLE), torch.ones(2, 2), mesh)
        return len(outer.events), len(inner.events)

    assert run_simulated(fn, 4, MESH) == [(2, 1)] * 4


def test_backward_in_a_thread_of_autograd_reaches_the_log() -> None:
    mesh = Mesh({"a": 1, "b": 1})  # nothing waits for another rank: any thread may run it

    def fn(bound: BoundMesh) -> list[tuple[str, str, str]]:
        def later() -> None:
            with traffic.resume(kept, "gradient of x"):
                traffic.emit("t", ("a",), "AllReduce", 4)

        with traffic.record() as log:
            with traffic.label("op"):
                kept = traffic.note()
            thread = threading.Thread(target=later)
            thread.start()
            thread.join()
        later()  # the log is closed
        return [(event.op, event.direction, event.reason) for event in log.events]

    assert run_simulated(fn, 1, mesh) == [[("op", "backward", "gradient of x")]]


def test_bytes_count_the_dtype_and_this_rank() -> None:
    uneven = Layout(MESH, (4, 2), P("dp"), sizes={0: (1, 3)})

    def fn(mesh: BoundMesh) -> int:
        rows = uneven.local_shape(mesh.rank)[0]
        with traffic.record() as log:
            execute(plan(uneven, WHOLE), torch.ones(rows, 2, dtype=torch.bfloat16), mesh)
        return log.nbytes

    assert run_simulated(fn, 4, MESH) == [12, 12, 4, 4]

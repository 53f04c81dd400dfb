"""weft.cache_info(): what is a hit and what is a miss; threads; clearing; bounds."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import weft
from tests.sharded import Make, agree
from weft import P
from weft.tensor.trace.capture import capture
from weft.tensor.trace.derivatives import differentiated

X = torch.arange(1.0, 31.0, dtype=torch.float64).view(5, 6) / 8


def on_one(fn: Callable[[Any, Any], Any]) -> Any:
    """`fn(mesh, x)` on a world of one rank."""
    return weft.testing.run(
        lambda mesh: fn(mesh, weft.distribute_tensor(X, mesh, P("x"))), mesh={"x": 1}
    )[0]


def num_misses(*calls: Callable[[], Any]) -> list[int]:
    """How many recipes each call has built."""
    found = []
    for call in calls:
        before = weft.cache_info()["recipes"].misses
        call()
        found.append(weft.cache_info()["recipes"].misses - before)
    return found


def in_mode(mode: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with mode:
            call()

    return run


def with_default_dtype(dtype: torch.dtype, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            call()
        finally:
            torch.set_default_dtype(before)

    return run


def twice(*tensors: Any) -> list[Callable[[], Any]]:
    return [lambda y=y: y * 2 for y in tensors]


def autocast(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype=dtype)


APART: dict[str, Callable[[Any], list[Callable[[], Any]]]] = {
    "1, True, 1.0, 1j": lambda x: [lambda k=k: x + k for k in (1, True, 1.0, 1j)],
    "0.0, -0.0": lambda x: [lambda k=k: x.clamp(min=k) for k in (0.0, -0.0)],
    "integers": lambda x: [lambda k=k: x.sum(k) for k in (0, 1, (0, 1), None)],
    "dtype": lambda x: [lambda d=d: x.sum(dtype=d) for d in (torch.float32, torch.float64, None)],
    "slices": lambda x: [lambda s=s: x[s] for s in (
        slice(1, 3), slice(1, 4), slice(1, 4, 2), (Ellipsis, slice(1, 3)), [0, 2])],
    "strings": lambda x: [
        lambda s=s: torch.div(x, x, rounding_mode=s) for s in ("floor", "trunc", None)],
    "grad mode": lambda x: [lambda: x * 2, in_mode(torch.no_grad(), lambda: x * 2)],
    "requires_grad": lambda x: twice(x, x.clone().requires_grad_()),
    "autocast": lambda x: [
        lambda: x @ x.t(), in_mode(autocast(torch.bfloat16), lambda: x @ x.t()),
        in_mode(autocast(torch.float16), lambda: x @ x.t())],
    "default dtype": lambda x: [
        lambda: x * 1.5, with_default_dtype(torch.float64, lambda: x * 1.5),
        with_default_dtype(torch.bfloat16, lambda: x * 1.5)],
    "layout": lambda x: twice(x, x.redistribute(placements=[weft.Shard(1)])),
    "strides": lambda x: twice(x, x.t(), x.reshape(6, 5)),
    "plain strides": lambda x: [
        lambda: x + torch.ones(5, 6), lambda: x + torch.ones(6, 5).t()],
    "list or tuple": lambda x: [lambda: torch.cat([x, x]), lambda: torch.cat((x, x))],
    "length of a list": lambda x: [lambda: torch.cat([x, x]), lambda: torch.cat([x, x, x])],
    "numpy or Python": lambda x: [
        lambda: x * 2, lambda: x * np.int64(2), lambda: x * np.float32(2)],
    "keywords": lambda x: [lambda: x.sum(0, True), lambda: x.sum(dim=0, keepdim=True)],
}
"""Calls of which each is decided by itself."""

TOGETHER: dict[str, Callable[[Any], list[Callable[[], Any]]]] = {
    "rates": lambda x: [lambda k=k: x * k for k in (0.1, 0.2, 1e-9, 3e8, -4.5)],
    "numpy rates": lambda x: [lambda k=k: x * np.float64(k) for k in (0.1, 0.2, -0.3)],
    "narrow numpy rates": lambda x: [lambda k=k: x * np.float32(k) for k in (0.1, 0.2, -0.3)],
    "rates in keywords": lambda x: [
        lambda k=k: torch.add(x, x, alpha=k) for k in (0.1, 0.2, -0.3)],
    "every NaN": lambda x: [lambda: x.masked_fill(x > 1, float("nan")) for _ in range(3)],
    "every NaN of numpy": lambda x: [lambda: x * np.float64("nan") for _ in range(3)],
    "other tensors": lambda x: [lambda k=k: x + torch.full((6,), float(k)) for k in range(3)],
    "other results": lambda x: [lambda k=k: (x + k / 3).mul(x * (k + 0.5)) for k in range(1, 4)],
    "0-dim numbers": lambda x: [lambda k=k: x * torch.tensor(k) for k in (0.5, 1.5)],
    "no_grad and inference mode": lambda x: [
        in_mode(torch.no_grad(), lambda: x * 2), in_mode(torch.inference_mode(), lambda: x * 2)],
    "fresh slices": lambda x: [lambda: x[1:3, ..., None] for _ in range(2)],
    "fresh sizes": lambda x: [lambda: x.view(torch.Size([6, 5])) for _ in range(2)],
    "generator": lambda x: [lambda: F.dropout(x, 0.5, training=False) for _ in range(2)],
}
"""Calls of which all but the first are hits."""


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@pytest.mark.parametrize("name", APART)
def test_what_means_something_else_is_decided_by_itself(name: str) -> None:
    def program(mesh: Any, x: Any) -> tuple[list[int], list[int]]:
        calls = APART[name](x)
        return num_misses(*calls), num_misses(*calls)

    first, again = on_one(program)
    assert all(first) and not any(again)


@pytest.mark.filterwarnings("ignore::weft.WeftWarning")
@pytest.mark.parametrize("name", TOGETHER)
def test_what_only_flows_through_is_a_hit(name: str) -> None:
    def program(mesh: Any, x: Any) -> list[int]:
        return num_misses(*TOGETHER[name](x))

    first, *later = on_one(program)
    assert first and not any(later)


def test_meshes_do_not_share_recipes() -> None:
    def on_rank(mesh: Any) -> list[int]:
        other = weft.init_mesh({"y": 1, "x": 1})
        x, y = (weft.distribute_tensor(X, one, P("x")) for one in (mesh, other))
        return num_misses(lambda: x * 2, lambda: y * 2, lambda: x * 2, lambda: y * 2)

    assert weft.testing.run(on_rank, mesh={"x": 1}) == [[1, 1, 0, 0]]


def signs_of_zero(make: Make) -> Any:
    x, seen = make(X, False), []
    for k in (0.0, -0.0, 0.0, float("nan"), float("inf"), -float("inf"), float("nan")):
        seen += [torch.full_like(x, k), 1 / (x * 0 + k), x * k, x.masked_fill(x > 1, k),
                 torch.copysign(x, k), F.leaky_relu(-x, k)]
    for c in (complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0)):
        full = torch.full_like(x, c, dtype=torch.complex128)
        seen += [1 / full.real, 1 / full.imag]
    return seen


@pytest.mark.parametrize("way", ["uneven", "replicated"])
def test_zeros_of_both_signs(way: str) -> None:
    agree(signs_of_zero, way)


def test_arguments_that_cannot_be_hashed() -> None:
    def program(mesh: Any, x: Any) -> list[int]:
        index = np.array([0, 2, 4])
        due = X[index]
        for _ in range(3):
            assert torch.equal(x[index].full_tensor(), due)
            index[0] += 1
            due = X[index]
        kept = weft.cache_info()["recipes"].currsize
        x[index]
        return [weft.cache_info()["recipes"].currsize - kept]

    assert on_one(program) == [0]


def test_info_counts_each_call_once() -> None:
    def program(mesh: Any, x: Any) -> Any:
        weft.cache_clear()
        for k in range(10):
            x * (k + 0.5)
            F.leaky_relu(x, 0.25)  # its float is baked in
            torch.stack([x, x])
            x.is_complex(), x.shape, x.detach(), x.t().is_contiguous()
        return weft.cache_info()

    info = on_one(program)
    # Attributes are constants of the meta from their second call on.
    assert (info["recipes"].misses, info["recipes"].hits) == (4, 4 * 9 + 2 * 9), info
    assert info["structures"].misses == 4 and info["plans"].maxsize
    assert list(info) == ["recipes", "structures", "traces", "metas", "transitions", "plans"]
    head, *rows = repr(info).splitlines()
    assert head.split() == ["kind", "hits", "misses", "maxsize", "currsize"]
    assert [row.split()[0] for row in rows] == list(info)


def test_clearing_changes_nothing_but_the_time() -> None:
    def train(mesh: Any, clear: Callable[[int], bool]) -> list[Any]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        w = weft.distribute_tensor(X[:3] / 64, mesh, P(None, "x")).requires_grad_()
        seen = []
        for step in range(6):
            if clear(step):
                weft.cache_clear()
            loss = F.softmax(F.linear(x, w), -1).square().mean()
            if clear(step + 1):
                weft.cache_clear()  # between forward and backward
            loss.backward()
            with torch.no_grad():
                w -= w.grad * 0.1 * step
            w.grad = None
            seen.append((loss.item(), w.full_tensor().tolist()))
        return seen

    due = weft.testing.run(lambda mesh: train(mesh, lambda step: False), mesh={"x": 2})
    assert due == weft.testing.run(lambda mesh: train(mesh, lambda step: step % 2 == 0),
                                   mesh={"x": 2})
    one_rank = weft.testing.run(
        lambda mesh: train(mesh, lambda step: mesh.rank == 1 and step % 3 == 1), mesh={"x": 2}
    )
    assert one_rank == due


def test_recipes_of_a_mesh_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.tensor.meta.MAX_RECIPES_OF_MESH", 64)

    def program(mesh: Any, x: Any) -> int:
        most = 0
        for k in range(1, 40):
            y = x.reshape(-1)[: k % 30 + 1] * 2
            assert torch.equal((y + k).full_tensor(), X.reshape(-1)[: k % 30 + 1] * 2 + k)
            most = max(most, sum(len(meta.recipes) for meta in mesh.cache["metas"].values()))
        return most

    assert 32 <= on_one(program) <= 65


def test_threads_share_recipes() -> None:
    """Of one rank: no call fails, no result is another one's, no count is lost."""
    num_threads, num_steps = 6, 60

    def program(mesh: Any, x: Any) -> None:
        weft.cache_clear()
        failures: list[BaseException] = []
        start = threading.Barrier(num_threads)

        def work(me: int) -> None:
            try:
                start.wait()
                for step in range(num_steps):
                    rows = step % 7 + 1
                    full = torch.full((rows, 4), float(me + step))
                    mine = weft.distribute_tensor(full, mesh, P("x"), src_data_rank=None)
                    out = (mine * (me + 0.5)).sum(1) + mine[0, 0]
                    due = (full * (me + 0.5)).sum(1) + full[0, 0]
                    assert torch.equal(out.to_local(), due)
                    assert torch.equal(F.leaky_relu(-mine, me + 0.25).to_local(),
                                       F.leaky_relu(-full, me + 0.25))
                    if step % 20 == me:
                        weft.cache_clear() if me == 0 else weft.cache_info()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(me,)) for me in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        program(weft.init_mesh({"x": 1}), None)
    finally:
        sys.setswitchinterval(interval)


def test_threads_lose_no_count() -> None:
    mesh = weft.init_mesh({"x": 1})
    x = weft.distribute_tensor(X, mesh, P("x"))
    x * 2
    weft.cache_clear()
    x * 2
    threads = [threading.Thread(target=lambda: [x * 2 for _ in range(500)]) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    info = weft.cache_info()["recipes"]
    assert (info.hits, info.misses) == (8 * 500, 1)


def test_changing_sizes_leave_little_behind() -> None:
    """The benchmark's 10,000 steps in small: tables fill up, and stay."""
    def program(mesh: Any, _: Any) -> list[int]:
        sizes = []
        for step in range(150):
            x = weft.ones(step % 50 + 1, 4, mesh=mesh, spec=P("x"))
            (x * (step + 0.5)).softmax(1).sum()
            if step in (60, 149):
                info = weft.cache_info()
                sizes.append(info["recipes"].currsize + info["metas"].currsize)
        return sizes

    early, late = on_one(program)
    assert late <= early


def test_clearing_leaves_nothing_behind() -> None:
    """A transition that is made anew takes the place of the old one at the leaves it serves."""
    def on_rank(mesh: Any) -> list[int]:
        x = weft.distribute_tensor(X, mesh, P("x"))
        w = weft.distribute_tensor(X[0], mesh, P()).requires_grad_()
        found = []
        for _ in range(4):
            (x * w).sum().backward()
            w.grad = None
            weft.cache_clear()
            gc.collect()
            address = w.to_local().data_ptr()
            found.append(sum(type(one) is torch.Tensor and one.device.type == "cpu"
                             and one.data_ptr() == address for one in gc.get_objects()))
        return found

    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        assert found == found[:1] * 4


def test_clearing_leaves_nothing_of_layouts_that_are_gone() -> None:
    """Where cuts follow from data, each step has new layouts, which the planner and metas keep."""
    def on_rank(mesh: Any) -> list[Any]:
        x, comm, wait = weft.distribute_tensor(X, mesh, P("x")), mesh.comm((0,)), torch.zeros(2)
        found = []
        for first in (0, 1, 2, 4):
            of_data = (0, first, 5)
            y = (x.redistribute(mesh, x.sharding.recut(0, 5, of_data)) * 2).requires_grad_()
            y.redistribute(placements=P()).sum().backward()
            del y
            comm.all_reduce(wait, "sum")
            weft.cache_clear()
            gc.collect()
            left = [one for one in gc.get_objects()
                    if type(one) is weft.Layout and of_data in one.cuts]
            found.append((weft.cache_info()["metas"].currsize, len(left)))
            del left
            comm.all_reduce(wait, "sum")
        return found

    for found in weft.testing.run(on_rank, mesh={"x": 2}):
        assert found == [(found[0][0], 0)] * 4


def test_what_was_asked_of_derivatives_leaves_nothing_behind() -> None:
    """Of ops whose gradient has gradients, and is computed of results that are saved."""
    def metas() -> int:
        gc.collect()
        return sum(type(one) is torch.Tensor and one.is_meta for one in gc.get_objects())

    before = metas()
    for function in (torch.exp, torch.tanh, F.gelu):
        given = torch.empty(3, 5, device="meta")
        trace = capture(function, (given,), {}, [given])
        assert differentiated(trace.ops[0], trace.metas, [0]) == ((0,),)
        del given, trace
    assert metas() == before

"""Calls that no recipe is kept for: the first of its kind, and a new size of a known structure.

A first-time miss runs on a mesh and sizes never seen before, after every cache of the library
was emptied; a new size runs where three other sizes went before. Both record a gradient.
What is shown is what the miss adds: the call's time less that of the same call again.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import weft
from bench import world
from bench.timing import Figure, Row, once
from bench.world import Lay, lay_dtensor, lay_weft

MISS_MS, NEW_SIZE_US = 5.0, 150.0
WIDTH = 8

Call = Callable[..., Any]

CALLS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "linear": (F.linear, ("x", "w", "b")),
    "add": (torch.add, ("x", "y")),
    "view": (lambda x: x.view(-1, 2, WIDTH // 2), ("x",)),
    "softmax": (lambda x: F.softmax(x, -1), ("x",)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b), ("x", "b", "c")),
    "cross_entropy": (F.cross_entropy, ("x", "t")),
    "softmax, sharded": (lambda z: F.softmax(z, -1), ("z",)),
    "layer_norm, sharded": (lambda z: F.layer_norm(z, z.shape[-1:]), ("z",)),
    "var, sharded": (lambda z: z.var(-1), ("z",)),
    "cumsum, sharded": (lambda z: z.cumsum(-1), ("z",)),
    "sdpa": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), ("q",)),
}
"""The call, and which operands it takes: x, y, q, t are sharded by rows, z along its rows (there a
kernel communicates), w, b, c are whole."""

def operands(rows: int, lay: Lay) -> dict[str, Tensor]:
    """Operands with `rows` rows on this rank; `lay(local, dim)` makes the sharded tensor."""
    local = {
        "x": torch.randn(rows, WIDTH), "y": torch.randn(rows, WIDTH),
        "q": torch.randn(rows, 2, 4, WIDTH), "t": torch.randint(WIDTH, (rows,)),
        "z": torch.randn(rows, WIDTH), "w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH),
        "c": torch.randn(WIDTH),
    }
    dims = dict.fromkeys("xyqt", 0) | {"z": 1}
    laid = {name: lay(one, dims.get(name)) for name, one in local.items()}
    return {
        name: one.requires_grad_() if one.dtype.is_floating_point else one
        for name, one in laid.items()
    }


def empty_caches() -> None:
    """Empty every cache of the library."""
    weft.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("weft."):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


_sizes = itertools.count(5)
_names = itertools.count()


def _never_seen() -> Lay:
    empty_caches()
    return lay_weft(
        weft.init_mesh({f"axis{next(_names)}": world.NUM_RANKS}, device_type="cpu"))


def _dtensor_never_seen() -> Lay:
    return lay_dtensor(
        init_device_mesh("cpu", (world.NUM_RANKS,), mesh_dim_names=(f"axis{next(_names)}",)))


def _added(name: str, lay_of: Callable[[], Lay], num: int) -> float:
    """Microseconds that the first of two equal calls takes longer than the second, in the median;
    each time of new sizes."""
    call, names = CALLS[name]
    found = []
    for _ in range(3 + num):  # the first three warm up
        have = operands(next(_sizes), lay_of())
        run = partial(call, *[have[name] for name in names])
        first = once(run)
        found.append(first - once(run))
    return statistics.median(found[3:]) / 1e3


def _row(name: str, num_rounds: int) -> Row:
    num = max(5, num_rounds)
    miss = _added(name, _never_seen, num)
    new = _added(name, lambda: lay_weft(world.weft_line()), num)
    times = {"weft, first": miss, "weft, new size": new}
    if name != "sdpa":  # DTensor has no strategy for it on a CPU
        times["DTensor, first"] = _added(name, _dtensor_never_seen, num)
        times["DTensor, new size"] = _added(name, lambda: lay_dtensor(world.line()), num)
    return Row(name, times, [
        Figure("first-time miss", miss / 1e3, MISS_MS, "ms"),
        Figure("new size", new, NEW_SIZE_US, "µs"),
    ])


def measure(num_rounds: int) -> list[Row]:
    return [_row(name, num_rounds) for name in CALLS]

"""Every program of the autograd tests, on whatever ranks there are."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

import weft
from tests.sharded import data, layout_for, same
from tests.sim import (
    test_autograd_corners,
    test_late_hooks,
    test_own_autograd,
    test_tensor_autograd,
    test_tensor_functions,
    test_tensor_hooks,
)
from weft import Layout, P, WeftWarning

PROGRAMS: dict[str, list[Any]] = {
    "autograd": test_tensor_autograd.PROGRAMS,
    "corners": test_autograd_corners.PROGRAMS,
    "functions": test_tensor_functions.PROGRAMS,
    "hooks": test_tensor_hooks.PROGRAMS,
    "late hooks": test_late_hooks.PROGRAMS,
    "rules": test_own_autograd.PROGRAMS,
}

WAYS: dict[str, Any] = {
    "both": P("dp", "tp"),
    "half partial": P("dp", partial={"tp": "sum"}),
    "ragged": (2, 0, 3, 0),
}

def differences(mesh: Any, kind: str, way: str) -> list[str]:
    """Which programs do not do on these ranks what they do on plain tensors."""
    found = []
    with ExitStack() as registered, warnings.catch_warnings():
        warnings.simplefilter("ignore", WeftWarning)  # fallbacks are tested elsewhere
        for op, pattern, options in test_own_autograd.RULES if kind == "rules" else ():
            weft.register_rule(op, pattern, **options)
            registered.callback(weft.unregister_rule, op)
        for program in PROGRAMS[kind]:
            said = difference(mesh, program, WAYS[way])
            if said:
                found.append(f"{program.__name__}: {said}")
    return found


def difference(mesh: Any, program: Any, way: Any) -> str | None:
    """What the program gives here that it does not give on plain tensors."""
    def make(full: Tensor, grad: bool = True) -> Tensor:
        layout = _layout(mesh, full, way)
        made = weft.distribute_tensor(full, mesh, layout, src_data_rank=None)
        return made.requires_grad_(grad and full.is_floating_point())

    def plain(full: Tensor, grad: bool = True) -> Tensor:
        return full.clone().requires_grad_(grad and full.is_floating_point())

    expected, got = (_outcome(lambda make=make: data(program(make))) for make in (plain, make))
    try:
        if isinstance(expected, Exception) or isinstance(got, Exception):
            return None if type(expected) is type(got) else f"{got!r} instead of {expected!r}"
        same(got, expected, "result")
    except AssertionError as error:
        return str(error)
    return None


def _layout(mesh: Any, full: Tensor, way: Any) -> Layout:
    if isinstance(way, tuple):
        whole = not full.ndim or len(full) != sum(way)
        spec = P() if whole else P(tuple(mesh.axis_names))
        return Layout(mesh, tuple(full.shape), spec, sizes={} if whole else {0: way})
    return layout_for(mesh, tuple(full.shape), way)


def _outcome(run: Any) -> Any:
    try:
        return run()
    except Exception as error:
        return error
    finally:
        torch.set_grad_enabled(True)

"""`weft.strict()`, `weft.explain()`, `weft.debug()`: the modes that a communicating recipe checks.

The first two are per thread, `debug` is per rank. A recipe that communicates nothing never looks
here.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import _symbolic_trace as fx

from weft.comm import PROCESS, source_line, this_world, user_frame
from weft.core import Layout
from weft.core.scopes import Inside, block, setting
from weft.errors import StrictError, UnsupportedOpError, WeftWarning
from weft.transport import traffic
from weft.transport.nodes import transforms
from weft.transport.transition import Transition

__all__ = [
    "DEBUG", "STRICT", "check_plain", "check_strict", "check_summaries", "check_traced",
    "check_transforms", "debug", "explain", "inside_region", "is_inside_region", "is_strict",
    "num_dispatch_modes", "source_line", "strict", "warn",
]


class _Thread(threading.local):
    strict = False
    region: str | None = None


_thread = _Thread()


STRICT = Inside()
"""Strict blocks (or traces, or regions of local tensors)."""

DEBUG = Inside(int(PROCESS.on))
"""Debug blocks."""


def warn(text: str) -> None:
    """Issue a WeftWarning at the user's line, however deep inside it is noticed."""
    frame = user_frame()
    if frame is None:
        warnings.warn(text, WeftWarning, stacklevel=2)
        return
    names = frame.f_globals
    warnings.warn_explicit(
        text, WeftWarning, frame.f_code.co_filename, frame.f_lineno,
        names.get("__name__"), names.setdefault("__warningregistry__", {}),
    )


@block("weft.strict()")
def strict(enabled: bool = True) -> Iterator[None]:
    """Inside, an op that would communicate implicitly raises StrictError instead.

    Explicit communication (`redistribute`, `full_tensor`, `item`) is still allowed.

    Args:
        enabled: False allows everything again, inside of a `with weft.strict()`.

    Raises:
        StrictError: where such an op is called.
    """
    with setting(_thread, strict=enabled), STRICT.counted(enabled):
        yield


def is_strict() -> bool:
    return _thread.strict


@contextmanager
def inside_region(name: str) -> Iterator[None]:
    """Inside, plain tensors are a rank's own: none is taken as replicated."""
    with setting(_thread, region=name), STRICT.counted():
        yield


def is_inside_region() -> bool:
    """Whether plain tensors are a rank's own."""
    return _thread.region is not None


@block("weft.explain() as log")
def explain() -> Iterator[traffic.Log]:
    """Record every transition: op, source line, layouts, bytes and reason, backward included.

    Yields:
        The log: `log.events`, `print(log)`.
    """
    with traffic.record() as log:
        yield log


@block("weft.debug()")
def debug(enabled: bool = True) -> Iterator[None]:
    """Inside, all ranks of a group compare their requests before each collective.

    They also compare replicated values, each at its first use: plain tensors that meet
    ShardTensors, and leaves. If requests or values differ, or some ranks do not come within the
    timeout, all ranks raise the same CommunicationError. The mode belongs to the rank (in a
    process, to all its threads). All ranks enter and leave it together. `WEFT_DEBUG=1` in the
    environment turns it on for good.

    Args:
        enabled: False turns it off, inside of a `with weft.debug()`.

    Raises:
        CommunicationError: where ranks disagree, on all of them.
    """
    switch = setting(this_world().debug, on=enabled)
    with switch, traffic.STATE.counted(enabled), DEBUG.counted(enabled):
        yield


num_dispatch_modes: Any = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_TRACERS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


def is_traced() -> bool:
    """Whether make_fx, torch.export, functionalization or torch.jit.trace writes down what runs on
    this thread, or make_fx looks at what it is given."""
    if torch._C._is_tracing() or fx.is_fx_symbolic_tracing():
        return True
    return num_dispatch_modes() > 0 and any(
        torch._C._get_dispatch_mode(tracer) is not None for tracer in _TRACERS
    )


def check_traced(op: str) -> None:
    """Raise UnsupportedOpError while a program is traced, because the graph would hold this rank's
    blocks as constants, and for fake tensors."""
    if num_dispatch_modes() and torch._C._get_dispatch_mode(_FAKE) is not None:
        raise UnsupportedOpError(
            op, f"at {source_line()} a ShardTensor is used under FakeTensorMode",
            "fake tensors have no data that collectives could send", [op],
            "the call outside of the mode; a program without data runs on meta tensors: "
            "weft.distribute_tensor(torch.empty(shape, device=\"meta\"), mesh, placements)")
    if is_traced():
        raise UnsupportedOpError(
            op, f"at {source_line()} a ShardTensor is used while make_fx, torch.export, "
            "torch.func.linearize or torch.jit traces", "a traced graph knows ops on plain "
            "tensors, and neither layouts nor communication", [op],
            "trace the program on plain tensors, and run it on ShardTensors untraced\n"
            "of linearize: torch.func.jvp(fn, (x,), (tangent,))")


def check_transforms(op: str) -> None:
    """Raise UnsupportedOpError while a transform of torch.func runs: its data on plain operands
    would be lost here."""
    if transforms() is not None:
        raise UnsupportedOpError(
            op, f"at {source_line()} a ShardTensor meets plain tensors under a transform "
            "of torch.func", "grad, jvp and the like do not reach local tensors",
            ["a function that closes over a ShardTensor"],
            "torch.autograd.grad on ShardTensors, or the transform with x.full_tensor()")


def check_plain(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise StrictError when strict mode forbids the plain tensors among these operands, and
    UnsupportedOpError where they are a rank's own. A plain 0-dim tensor without gradient is a
    number."""
    region = _thread.region
    if not is_strict() and region is None:
        return
    plain = [
        tuple(tensor.shape) for tensor in tensors
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and (tensor.dim() or tensor.requires_grad)
    ]
    if plain and region is not None:
        raise UnsupportedOpError(
            op, f"at {source_line()} a ShardTensor meets {len(plain)} plain tensors inside "
            f"{region}", "inside, plain tensors are a rank's own blocks, elsewhere they "
            "are the same on every rank", [f"shape {shape}" for shape in plain],
            "give the ShardTensor to the function, with a spec; or x.to_local()")
    if plain:
        raise StrictError(
            op, f"at {source_line()} {len(plain)} plain tensors are taken as replicated",
            "under weft.strict() every operand is a ShardTensor",
            [f"shape {shape}" for shape in plain],
            "weft.distribute_tensor(t, mesh, placements)")


def check_summaries(op: str, operands: Sequence[Layout], axes: Sequence[int]) -> None:
    """Raise StrictError when strict mode forbids an algorithm that communicates over axes."""
    if is_strict():
        layout = next(one for one in operands if set(axes) & set(one.sharded_axes))
        dims = [() if set(cut) & set(axes) else cut for cut in layout.dims]
        raise StrictError(
            op, f"an operand is {layout}, and what it needs of other blocks would be sent "
            f"over {[layout.mesh.axis_names[axis] for axis in axes]}",
            "under weft.strict() no op communicates implicitly", [source_line()],
            f"x.redistribute(placements={list(layout.replace(dims=dims).placements)!r})")


def check_strict(op: str, transition: Transition) -> None:
    """Raise StrictError when strict mode forbids this operand's transition, as it communicates."""
    if is_strict() and transition.communicates:
        if transition.cover is not None and transition.src == transition.dst:
            cover, layout = transition.cover, transition.dst
            check_summaries(op, [layout], [
                axis for axes, mine in zip(layout.dims, cover.reads) if mine for axis in axes])
        raise StrictError(
            op, f"an operand is {transition.src} and has to be {transition.dst}",
            "under weft.strict() no op communicates implicitly", [source_line()],
            f"x.redistribute(placements={list(transition.dst.placements)!r})")

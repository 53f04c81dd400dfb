"""Calls that torch's kernels refuse and its meta kernels take: refused on all ranks alike.

A meta kernel may lack a check of its op's kernel, and knows nothing of the dtypes that the kernel
is written for. A rank without elements runs no kernel, so it would go on where the others raise. A
call without a recipe is therefore tried on zeros, by every rank: of the very shapes, if these are
few elements, else of few of them, where only the dtypes are judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.tensor.call.torchs_errors import is_torchs
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import Trace, unwatched
from weft.tensor.trace.trees import flatten, slots_of, substitute

__all__ = ["check_kernels"]

_FEW = 1 << 12
"""Elements of all tensors of a call that is tried."""

_OF_DTYPES = "not implemented for '"

_NO_LENGTHS = frozenset((
    "bias", "index", "indices", "mat2", "other", "running_mean", "running_var", "source", "src",
    "target", "vec", "weight",
))
"""Names of arguments that hold places, or numbers of any value."""

_KNOWN = frozenset((torch.float32, torch.float64))
"""Dtypes that every kernel takes."""

_TAKEN: set[Any] = set()
"""Functions and the dtypes of their operands, of which a short trial has ended."""


def check_kernels(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], trace: Trace | None,
    device: str,
) -> None:
    """Raise torch's error of a call of these tensors, if its kernels refuse it whatever the data.

    Only of ops of torch that draw nothing, on CPUs. `trace`: None where there is none.
    """
    if device != "cpu" or not is_torchs(func) or not (trace is None or _can_be_tried(trace)):
        return
    shapes = [tuple(tensor.shape) for tensor in tensors]
    is_whole = sum([one.numel() for one in (trace.metas if trace else tensors)]) <= _FEW
    about = func, tuple([tensor.dtype for tensor in tensors])
    if not is_whole:
        if trace is None or tensors[0].dtype in _KNOWN or about in _TAKEN:
            return
        shapes = _short(shapes)
        if not _gives_few(func, args, kwargs, tensors, shapes):
            _TAKEN.add(about)
            return
    error = _refusal(func, args, kwargs, tensors, shapes, 0)
    if error is not None and (_OF_DTYPES in str(error) or (
            is_whole and not _tell_lengths(tensors, trace))):
        again = _refusal(func, args, kwargs, tensors, shapes, 1)
        if type(again) is type(error) and str(again) == str(error):
            raise error
    if not is_whole:
        _TAKEN.add(about)


def _can_be_tried(trace: Trace) -> bool:
    """Whether it draws nothing, is torch's own, and computes something."""
    about = [facts(op.overload) for op in trace.ops]
    return not all(one.is_view for one in about) and all(
        one.name.startswith("aten.") and not one.is_random for one in about)


def _tell_lengths(tensors: Sequence[torch.Tensor], trace: Trace | None) -> bool:
    """Whether an operand may hold lengths, which few values are. Zeros are places, and numbers."""
    numbers = [at for at, one in enumerate(tensors) if at and not (
        one.is_floating_point() or one.is_complex() or one.dtype is torch.bool)]
    if trace is None or not numbers:
        return bool(numbers)
    others = [op.kwargs for op in trace.ops] + [
        arg for op in trace.ops for name, arg in zip(facts(op.overload).names, op.args)
        if name not in _NO_LENGTHS]
    return any(slot.index in numbers for slot in slots_of(others))


def _short(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes with the longest dims, the same for all, that are few elements."""
    longest = 1 << 6
    while True:
        short = [tuple([min(length, longest) for length in shape]) for shape in shapes]
        if longest == 1 or sum(map(_numel, short)) <= _FEW:
            return short
        longest >>= 1


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _gives_few(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
) -> bool:
    """Whether the call of tensors of these shapes can be made, and gives few elements."""
    try:
        out = _called(func, args, kwargs, tensors, shapes, "meta", 0)
    except Exception:
        return False
    return sum([one.numel() for one in flatten(out)]) <= 8 * _FEW


def _refusal(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]], value: int,
) -> Exception | None:
    """The error of the call of tensors full of a value."""
    state = torch.default_generator.get_state()
    try:
        _called(func, args, kwargs, tensors, shapes, "cpu", value)
    except torch.linalg.LinAlgError:  # of the values
        return None
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return error
    except Exception:
        return None
    finally:
        torch.default_generator.set_state(state)
    return None


def _called(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]], device: str, value: int,
) -> Any:
    with torch.no_grad(), unwatched(), torch._C.DisableTorchFunction():
        made = [torch.full(shape, value, dtype=tensor.dtype, device=device)
                for shape, tensor in zip(shapes, tensors)]
        args, kwargs = substitute((args, kwargs), iter(made))
        return func(*args, **kwargs)

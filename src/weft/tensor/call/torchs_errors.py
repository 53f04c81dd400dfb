"""Errors of torch, with layouts added and weft's frames removed.

A call that torch refuses fails in a meta kernel, while weft captures the call, or in a rule that
its operands do not fit. Such a message has shapes alone, some twenty frames below the user's line.
The kernels themselves often word it differently. So a call of few elements is made again on tensors
of zeros, which the kernels refuse before they compute.

Calls that cannot be captured, because data decide their result, would send something before a
kernel refuses them. So these are tried before: see `check_refused`.
"""

from __future__ import annotations

import os
import re
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from weft import errors
from weft.comm import PROCESS, BoundMesh
from weft.core.dtypes import dtype_text
from weft.tensor.meta import dense
from weft.tensor.shard_tensor import ShardTensor
from weft.tensor.trace.capture import unwatched
from weft.tensor.trace.trees import flatten, leaves, map_tensors

__all__ = ["check_refused", "in_torchs_words", "told_of", "with_layouts"]

_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(errors.__file__))
)
"""The folders of torch and of weft."""

_PYTHONS = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_MOST = 8
"""Operands that are shown."""

_FEW = 1 << 22
"""Elements of all operands of a call that is made again."""

_FEWEST = 1 << 12
"""Elements of all operands of a call that is tried, which costs what the call itself costs."""

_OF_VALUES = re.compile(r"sum|length|offset|allocated|increas|monoton|pivot|permut")
"""Of errors that other values of the operands may not give."""

_LACKS = re.compile(r"fake impl|[Mm]eta (tensor|kernel)| meta |Could not run|not allocated")
"""Of errors of meta tensors alone."""

_KINDS = re.compile(r"(torch\.|Meta|CPU)\w*(Tensor|Type)")
"""How messages call a kind of tensor, which is another on the meta device."""

_NOT_TRIED: Any = (torch.Generator, types.FunctionType, types.MethodType)
"""Of arguments: they would change, or do something."""

_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)


def in_torchs_words(error: Exception, func: Any, args: Any, kwargs: Any) -> Exception:
    """The error that torch's kernels raise for a call, if they do; else the given one."""
    is_wefts = isinstance(error, (errors.WeftError, Warning))
    if is_wefts and not isinstance(error, errors.LayoutError):
        return error
    told = _of_zeros(func, args, kwargs)
    return error if told is None else told.with_traceback(error.__traceback__)


def _of_zeros(func: Any, args: Any, kwargs: Any) -> Exception | None:
    """What torch raises for a call of few elements on zeros, if it refuses it. Plain masks stay:
    messages count what they select."""
    tensors = flatten((args, kwargs))
    if not _is_torchs(func) or sum([one.numel() for one in tensors]) > _FEW or (
        not all(one.device.type == "cpu" and dense(one) for one in tensors)
    ):
        return None

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.bool and type(tensor) is not ShardTensor:
            return tensor.detach().clone()
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    return _refusal(func, *map_tensors(zeros, (args, kwargs)))


def _is_torchs(func: Any) -> bool:
    return str(getattr(func, "__module__", None) or "torch").startswith("torch")


def _refusal(func: Any, args: Any, kwargs: Any) -> Exception | None:
    """What torch raises for a call on plain tensors, if it refuses it."""
    state = torch.default_generator.get_state()
    try:
        with torch.no_grad(), unwatched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*args, **kwargs)
    except _REFUSALS as told:
        return told
    except Exception:
        return None
    finally:
        torch.default_generator.set_state(state)
    return None


def _words(error: BaseException) -> str:
    """What an error says, but for the kind of tensors."""
    return _KINDS.sub("", str(error))


def check_refused(error: BaseException | None, func: Any, args: Any, kwargs: Any) -> None:
    """Raise what kernels say of a call that cannot be captured, before it sends something.

    That is, where meta tensors gave an error of the same words: then it is no lack of data, or of
    a meta kernel. Else a call of very few elements is tried on several values: an error that
    all of these give, and that is not about values, is one of shapes, dtypes, or other arguments.
    """
    if isinstance(error, Exception) and not _LACKS.search(str(error)):
        told = _of_zeros(func, args, kwargs)
        if told is not None and _words(told) == _words(error):
            raise told
        return
    if not _may_be_tried(func, args, kwargs):
        return
    said: list[Exception] = []
    for fill in (_identity, torch.ones_like, torch.zeros_like, _ascending):
        told = _refusal(func, *map_tensors(
            lambda one, fill=fill: fill(torch.zeros(one.shape, dtype=one.dtype)), (args, kwargs)))
        if told is None:
            return
        if not _OF_VALUES.search(str(told)):
            said.append(told)
    if len(said) > 1 and len(set(map(_words, said))) == 1:
        raise said[0]


def _may_be_tried(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is torch's own, of few elements, would send some, and runs nothing of the
    user's."""
    tensors = flatten((args, kwargs))
    return (
        _is_torchs(func)
        and not leaves((args, kwargs), _NOT_TRIED)
        and any(type(one) is ShardTensor and not one._meta.layout.is_replicated for one in tensors)
        and sum([one.numel() for one in tensors]) <= _FEWEST
        and all(one.device.type == "cpu" and dense(one) for one in tensors)
    )


def _identity(zeros: torch.Tensor) -> torch.Tensor:
    """Ones on the diagonal of each matrix: what has an inverse and roots. Zeros of integers."""
    if zeros.dim() > 1 and (zeros.is_floating_point() or zeros.is_complex()):
        zeros.diagonal(dim1=-2, dim2=-1).fill_(1)
    return zeros


def _ascending(zeros: torch.Tensor) -> torch.Tensor:
    return torch.arange(zeros.numel()).to(zeros.dtype).view(zeros.shape)


def with_layouts(
    error: Exception, name: str, tensors: Sequence[torch.Tensor], mesh: BoundMesh
) -> Exception:
    """The error with a note that names the call.

    The frames below this call are dropped if they are torch's and weft's alone (those of a user's
    own function stay), and none with `WEFT_DEBUG=1`.
    """
    if isinstance(error, (errors.WeftError, Warning)):
        return error
    if not told_of(error):
        shown = [_text(tensor) for tensor in tensors[:_MOST]] + ["..."] * (len(tensors) > _MOST)
        error.add_note(f"  in {name} of {', '.join(shown)} on {mesh!r}{_taken_for_whole(tensors)}"
                       f"{_without_data(error, tensors)}")
    if PROCESS.on or not all(map(_is_ours, _files(error))):
        return error
    return error.with_traceback(None)


def told_of(error: Exception) -> bool:
    """Whether an error already names layouts: it is weft's, or has the note of an inner call."""
    return isinstance(error, (errors.WeftError, Warning)) or any(
        note.startswith("  in ") for note in getattr(error, "__notes__", ())
    )


def _taken_for_whole(tensors: Sequence[torch.Tensor]) -> str:
    """A hint, where a plain operand has the shape of another's shard."""
    plain = [one.shape for one in tensors if type(one) is not ShardTensor]
    for one in tensors:
        if type(one) is ShardTensor and any(_may_be_a_shard(shape, one) for shape in plain):
            return ("\n  a plain tensor counts as whole, on every rank; if this one is a rank's "
                    f"shard: weft.ShardTensor.from_local(x, mesh, {one.spec!r})")
    return ""


def _without_data(error: Exception, tensors: Sequence[torch.Tensor]) -> str:
    """A hint, where a parameter of the meta device meets tensors with data."""
    meta = {one.device.type == "meta" for one in tensors}
    if "meta" not in str(error) or len(meta) < 2:
        return ""
    return ("\n  parameters of the meta device have no data: weft.nn.materialize(model), "
            "after weft.distribute_module")


def _may_be_a_shard(shape: Sequence[int], of: ShardTensor) -> bool:
    """Whether it has the whole's shape, but is shorter in sharded dims. All ranks agree."""
    pairs = [(here, whole) for here, whole, axes in zip(shape, of.shape, of.sharding.dims) if axes]
    rest = [(here, whole) for here, whole, axes in zip(shape, of.shape, of.sharding.dims)
            if not axes]
    return len(shape) == of.ndim and bool(pairs) and (
        all(here < whole for here, whole in pairs) and all(here == whole for here, whole in rest)
    )


def _text(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) is ShardTensor:
        return tensor.sharding.text(dtype)
    return f"plain {dtype_text(dtype)}[{', '.join(map(str, tensor.shape))}]"


def _files(error: Exception) -> list[str]:
    """Where the frames below the one that caught the error run."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return found


def _is_ours(file: str) -> bool:
    return file.startswith(("<", *_OURS)) or (
        file.startswith(_PYTHONS) and "-packages" not in file.removeprefix(_PYTHONS)
    )

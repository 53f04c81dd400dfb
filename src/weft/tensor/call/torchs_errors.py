"""Errors of torch, with layouts added and weft's frames removed.

A call that torch refuses fails in a meta kernel, while weft captures the call, or in a rule that
its operands do not fit. Such a message has shapes alone, some twenty frames below the user's line.
The kernels themselves often word it differently. So a call of few elements is made again on tensors
of zeros, which the kernels refuse before they compute.
"""

from __future__ import annotations

import os
import re
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
from weft.tensor.trace.trees import flatten, map_tensors

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

_LACKS = re.compile(r"fake impl|[Mm]eta (tensor|kernel)| meta |Could not run|not allocated")
"""Of errors of meta tensors alone."""

_KINDS = re.compile(r"(torch\.|Meta|CPU)\w*(Tensor|Type)")
"""How messages call a kind of tensor, which is another on the meta device."""

_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)


def in_torchs_words(error: Exception, func: Any, args: Any, kwargs: Any) -> Exception:
    """The error that torch's kernels raise for a call, if they do; else the given one."""
    is_torchs = str(getattr(func, "__module__", None) or "torch").startswith("torch")
    tensors = flatten((args, kwargs))
    is_wefts = isinstance(error, (errors.WeftError, Warning))
    if not is_torchs or (is_wefts and not isinstance(error, errors.LayoutError)) or (
        sum([one.numel() for one in tensors]) > _FEW
        or not all(one.device.type == "cpu" and dense(one) for one in tensors)
    ):
        return error

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    state = torch.default_generator.get_state()
    try:
        with torch.no_grad(), unwatched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*map_tensors(zeros, args), **map_tensors(zeros, kwargs))
    except _REFUSALS as told:
        return told.with_traceback(error.__traceback__)
    except Exception:
        return error
    finally:
        torch.default_generator.set_state(state)
    return error


def check_refused(error: BaseException | None, func: Any, args: Any, kwargs: Any) -> None:
    """Raise what kernels say of a call where meta tensors gave an error of the same words: then it
    is no lack of data, or of a meta kernel."""
    if not isinstance(error, Exception) or _LACKS.search(str(error)):
        return
    told = in_torchs_words(error, func, args, kwargs)
    if told is not error and _KINDS.sub("", str(told)) == _KINDS.sub("", str(error)):
        try:
            raise told
        finally:
            del told  # whose traceback holds this frame


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
        tensors = [one for one in tensors if not one.is_nested]  # which may have no shape
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

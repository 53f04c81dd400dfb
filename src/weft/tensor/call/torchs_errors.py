"""What torch refuses, as users of ShardTensors read it: with layouts, and without our frames.

A call that torch refuses is refused by its meta kernels, while weft finds out what the call
consists of. Their messages speak of shapes, and lie some twenty frames below the user's line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from weft import errors
from weft.comm import PROCESS, BoundMesh
from weft.core.dtypes import dtype_text
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["with_layouts"]

_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(errors.__file__))
)
"""The folders of torch and of weft."""

_PYTHONS = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_MOST = 8
"""Operands that are shown."""


def with_layouts(
    error: Exception, name: str, tensors: Sequence[torch.Tensor], mesh: BoundMesh
) -> Exception:
    """The error with a note of what was called.

    The frames below this call are dropped if they are torch's and weft's alone (those of a user's
    own function stay), and none with `WEFT_DEBUG=1`.
    """
    if isinstance(error, (errors.WeftError, Warning)):
        return error
    if not any(note.startswith("  in ") for note in getattr(error, "__notes__", ())):
        shown = [_text(tensor) for tensor in tensors[:_MOST]] + ["..."] * (len(tensors) > _MOST)
        error.add_note(f"  in {name} of {', '.join(shown)} on {mesh!r}")
    if PROCESS.on or not all(map(_is_ours, _files(error))):
        return error
    return error.with_traceback(None)


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

"""ShardTensors under torch.compile: their ops run eagerly.

TorchDynamo traces Python, and a ShardTensor's ops are Python: it would trace weft itself. So weft
is among the files that it skips, as torch's own are. A compiled function then breaks its graph
where it meets a ShardTensor, runs that op eagerly, backward included, and goes on. Code on plain
tensors alone is compiled. One warning says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from weft.errors import message
from weft.tensor import modes
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["compile_without_weft", "unseen"]

_TOLD: set[str] = set()


def compile_without_weft(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.compile`, of which the first call imports the compiler, and has it leave weft out."""
    if "skip" not in _TOLD:
        _TOLD.add("skip")
        # The one name that is looked into wherever it lies.
        intercept: Any = ShardTensor.__torch_function__
        intercept.__func__._torchdynamo_disable = True
        torch._dynamo.trace_rules.add("weft")  # type: ignore[attr-defined]
    return original(*args, **kwargs)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, nothing is compiled: what weft asks of torch's own Python is none of the user's."""
    callback = set_eval_frame(None)
    try:
        if callable(callback) and "compile" not in _TOLD:
            _TOLD.add("compile")
            modes.warn(
                message("torch.compile", "a compiled function uses a ShardTensor",
                        "ops on ShardTensors run eagerly, between compiled pieces", [],
                        "torch.compile what runs on local tensors")
            )
        yield
    finally:
        set_eval_frame(callback)

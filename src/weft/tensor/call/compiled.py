"""ShardTensors under torch.compile: their ops run eagerly.

To TorchDynamo a ShardTensor's ops are plain Python, so it would trace weft itself. Therefore weft
is among the files that it skips, as torch's own are. A compiled function then breaks its graph
where it meets a ShardTensor, runs that op eagerly, backward included, and goes on. Ops on plain
tensors alone are compiled. One warning says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._higher_order_ops.flex_attention import flex_attention

from weft.core.scopes import setting
from weft.errors import UnsupportedOpError, WeftError, message
from weft.tensor import modes
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["compile_options", "compile_without_weft", "unseen"]

_TOLD: set[str] = set()

_SIGNS = (str(Path(__file__).parents[2]), ShardTensor.__name__)
"""What TorchDynamo names when it meets a ShardTensor."""


def compile_without_weft(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.compile`; its first call imports the compiler, and makes it skip weft."""
    if "skip" not in _TOLD:
        _TOLD.add("skip")
        # The one name that is looked into wherever it lies.
        intercept: Any = ShardTensor.__torch_function__
        intercept.__func__._torchdynamo_disable = True
        torch._dynamo.trace_rules.add("weft")  # type: ignore[attr-defined]
        # A graph that ends before it goes on in its frame, where it meets the ShardTensor again.
        torch._dynamo.eval_frame.skip_code(type(flex_attention).__call__.__code__)
    compiled = original(*args, **kwargs)
    module = str(getattr(args[0], "__module__", "")) if args else ""
    if module == "torch.nn.attention.flex_attention":
        return _flex_attention(compiled, args[0], kwargs)
    if not kwargs.get("fullgraph") or not args or module.startswith("weft."):
        return compiled  # without a function it decorates one, by another call
    name = getattr(args[0], "__name__", type(args[0]).__name__)
    if isinstance(compiled, torch.nn.Module):
        compiled.forward = _in_one_graph(compiled.forward, name)
        return compiled
    return _in_one_graph(compiled, name)


def _in_one_graph(compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function; if a ShardTensor prevents a single graph, its error says so."""
    @wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, WeftError) or not any(sign in str(error) for sign in _SIGNS):
                raise
            raise UnsupportedOpError(
                "torch.compile(fullgraph=True)", "the compiled function uses a ShardTensor",
                "ops on ShardTensors run eagerly, so the graph ends at each of them",
                [name],
                "torch.compile without fullgraph, or of what runs on local tensors\n"
                "for code of others: torch.compiler.set_stance(\"force_eager\")") from None

    return run


class _Options(threading.local):
    found: dict[str, Any] | None = None


_options = _Options()


def compile_options() -> dict[str, Any] | None:
    """How the caller has `flex_attention` compiled, or code around it; None: not at all."""
    callback = set_eval_frame(None)
    set_eval_frame(callback)
    if _options.found is not None or not callable(callback):
        return _options.found
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return {"backend": callback}


def _flex_attention(
    compiled: Callable[..., Any], original: Callable[..., Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """`flex_attention`, or torch's function inside of it: on ShardTensors its kernel is compiled,
    which each rank runs on its shards."""
    is_inner = original.__name__ != "flex_attention"

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(type(one) is ShardTensor for one in (*args, *kwargs.values())):
            return compiled(*args, **kwargs)
        with nullcontext() if is_inner else setting(_options, found=options):
            return original(*args, **kwargs)

    return run


class unseen:  # a context manager; as a generator it would take 2 us
    """Inside, nothing is compiled: weft's own calls of torch's Python are not the user's."""

    __slots__ = ("callback",)

    def __enter__(self) -> None:
        callback = self.callback = set_eval_frame(None)
        if callable(callback) and "compile" not in _TOLD:
            _TOLD.add("compile")
            try:
                modes.warn(
                    message("torch.compile", "a compiled function uses a ShardTensor",
                            "ops on ShardTensors run eagerly, between compiled pieces", [],
                            "torch.compile what runs on local tensors")
                )
            except BaseException:
                set_eval_frame(callback)
                raise

    def __exit__(self, *_: object) -> None:
        set_eval_frame(self.callback)

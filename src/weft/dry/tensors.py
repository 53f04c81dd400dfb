"""Tensors of a dry run: every tensor that the program makes is a meta tensor, and is counted.

A dispatch mode sees each operation of this rank on local and plain tensors, in backward too. It

- makes what the program makes on any device a meta tensor (weft's own bookkeeping stays where it
  is);
- counts memory (`Meter`) and floating-point operations (torch's formulas);
- keeps the values of small tensors that follow from constants: positions, masks of ones. If the
  program reads a value, this is what it gets. A value that nobody can know is `reads`, and a
  position that it decides (of the largest, of all in order) is that of a random one;
- gives attention the fused kernel of the CPU, where torch's own choice for meta tensors would make
  all scores at once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from weft.tensor.trace.meta_results import known_result
from weft.tensor.trace.trees import flatten, map_tensors
from weft.testing.memory import Meter

__all__ = ["Devices", "DryTensors", "fused_attention", "known_data"]

_aten = torch.ops.aten
_META = torch.device("meta")
_KNOWN_NUMEL = 1 << 20
"""So large may a tensor be whose values are kept."""

_VALUE = "_weft_value"
"""The attribute of a meta tensor that holds its values."""

_COPIES = _aten._to_copy.default
_READS = _aten._local_scalar_dense.default
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default)
_EMPTY = (
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
)
_CHOOSES = (
    _aten.topk.default, _aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim,
    _aten.sort.default, _aten.sort.stable, _aten.argsort.default, _aten.argsort.stable,
    _aten.multinomial.default,
)
"""Ops whose results are positions that the values of their first operand decide."""

_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
_FLOPS: dict[Any, Any] = dict(flop_registry)
_FLOPS[_ATTENTION] = flop_registry[_aten._scaled_dot_product_flash_attention]


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, *_: Any, **__: Any
) -> int:
    """Five products: the scores again, and the gradients of both factors of either product."""
    heads = query[0] * query[1] * query[2]
    return 2 * heads * key[2] * (3 * query[3] + 2 * value[3])


def _of_shapes(function: Any) -> Any:
    def run(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        args, kwargs = _shapes((args, kwargs))
        return function(*args, **kwargs)

    return run


def _shapes(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor.shape, tree)


_FLOPS[_aten._scaled_dot_product_flash_attention_for_cpu_backward] = _of_shapes(_attention_backward)


class DryTensors(TorchDispatchMode):
    """The mode. `meter` counts memory, `flops` the operations so far."""

    def __init__(self, reads: float) -> None:
        super().__init__()
        self.reads, self.flops = reads, 0
        self.meter = Meter(_is_meta)
        self._random = torch.Generator().manual_seed(0)
        self._lost: dict[int, Any] = {}
        """Storages of values that something unknown was written to, kept by their address."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, and call it around each operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = flatten((args, kwargs))
        if func is _READS:
            return self._read(args[0])
        if func in _LIFTS:
            out = args[0] if _is_meta(args[0]) or _by_weft() else self._known(args[0])
        else:
            metas = sum(map(_is_meta, given))
            if 0 < metas < len(given):
                args, kwargs = map_tensors(self._brought, (args, kwargs))
            asks = kwargs.get("device")
            makes = asks is not None or not given
            if makes and asks != _META and _makes_tensors(func) and not _by_weft():
                out = func(*args, **{**kwargs, "device": _META})
            else:
                try:
                    out = func(*args, **kwargs)
                except RuntimeError:  # also where torch has no kernel
                    out = self._by_data(func, args, kwargs)
            self._follow(func, args, kwargs, given, out)
        count = _FLOPS.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        self.meter.see([*given, *flatten(out)])
        return out

    # Values.

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, where they are known."""
        if not _is_meta(tensor):
            return tensor
        value = getattr(tensor, _VALUE, None)
        if value is None or value.untyped_storage()._cdata in self._lost:
            return None
        return value

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor that stands for a tensor of the program's."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
        if tensor.numel() <= _KNOWN_NUMEL:
            setattr(made, _VALUE, tensor)
        return made

    def _known_if(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if _is_meta(tensor) else self._known(tensor)

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        """Beside meta tensors, others of more than a number are meta tensors, too."""
        if type(tensor) is torch.Tensor and not _is_meta(tensor) and tensor.dim():
            return self._known(tensor)
        return tensor

    def _read(self, tensor: torch.Tensor) -> Any:
        value = self._value(tensor)
        if value is not None:
            return value.item()
        kind = type(torch.empty((), dtype=tensor.dtype, device="cpu").item())
        return kind(self.reads)

    def read_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor on the CPU; unknown ones are all alike."""
        value = self._value(tensor)
        if value is not None:
            return value.clone()
        return torch.full(tensor.shape, self.reads, dtype=tensor.dtype, device="cpu")

    def _by_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op makes that depends on data: by the values, or as if none were zero, and all
        were different and equally frequent."""
        if func is _COPIES:  # to the CPU: weft, or the program, is about to read it
            return self.read_all(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if all(self._value(one) is not None for one in flatten((args, kwargs))):
            found = func(*map_tensors(self._value, args), **map_tensors(self._value, kwargs))
            return map_tensors(self._known, found)
        with torch.no_grad():
            known = known_result(func, args, kwargs)  # torch's meta kernel refuses what others take
        if known is not None:
            return known
        if func in _GUESSES:
            return map_tensors(self._known_if, _GUESSES[func](*args, **kwargs))
        before = _config.meta_nonzero_assume_all_nonzero
        _config.meta_nonzero_assume_all_nonzero = True
        try:
            return func(*args, **kwargs)
        finally:
            _config.meta_nonzero_assume_all_nonzero = before

    def _follow(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any
    ) -> None:
        """Keep the values of the results, where those of all operands are known."""
        results = flatten(out)
        if not results or not any(map(_is_meta, results)):
            return
        written = func._schema.is_mutable
        values = [self._value(one) for one in given]
        if (
            any(value is None for value in values) or func in _EMPTY
            or max([one.numel() for one in (*results, *given)]) > _KNOWN_NUMEL
        ):
            if written:
                self._lose([value for one, value in zip(given, values) if value is not None])
            elif func in _CHOOSES:
                self._choose(func, args, kwargs, results)
            return
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            args, kwargs = map_tensors(self._value, (args, kwargs))
            found = flatten(func(*args, **kwargs))
        except (RuntimeError, NotImplementedError, IndexError):
            return
        for one, value in zip(results, found):
            if _is_meta(one):
                setattr(one, _VALUE, value)

    def _choose(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """The positions that data decide are those of random data."""
        given, *more = args
        if max([given.numel(), *[one.numel() for one in results]]) > _KNOWN_NUMEL:
            return
        made = torch.rand(given.shape, generator=self._random, device="cpu")
        for one, value in zip(results, flatten(func(made, *more, **kwargs))):
            if one.dtype is torch.int64:
                setattr(one, _VALUE, value)

    def _lose(self, values: list[torch.Tensor]) -> None:
        """Something unknown was written: to which of them is not asked."""
        for value in values:
            storage = value.untyped_storage()
            self._lost[storage._cdata] = storage


def _all_different(
    x: torch.Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[torch.Tensor, ...]:
    """`_unique2` of such elements."""
    count = x.numel()
    like = torch.empty((count if counts else 0,), dtype=torch.int64, device=_META)
    places = torch.empty(x.shape if inverse else (0,), dtype=torch.int64, device=_META)
    return x.new_empty(count), places, like


def _spread_evenly(x: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    """`bincount` of numbers that are equally frequent."""
    ends = torch.arange(minlength + 1, device="cpu") * x.numel() // max(minlength, 1)
    return ends.diff() if weights is None else ends.diff().double()


_GUESSES: dict[Any, Any] = {
    _aten._unique2.default: _all_different, _aten.bincount.default: _spread_evenly,
}


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _makes_tensors(func: Any) -> bool:
    return any(one.name == "device" for one in func._schema.arguments)


def _by_weft() -> bool:
    """Whether the innermost frame that is not torch's is weft's."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "weft.dry.")):
            return module.startswith("weft.")
        frame = frame.f_back
    return False


class Devices(TorchFunctionMode):
    """Accelerators that the program asks for need not be there; what it reads are values."""

    def __init__(self, tensors: DryTensors) -> None:
        super().__init__()
        self.tensors = tensors

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TO_PYTHON and type(args[0]) in _PLAIN and args[0].is_meta:
            return func(self.tensors.read_all(args[0]), *args[1:], **kwargs)
        if func in _TO_ACCELERATORS:
            return func.__self__ if not args else args[0]
        if kwargs.get("device") is not None and _is_accelerator(kwargs["device"]):
            kwargs = {**kwargs, "device": _META}
        if func is torch.Tensor.to and len(args) > 1 and _is_accelerator(args[1]):
            args = (args[0], _META, *args[2:])
        return func(*args, **kwargs)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TO_PYTHON = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_TO_ACCELERATORS = (torch.Tensor.cuda, torch.Tensor.xpu)


def _is_accelerator(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return torch.device(device).type not in ("cpu", "meta")
    return isinstance(device, int) and not isinstance(device, bool)


@contextmanager
def known_data() -> Iterator[None]:
    """Inside, `torch.tensor` and `torch.as_tensor` of this thread keep the data of what they make:
    on the meta device they would be lost before any mode sees them."""
    originals = torch.tensor, torch.as_tensor
    thread = threading.get_ident()

    def keeping(original: Any) -> Any:
        @functools.wraps(original)
        def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            mine = threading.get_ident() == thread and not isinstance(data, torch.Tensor)
            if mine and device is not None:
                return original(data, *args, **kwargs, device="cpu").to(_META)
            return original(data, *args, device=device, **kwargs)

        return make

    torch.tensor, torch.as_tensor = map(keeping, originals)
    try:
        yield
    finally:
        torch.tensor, torch.as_tensor = originals


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention on meta tensors is the CPU's kernel, where that takes the operands.

    For meta tensors torch chooses the products that make all scores at once.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Any:
    if enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    fused = (
        query.dim() == 4 and not dropout_p and query.numel() and key.numel()
        and query.shape[-1] == value.shape[-1]
        and (attn_mask is None or not attn_mask.requires_grad)
    )
    if not fused:
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return _ATTENTION(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

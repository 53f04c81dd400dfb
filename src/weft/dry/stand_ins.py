"""Stand-ins, during a dry run, for what a machine without accelerators lacks.

- Accelerators that the program asks for need not be there.
- `torch.tensor` keeps the data that it is given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from weft.comm.alone import is_alone
from weft.core.scopes import setting
from weft.dry.tensors import DryTensors, by_weft
from weft.tensor import ShardTensor
from weft.tensor.trace import casts

__all__ = ["Devices", "stand_ins"]

_META = torch.device("meta")


class Devices(TorchFunctionMode):
    """Accelerators that the program asks for need not be there; tensors that it reads have
    values."""

    def __init__(self, tensors: DryTensors) -> None:
        super().__init__()
        self.tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = func in _TO_PYTHON or (func is torch.Tensor.__format__ and not args[0].dim())
        if reads and type(args[0]) in _PLAIN and args[0].is_meta:
            return func(self.tensors.read_all(args[0]), *args[1:], **kwargs)
        if func is torch.Tensor.__deepcopy__ and args[0].is_meta:
            return self.tensors.deepcopy(args[0], functools.partial(func, *args, **kwargs))
        if func in _WITH_LENGTHS:  # torch would write lists into a tensor below any mode
            args = tuple([_as_tensor(one) for one in args])
            kwargs = {name: _as_tensor(one) for name, one in kwargs.items()}
        if func is _PADS and type(args[0]) in _PLAIN:
            return _padded(*args, **kwargs)
        if func in _TO_ACCELERATORS:
            return func.__self__ if not args else args[0]
        if func is torch.Tensor.cpu and _is_the_programs(args[0]):
            return args[0]
        if _is_elsewhere(func, args, kwargs.get("device")):
            kwargs = {**kwargs, "device": _META}
        if func is torch.Tensor.to and len(args) > 1 and _is_elsewhere(func, args, args[1]):
            args = (args[0], _META, *args[2:])
        if not _names_meta(kwargs.get("device"), sys._getframe(1)):
            return func(*args, **kwargs)
        self.tensors.asks_for_meta = True
        try:
            return func(*args, **kwargs)
        finally:
            self.tensors.asks_for_meta = False


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TO_PYTHON = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_PADS: Any = torch._C._VariableFunctions._pad_packed_sequence  # type: ignore[attr-defined]
_WITH_LENGTHS = (torch.ctc_loss, torch.nn.functional.ctc_loss)
_TO_ACCELERATORS = (torch.Tensor.cuda, torch.Tensor.xpu, torch.Tensor.pin_memory)


def _as_tensor(given: Any) -> Any:
    return torch.tensor(given) if isinstance(given, (list, tuple)) else given


def _padded(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_pad_packed_sequence`: torch would write lengths into a tensor below any mode."""
    sizes = batch_sizes.tolist()
    if 0 < total_length < len(sizes):
        raise ValueError("Expected total_length to be at least the length of the longest sequence "
                         f"in input, but got total_length={total_length} and max sequence length "
                         f"being {len(sizes)}")
    shape = max(total_length, len(sizes)), sizes[0], *data.shape[1:]
    out = data.new_full(shape, padding_value)
    for at, part in enumerate(data.split(sizes)):
        out[at, : len(part)] = part
    lengths = torch.tensor([sum(one > at for one in sizes) for at in range(sizes[0])])
    return out.transpose(0, 1) if batch_first else out, lengths


def _names_meta(device: Any, caller: FrameType) -> bool:
    """Whether the program itself names the meta device: as text, or by `with torch.device("meta")`.
    A device that it takes from a tensor stands for another one."""
    if type(device) is str:
        return device == "meta"
    return device == _META and caller.f_code is DeviceContext.__torch_function__.__code__


def _is_elsewhere(func: Any, args: Any, device: Any) -> bool:
    """Whether a device that is asked for is that of the program's own tensors: an accelerator; or
    the CPU, where a tensor that is there already does not move."""
    if _is_accelerator(device):
        return True
    is_cpu = isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"
    return is_cpu and func is torch.Tensor.to and _is_the_programs(args[0])


def _is_accelerator(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return torch.device(device).type not in ("cpu", "meta")
    return isinstance(device, int) and not isinstance(device, bool)


def _is_the_programs(tensor: Any) -> bool:
    """Whether a tensor without data is one that the program moves, and not weft, to read it."""
    return tensor.is_meta and (type(tensor) is ShardTensor or not by_weft())


@contextmanager
def stand_ins() -> Iterator[None]:
    """Inside, torch does for tensors without data, on devices that are not there, what it does in a
    run."""
    optimizer: Any = sys.modules[torch.optim.Optimizer.__module__]
    fused = [*optimizer._get_fused_kernels_supported_devices(), "meta"]
    region, scaler = torch.amp.autocast_mode.autocast, torch.amp.GradScaler
    forget = torch.clear_autocast_cache

    def clear() -> None:
        forget()
        casts.forget()

    with (
        setting(torch, tensor=_keeping(torch.tensor), as_tensor=_keeping(torch.as_tensor)),
        # `fused=True` takes parameters without memory, as it takes those of a device.
        setting(optimizer, _get_fused_kernels_supported_devices=lambda: fused),
        setting(region, __init__=_on_cpu(region.__init__, "device_type")),
        setting(scaler, __init__=_on_cpu(scaler.__init__, "device")),
        # What autocast has cast of tensors without memory lives until its region ends.
        casts.KEEPS.counted(), setting(torch, clear_autocast_cache=clear),
        setting(torch.random, fork_rng=_forking(torch.random.fork_rng)),
        # Distributions take parameters without data for valid ones.
        setting(torch.distributions.Distribution, _validate_args=False),
    ):
        yield


def _keeping(original: Any) -> Any:
    """`torch.tensor` or `torch.as_tensor` that keeps, in dry ranks, the data of what it makes: on
    the meta device they would be lost before any mode sees them."""
    @functools.wraps(original)
    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        mine = is_alone() and not isinstance(data, torch.Tensor)
        if mine and device is not None:
            return original(data, *args, **kwargs, device="cpu").to(_META)
        return original(data, *args, device=device, **kwargs)

    return make


def _on_cpu(original: Any, name: str) -> Any:
    """CUDA's autocast is there; that of other accelerators, and the scaling of gradients, are the
    CPU's, in the dtype of the accelerator. torch turns them off where there is none."""
    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        device = args[0] if args else kwargs.get(name, "cuda")
        if is_alone() and name == "device_type" and device == "cuda":
            with (
                setting(torch.cuda.amp.common, amp_definitely_not_available=lambda: False),
                setting(torch.cuda, is_bf16_supported=lambda *_: True),
            ):
                return original(self, *args, **kwargs)
        if is_alone() and _is_accelerator(device):
            args, kwargs = args[1:], {**kwargs, name: "cpu"}
            if name == "device_type" and not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.get_autocast_dtype(device)
            return original(self, kwargs.pop(name), *args, **kwargs)
        return original(self, *args, **kwargs)

    return start


def _forking(original: Any) -> Any:
    """`fork_rng` that keeps the generator's state also where a checkpoint computes tensors without
    data again. For these torch keeps none."""
    @functools.wraps(original)
    def fork(*args: Any, device_type: Any = None, **kwargs: Any) -> Any:
        device = "cpu" if is_alone() and device_type == "meta" else device_type
        return original(*args, device_type=device, **kwargs)

    return fork

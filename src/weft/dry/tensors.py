"""Tensors of a dry run: every tensor that the program makes is a meta tensor, and is counted.

A dispatch mode sees each operation of this rank on local and plain tensors, in backward too. It

- turns every tensor that the program makes, on any device, into a meta tensor (weft's own
  bookkeeping stays where it is);
- counts memory (`Meter`), floating-point operations, and the time that they take; tensors that the
  program itself makes on the meta device have no memory in a run either, and do not count, and the
  states of torch's generator that checkpoints keep do;
- keeps the values of small tensors that follow from constants: positions, masks of ones, also where
  a large batch shares them. If the program reads such a value, it gets it. An unknown value is
  `reads`, a finite number, and positions that unknown values decide (of the largest, of all in
  order) are those of random values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import _config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from weft.comm import RecordingWorld
from weft.core.scopes import setting
from weft.dry.compute import Compute
from weft.dry.guesses import CHOOSES, FINITE, GUESSES, VALUES
from weft.dry.kernels import AS_KERNELS
from weft.dry.operations import EMPTY, flops_of, traffic_of
from weft.tensor.trace.meta_results import known_result
from weft.tensor.trace.trees import flatten, map_tensors
from weft.testing.memory import Meter

__all__ = ["DryTensors", "by_weft"]

_aten = torch.ops.aten
_META = torch.device("meta")
_KNOWN_NUMEL = 1 << 20
"""The most elements of a tensor whose values are kept."""

_VALUE = "_weft_value"
"""The attribute of a meta tensor that holds its values."""

_STATE = torch.Generator().get_state().shape
"""The shape of a state of torch's generator on the CPU."""

_COPIES = _aten._to_copy.default
_PACKS = _aten._pack_padded_sequence.default
_READS = _aten._local_scalar_dense.default
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default)


class DryTensors(TorchDispatchMode):
    """The mode. `meter` counts memory, `flops` the operations so far, `seconds` how long they take
    at these rates; the work of the communicators does not count."""

    def __init__(self, reads: float, world: RecordingWorld, compute: Compute | None = None) -> None:
        super().__init__()
        self.reads, self.world, self.compute = reads, world, compute
        self.flops, self.seconds = 0, 0.0
        self.meter = Meter(_has_memory)
        self.asks_for_meta = False
        """Whether the program names the meta device in the call that runs."""
        self.num_guessed = 0
        """How often a value was read that is not known."""
        self._random = torch.Generator()
        self._lost: dict[int, StorageWeakRef] = {}
        """Storages of values that something unknown was written to. A reference keeps the address,
        and not the memory."""
        self._samples: dict[int, StorageWeakRef] = {}
        """Storages of one sample that stands for all of a tensor: not to be written to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch would import its compiler, and call it around each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # then ops arrive that are made of others
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        given = flatten((args, kwargs))
        if func is _READS:
            return self._read(args[0])
        if func in _LIFTS:
            out = args[0] if _is_meta(args[0]) or by_weft() else self._known(args[0])
        else:
            metas = sum(map(_is_meta, given))
            if 0 < metas < len(given):
                args, kwargs = map_tensors(self._brought, (args, kwargs))
            asks = kwargs.get("device")
            makes = asks is not None or not given
            if makes and asks != _META and _makes_tensors(func) and not by_weft():
                out = func(*args, **{**kwargs, "device": _META})
            else:
                try:
                    out = func(*args, **kwargs)
                except RuntimeError:  # also where torch has no kernel
                    out = self._by_data(func, args, kwargs)
            if func in AS_KERNELS:
                out = AS_KERNELS[func](out, *args)
            self._follow(func, args, kwargs, given, out)
        if self._is_shape(kwargs, given):
            for one in flatten(out):
                self.meter.leave_out(one)
            return out
        self._count(func, args, kwargs, given, out)
        self.meter.see([*given, *flatten(out)])
        return out

    def _is_shape(self, kwargs: Any, given: list[torch.Tensor]) -> bool:
        """Whether a result has no memory in a run either: the program makes it on the meta device,
        or computes it of such tensors alone."""
        asks = kwargs.get("device")
        if given:
            return (asks in (None, _META) and all(map(self.meter.leaves_out, given))
                    and not by_weft())
        return self.asks_for_meta and asks == _META and not by_weft()

    def _count(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any
    ) -> None:
        """Count the operation's arithmetic, and its time."""
        flops = flops_of(func, args, kwargs, out)
        self.flops += flops
        if self.compute is not None and not self.world.at_work:
            nbytes = traffic_of(func, given, out)
            self.seconds += 0.0 if nbytes is None else self.compute.seconds_of(flops, nbytes)

    # Values.

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, where they are known."""
        if not _is_meta(tensor):
            return tensor
        value = getattr(tensor, _VALUE, None)
        if value is None or value.shape != tensor.shape:  # it was given other data
            return None
        if _is_in(self._lost, value):
            return None
        return value

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A tensor gets these values from others."""
        if not _is_meta(tensor):
            tensor.copy_(value)
        elif value.numel() <= _KNOWN_NUMEL:
            setattr(tensor, _VALUE, value)

    def deepcopy(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A deep copy, made by torch, of the tensor alone: torch copies all attributes, too, and a
        copy of the values would be a tensor of the program's."""
        value = vars(tensor).pop(_VALUE, None)
        try:
            made = make()
        finally:
            if value is not None:
                setattr(tensor, _VALUE, value)
        known = self.known(tensor)
        if known is not None:
            self.learn(made, known.clone())
        return made

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor that stands for one of the program's tensors."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
        if tensor.numel() <= _KNOWN_NUMEL:
            setattr(made, _VALUE, tensor)
        return made

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        """The operands: beside meta tensors, other tensors of several elements become meta tensors,
        too."""
        if type(tensor) is torch.Tensor and not _is_meta(tensor) and tensor.dim():
            return self._known(tensor)
        return tensor

    def _read(self, tensor: torch.Tensor) -> Any:
        value = self.known(tensor)
        if value is not None:
            return value.item()
        self.num_guessed += 1
        kind = type(torch.empty((), dtype=tensor.dtype, device="cpu").item())
        return kind(self.reads)

    def read_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor on the CPU; unknown ones are all alike."""
        value = self.known(tensor)
        if value is None:
            self.num_guessed += 1
        with _disable_current_modes():
            if value is not None:
                return value.clone()
            return torch.full(tensor.shape, self.reads, dtype=tensor.dtype, device="cpu")

    def _by_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that depends on data: by the values if they are known, else as if
        none were zero, and all were different and equally frequent."""
        if func is _COPIES:  # to the CPU: weft, or the program, is about to read it
            return self.read_all(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is _PACKS:
            return self._packed(*args)
        if all(self.known(one) is not None for one in flatten((args, kwargs))):
            found = func(*map_tensors(self.known, args), **map_tensors(self.known, kwargs))
            return map_tensors(self._known, found)
        with torch.no_grad():
            known = known_result(func, args, kwargs)  # torch's meta kernel refuses what others take
        if known is not None:
            return known
        if func is _aten.index.Tensor:
            args = args[0], [one for index in args[1] for one in self._positions(index)]
        if func in GUESSES:
            found = GUESSES[func](*args, **kwargs)
            return map_tensors(lambda one: one if _is_meta(one) else self._known(one), found)
        with setting(_config, meta_nonzero_assume_all_nonzero=True):
            return func(*args, **kwargs)

    def _packed(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """The kernel reads lengths on the CPU, and the program looks for the numbers of samples
        there. Samples of unknown lengths are as long as the longest."""
        value = self.known(lengths)
        if value is None:
            longest = x.shape[batch_first]
            value = torch.full(lengths.shape, longest, dtype=torch.int64, device="cpu")
        return _PACKS(x, value, batch_first)

    def _positions(self, index: Any) -> list[Any]:
        """An index; of a mask that is known, the positions where it holds."""
        value = None if index is None or index.dtype is not torch.bool else self.known(index)
        if value is None:
            return [index]
        return [one.to(_META) for one in value.nonzero(as_tuple=True)]

    def _follow(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any
    ) -> None:
        """Keep the values of the results, where those of all operands are known."""
        results = flatten(out)
        if not results or not any(map(_is_meta, results)):
            return
        written = func._schema.is_mutable
        values = [value for one in given if (value := self.known(one)) is not None]
        found = None
        if len(values) == len(given) and not (
            func in EMPTY and not self._takes_positions(results[0])
        ) and not (written and any(_is_in(self._samples, value) for value in values)):
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            small = max([one.numel() for one in (*results, *given)]) <= _KNOWN_NUMEL
            run = VALUES.get(func, func)
            opened, named = map_tensors(self.known, (args, kwargs))
            try:
                if small or func.is_view:
                    found = flatten(run(*opened, **named))
                elif not written:
                    found = _of_equal_samples(run, opened, named, results)
                    for one in found or ():
                        if one is not None and one.dim() and not one.stride(0):
                            _mark(self._samples, one)
            except (RuntimeError, NotImplementedError, IndexError):
                return
        if found is not None:
            for one, value in zip(results, found):
                if _is_meta(one) and value is not None:
                    setattr(one, _VALUE, value)
        elif written:
            for value in values:  # something unknown was written to one
                _mark(self._lost, value)
        elif func in CHOOSES:
            self._choose(func, args, kwargs, results)
        elif func in FINITE and _asks_for_finite(*args):
            setattr(results[0], _VALUE, torch.tensor(FINITE[func]).expand(results[0].shape))

    def _takes_positions(self, made: torch.Tensor) -> bool:
        """Whether memory without values counts as known, as the program will write to all of it:
        so it makes the inverse of a permutation."""
        return made.dtype is torch.int64 and not self.world.at_work

    def _choose(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """The positions that data decide are those of random data. They are the same for every
        tensor of one shape, because a checkpoint that recomputes has to choose the same."""
        given, *more = args
        if max([given.numel(), *[one.numel() for one in results]]) > _KNOWN_NUMEL:
            return
        made = torch.rand(given.shape, generator=self._random.manual_seed(0), device="cpu")
        for one, value in zip(results, flatten(func(made, *more, **kwargs))):
            if value.dtype is torch.int64:  # a position, and not an element that was chosen
                setattr(one, _VALUE, value)


def _mark(storages: dict[int, StorageWeakRef], value: torch.Tensor) -> None:
    storage = value.untyped_storage()
    storages[storage._cdata] = StorageWeakRef(storage)


def _is_in(storages: dict[int, StorageWeakRef], value: torch.Tensor) -> bool:
    return value.untyped_storage()._cdata in storages


def _asks_for_finite(x: torch.Tensor, other: Any = None) -> bool:
    """Whether numbers are compared with themselves, or with infinity, if with anything."""
    return other is None or other is x or (isinstance(other, float) and math.isinf(other))


def _of_equal_samples(
    run: Any, args: Any, kwargs: Any, results: list[torch.Tensor]
) -> list[torch.Tensor | None] | None:
    """The results of an op on large operands whose samples (dim 0) are all one in memory, such as
    positions that a batch shares.

    What it makes of two such samples and of three says what it makes of all of them: results that
    are equal for each sample, or do not depend on their number. None is for others.
    """
    given = flatten((args, kwargs))
    num = max([len(one) for one in given if one.dim() and not one.stride(0)], default=0)
    if not num:  # such as random numbers: the values would take the memory of the result
        return None
    if any(one.numel() > _KNOWN_NUMEL and (len(one) != num or one.stride(0)) for one in given):
        return None

    def of(few: int) -> list[torch.Tensor]:
        part = map_tensors(
            lambda one: one[:few] if one.dim() and len(one) == num > few else one, (args, kwargs))
        return flatten(run(*part[0], **part[1]))

    found: list[torch.Tensor | None] = []
    for one, two, three in zip(results, of(2), of(3)):
        sample = three[:1].expand_as(three) if three.dim() else three
        if two.shape == three.shape == one.shape and torch.equal(two, three):
            found.append(three)
        elif one.dim() and len(one) == num and len(two) == 2 and len(three) == 3 and (
            three.shape[1:] == one.shape[1:] and torch.equal(three, sample)
            and torch.equal(two, sample[:2])
        ):
            found.append(three[:1].expand(one.shape))
        else:
            found.append(None)
    return found


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory in a run: those without data, and a state of the generator."""
    return _is_meta(tensor) or (tensor.dtype is torch.uint8 and tensor.shape == _STATE)


def _makes_tensors(func: Any) -> bool:
    return any(one.name == "device" for one in func._schema.arguments)


def by_weft() -> bool:
    """Whether the innermost frame that is not torch's is weft's."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "weft.dry.", "weft.testing.")):
            return module.startswith("weft.")
        frame = frame.f_back
    return False

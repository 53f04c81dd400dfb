"""The key of a call: everything that its recipe depends on.

A key is the function and the flags that change its meaning (grad mode, autocast, default dtype),
the names of keywords, then an entry for each argument:

| argument | in the key |
|---|---|
| ShardTensor | its `Meta` |
| plain tensor | shape, strides, dtype, requires_grad; of a subclass the class before |
| int | itself |
| float | `float`, because rates change every step; its text where it is zero or not finite |
| list, tuple, dict, slice | its type, its length (a dict: its names), then its parts |
| tuple of ints | its type and itself |
| other things | type and value |

`ShardTensor.__torch_function__` adds the usual kinds itself, in the loop that opens the arguments,
and leaves the others to `add`; the general route adds all of them here. Smaller keys are derived
from this one: `structure_key` without lengths, `trace_key` without layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled
from torch._C import _is_any_autocast_enabled as is_autocast_enabled

from weft.tensor.counts import NAN
from weft.tensor.meta import Meta, autocast_state, contiguous_strides, dense
from weft.tensor.shard_tensor import ShardTensor, now_requires_grad

__all__ = ["Structure", "add", "floats_of", "key_of", "structure_key", "trace_key"]

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_NONE = type(None), None
_INTS = {int}
_WITHOUT_FLOATS = _PLAIN | {bool, int, str, type(None), torch.dtype, torch.Size}


def key_of(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The key of a call, and what `add` has met."""
    key: list[Any] = [
        func, is_grad_enabled(), is_autocast_enabled() and autocast_state(),
        torch.get_default_dtype(),
    ]
    met: list[Any] = []
    if kwargs:
        key.append(tuple(kwargs))
    for arg in (*args, *kwargs.values()):
        add(key, arg, met)
    return key, met


def add(key: list[Any], arg: Any, met: list[Any]) -> None:
    """Add an argument; `met` gets the tensors in it, and what cannot be hashed."""
    kind = type(arg)
    if kind is int:
        key.append(arg)
    elif kind is slice:
        key.append(slice)
        for part in (arg.start, arg.stop, arg.step):
            if part is None:
                key += _NONE
            else:
                add(key, part, met)
    elif kind is list or kind is tuple:
        key.append(kind)
        if kind is tuple and set(map(type, arg)) == _INTS:
            key.append(arg)
            return
        key.append(len(arg))
        for part in arg:
            add(key, part, met)
    elif kind is float:
        key.append(float if arg and arg - arg == 0.0 else repr(arg))
    elif isinstance(arg, torch.Tensor):
        _add_tensor(key, arg, kind)
        met.append(arg)
    elif kind is complex:
        key += (complex, repr(arg))  # 0j and -0j are equal
    elif _is_float(arg):  # a rate of numpy
        number = float(arg)
        key += (kind, float if number and number - number == 0.0 else repr(number))
    elif kind is dict:
        key += (dict, tuple(arg))
        for part in arg.values():
            add(key, part, met)
    else:
        key += (kind, arg)
        try:
            hash(arg)
        except TypeError:
            met.append(arg)


def _add_tensor(key: list[Any], tensor: Any, kind: type) -> None:
    if kind is ShardTensor:
        meta = tensor._meta
        if key[1] and not meta.requires_grad and tensor._local.requires_grad:
            meta = now_requires_grad(tensor)
        key.append(meta)
    elif dense(tensor):
        if kind not in _PLAIN:
            key.append(kind)
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _is_float(arg: Any) -> bool:
    kind = type(arg)
    return isinstance(arg, float) or (
        kind.__module__ == "numpy" and kind.__name__.startswith("float")
    )


def floats_of(given: Iterable[Any]) -> list[float]:
    """The numbers that a key has by type, in order."""
    found: list[float] = []
    for arg in given:
        kind = type(arg)
        if kind is ShardTensor or kind in _WITHOUT_FLOATS:
            continue
        if kind is list or kind is tuple:
            found += floats_of(arg)
        elif kind is slice:
            found += floats_of((arg.start, arg.stop, arg.step))
        elif kind is dict:
            found += floats_of(arg.values())
        elif _is_float(arg):
            number = float(arg)
            found.append(number if number == number else NAN)
    return found


class Structure(NamedTuple):
    """A call with its lengths taken out.

    Args:
        key: equal for all calls of one structure.
        values: the different lengths, in the order in which the key numbers them.
        numbers: which of these the call names as a number as well.
    """

    key: tuple[Any, ...]
    values: list[Any]
    numbers: frozenset[int]


_AS_THEY_ARE = frozenset((0, 1, None))

_NAMES = tuple([object() for _ in range(64)])
"""What stands in a key for a number that is a length, too."""


def structure_key(key: Sequence[Any], floats: Sequence[float]) -> Structure | None:
    """The structure of the call with this key, and with these floats; None where strides are not
    those of a part of a dense tensor, or a tensor was reduced.

    A plain tensor stands in the key as shape, strides, dtype and requires_grad; an argument that
    is a torch.Size follows its type. Lengths come last: 0 and 1 as they are, others by number.
    Where a tensor is part of a longer one, that one's lengths count, too.
    """
    out: list[Any] = []
    lengths: list[Any] = []
    numbers: list[int] = []
    items = iter(key)
    for item in items:
        kind = type(item)
        if kind is Meta:
            form = item.form
            if form is None or item.was_reduced:
                return None
            out.append(form)
            layout = item.layout
            lengths += layout.shape
            if any(layout.cuts):
                lengths += layout.cuts
            if form.gaps:
                lengths += item.lines()
            continue
        if kind is torch.Size and out[-1] is not torch.Size:
            if next(items) != contiguous_strides(item):
                return None
            out.append(len(item))
            lengths += item
            continue
        if kind is int or kind is tuple or kind is torch.Size:
            numbers.append(len(out))
        out.append(item)
    num = len(out)
    seen: dict[Any, int] = {}
    number_of = seen.setdefault
    out += [
        length if length in _AS_THEY_ARE else number_of(length, -1 - len(seen))
        for length in lengths
    ]
    named: set[int] = set()
    for at in numbers:
        item = out[at]
        if type(item) is int:
            if item in seen:
                out[at] = _name_of(item, seen, named)
        elif not seen.keys().isdisjoint(item):
            out[at] = tuple([
                _name_of(one, seen, named) if type(one) is int and one in seen else one
                for one in item
            ])
    return Structure((*out, num, *floats), list(seen), frozenset(named))


def _name_of(number: int, seen: dict[Any, int], named: set[int]) -> Any:
    at = -1 - seen[number]
    named.add(at)
    return _NAMES[at] if at < len(_NAMES) else number


def trace_key(key: Sequence[Any], asks_for_grad: bool) -> tuple[Any, ...]:
    """The key of the trace of a call: tensors count by the properties of their meta tensors.

    `asks_for_grad`: whether the function checks if a gradient is needed.
    """
    func, recorded, *others = key
    out: list[Any] = [func, asks_for_grad and recorded]
    for item in others:
        if type(item) is Meta:
            out += (item.shape, item.stride(), item.dtype, asks_for_grad and item.requires_grad)
        else:
            out.append(item)
    return tuple(out)

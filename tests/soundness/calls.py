"""ATen calls with concrete small tensors, by the op of the rule table that they belong to."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.sweep.samples import Sample, aliases_of, database, samples_of
from weft.ops import find
from weft.rules.factors import packet
from weft.tensor.trace.calls import facts
from weft.tensor.trace.capture import capture, meta_like
from weft.tensor.trace.trees import fill, flatten, slots_of

__all__ = ["AtenCall", "calls_of"]

_MOST_NUMEL = 2000


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One call of an overload; `op` is its name in the table of rules."""

    op: str
    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def form(self) -> tuple[Any, ...]:
        """What two calls have in common that say the same."""
        tensors = flatten((self.args, self.kwargs))
        return str(self.overload), tuple((one.shape, one.dtype) for one in tensors)

    def ndim(self) -> int:
        """The dims of the operand that has most."""
        return max((one.ndim for one in flatten((self.args, self.kwargs))), default=0)


def calls_of(
    entry: str, dtype: torch.dtype, most: int = 8, aliases: bool = False
) -> Iterator[AtenCall]:
    """The calls, of ops that a rule speaks of, that samples of an entry of the database make.

    `aliases`: by its other names as well.
    """
    seen = set()
    names = ("", *(aliases_of(entry) if aliases else ()))
    samples = [samples_of(entry, dtype, most, alias=name) for name in names]
    for sample in itertools.chain.from_iterable(samples):
        if sum(one.numel() for one in sample.tensors) > _MOST_NUMEL:
            continue
        for call in _within(sample):
            if call.form() not in seen:
                seen.add(call.form())
                yield call


def _within(sample: Sample) -> Iterator[AtenCall]:
    """What one sample consists of, run op by op."""
    metas = [meta_like(one) for one in sample.tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trace = capture(lambda *own: sample.fn(list(own)), metas, {}, metas)
        except Exception:  # it reads values, say; the sweep sees to it
            return
        values: dict[int, Tensor] = dict(enumerate(sample.tensors))
        for op in trace.ops:
            slots = slots_of((op.args, op.kwargs))
            about = facts(op.overload)
            if about.writes or about.is_random or any(one.index not in values for one in slots):
                return
            args, kwargs = fill(op.args, values), fill(op.kwargs, values)
            name = packet(about.functional)
            if any(one.is_meta for one in flatten((args, kwargs))):
                return
            if slots and find(about.functional) is not None:
                yield AtenCall(name, op.overload, args, kwargs)
            try:
                with torch.no_grad():
                    out = flatten(op.overload(*args, **kwargs))
            except (RuntimeError, NotImplementedError):  # of a meta tensor that it makes itself
                return
            values.update(zip([slot.index for slot in slots_of(op.results)], out))


def entries() -> list[str]:
    """The names of the database's entries."""
    return list(database())

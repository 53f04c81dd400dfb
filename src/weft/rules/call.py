"""One op with its arguments, as rules see it: of each tensor the shape, the dtype, the layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from weft.core import Layout

__all__ = ["Call", "TensorArg"]


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A tensor argument or result: its global shape, its dtype as text ("float32"), and the dims
    along which it was expanded, so that all elements are one."""

    shape: tuple[int, ...]
    dtype: str
    expanded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One op with its arguments; a TensorArg represents each tensor.

    Args:
        op: the overload's name, "aten.add.Tensor". In-place and out= overloads have their
            functional name.
        args, kwargs: the arguments, in the order of the schema.
        results: the tensors that the op returns.
        names: the schema's names of the positional arguments, if they are known.
        counts: per tensor parameter of the schema, the number of tensors in it: 0 for None, any
            number for a list. None if the schema is not known: tensors then fill a rule's
            operands in order.
        layouts: those of the tensors, in their order; () if they are not known.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[TensorArg, ...]
    names: tuple[str, ...] = ()
    counts: tuple[int, ...] | None = None
    layouts: tuple[Layout, ...] = ()
    tensors: tuple[TensorArg, ...] = field(init=False)
    """The TensorArgs in order, including those in lists, positional ones first."""

    def __post_init__(self) -> None:
        found: list[TensorArg] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(self.kwargs.values(), found)
        object.__setattr__(self, "tensors", tuple(found))

    @property
    def base(self) -> str:
        """The op without its namespace and overload: "add"."""
        return self.op.split(".")[1]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument with this name in the schema; the default if the op has none."""
        if name in self.names:
            at = self.names.index(name)
            return self.args[at] if at < len(self.args) else default
        return self.kwargs.get(name, default)


def _collect(values: Iterable[Any], found: list[TensorArg]) -> None:
    for value in values:
        if type(value) is TensorArg:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(cast("Iterable[Any]", value), found)

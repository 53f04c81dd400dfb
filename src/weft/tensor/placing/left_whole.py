"""Warnings, once per line, about calls that leave a sharded operand whole on every rank, or a
partial one that they cannot shard; about halos larger than the shards; and, once per op, about
operands that are gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft import propagate
from weft.core import Layout
from weft.core.units import nbytes_text
from weft.errors import ShardTypeError, StrictError, message
from weft.planner.geometry import largest
from weft.rules import Decision, Rule
from weft.tensor import modes
from weft.tensor.shard_tensor import ShardTensor

__all__ = ["LeftWhole", "WideHalo", "find_wide", "find_written", "is_large", "tell",
           "warn_if_whole"]

_WARNED: set[str] = set()


class _Limit:
    """`nbytes`: the number of bytes from which a call warns; None: never."""

    nbytes: int | None = 2**20


def warn_if_whole(nbytes: int | None) -> int | None:
    """Set the size from which a call warns that it leaves a sharded value whole on every rank.

    A call that needs a dim whole gathers it, and one that needs all dims whole sums a partial value
    on every rank. If its result is then sharded over fewer mesh axes than its operand was, every
    rank of these axes holds all of it and repeats all further work.

    Args:
        nbytes: bytes of the result on one rank; initially 1 MiB (2**20). None: no call warns.

    Returns:
        The previous number.

    Raises:
        ShardTypeError: not a number of bytes.
    """
    given: Any = nbytes
    if given is not None and (
        isinstance(given, bool) or not isinstance(given, (int, float)) or given < 0
    ):
        raise ShardTypeError(
            "warn_if_whole(nbytes)", f"nbytes is {given!r}",
            "it is a number of bytes, or None for no warning", [repr(given)],
            "weft.warn_if_whole(2**20)")
    before, _Limit.nbytes = _Limit.nbytes, nbytes
    return before


def is_large(nbytes: int) -> bool:
    """Whether a call that leaves so many bytes whole warns."""
    return _Limit.nbytes is not None and nbytes >= _Limit.nbytes


@dataclass(frozen=True, slots=True)
class LeftWhole:
    """A call that leaves the value of a sharded or partial operand whole.

    Args:
        name: the op.
        operand, result: their layouts.
        axes: the mesh axes over which the operand was sharded, or partial, and the result is not.
        nbytes: of the result on one rank, at most those of the gathered operand.
        dims: the dims of the operand that the op can have sharded.
        is_write: whether the result is a tensor that was there before.
    """

    name: str
    operand: Layout
    result: Layout
    axes: tuple[int, ...]
    nbytes: int
    dims: tuple[int, ...]
    is_write: bool = False

    def check(self) -> None:
        """Warn at the user's line, or raise in strict mode, from that many bytes on."""
        warns = is_large(self.nbytes)
        if modes.is_strict() and (warns or not self._is_partial):
            raise StrictError(self._message("under weft.strict() no op communicates implicitly"))
        if warns:
            modes.warn(self._message(
                "what is sharded stays sharded, unless the op needs it whole "
                "(weft.warn_if_whole sets from how many bytes on weft warns)"))

    @property
    def _is_partial(self) -> bool:
        return not any(isinstance(self.operand.on(axis), int) for axis in self.axes)

    def _message(self, rule: str) -> str:
        names = ", ".join([repr(self.operand.mesh.axis_names[axis]) for axis in self.axes])
        free = [dim for dim in self.dims if _can_take(self.operand, dim, self.axes)]
        fix = "a layout of which the op needs no sharded dim whole"
        if self.is_write:
            fix = f"write into a tensor that {names} shards: redistribute it before"
        elif free:
            dims = [() if set(axes) & set(self.axes) else axes for axes in self.operand.dims]
            dims[free[0]] = (*dims[free[0]], *self.axes)
            placements = self.operand.replace(dims=tuple(dims)).placements
            fix = f"x.redistribute(placements={list(placements)!r}) before, sharding dim {free[0]}"
        moved = "reduced" if self._is_partial else "gathered"
        return message(
            self.name, f"at {modes.source_line()} an operand {self.operand} is {moved} over "
            f"{names}, and the result {self.result} is left whole there: "
            f"{nbytes_text(self.nbytes)} on every rank", rule, [str(self.operand)], fix)


@dataclass(frozen=True, slots=True)
class WideHalo:
    """A call whose ranks read more of other shards than they hold themselves.

    Args:
        name: the op. operand: its layout.
        held, read: bytes of the largest shard, and of the largest box that is read.
    """

    name: str
    operand: Layout
    held: int
    read: int

    def check(self) -> None:
        """Warn at the user's line, where there are that many bytes."""
        if not is_large(self.read):
            return
        modes.warn(message(
            self.name, f"at {modes.source_line()} a rank that holds {nbytes_text(self.held)} of an "
            f"operand {self.operand} reads {nbytes_text(self.read)}",
            "windows that reach beyond the next shard bring most of it from others "
            "(weft.warn_if_whole sets from how many bytes on weft warns)", [str(self.operand)],
            "fewer shards of this dim, and more of another: x.redistribute(placements=...)"))


def find_wide(
    name: str, layouts: Sequence[Layout], decision: Decision, rule: Rule | None,
    results: Sequence[Tensor],
) -> LeftWhole | WideHalo | None:
    """The largest operand that a call leaves whole; or one of which ranks read more than twice what
    they hold; None if neither. `decision`: on the layouts of the operands, by the rule, if there is
    one."""
    if not decision.results:
        return None
    itemsize = max([one.dtype.itemsize for one in results], default=0)
    result = max(decision.results, key=largest)
    found: list[LeftWhole] = []
    for at, (source, target) in enumerate(zip(layouts, decision.operands)):
        dims = () if rule is None else propagate.can_be_sharded(rule, at)
        axes = tuple([axis for axis in range(source.mesh.ndim)
                      if _is_lost(source, target, axis, dims) and result.on(axis) is None])
        if axes:
            nbytes = itemsize * min(largest(result), largest(target))
            found.append(LeftWhole(name, source, result, axes, nbytes, dims))
    if found:
        return max(found, key=lambda one: one.nbytes)
    for layout, cover in zip(decision.operands, decision.reads):
        if cover is not None:
            held, read = largest(layout), cover.largest(layout)
            if read > 2 * held:
                return WideHalo(name, layout, itemsize * held, itemsize * read)
    return None


def find_written(
    name: str, layouts: Sequence[Layout], result: Layout, target: Layout, itemsize: int
) -> LeftWhole | None:
    """The operand of a write whose sharded `result` is gathered, because `target` is whole."""
    axes = [axis for axis in range(target.mesh.ndim) if target.mesh.axis_sizes[axis] > 1
            and isinstance(result.on(axis), int) and target.on(axis) is None]
    for layout in layouts:
        lost = tuple([axis for axis in axes if isinstance(layout.on(axis), int)])
        if lost:
            nbytes = itemsize * largest(target)
            return LeftWhole(name, layout, target, lost, nbytes, (), is_write=True)
    return None


def _is_lost(source: Layout, target: Layout, axis: int, free: Sequence[int]) -> bool:
    """Whether an operand that this axis shards is gathered; or one that is partial over it becomes
    whole and has no dim that the op can have sharded over it: where it has, cost decided."""
    held = source.on(axis)
    if source.mesh.axis_sizes[axis] == 1 or isinstance(target.on(axis), int):
        return False
    return isinstance(held, int) or bool(held is not None and source.ndim and not any(
        _can_take(source, dim, (axis,)) for dim in free))


def _can_take(layout: Layout, dim: int, axes: Sequence[int]) -> bool:
    """Whether these axes, too, can shard the dim."""
    sizes = layout.mesh.axis_sizes
    shards = math.prod([sizes[axis] for axis in (*layout.dims[dim], *axes)])
    return not set(layout.dims[dim]) & set(axes) and layout.shape[dim] >= shards


def tell(
    name: str, reason: str, tensors: Sequence[Tensor], fix: str, any_size: bool = True,
    in_strict: str = "x.redistribute(placements=[Replicate(), ...]) before the call",
) -> None:
    """Warn once per op about the operands that it gathers, or raise in strict mode; `any_size`:
    also if they are smaller than what `warn_if_whole` says; `in_strict`: the fix of that error."""
    sharded = [t for t in tensors if type(t) is ShardTensor and not t._meta.layout.is_replicated]
    nbytes = sum(math.prod(t.shape) * t.dtype.itemsize for t in sharded)
    if not nbytes or not (any_size or is_large(nbytes)):
        return
    layouts = [str(t._meta.layout) for t in sharded]
    if modes.is_strict():
        raise StrictError(
            name, f"{reason}, so it would gather {nbytes_text(nbytes)} on every rank",
            "under weft.strict() no op communicates implicitly", layouts, in_strict)
    if name not in _WARNED and any(one.dim() for one in sharded):  # a number costs nothing
        _WARNED.add(name)
        modes.warn(
            message(name, f"{reason}, so its operands were gathered, {nbytes_text(nbytes)} on "
                    "every rank",
                    "an op without a rule runs on full tensors", layouts, fix)
        )

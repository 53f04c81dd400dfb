"""The meaning of an op for sharded operands (`Rule`), and how one call is run (`Decision`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core import Cover, Layout
from weft.rules.window import AnyWindow, Idle, OnBox, Window

__all__ = ["Decision", "FactorDims", "Length", "LocalArgs", "Rule"]

FactorDims = tuple[tuple[str, ...], ...]
"""Per dim of a tensor, its factors, major to minor; () is a dim of size 1 that broadcasts."""

LocalArgs = Callable[[tuple[int, ...]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Mesh coordinate -> (args, kwargs) of the local op, with TensorArgs in place of tensors."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long a dim of a result is: what some dims of operands are together, and a number; times
    what other dims are.

    Args:
        terms: (operand, dim) of each.
        plus: the number.
        times: (operand, dim) of the others.
        least: (operand, dim, length): what it holds from; shorter operands give something else.
    """

    terms: tuple[tuple[int, int], ...] = ()
    plus: int = 0
    times: tuple[tuple[int, int], ...] = ()
    least: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """One operation as mathematics over factors.

    Args:
        operands: per tensor operand, per dim, its factors; None for one whose dims no result has.
        unread: the operands that stay as they are, because only their metadata is read.
        results: the same per result.
        sizes: the size of every factor.
        reduce: the kind of reduction of each factor that no result has.
        whole: factors that must not be sharded.
        linear, bias, moves, by_size, needs_kernel, fill, on_box, keeps: those of `RuleText`, for
            the tensors of the call.
        size_arg: position of the argument that gives the result's shape...
        size_dims: ...or the lengths of these of its dims (first, one past the last).
        counts: positions of arguments that are the size of a factor (`groups`). Where it is
            sharded, a rank passes the size of its shard.
        offsets: for factors of which each operand holds a part (concatenation): where in the factor
            the part of each operand begins.
        nonempty: factors that the op refuses with length 0, so that no shard may be empty.
        finish: pairs (operand, factor): the factor may stay sharded in this operand, and the kernel
            of the op combines the shards. A result without the factor is then whole, or
            partial if `reduce` names a kind.
        beside: (operand, factor, other): an axis that shards `other` may shard the factor in this
            operand, whose shards the kernel combines; it then shards the factor in no other
            operand.
        windows: (operand, factor) -> the window by which the operand's dim belongs to the factor:
            where it is sharded, ranks get the boxes that their shards of the factor read.
        spreads: (result, factor) -> the window by which the result's dim belongs to the factor,
            read backwards: ranks get the boxes that their shards of the result are made of.
        folds: whether the local op, given such a window, leaves boxes of partial values instead,
            which the ranks sum.
        op: the overload to run on the local tensors, if it is not the one that was called...
        args: ...with these positional arguments.
    """

    operands: tuple[FactorDims | None, ...]
    results: tuple[FactorDims, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = field(default_factory=dict[str, str])
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    bias: tuple[int, ...] = ()
    unread: frozenset[int] = frozenset()
    moves: bool = False
    size_arg: int | None = None
    size_dims: tuple[int, int] | None = None
    counts: Mapping[int, str] = field(default_factory=dict[int, str])
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    nonempty: frozenset[str] = frozenset()
    by_size: bool = False
    finish: frozenset[tuple[int, str]] = frozenset()
    beside: frozenset[tuple[int, str, str]] = frozenset()
    needs_kernel: bool = False
    windows: Mapping[tuple[int, str], AnyWindow] = field(
        default_factory=dict[tuple[int, str], AnyWindow]
    )
    spreads: Mapping[tuple[int, str], Window] = field(
        default_factory=dict[tuple[int, str], Window]
    )
    folds: bool = False
    fill: float = 0.0
    on_box: OnBox | None = None
    keeps: bool = True
    op: str | None = None
    args: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How one call is carried out.

    With `op` or `args`, the local op is that ATen overload, or the one that was called,
    with those arguments; otherwise it is the very function that was called.

    Args:
        operands: the layout that each tensor operand is moved to.
        results: the layouts of the results as the local op leaves them.
        args: coordinate -> (args, kwargs) of the local op; None = as called.
        op: the overload to run on the local tensors; None = the one that was called.
        chosen: per mesh axis, what it shards or passes: a factor, "partial(sum)", or "".
        by_form: whether no cost was compared. The axes then do the same for all layouts that
            differ only in their lengths and have the same factors.
        reads: per operand, what ranks read of it beyond its layout; () if they read only what they
            own.
        folds: per result, the boxes of partial values that the local op leaves, which are summed.
        runs: coordinate -> what runs on the local tensors in place of the op, or `Idle`; None = the
            op.
        finish: the dims (operand, dim) whose shards the op's kernel combines; empty if the op
            itself runs on the local tensors.
        starts: of a slice of consecutive places, where it begins in each dim of the operand.
        keeps: whether autograd keeps what ranks read beyond their layout.
        lengths: of a part of the one operand, or of more than it, that no rule describes: how long
            each dim is, which belongs to the operand's dim in this place.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    args: LocalArgs | None = None
    op: str | None = None
    chosen: tuple[str, ...] = ()
    by_form: bool = False
    finish: tuple[tuple[int, int], ...] = ()
    reads: tuple[Cover | None, ...] = ()
    folds: tuple[Cover | None, ...] = ()
    runs: Callable[[tuple[int, ...]], Callable[..., Any] | Idle | None] | None = None
    starts: tuple[int, ...] | None = None
    keeps: bool = True
    lengths: tuple[Length, ...] | None = None

    def reason(self) -> str:
        """Why the operands are moved to these layouts, for `weft.explain()`."""
        if not self.operands or not self.chosen:
            return "the operands stay as they are"
        names = self.operands[0].mesh.axis_names
        said = [
            f"{name} {'passes ' if what.startswith('partial(') else 'shards '}{what}"
            for name, what in zip(names, self.chosen)
            if what
        ]
        return ", ".join(said) or "every axis is replicated"

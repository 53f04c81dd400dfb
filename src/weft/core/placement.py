"""Placements, one per mesh axis: the spelling that torch's DTensor uses.

`Shard(dim)`, `Replicate()`, `Partial(kind)` and `StridedShard(dim, split_factor)` are values.
torch's own placement objects are recognised by their fields, so this file needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.errors import PlacementError, ShardTypeError, message

__all__ = ["KINDS", "Partial", "Placement", "Replicate", "Shard", "StridedShard", "as_placement"]

KINDS = ("sum", "avg", "max", "min", "product", "and", "or", "band", "bor", "bxor")
"""The reductions that a partial axis may wait for."""


class Placement:
    """What one mesh axis does to a tensor."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis cuts a tensor dim (`dim`, when given)."""
        return False

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the axis holds terms that are still to be reduced (by `reduce_op`)."""
        return False


@dataclass(frozen=True, slots=True, repr=False)
class Shard(Placement):
    """The axis cuts tensor dim `dim`; `sizes` are explicit shard sizes, in shard order."""

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ShardTypeError(
                message("Shard(dim)", f"dim is {self.dim!r}, a {type(self.dim).__name__}",
                        "a tensor dim is an integer", [self.dim], "Shard(0)")
            )
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={self.sizes}"
        return f"Shard(dim={self.dim}{sizes})"

    def __str__(self) -> str:
        return f"S({self.dim})" if self.sizes is None else f"S({self.dim}, sizes={self.sizes})"


@dataclass(frozen=True, slots=True, repr=False)
class StridedShard(Placement):
    """The axis cuts tensor dim `dim` below axes that stand to its right.

    Decoded from the last mesh axis: this axis is inserted where the product of the sizes of the
    axes already there equals `split_factor`. Unequal to every `Shard`.
    """

    dim: int
    split_factor: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={self.sizes}"
        return f"StridedShard(dim={self.dim}, split_factor={self.split_factor}{sizes})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


@dataclass(frozen=True, slots=True, repr=False)
class Replicate(Placement):
    """Every coordinate of the axis holds the same."""

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Every coordinate of the axis holds a full-size term, to be reduced by `reduce_op`."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in KINDS:
            raise PlacementError(
                message("Partial(reduce_op)", f"{self.reduce_op!r} is none of {len(KINDS)} kinds",
                        f"the kinds of reduction are {', '.join(KINDS)}", [repr(self.reduce_op)],
                        'Partial("sum")')
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


def as_placement(value: Any, call: str = "placements") -> Placement:
    """Our placement for ours or torch's own object.

    Raises:
        ShardTypeError: `value` is no placement.
    """
    if isinstance(value, Placement):
        return value
    match type(value).__name__:
        case "Shard":
            return Shard(value.dim)
        case "_StridedShard":
            return StridedShard(value.dim, value.split_factor)
        case "Replicate":
            return Replicate()
        case "Partial" | "_Partial":
            return Partial(value.reduce_op)
    raise ShardTypeError(
        message(call, f"{value!r} is a {type(value).__name__}, no placement",
                "a placement is Shard(dim), Replicate() or Partial(kind), one per mesh axis",
                [repr(value)], "[Shard(0), Replicate()]")
    )

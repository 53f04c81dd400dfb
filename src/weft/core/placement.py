"""Placements, one per mesh axis: the spelling of torch's DTensor.

`Shard(dim)`, `Replicate()`, `Partial(kind)` and `StridedShard(dim, split_factor)` are values
whose text is torch's. torch's own placement objects are recognized by their type and fields, so
this file needs no torch.

Placements that mean the same are equal, also to torch's objects, from either side and with the same
hash: `Shard(dim)`, `Replicate()` and `Partial(kind)`. torch's `_StridedShard` equals none of these,
because it cuts lengths that do not divide evenly at other offsets. Nothing here is an instance of
torch's classes: instead of `isinstance` use `is_shard()`, `is_replicate()` and `is_partial()`,
which both have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from weft.core.integers import integers, listed
from weft.errors import PlacementError, ShardTypeError

__all__ = [
    "KINDS", "Partial", "Placement", "Replicate", "Shard", "StridedShard", "as_placement",
    "is_name", "is_placements", "is_torch_strided",
]


class _Kinds(tuple[str, ...]):
    """A tuple of which help() shows a text of its own, not that of tuples."""


KINDS = _Kinds(("sum", "avg", "max", "min", "product", "and", "or", "band", "bor", "bxor"))
"""The kinds of reduction that a partial axis may have."""

KINDS.__doc__ = "The kinds of reduction that a partial axis may have."


_ALSO_CALLED = {"mean": "avg", "average": "avg", "prod": "product", "mul": "product",
                "amax": "max", "amin": "min", "all": "and", "any": "or", "xor": "bxor"}
"""Kinds by names that they have elsewhere, for errors."""


class Placement:
    """What one mesh axis does to a tensor."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis shards a tensor dim (`dim`, if given, in the placement's spelling).

        Args:
            dim: the tensor dim; None asks about any.
        """
        return False

    def is_replicate(self) -> bool:
        """Whether every coordinate of the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the axis holds partial values that are still to be reduced.

        Args:
            reduce_op: the kind of reduction; None asks about any.
        """
        return False


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Shard(Placement):
    """The axis shards tensor dim `dim` (negative: from the end), as `torch.chunk` does.

    Args:
        dim: the tensor dim.
        sizes: explicit shard sizes (numbers of elements), in shard order. If several axes shard
            the dim, the major one carries all of them.

    Raises:
        ShardTypeError: a dim or sizes that are not whole numbers.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_shard("Shard", self)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __eq__(self, other: object) -> bool:
        if type(other) is Shard:
            return self.dim == other.dim and self.sizes == other.sizes
        same = self.sizes is None and _torch_name(other) == "Shard"
        return other.dim == self.dim if same else NotImplemented  # type: ignore[attr-defined]

    def __hash__(self) -> int:  # torch's
        return hash(self.dim) if self.sizes is None else hash((self.dim, self.sizes))

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim}{_sizes_text(self.sizes)})"

    def __str__(self) -> str:
        return f"S({self.dim}{_sizes_text(self.sizes)})"


@dataclass(frozen=True, slots=True, repr=False)
class StridedShard(Placement):
    """The axis shards tensor dim `dim` below axes to its right.

    Decoding starts from the last mesh axis: among the axes to its right that shard the same dim,
    this one is inserted where the product of the sizes before it equals `split_factor`. Axes of
    size 1 leave several such places; the first one below some axis is meant, and `skip`
    counts how many more to pass. Unequal to every `Shard`. The text is that of torch's
    `_StridedShard`; its `is_shard` is true, because the axis does shard the dim.

    Args:
        dim: as in `Shard`.
        split_factor: see above.
        sizes: as in `Shard`.
        skip: see above.

    Raises:
        ShardTypeError: an argument that is not a whole number.
    """

    dim: int
    split_factor: int
    sizes: tuple[int, ...] | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        _check_shard("StridedShard", self)
        fix = "StridedShard(0, split_factor=2)"
        integers((self.split_factor, self.skip), "StridedShard(dim, split_factor)",
                 "split_factor and skip", fix)
        if self.split_factor < 1 or self.skip < 0:
            raise PlacementError(
                "StridedShard(dim, split_factor)",
                f"split_factor is {self.split_factor}, skip is {self.skip}",
                "split_factor is a product of axis sizes, at least 1; skip at least 0",
                [repr(self)], fix)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        skip = f", skip={self.skip}" if self.skip else ""
        return (f"StridedShard(dim={self.dim}, split_factor={self.split_factor}"
                f"{_sizes_text(self.sizes)}{skip})")

    def __str__(self) -> str:
        skip = f", skip={self.skip}" if self.skip else ""
        return f"_S({self.dim}, {self.split_factor}{_sizes_text(self.sizes)}{skip})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Replicate(Placement):
    """Every coordinate of the axis holds the same."""

    def is_replicate(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is Replicate:
            return True
        return True if _torch_name(other) == "Replicate" else NotImplemented

    def __hash__(self) -> int:  # torch's
        return -2

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Partial(Placement):
    """Every coordinate of the axis holds a partial value of full size, to be reduced.

    Args:
        reduce_op: the kind of reduction, one of `weft.KINDS`.

    Raises:
        PlacementError: no such kind.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in KINDS:
            meant = _ALSO_CALLED.get(str(self.reduce_op), "sum")
            raise PlacementError(
                "Partial(reduce_op)", f"{self.reduce_op!r} is none of {len(KINDS)} kinds",
                f"the kinds of reduction are {', '.join(KINDS)}", [repr(self.reduce_op)],
                f'Partial("{meant}")')

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __eq__(self, other: object) -> bool:
        if type(other) is Partial:
            return self.reduce_op == other.reduce_op
        same = _torch_name(other) == "Partial"
        return other.reduce_op == self.reduce_op if same else NotImplemented  # type: ignore

    def __hash__(self) -> int:  # torch's
        return 1 + hash(self.reduce_op)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


def as_placement(value: Any, call: str = "placements") -> Placement:
    """weft's placement, for weft's own or torch's object.

    torch's `_StridedShard` denotes other boxes than weft's for some shapes; `Layout` checks this.

    Raises:
        ShardTypeError: `value` is not a placement.
    """
    if isinstance(value, Placement):
        return value
    match _torch_name(value):
        case "Shard":
            return Shard(value.dim)
        case "_StridedShard":
            return StridedShard(value.dim, value.split_factor)
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(value.reduce_op)
        case _:
            pass
    hint = "[Shard(0), Replicate()]"
    if isinstance(value, str):
        hint = f"P({value!r})" if is_name(value) else f"P('dp', None), or {hint}"
    raise ShardTypeError(
        call, f"{value!r}, of type {type(value).__name__}, is no placement",
        "a placement is Shard(dim), Replicate() or Partial(kind), one per mesh axis",
        [repr(value)], hint)


def is_name(text: str) -> bool:
    """Whether it may be meant for an axis, and not for the text of a placement or spec."""
    return not set(text) & set("()[]{}, ")


def is_placements(value: Any) -> bool:
    """Whether `value` is a list or tuple of placements, weft's or torch's."""
    given = listed(value)
    return bool(given) and all(
        isinstance(one, Placement) or _torch_name(one) in _TORCHS for one in given
    )


def is_torch_strided(value: Any) -> bool:
    """Whether `value` is torch's own `_StridedShard`."""
    return _torch_name(value) == "_StridedShard"


_TORCHS = frozenset(("Shard", "_StridedShard", "Replicate", "Partial"))


def _torch_name(value: Any) -> str | None:
    # Only torch's exact types: a subclass (`_MaskPartial`) has another meaning.
    kind = cast(type[object], type(value))
    return kind.__name__ if kind.__module__.startswith("torch.distributed.tensor.") else None


def _check_shard(name: str, shard: Shard | StridedShard) -> None:
    dim: Any = shard.dim
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ShardTypeError(
            f"{name}(dim)", f"dim is {shard.dim!r}, of type {type(shard.dim).__name__}",
            "a tensor dim is a whole number", [repr(shard.dim)], f"{name}(0)")
    if shard.sizes is not None:
        sizes = integers(shard.sizes, f"{name}(sizes=)", "shard sizes", "Shard(0, sizes=(6, 14))")
        object.__setattr__(shard, "sizes", sizes)


def _sizes_text(sizes: tuple[int, ...] | None) -> str:
    return "" if sizes is None else f", sizes={sizes}"

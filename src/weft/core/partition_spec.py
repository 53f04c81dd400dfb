"""Partition specs: one entry per tensor dim, naming the mesh axes that shard it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from weft.core.integers import listed
from weft.core.mesh import AxisName
from weft.core.names import also_called
from weft.core.placement import Partial
from weft.errors import ShardTypeError

__all__ = ["P", "SpecEntry", "SpecItem"]

SpecEntry = tuple[AxisName, ...]
"""The axes that shard a dim, major to minor; () if none do."""

SpecItem = AxisName | tuple[AxisName, ...] | None
"""An entry as the user writes it: a single axis is its name, no axis is None."""


class P(Sequence[SpecItem]):
    """Which mesh axes shard each tensor dim: `P(("dp", "tp"), None, partial={"cp": "sum"})`.

    A sequence of its entries, as JAX's PartitionSpec: `len(spec)`, `spec[0]`, `rows, *rest = spec`,
    `P("layers", *spec)`. `partial` is not among them: `P(*spec, partial=dict(spec.partial))`.
    Trailing None entries count in `len`, but not in equality or in the text.

    Args:
        entries: one per tensor dim: an axis name or number, a tuple of them (major to minor), or
            None. Trailing None entries may be omitted.
        partial: map axis -> kind of reduction that is still to be done.

    Raises:
        ShardTypeError: an entry of another type, or a `partial` that is not a map.
        PlacementError: an unknown kind.

    >>> P("dp", None, None) == P("dp"), P(("dp", "tp"), partial={"cp": "sum"})
    (True, P(('dp', 'tp'), partial={'cp': 'sum'}))
    >>> P("layers", *P(("dp", "tp"), None)), len(P("dp", None)), P("dp", None)[1]
    (P('layers', ('dp', 'tp')), 2, None)
    """

    __slots__ = ("_items", "entries", "partial")

    _items: tuple[SpecItem, ...]
    entries: tuple[SpecEntry, ...]
    partial: tuple[tuple[AxisName, str], ...]

    @also_called({"unreduced": 'P("dp", partial={"tp": "sum"})',
                  "": 'P("dp"): the axis of each dim, in order'})
    def __init__(self, *entries: SpecItem, partial: Mapping[AxisName, str] | None = None) -> None:
        canonical = [_entry(entry) for entry in entries]
        self._items = tuple([_item(entry) for entry in canonical])
        while canonical and not canonical[-1]:
            canonical.pop()
        self.entries = tuple(canonical)
        given: Any = partial
        if given is not None and not isinstance(given, Mapping):
            raise ShardTypeError(
                "P(partial=)", f"{partial!r} is of type {type(partial).__name__}",
                "partial is a map axis -> kind of reduction", [repr(partial)],
                'P("dp", partial={"cp": "sum"})')
        kinds = {axis: Partial(kind).reduce_op for axis, kind in (partial or {}).items()}
        self.partial = tuple(sorted(kinds.items(), key=lambda item: str(item[0])))

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> SpecItem: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[SpecItem, ...]: ...

    def __getitem__(self, index: int | slice) -> SpecItem | tuple[SpecItem, ...]:
        return self._items[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, P):
            return NotImplemented
        return (self.entries, self.partial) == (other.entries, other.partial)

    def __hash__(self) -> int:
        return hash((self.entries, self.partial))

    def __repr__(self) -> str:
        shown = [repr(_item(entry)) for entry in self.entries]
        if self.partial:
            shown.append(f"partial={dict(self.partial)!r}")
        return f"P({', '.join(shown)})"


def _item(entry: SpecEntry) -> SpecItem:
    return (entry[0] if len(entry) == 1 else entry) if entry else None


def _entry(entry: Any) -> SpecEntry:
    if entry is None:
        return ()
    if isinstance(entry, (str, int)) and not isinstance(entry, bool):
        return (entry,)
    axes = listed(entry)
    if axes is not None and all(
        isinstance(axis, (str, int)) and not isinstance(axis, bool) for axis in axes
    ):
        return tuple(axes)
    raise ShardTypeError(
        "P(*entries)", f"entry {entry!r} is of type {type(entry).__name__}",
        "an entry is an axis name or number, a tuple of them, or None", [repr(entry)],
        'P(("dp", "tp"), None)')

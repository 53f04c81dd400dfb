"""The result of distributing a module: a line per tensor, and the bytes on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from weft.comm import as_bound_mesh
from weft.core import Layout, Mesh
from weft.core.arguments import MeshLike
from weft.core.display import AsText
from weft.core.names import also_called
from weft.core.units import nbytes_text
from weft.errors import ModuleError
from weft.nn.match import as_patterns, idle_patterns, layouts_of, pins_of, shadowed
from weft.nn.named import Named, named_tensors, refuse_lazy
from weft.nn.pins import Cut, PinHook
from weft.planner.geometry import largest
from weft.tensor import ShardTensor

__all__ = ["MATCHED", "Pin", "Report", "Row", "report"]

MATCHED = "_weft_matched"
"""The attribute in which a distributed module keeps name -> pattern."""

MAX_RANKS = 4096
"""With more ranks no total over every rank is computed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter or buffer: its names (several for tied weights), its layout, and the pattern.

    `pattern` is None if none matched.
    """

    names: tuple[str, ...]
    kind: str
    layout: Layout
    dtype: torch.dtype
    pattern: str | None

    @property
    def full_nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return prod(self.layout.shape) * self.dtype.itemsize

    def nbytes(self, rank: int) -> int:
        """The size of one rank's block in bytes.

        Args:
            rank: the rank's position in the mesh.
        """
        at = self.layout.mesh.coordinate(rank)
        return prod(self.layout.local_shape_at(at)) * self.dtype.itemsize

    @property
    def max_nbytes(self) -> int:
        """The size of the largest block in bytes."""
        return largest(self.layout) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Pin:
    """A module whose inputs or outputs have fixed layouts."""

    path: str
    pin: Any
    pattern: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Report(AsText):
    """What `distribute_module` does with a module. `print` shows it.

    Attributes:
        mesh: the mesh.
        rows: a row for each parameter and buffer.
        pins: the activations with fixed layouts.
        idle: the patterns that match no name.
        shadowed: the patterns whose names were all matched by earlier ones.
    """

    mesh: Mesh
    rows: tuple[Row, ...]
    pins: tuple[Pin, ...] = ()
    idle: tuple[str, ...] = ()
    shadowed: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Row:
        """The row of a parameter or buffer, by any of its names."""
        for row in self.rows:
            if name in row.names:
                return row
        raise KeyError(name)

    def nbytes(self, rank: int) -> int:
        """The size of all blocks of one rank in bytes.

        Args:
            rank: the rank's position in the mesh that all tensors share.
        """
        return sum(row.nbytes(rank) for row in self.rows)

    @property
    def full_nbytes(self) -> int:
        """The size of the module on one device in bytes."""
        return sum(row.full_nbytes for row in self.rows)

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The names that no pattern matches."""
        return tuple(row.names[0] for row in self.rows if row.pattern is None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return f"Report({len(self.rows)} tensors on {self.mesh}, {nbytes_text(self.full_nbytes)})"

    def _lines(self) -> Iterator[str]:
        kinds = [row.kind for row in self.rows]
        yield (f"{kinds.count('parameter')} parameters and {kinds.count('buffer')} buffers on "
               f"{self.mesh}, {self.mesh.size()} ranks")
        table = [("name", "layout", "bytes per rank", "pattern")]
        for row in self.rows:
            text = row.layout.text(str(row.dtype).removeprefix("torch."))
            if row.layout.mesh != self.mesh:
                text += f" on {row.layout.mesh}"
            why = "-" if row.pattern is None else repr(row.pattern)
            table.append((row.names[0], text, f"{row.max_nbytes:,}", why))
            table += [(f"  = {name}", "", "", "") for name in row.names[1:]]
        widths = [max(len(line[at]) for line in table) for at in range(3)]
        for name, layout, nbytes, why in table:
            yield (f"{name:<{widths[0]}}  {layout:<{widths[1]}}  {nbytes:>{widths[2]}}  {why}"
                   ).rstrip()
        yield self._total()
        for pin in self.pins:
            why = "" if pin.pattern is None else f", by {pin.pattern!r}"
            shown = _shown(pin.pin, self.mesh)
            yield f"{pin.pin.word} of {pin.path or 'the module'} pinned: {shown}{why}"
        if self.shadowed:
            yield f"earlier patterns took all names of: {', '.join(map(repr, self.shadowed))}"
        if self.idle:
            yield f"matched nothing: {', '.join(map(repr, self.idle))}"

    def _total(self) -> str:
        full = self.full_nbytes
        if any(row.layout.mesh != self.mesh for row in self.rows):
            return f"in all: {full:,} bytes, on several meshes"
        if self.mesh.size() > MAX_RANKS:
            most = sum(row.max_nbytes for row in self.rows)
            return f"in all: at most {most:,} bytes on a rank, of {full:,}"
        totals = [self.nbytes(rank) for rank in range(self.mesh.size())]
        least, most = min(totals, default=0), max(totals, default=0)
        of_rank = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return f"in all: {of_rank} bytes on a rank, of {full:,}"


def _shown(pin: Any, mesh: Mesh) -> str:
    named = [f"{name}={_worded(spec, mesh)}" for name, spec in pin.by_name.items()]
    return ", ".join([_worded(spec, mesh) for spec in pin.specs] + named)


def _worded(spec: Any, mesh: Mesh) -> str:
    if not isinstance(spec, Cut):
        return repr(spec)
    axes = ", ".join(str(mesh.axis_names[axis]) for axis in spec.axes)
    return f"{axes} replicates" if spec.dim is None else f"{axes} shards dim {spec.dim}"


@also_called(device_mesh="mesh")
def report(
    module: nn.Module, mesh: MeshLike | None = None, shardings: Mapping[str, Any] | None = None,
    activations: Mapping[str, Any] | None = None,
) -> Report:
    """What `distribute_module` has done with a module; given shardings, what it would do.

    The latter needs no ranks: the mesh may be a plain `Mesh` of any size, and the module may be on
    the meta device. Patterns that match nothing are listed; `distribute_module` raises for them.

    Args:
        module: the module.
        mesh: None means the current one; used only if shardings are given.
        shardings: as in `distribute_module`.
        activations: as in `distribute_module`.

    Returns:
        The report; `print` shows it as a table.

    Raises:
        ModuleError: the module is not distributed, and no shardings are given.
    """
    tensors = named_tensors(module)
    refuse_lazy("report(module)", tensors)
    if shardings is None and activations is None:
        return _done(module, tensors)
    value = mesh if type(mesh) is Mesh else as_bound_mesh(mesh, "report(mesh)").abstract
    shardings = as_patterns("shardings", shardings)
    activations = as_patterns("activations", activations)
    matches = layouts_of(tensors, shardings, value)
    pins = pins_of(module, shardings, activations, value)
    idle = idle_patterns(module, tensors, shardings, False)
    return Report(
        value,
        tuple(_row(match.named, match.layout, match.pattern) for match in matches),
        tuple(Pin(pinned.path, pinned.pin, pinned.pattern) for pinned in pins),
        (*idle, *idle_patterns(module, tensors, activations, True)),
        tuple(shadowed(shardings, matches, pins, idle)),
    )


def _done(module: nn.Module, tensors: Sequence[Named]) -> Report:
    known = getattr(module, MATCHED, {})
    rows, plain = [], []
    for named in tensors:
        if isinstance(named.tensor, ShardTensor):
            pattern = next((known[name] for name in named.names if name in known), None)
            rows.append(_row(named, named.tensor.sharding, pattern))
        else:
            plain.append(named.name)
    if plain or not rows:
        raise ModuleError(
            "report(module)", f"{len(plain)} of {len(tensors)} parameters and buffers are "
            "plain tensors", "a report is of a distributed module, or of shardings that "
            "are given", plain, "report(module, mesh, shardings={...})")
    pins = []
    for path, inner in module.named_modules():
        for hook in (*inner._forward_pre_hooks.values(), *inner._forward_hooks.values()):
            if isinstance(hook, PinHook):
                pins.append(Pin(path, hook.pin, hook.pattern))
    return Report(rows[0].layout.mesh, tuple(rows), tuple(pins))


def _row(named: Named, layout: Layout, pattern: str | None) -> Row:
    kind = "parameter" if named.is_parameter else "buffer"
    return Row(tuple(named.names), kind, layout, named.tensor.dtype, pattern)

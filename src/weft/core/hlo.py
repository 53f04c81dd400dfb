"""XLA's op-sharding text: tiles over a list of devices, in both of its versions.

Version 1 lists the devices, version 2 describes them as a transposed iota. A device list is
stored as *digits*: pairs (size, stride), major to minor, whose mixed-radix sums are the list. A
list in mesh order has one digit per axis, so nothing here grows with the number of devices
until the list is requested. Axes of size 1 have no digit and do not appear in the text.

Source of the format: XLA's `HloSharding` and `IotaTileAssignment`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from weft.core.cuts import default_is_flat, flat_cuts
from weft.core.encoding import Spelled
from weft.core.mesh import Mesh, row_major
from weft.errors import PlacementError, ShardTypeError

__all__ = [
    "Digits", "TileAssignment", "merged", "read", "read_sizes", "read_tiles", "tile_assignment",
]

Digits = tuple[tuple[int, int], ...]
"""(size, stride) pairs, major to minor; contiguous neighbours are merged."""


@dataclass(frozen=True, slots=True)
class TileAssignment:
    """Which devices hold which tile: `tiles` per tensor dim, each on `num_replicas` devices."""

    mesh: Mesh
    tiles: tuple[int, ...]
    num_replicas: int
    positions: Digits

    @property
    def devices(self) -> tuple[int, ...]:
        """Device ids, row-major over the tiles, then the replicas of each tile."""
        return tuple(map(self.mesh.rank_at, _expand(self.positions)))

    @property
    def replication_groups(self) -> tuple[tuple[int, ...], ...]:
        """Per tile, row-major, the devices that hold it."""
        devices, step = self.devices, self.num_replicas
        return tuple(devices[at : at + step] for at in range(0, len(devices), step))

    def text(self, version: int) -> str:
        """The op-sharding string of version 1 or 2.

        Raises:
            PlacementError: another version; or version 2 for device ids that are not a transposed
                iota.
        """
        if version not in (1, 2):
            raise PlacementError(
                "hlo_sharding(version)", f"there is no version {version!r}",
                "version 1 lists the devices, version 2 is the iota form",
                [repr(version)], "layout.hlo_sharding(version=2)")
        if math.prod(self.tiles) == 1:
            return "{replicated}"
        tiles = [*self.tiles, self.num_replicas] if self.num_replicas > 1 else self.tiles
        devices = self._iota() if version == 2 else _commas(self.devices)
        last = " last_tile_dim_replicate" if self.num_replicas > 1 else ""
        return f"{{devices=[{_commas(tiles)}]{devices}{last}}}"

    def _iota(self) -> str:
        digits = self.positions if self.mesh.ranks is None else _compress(self.devices)
        radix = sorted(digits or (), key=lambda digit: -digit[1])
        strides = tuple([stride for _, stride in radix])
        if digits is None or strides != row_major([size for size, _ in radix]):
            raise PlacementError(
                "hlo_sharding(version=2)", f"the {self.mesh.size()} device ids of "
                f"{self.mesh} are no transposed iota",
                "version 2 describes devices 0..n-1 in the order of permuted axes",
                [f"devices {_commas(self.devices[:16])}, ..."],
                "layout.hlo_sharding(version=1)")
        order = [radix.index(digit) for digit in digits]
        transposed = f"T({_commas(order)})" if order != sorted(order) else ""
        return f"<=[{_commas(size for size, _ in radix)}]{transposed}"


def tile_assignment(layout: Spelled) -> TileAssignment:
    """The tiles of a layout's dims; axes that shard nothing replicate, in mesh order.

    Raises:
        PlacementError: partial axes, or cuts that are not flat.
    """
    mesh, dims = layout.mesh, layout.dims
    sizes = [tuple([mesh.axis_sizes[axis] for axis in axes]) for axes in dims]
    kinds = layout.kinds
    ragged = [
        f"dim {dim}" + (f" with sizes {layout.sizes_of(dim)}" if cut else "")
        for dim, (cut, length, its) in enumerate(zip(layout.cuts, layout.shape, sizes))
        if not (default_is_flat(length, its) if cut is None else cut == flat_cuts(length, its))
    ]
    if kinds or ragged:
        raise PlacementError(
            "Layout.hlo_sharding()", f"{layout} has {len(kinds)} partial axes and "
            f"{len(ragged)} dims whose cuts are not flat",
            "XLA's op-sharding has no partial values, and cuts each dim by one "
            "ceiling over all its axes", [*kinds, *ragged],
            "use layout.placements, which says everything, or layout.spec with sizes; "
            'or cut flat, Layout(mesh, shape, spec, sizes={0: "flat"})')
    cutting = [axis for axes in dims for axis in axes]
    order = cutting + [axis for axis in range(mesh.ndim) if axis not in cutting]
    tiles = tuple(map(math.prod, sizes))
    positions = merged((mesh.axis_sizes[axis], mesh.axis_strides[axis]) for axis in order)
    return TileAssignment(mesh, tiles, mesh.size() // math.prod(tiles), positions)


_COUNTS = r"[1-9]\d*(?:,[1-9]\d*)*"
_NUMBERS = r"\d+(?:,\d+)*"
_TEXT = (  # compiled at its first use
    rf"\{{\s*devices=\[(?P<tiles>{_COUNTS})\]"
    rf"(?:<=\[(?P<reshape>{_COUNTS})\](?:T\((?P<order>{_NUMBERS})\))?|(?P<devices>{_NUMBERS}))"
    r"(?P<last>\s+last_tile_dim_replicate)?\s*\}"
)


def read(text: str, mesh: Mesh, ndim: int) -> tuple[tuple[int, ...], ...]:
    """Axes per tensor dim, major to minor, of an op-sharding string over the axes of `mesh`.

    Raises:
        PlacementError: text of another form (maximal, manual, tuples), tiles or devices that do
            not fit the tensor or the mesh, tiles that split an axis.
    """
    call = "Layout.from_hlo(text)"
    match = _matched(text, call)
    if match is None:
        return ((),) * ndim
    tiles = _numbers(match["tiles"])
    replicas = tiles.pop() if match["last"] else 1
    listed = _numbers(match["devices"] or match["reshape"])
    num_devices = len(listed) if match["devices"] else math.prod(listed)
    num_tiled = math.prod(tiles) * replicas
    if len(tiles) != ndim or not num_tiled == num_devices == mesh.size():
        raise PlacementError(
            call, f"{text!r} has {len(tiles)} tile dims for {num_tiled} devices and lists "
            f"{num_devices}, the tensor has {ndim} dims and {mesh} {mesh.size()} devices",
            "there is one tile dim per tensor dim (and one for replicas), and the devices "
            "are those of the mesh", [text],
            f"a shape of {len(tiles)} dims, and a mesh of these devices")
    positions = _positions(match, mesh, replicas)
    if positions is None:
        raise PlacementError(
            call, f"{text!r} lists the devices of {mesh} in an order of their own",
            "the devices are those of the mesh, each once, in the order of whole axes",
            _wrong_devices(match, mesh) or [text],
            f"the devices in that order, Mesh(({mesh.size()},), ranks=(...))")
    return _axes_of_tiles(text, mesh, tiles, list(positions))


def read_tiles(text: str, call: str) -> tuple[list[int], list[int], list[int]] | None:
    """Tiles per tensor dim, the lengths of the grid of devices (the tiles, and the replicas of each
    if there are any), and the devices, row-major; None if all is replicated.

    The list of devices is empty for an iota that is in no order of axes.

    Raises:
        PlacementError: text of another form.
    """
    match = _matched(text, call)
    if match is None:
        return None
    grid = _numbers(match["tiles"])
    tiles = grid[:-1] if match["last"] else grid
    if match["devices"]:
        return tiles, grid, _numbers(match["devices"])
    digits = _permuted(match)
    return tiles, grid, [] if digits is None else _expand(digits)


def read_sizes(text: str, call: str) -> tuple[list[int], list[int]] | None:
    """Tiles per tensor dim, and axis sizes of a mesh of devices 0, 1, ... whose axes form them;
    None for a list of devices, and if no such axes exist. Its run time does not depend on the
    number of devices."""
    match = _matched(text, call)
    digits = None if match is None or match["devices"] else _permuted(match)
    if match is None or digits is None:
        return None
    grid, left = _numbers(match["tiles"]), list(digits)
    if math.prod(grid) != math.prod(size for size, _ in left):
        return None
    pieces = [piece for tile in grid for piece in _taken(tile, left)]
    if any(part == 1 for part, _ in pieces):
        return None
    tiles = grid[:-1] if match["last"] else grid
    return tiles, [part for part, _ in sorted(pieces, key=lambda piece: -piece[1])]


def _taken(tile: int, digits: list[tuple[int, int]]) -> list[tuple[int, int]]:
    # The digits that a tile takes from the front of a list. The last one has size 1 if the tile
    # ends, or splits, within a digit by a number that does not divide it.
    found: list[tuple[int, int]] = []
    while tile > 1 and (not found or found[-1][0] > 1):
        size, stride = digits.pop(0)
        part = math.gcd(size, tile)
        if part < size:
            digits.insert(0, (size // part, stride))
        found.append((part, stride * (size // part)))
        tile //= part
    return found


def _wrong_devices(match: re.Match[str], mesh: Mesh) -> list[str]:
    # For a list: devices that repeat or are not in the mesh. For an iota: an invalid order.
    if not match["devices"]:
        return [f"T({match['order']})"] if _permuted(match) is None else []
    counts = Counter(_numbers(match["devices"]))
    return [f"device {one}, {count} times" for one, count in counts.items() if count > 1] + [
        f"device {one}, not in the mesh" for one in counts if mesh.position_of_rank(one) is None
    ]


def _matched(text: str, call: str) -> re.Match[str] | None:
    # The parts of an op-sharding string; None for a replicated one.
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardTypeError(
            call, f"{text!r} is a {type(text).__name__}", "an op-sharding is given by its "
            "string", [repr(text)], '"{devices=[2,4]<=[8]}"')
    if re.fullmatch(r"\{\s*replicated\s*\}", text.strip()):
        return None
    match = re.fullmatch(_TEXT, text.strip())
    if match is None:
        raise PlacementError(
            call, f"{text!r} is neither {{replicated}} nor {{devices=[tiles]...}}",
            "only tiled and replicated shardings of one tensor are layouts; maximal "
            "(one owner), manual, unknown, subgroup types and tuples are not", [text],
            "for one owner give explicit sizes, P('x') with sizes={0: (n, 0, ...)}; for "
            "a manual region use weft.local_map; else write a partition spec")
    return match


def _permuted(match: re.Match[str]) -> Digits | None:
    # Devices 0, 1, ... in the order of permuted axes; None if that is not a permutation.
    sizes = _numbers(match["reshape"])
    order = _numbers(match["order"]) if match["order"] else list(range(len(sizes)))
    if sorted(order) != list(range(len(sizes))):
        return None
    return merged((sizes[place], math.prod(sizes[place + 1 :])) for place in order)


def _positions(match: re.Match[str], mesh: Mesh, replicas: int) -> Digits | None:
    # The listed devices as positions in the mesh; None if they are in no order of axes.
    if match["devices"]:
        ids: Sequence[int] = _numbers(match["devices"])
    else:
        digits = _permuted(match)
        if digits is None or mesh.ranks is None:
            return digits
        ids = _expand(digits)
    positions = [mesh.position_of_rank(device) for device in ids]
    known = [position for position in positions if position is not None]
    if len(set(known)) < len(ids):
        return None
    # The replicas of a tile have no order among themselves.
    return _compress([
        position
        for at in range(0, len(known), replicas)
        for position in sorted(known[at : at + replicas])
    ])


def _axes_of_tiles(
    text: str, mesh: Mesh, tiles: Sequence[int], digits: list[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    dims: list[tuple[int, ...]] = []
    split: list[str] = []
    for dim, tile in enumerate(tiles):
        axes: list[int] = []
        for part, stride in [] if split else _taken(tile, digits):
            found = _axes_of_digit(mesh, part, stride)
            if found is None:
                split.append(f"dim {dim}: tile {tile}")
                break
            axes += found
        dims.append(tuple(axes))
    if split:
        raise PlacementError(
            "Layout.from_hlo(text)", f"{text!r} cuts within an axis of {mesh}",
            "every tile is made of whole mesh axes", split,
            "name the axes by a mesh of smaller axes, Mesh({'a': 2, 'b': 4}) for [2,4]; "
            "or write a partition spec, P(...), over this mesh")
    return tuple(dims)


def _axes_of_digit(mesh: Mesh, size: int, stride: int) -> list[int] | None:
    # A digit covers the strides [stride, stride * size): the axes that fill this range exactly.
    axes: list[int] = []
    top = size * stride
    for axis, (length, step) in enumerate(zip(mesh.axis_sizes, mesh.axis_strides)):
        if length > 1 and length * step == top > stride:
            axes.append(axis)
            top = step
    return axes if top == stride and size > 1 else None


def merged(digits: Iterable[tuple[int, int]]) -> Digits:
    """The same sums by fewer digits, in the given order.

    >>> merged([(3, 16), (4, 2), (2, 1)])
    ((3, 16), (8, 1))
    """
    out: list[tuple[int, int]] = []
    for size, stride in digits:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def _expand(digits: Digits) -> list[int]:
    ranges = [range(0, size * stride, stride) for size, stride in digits]
    return [sum(offsets) for offsets in product(*ranges)]


def _compress(values: Sequence[int]) -> Digits | None:
    # The digits whose sums are `values`, minor ones found first; None if there are none.
    digits: list[tuple[int, int]] = []
    while len(values) > 1:
        stride = values[1]
        size = 2
        while size < len(values) and values[size] == size * stride:
            size += 1
        if len(values) % size or any(
            value != values[at - at % size] + at % size * stride for at, value in enumerate(values)
        ):
            return None
        digits.insert(0, (size, stride))
        values = values[::size]
    return tuple(digits)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _commas(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))

"""Meshes, shapes, specs and layouts from text: one parser for everything that weft prints.

Texts come from command lines, logs and error messages. Nothing is guessed: malformed text
is refused, with a suggestion of the text that was probably meant.

    mesh    dp=2,tp=4 | 2,4 | Mesh(dp=2, tp=4)
    ranks   8-15 | 0,2,4-7
    shape   1024,4096 | (1024, 4096)
    sizes   0=6,3,4,7 | 0=balanced
    spec    P(dp,(tp,sp),None,partial={cp:sum}), quotes allowed
            [Shard(0), Replicate(), Partial(sum)] | [S(0), R, P(sum)]
            {devices=[2,1,4]<=[8] last_tile_dim_replicate}
    layout  f32[8@dp{6,2}, 16@(tp,sp)] partial(sum@cp)
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.partition_spec import P
from weft.core.placement import Partial, Placement, Replicate, Shard, StridedShard
from weft.core.reader import CLOSING, Call, Reader, UnreadableError
from weft.errors import LayoutError, MeshError, PlacementError, WeftError

__all__ = [
    "parse_layout", "parse_mesh", "parse_ranks", "parse_shape", "parse_sizes", "parse_spec",
    "read_layout",
]

_AXIS = re.compile(r"\s*([^\W\d][\w.:/-]*|\d+)\s*=\s*(\d+)\s*")
_SIZE = re.compile(r"\s*(\d+)\s*")


def parse_mesh(text: str, ranks: Iterable[int] | None = None, call: str = "mesh") -> Mesh:
    """The mesh of `dp=2,tp=4`, of sizes alone (`2,4`), or of a mesh's own text.

    Raises:
        MeshError: malformed text; whatever `Mesh` refuses.

    >>> parse_mesh("dp=2,tp=4").size()
    8
    """
    inner = _inside(text, r"Mesh\(", r"\)")
    if inner != text and not inner.strip():
        return Mesh((), ranks)
    parts = inner.split(",")
    named = [_AXIS.fullmatch(part) for part in parts]
    sizes = [_SIZE.fullmatch(part) for part in parts]
    if all(sizes):
        return Mesh([int(part) for part in parts], ranks)
    pairs = [(match[1], int(match[2])) for match in named if match]
    if len(pairs) == len(parts):
        if [name for name, _ in pairs] == [str(number) for number in range(len(pairs))]:
            return Mesh([size for _, size in pairs], ranks)
        return Mesh(pairs, ranks)
    found = re.findall(r"([^\W\d][\w.]*)\W+(\d+)", inner)
    wrong = [repr(part.strip()) for part, match in zip(parts, named) if not match]
    raise MeshError(
        call, f"{text!r} has {len(wrong)} of {len(parts)} parts that are no axis",
        "a mesh is written as name=size, separated by commas, or as sizes alone", wrong,
        ",".join(f"{name}={size}" for name, size in found) or "dp=2,tp=4")


def parse_ranks(text: str, call: str = "ranks") -> tuple[int, ...]:
    """Device ids: `8-15` means 8 to 15, both included.

    Raises:
        MeshError: malformed text, or a descending range.

    >>> parse_ranks("0,2,4-7")
    (0, 2, 4, 5, 6, 7)
    """
    parts = [part.strip() for part in text.split(",")]
    spans = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in parts]
    wrong = [repr(part) for part, span in zip(parts, spans)
             if span is None or int(span[2] or span[1]) < int(span[1])]
    if wrong:
        ordered = (sorted(map(int, re.findall(r"\d+", part))) for part in parts)
        fixed = ["-".join(dict.fromkeys(map(str, (each[0], each[-1])))) for each in ordered if each]
        raise MeshError(
            call, f"{text!r} has {len(wrong)} of {len(parts)} parts that are no ranks",
            "ranks are numbers and ranges first-last, separated by commas", wrong,
            ",".join(fixed) or "8-15")
    return tuple(
        rank for span in spans if span
        for rank in range(int(span[1]), int(span[2] or span[1]) + 1)
    )


def parse_shape(text: str, call: str = "shape") -> tuple[int, ...]:
    """The global shape of `1024,4096`, brackets allowed; `()` has no dims.

    Raises:
        LayoutError: malformed text.

    >>> parse_shape("1024,4096"), parse_shape("(7,)"), parse_shape("()")
    ((1024, 4096), (7,), ())
    """
    inner = _inside(_inside(text, r"(?:torch\.Size\()?\[", r"\]\)?"), r"\(", r"\)")
    if not inner.strip() and text.strip():
        return ()
    parts = inner.rstrip().removesuffix(",").split(",")
    if all(map(_SIZE.fullmatch, parts)):
        return tuple(map(int, parts))
    wrong = [repr(part.strip()) for part in parts if not _SIZE.fullmatch(part)]
    raise LayoutError(
        call, f"{text!r} has {len(wrong)} of {len(parts)} parts that are no lengths",
        "a shape is written as whole numbers, separated by commas", wrong,
        ",".join(re.findall(r"\d+", text)) or "1024,4096")


def parse_sizes(texts: Iterable[str], call: str = "sizes") -> dict[int, tuple[int, ...] | str]:
    """Shard sizes per tensor dim from texts `dim=sizes`, or `dim=` and a way to cut.

    Raises:
        LayoutError: malformed text, or a dim that is given twice.

    >>> parse_sizes(["0=6,3,4,7", "1=balanced"])
    {0: (6, 3, 4, 7), 1: 'balanced'}
    """
    found: dict[int, tuple[int, ...] | str] = {}
    wrong: list[str] = []
    texts = tuple(texts)
    for text in texts:
        match = re.fullmatch(r"\s*(-?\d+)\s*=\s*(?:([a-z]+)|(\d+(?:\s*,\s*\d+)*))\s*", text)
        if match is None:
            wrong.append(repr(text))
        elif int(match[1]) in found:
            wrong.append(f"{text!r}, dim {match[1]} again")
        else:
            found[int(match[1])] = match[2] or tuple(map(int, match[3].split(",")))
    if wrong:
        numbers = re.findall(r"\d+", texts[0])
        if re.fullmatch(r"[\s\d,]+", texts[0]):  # sizes without their dim
            numbers.insert(0, "0")
        fix = f"{numbers[0]}={','.join(numbers[1:])}" if len(numbers) > 1 else "0=6,3,4,7"
        raise LayoutError(
            call, f"{len(wrong)} of {len(texts)} texts give no sizes of a dim of their own",
            "sizes are written as dim=size,size,... in shard order, or dim=balanced, "
            "dim=flat; each dim once", wrong, fix)
    return found


def parse_spec(text: str, call: str = "spec") -> P | tuple[Placement, ...]:
    """A partition spec or a list of placements, as written in Python or as printed.

    Names of axes and kinds need no quotes, unless a name contains a `:`.

    Raises:
        PlacementError: malformed text.
        ShardTypeError: entries of the wrong type.

    >>> parse_spec("P((dp,tp), None, partial={cp: sum})"), parse_spec("[S(0), R]")
    (P(('dp', 'tp'), partial={'cp': 'sum'}), (Shard(dim=0), Replicate()))
    """
    return _read(text, call, _spec)


def parse_layout(text: str, mesh: Mesh, call: str = "layout") -> tuple[Layout, str | None]:
    """A layout from its own text, and the short name of a dtype if the text begins with one.

    Raises:
        PlacementError: malformed text; whatever `Layout` refuses.

    >>> parse_layout("f32[20@dp{6,14}, 8] partial(sum@tp)", parse_mesh("dp=2,tp=4"))[0].box(7)
    ((6, 20), (0, 8))
    """
    shape, spec, sizes, dtype = _read(text, call, _layout)
    return Layout.placed(mesh, shape, spec, call, sizes or None), dtype


def read_layout(
    mesh: Mesh, text: str | None, shape: tuple[int, ...] | None = None,
    sizes: Mapping[int, tuple[int, ...] | str] | None = None, call: str = "spec",
) -> tuple[Layout, str | None]:
    """The layout of a text in any spelling, and a dtype's short name if it contains one.

    Args:
        text: a spec, placements or an op-sharding, which need a shape; or a layout's own text,
            which contains one. None replicates.

    Raises:
        PlacementError: malformed text, or sizes beside a text that contains sizes.
        LayoutError: no shape, or two; and whatever `Layout` refuses.

    >>> read_layout(parse_mesh("2,4"), "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (8, 8))[0]
    Layout(Mesh((2, 4)), (8, 8), P(0))
    """
    text = "P()" if text is None else text
    is_own, is_hlo = _OWN_TEXT.match(text), text.lstrip().startswith("{")
    if sizes and (is_own or is_hlo):
        raise PlacementError(
            call, f"{text!r} and sizes for {len(sizes)} dims",
            "a layout's own text, or an op-sharding, says where it cuts, so it takes no "
            "sizes", [f"{dim}={size}" for dim, size in sizes.items()], text)
    if is_own:
        layout, dtype = parse_layout(text, mesh, call)
        if shape in (None, layout.shape):
            return layout, dtype
        raise LayoutError(
            call, f"{text!r} has shape {layout.shape}, beside shape {shape}",
            "a layout's own text says the shape", [shape], text)
    if shape is None:
        raise LayoutError(
            call, f"{text!r} has no shape, and none is given",
            "a spec says which axes shard, so it needs a global shape; a layout's own text "
            "has one", [text], f"--shape 1024,4096 {call} {shlex.quote(text)}")
    if is_hlo:
        return Layout.from_hlo(text, mesh, shape), None
    return Layout.placed(mesh, shape, parse_spec(text, call), call, sizes or None), None


_OWN_TEXT = re.compile(r"\s*\w*\[\s*[\d\]]")


T = TypeVar("T")


def _read(text: str, call: str, form: Callable[[Reader], T]) -> T:
    """The value of the whole text, read by `form`; or the error that shows the corrected text."""
    try:
        return form(Reader(text))
    except UnreadableError as error:
        fix = _corrected(text, form)
        if call.startswith("--"):  # an option of a command: a shell reads it
            fix = f"{call} {shlex.quote(fix)}"
        raise PlacementError(
            call, f"{text!r} cannot be read: {error}",
            "it is written as weft prints it: a spec P(dp, None, (tp,sp), "
            "partial={cp: sum}), placements [Shard(0), Replicate(), Partial(sum)], or a "
            "layout's text [8@dp, 16@(tp,sp)] partial(sum@cp)", [repr(text)],
            fix) from None


def _corrected(text: str, form: Callable[[Reader], object]) -> str:
    # The first of some likely texts that can be read.
    inner = text.strip().removeprefix("P").strip("()[], ")
    names = re.findall(r"[^\W\d][\w.]*", inner)
    open_: list[str] = []
    for mark in text:
        if mark in CLOSING:
            open_.append(CLOSING[mark])
        elif open_ and mark == open_[-1]:
            open_.pop()
    closed = text.strip().rstrip(",") + "".join(reversed(open_))
    guesses = [closed, f"[{text.strip()}]", f"[{inner}]"]
    if not re.search("[={@]", text) and _PLACEMENTS.keys().isdisjoint(names):
        guesses += [f"P({inner})", f"P({','.join(names)})"]
    for guess in guesses:
        try:
            form(Reader(guess))
        except (UnreadableError, WeftError):
            continue
        return guess
    return _FORMS[form]


_PLACEMENTS: dict[str, type[Placement]] = {
    "Shard": Shard, "S": Shard, "Replicate": Replicate, "R": Replicate, "Partial": Partial,
    "P": Partial, "StridedShard": StridedShard, "_S": StridedShard,
}


def _spec(reader: Reader) -> P | tuple[Placement, ...]:
    tree = reader.value()
    reader.end()
    if isinstance(tree, Call) and tree.name == "P":
        unknown = [f"{name}=" for name in tree.options if name != "partial"]
        unknown += [f"{each.name}(...)" for each in tree.values if isinstance(each, Call)]
        if unknown:
            raise UnreadableError(f"P takes no {', '.join(unknown)}")
        return P(*tree.values, **tree.options)
    if isinstance(tree, (list, tuple)) and tree:
        return tuple(map(_placement, cast(Sequence[Any], tree)))
    raise UnreadableError("it is neither P(...) nor a list of placements")


def _placement(tree: Any) -> Placement:
    if tree == "R":
        return Replicate()
    if not isinstance(tree, Call) or tree.name not in _PLACEMENTS:
        shown = tree.name if isinstance(tree, Call) else tree
        raise UnreadableError(f"{shown!r} is no placement")
    takes = inspect.signature(_PLACEMENTS[tree.name])
    try:
        given = takes.bind(*tree.values, **tree.options)
    except TypeError:
        raise UnreadableError(f"{tree.name} takes ({', '.join(takes.parameters)})") from None
    return _PLACEMENTS[tree.name](*given.args, **given.kwargs)


_Parts = tuple[tuple[int, ...], P, dict[int, tuple[int, ...]], str | None]


def _layout(reader: Reader) -> _Parts:
    """Shape, spec, explicit sizes and dtype of a layout's text."""
    dtype = reader.take()[1] if reader.tokens[0][0] == "name" else None
    shape: list[int] = []
    entries: list[Any] = []
    sizes: dict[int, tuple[int, ...]] = {}
    reader.expect("[")
    while not reader.accept("]"):
        if shape:
            reader.expect(",")
        shape.append(reader.of("number", "a length"))
        entries.append(reader.value() if reader.accept("@") else None)
        if reader.accept("{"):
            sizes[len(shape) - 1] = tuple(reader.items("}"))
    partial: dict[Any, str] = {}
    if reader.accept("partial", "name"):
        reader.expect("(")
        while not reader.accept(")"):
            if partial:
                reader.expect(",")
            kind = reader.of("name", "a kind")
            reader.expect("@")
            axis = reader.value()
            if not isinstance(axis, (str, int)) or axis in partial:
                raise UnreadableError(f"{axis!r} is no axis, or partial twice")
            partial[axis] = kind
    reader.end()
    return tuple(shape), P(*entries, partial=partial), sizes, dtype


_FORMS: dict[Callable[..., object], str] = {
    _spec: "P(dp,tp), one entry per dim; or [Shard(0), Replicate()], one placement per mesh axis",
    _layout: "[8@dp, 16@tp], one entry per dim",
}


def _inside(text: str, opening: str, closing: str) -> str:
    # The text between brackets, if it has them.
    match = re.fullmatch(rf"\s*{opening}(.*){closing}\s*", text, re.DOTALL)
    return match[1] if match else text

"""Which tensor or module a pattern means, and the resulting layout.

Patterns are globs of full names, in which `*` also matches dots. The first pattern that matches a
name counts. A tensor with several names has one layout; all of its names that some
pattern matches must agree on it.

Of a module with parameters, `*` means these alone: no group gathers buffers (frequencies, masks,
running statistics), so each use would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from weft.core import Layout, Mesh, P
from weft.errors import LayoutError, ModuleError, ShardTypeError, WeftError
from weft.nn.named import Named, Place, first_matches, outermost_matches
from weft.nn.pins import Brought, Cut, PrepareModuleInput, PrepareModuleOutput
from weft.nn.styles import Style
from weft.tensor import ShardTensor
from weft.tensor.placing.layouts import as_layout

__all__ = [
    "Matched", "Pinned", "as_patterns", "brought_of", "idle_patterns", "layouts_of", "pins_of",
    "refuse_idle", "refuse_idle_modules", "shadowed",
]

Pin = PrepareModuleInput | PrepareModuleOutput
_Styled = (Style, PrepareModuleInput, PrepareModuleOutput)


@dataclass(frozen=True, slots=True)
class Matched:
    """The layout for a tensor, and the pattern that gives it (None: no pattern)."""

    named: Named
    layout: Layout
    pattern: str | None


class Pinned(NamedTuple):
    """A module whose activations have a fixed layout, and the pattern that gives it."""

    pattern: str
    path: str
    module: nn.Module
    pin: Pin


def as_patterns(argument: str, given: Any) -> dict[str, Any]:
    """The map passed as `shardings=` or `activations=`, in its order."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ShardTypeError(
            f"distribute_module({argument}=)", f"{given!r} is of type "
            f"{type(given).__name__}", f"{argument} map patterns of names to specs",
            [type(given).__name__], f'{argument}={{"": {given!r}}}' if isinstance(given, _Styled)
            else f'{argument}={{"layers.*": P("tp")}}')
    return dict(given)


def layouts_of(tensors: Sequence[Named], shardings: Mapping[str, Any], mesh: Mesh) -> list[Matched]:
    """The layout for each tensor. Specs that do not fit are all told of in notes of one error."""
    found, failed = [], []
    of_buffers = shardings
    if any(named.is_parameter for named in tensors):
        of_buffers = {
            pattern: spec for pattern, spec in shardings.items()
            if pattern != "*" or isinstance(spec, Style)
        }
    for named in tensors:
        meant = shardings if named.is_parameter else of_buffers
        try:
            found.append(_layout(named, meant, mesh))
        except WeftError as error:
            error.add_note(f"  in distribute_module, for {', '.join(named.names)}")
            failed.append(error)
    if failed:
        first, *others = failed
        for other in others:
            first.add_note(f"  and{other.__notes__[-1].removeprefix('  in distribute_module,')}: "
                           f"{str(other).splitlines()[0]}")
        raise first
    return found


def _layout(named: Named, shardings: Mapping[str, Any], mesh: Mesh) -> Matched:
    said: dict[str, tuple[str, Layout]] = {}
    for place in named.places:
        for pattern, spec in shardings.items():
            if _means(pattern, spec, place):
                if not named.tensor.dim() and any(mark in pattern for mark in "*?["):
                    spec = P()  # a counter of batches among weights: there is no dim to shard
                said[place.name] = pattern, _laid(named, place, spec, mesh)
                break
    layouts = {layout for _, layout in said.values()}
    if len(layouts) > 1:
        raise LayoutError(
            "distribute_module(shardings=)", f"one tensor has {len(named.names)} names "
            f"(tied weights), which are given {len(layouts)} layouts",
            "tied weights are one tensor, which has one layout",
            [f"{name}: {layout} by {pattern!r}"
             for name, (pattern, layout) in said.items()],
            f"the same spec for {' and '.join(said)}, or a pattern for one of them alone")
    tensor = named.tensor
    if not said:
        given = tensor.sharding if isinstance(tensor, ShardTensor) else as_layout(
            mesh, tensor.shape, None)  # type: ignore[arg-type]
        return Matched(named, given, None)
    pattern, layout = next(iter(said.values()))
    return Matched(named, layout, pattern)


def _means(pattern: str, spec: Any, place: Place) -> bool:
    if isinstance(spec, Style):
        return fnmatchcase(place.path, pattern)
    return not isinstance(spec, _Styled) and fnmatchcase(place.name, pattern)


def _laid(named: Named, place: Place, spec: Any, mesh: Mesh) -> Layout:
    if isinstance(spec, Style):
        style, spec = spec, spec.spec(place.owner, place.key, mesh)
        if spec is None:
            raise style.refusal(place.owner, place.path)
    return as_layout(
        mesh, named.tensor.shape, spec, "distribute_module(shardings)")  # type: ignore[arg-type]


def pins_of(
    module: nn.Module, shardings: Mapping[str, Any], activations: Mapping[str, Any], mesh: Mesh
) -> list[Pinned]:
    """The modules whose activations have a fixed layout, by styles and by `activations`.

    For each map the first pattern that matches a module counts; if one pattern matches modules that
    contain each other, it applies to the outermost.
    """
    styled = {pattern: spec for pattern, spec in shardings.items() if isinstance(spec, _Styled)}
    found = []
    for pattern, path, inner, spec in first_matches(module, styled):
        for pin in spec.pins(mesh) if isinstance(spec, Style) else [spec]:
            found.append(Pinned(pattern, path, inner, pin))
    for pattern, path, inner, spec in outermost_matches(module, activations):
        found += [Pinned(pattern, path, inner, pin) for pin in _pins(pattern, spec, mesh)]
    return found


def brought_of(
    module: nn.Module, shardings: Mapping[str, Any], mesh: Mesh
) -> Iterator[tuple[nn.Module, str, Brought]]:
    """The layers whose style moves the input to the weight, with their names."""
    styled = {pattern: spec for pattern, spec in shardings.items() if isinstance(spec, Style)}
    for _, path, inner, style in first_matches(module, styled):
        brought = style.brings(inner, mesh)
        if brought is not None:
            yield inner, path, brought


def _pins(pattern: str, spec: Any, mesh: Mesh) -> Sequence[Pin]:
    if isinstance(spec, Style):
        pins = spec.pins(mesh)
        if not pins:
            raise ModuleError(
                "distribute_module(activations=)", f"{spec!r} shards parameters, not "
                "activations", "styles of parameters are given in shardings=",
                [repr(pattern)], f"shardings={{{pattern!r}: {spec!r}}}")
        return pins
    is_pin = isinstance(spec, PrepareModuleInput | PrepareModuleOutput)
    pin = spec if is_pin else PrepareModuleOutput(spec)
    for one in (*pin.specs, *pin.by_name.values()):
        _check(pattern, one, mesh)
    return [pin]


def _check(pattern: str, spec: Any, mesh: Mesh) -> None:
    """Check what can be known of a spec before there is an activation."""
    if isinstance(spec, P):
        names = [name for entry in spec.entries for name in entry]
        mesh.axes([*names, *(name for name, _ in spec.partial)], f"activations[{pattern!r}]")
    elif not (spec is None or isinstance(spec, (Cut, Layout, ShardTensor, list, tuple))):
        raise ShardTypeError(
            "distribute_module(activations=)", f"{spec!r} is of type {type(spec).__name__}",
            "a spec is a P, placements or a Layout", [repr(pattern)],
            f'activations={{{pattern!r}: P("dp")}}')


def idle_patterns(
    module: nn.Module, tensors: Iterable[Named], patterns: Mapping[str, Any], of_modules: bool
) -> list[str]:
    """The patterns that match no name; for a style that only shards, no module with parameters."""
    places = [place for named in tensors for place in named.places]
    names, owners = [place.name for place in places], [place.path for place in places]
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]

    def eligible(spec: Any) -> list[str]:
        if not of_modules and isinstance(spec, Style) and spec.only_cuts:
            return owners
        return paths if of_modules or isinstance(spec, _Styled) else names

    return [
        pattern for pattern, spec in patterns.items()
        if not any(fnmatchcase(name, pattern) for name in eligible(spec))
    ]


def shadowed(
    shardings: Mapping[str, Any], matches: Iterable[Matched], pins: Iterable[Pinned],
    idle: Iterable[str],
) -> list[str]:
    """The patterns all of whose names an earlier pattern has matched."""
    used = {match.pattern for match in matches} | {pin.pattern for pin in pins} | {*idle}
    return [
        pattern for pattern, spec in shardings.items()
        if pattern not in used and not isinstance(spec, _Styled)
    ]


def refuse_idle(
    module: nn.Module, tensors: Sequence[Named], shardings: Mapping[str, Any],
    activations: Mapping[str, Any],
) -> None:
    """Raises LayoutError if a pattern matches nothing."""
    _refuse_other_styles(shardings)
    names = [name for named in tensors for name in named.names]
    idle = idle_patterns(module, tensors, shardings, False)
    if idle:
        _refuse_names_of_the_other_kind(tensors, {each: shardings[each] for each in idle})
        of_modules = [each for each in idle if isinstance(shardings[each], _Styled)]
        where = f"{len(names)} names of parameters and buffers: {_some(names)}"
        if of_modules:
            where += "; styles are matched with names of modules that have some"
        raise LayoutError(
            "distribute_module(shardings=)", f"{len(idle)} of {len(shardings)} patterns "
            f"match none of the {where}", "every pattern matches at least one name",
            [_with_near(each, names) for each in idle],
            "print([name for name, _ in module.named_parameters()])")
    refuse_idle_modules("activations", module, activations)


def refuse_idle_modules(argument: str, module: nn.Module, patterns: Mapping[str, Any]) -> None:
    """Raises LayoutError if a pattern matches no module."""
    idle = idle_patterns(module, (), patterns, True)
    if idle:
        paths = [path for path, _ in module.named_modules() if path]
        raise LayoutError(
            f"distribute_module({argument}=)", f"{len(idle)} of {len(patterns)} "
            f"patterns match none of the {len(paths)} names of modules: {_some(paths)}",
            "every pattern matches at least one module",
            [_with_near(each, paths) for each in idle],
            "print([name for name, _ in module.named_modules()])")


def _refuse_other_styles(shardings: Mapping[str, Any]) -> None:
    """Raises ShardTypeError for classes of styles, torch's styles and words for them."""
    named = {each: _style_like(spec) for each, spec in shardings.items()}
    meant = {each: name for each, name in named.items() if name}
    if meant:
        table = ", ".join(f'{each!r}: weft.nn.{name}("tp")' for each, name in meant.items())
        raise ShardTypeError(
            "distribute_module(shardings=)", f"{len(meant)} of {len(shardings)} patterns "
            "are given what is no style of weft.nn but named as one", "a style is an "
            "object of a class of weft.nn, with the axis that it uses",
            [f"{each!r}: {shardings[each]!r}" for each in meant], f"shardings={{{table}}}")


def _style_like(given: Any) -> str | None:
    """The style of weft.nn that has this name: that of a class or of its object, or a word."""
    if isinstance(given, Style):
        return None
    said = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
    names = {one.__name__: one.__name__.lower() for one in Style.__subclasses__()}
    found = [name for name, low in names.items()
             if said.lower() in (low, low.removesuffix("parallel"))]
    return found[0] if found else None


def _refuse_names_of_the_other_kind(tensors: Sequence[Named], idle: Mapping[str, Any]) -> None:
    """Raises LayoutError if specs whose patterns match no parameter match modules with some, and if
    styles whose patterns match no module match parameters."""
    keys = {place.path: place.key for named in reversed(tensors) for place in named.places}
    meant = {
        each: next((f"{each}.{key}".removeprefix(".") for path, key in keys.items()
                    if fnmatchcase(path, each)), None)
        for each, spec in idle.items() if not isinstance(spec, _Styled)
    }
    what, other = "modules", "parameter or buffer"
    if not any(meant.values()):
        what, other = "parameters or buffers", "module"
        places = [place for named in tensors for place in named.places]
        meant = {
            each: each.rpartition(".")[0] for each, spec in idle.items()
            if isinstance(spec, _Styled) and any(
                fnmatchcase(place.name, each) and fnmatchcase(place.path, each.rpartition(".")[0])
                for place in places)
        }
    fixes = [f"{name!r}: {idle[each]!r}" for each, name in meant.items() if name is not None]
    if fixes:
        raise LayoutError(
            "distribute_module(shardings=)", f"{len(fixes)} patterns match {what}, and no {other}",
            "specs are for names of parameters and buffers, styles of weft.nn for names of modules",
            [repr(each) for each, name in meant.items() if name is not None],
            f"shardings={{{', '.join(fixes)}}}")


def _with_near(pattern: str, names: Sequence[str]) -> str:
    near = get_close_matches(pattern, names, 1, 0.75)
    return f"{pattern!r} (near {near[0]!r})" if near else repr(pattern)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

"""Rules as algebra, without torch: random factor strings on random layouts, box by box.

An operation is drawn as a factor string: its value is the reduction, over the factors that no
result has, of the product of its operands plus an addend. Plain loops over index tuples evaluate
it on the whole and on every coordinate's boxes; what the boxes give, put together as the decision
says, must be the whole. Numbers are integers, so equality is exact.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from weft.core import Layout, Mesh
from weft.propagate import decide
from weft.rules import Call, Decision, Rule, TensorArg, bind, parse
from weft.rules.rule import FactorDims

Index = tuple[int, ...]
Values = dict[Index, int]

MESHES = (Mesh({"x": 2}), Mesh({"x": 2, "y": 2}), Mesh({"x": 3, "y": 1}), Mesh({"x": 2, "y": 3}))

# text, shapes of operands, shapes of results, linear sets, number of operands that multiply
PRODUCTS = {
    "matmul": ("m k, k n -> m n", [(3, 4), (4, 2)], [(3, 2)], ((0,), (1,)), 2),
    "linear": ("b k, n k, n -> b n", [(3, 4), (5, 4), (5,)], [(3, 5)], ((0, 2), (1, 2)), 2),
    "batch": ("... m k, ... k n -> ... m n", [(2, 1, 3), (3, 2)], [(2, 1, 2)], ((0,), (1,)), 2),
    "bilinear": ("b i, o i j, b j -> b o", [(3, 2), (2, 2, 3), (3, 3)], [(3, 2)],
                 ((0,), (1,), (2,)), 3),
    "add": ("a b, b -> a b", [(4, 3), (3,)], [(4, 3)], ((0, 1),), 1),
    "heads": ("b (h d), h -> b h", [(2, 12), (3,)], [(2, 3)], ((0,), (1,)), 2),
    "join": ("b h d -> b (h d)", [(2, 3, 2)], [(2, 6)], ((0,),), 1),
    "split": ("(a b) c -> a (b c)", [(6, 2)], [(3, 4)], ((0,),), 1),
    "sum": ("a b c -> b", [(3, 4, 2)], [(4,)], ((0,),), 1),
    "max": ("a b:max -> a", [(3, 5)], [(3,)], (), 1),
    "whole": ("a b! -> a", [(3, 5)], [(3,)], (), 1),
    "diagonal": ("i i -> i", [(3, 3)], [(3,)], ((0,),), 1),
    "scalar": (", a -> a", [(), (5,)], [(5,)], ((0,), (1,)), 2),
    "ones": ("a b, a b -> a b", [(1, 4), (5, 1)], [(5, 4)], ((0,), (1,)), 2),
    "one row": ("a b -> b a", [(1, 3)], [(3, 1)], ((0,),), 1),
    "nothing": ("a b -> a", [(0, 3)], [(0,)], ((0,),), 1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_boxes_make_the_whole(name: str) -> None:
    text, operands, results, linear, num_factors = PRODUCTS[name]
    rng = random.Random(name)
    rule = bind(parse(text), operands, results, linear=linear)
    args = tuple(TensorArg(shape, "int64") for shape in operands)
    call = Call(f"test.{name}", args, {}, tuple(TensorArg(shape, "int64") for shape in results))
    for trial in range(80):
        mesh = MESHES[trial % len(MESHES)]
        layouts = [_layout(rng, mesh, shape) for shape in operands]
        decision = decide(rule, call, layouts, [rng.random() < 0.5] * len(operands))
        _check(rule, decision, num_factors, rng)


def test_the_check_finds_a_wrong_rule() -> None:
    """A reduction that is called a sum where it is a maximum must not pass."""
    rule = bind(parse("a b -> a"), [(3, 4)], [(3,)])
    right = bind(parse("a b:max -> a"), [(3, 4)], [(3,)])
    mesh, rng = Mesh({"x": 2}), random.Random(0)
    args = (TensorArg((3, 4), "int64"),)
    call = Call("test.wrong", args, {}, (TensorArg((3,), "int64"),))
    layout = Layout.make(mesh, (3, 4), ((), (0,)))
    decision = decide(rule, call, [layout], [False])
    with pytest.raises(AssertionError):
        _check(right, decision, 1, rng)


def _layout(rng: random.Random, mesh: Mesh, shape: Sequence[int]) -> Layout:
    dims: list[list[int]] = [[] for _ in shape]
    partial: list[str | None] = [None] * mesh.ndim
    for axis in rng.sample(range(mesh.ndim), mesh.ndim):
        place = rng.randrange(len(shape) + 2)
        if place < len(shape):
            dims[place].append(axis)
        elif place == len(shape):
            partial[axis] = "sum"
    cuts: list[Index | None] = [None] * len(shape)
    for dim, axes in enumerate(dims):
        if axes and rng.random() < 0.7:
            count = math.prod(mesh.axis_sizes[axis] for axis in axes)
            inner = sorted(rng.randint(0, shape[dim]) for _ in range(count - 1))
            cuts[dim] = (0, *inner, shape[dim])
    return Layout.make(mesh, shape, dims, cuts, partial)


def _indices(shape: Sequence[int]) -> Iterator[Index]:
    return itertools.product(*map(range, shape))


def _check(rule: Rule, decision: Decision, num_factors: int, rng: random.Random) -> None:
    operands = [
        {index: rng.randint(-3, 3) for index in _indices(layout.shape)}
        for layout in decision.operands
    ]
    shapes = [layout.shape for layout in decision.operands]
    expected = _evaluate(rule, operands, shapes, rule.sizes, num_factors)
    mesh = decision.results[0].mesh
    held = [_terms(rng, whole, layout) for whole, layout in zip(operands, decision.operands)]
    totals: list[dict[Index, list[tuple[Index, int]]]] = [{} for _ in decision.results]
    for coordinate in _indices(mesh.axis_sizes):
        mine = [one[coordinate] for one in held]
        local_shapes = [layout.local_shape_at(coordinate) for layout in decision.operands]
        sizes = _local_sizes(rule, decision, coordinate)
        pieces = _evaluate(rule, mine, local_shapes, sizes, num_factors)
        for place, (piece, layout) in enumerate(zip(pieces, decision.results)):
            box = layout.box_at(coordinate)
            assert set(piece) == set(_indices(layout.local_shape_at(coordinate)))
            axes = [axis for axis, kind in enumerate(layout.partial) if kind]
            key = tuple(coordinate[axis] for axis in axes)
            for index, value in piece.items():
                at = tuple(start + i for (start, _), i in zip(box, index))
                totals[place].setdefault(at, []).append((key, value))
    for place, layout in enumerate(decision.results):
        assert set(totals[place]) == set(expected[place]), "elements that nobody holds"
        for index, found in totals[place].items():
            by_term = dict(found)
            assert all(by_term[key] == value for key, value in found), "replicas differ"
            value = _combine(layout)(by_term.values())
            assert value == expected[place][index], (index, decision)


def _combine(layout: Layout) -> Callable[..., int]:
    return max if "max" in layout.partial else sum


def _terms(rng: random.Random, whole: Values, layout: Layout) -> Mapping[Index, Values]:
    """What every coordinate holds: its box, of terms that add up to the whole."""
    axes = [axis for axis, kind in enumerate(layout.partial) if kind]
    assert all(kind in (None, "sum") for kind in layout.partial)
    keys = list(_indices([layout.mesh.axis_sizes[axis] for axis in axes]))
    terms = {key: {index: rng.randint(-3, 3) for index in whole} for key in keys[1:]}
    terms[keys[0]] = {
        index: value - sum(terms[key][index] for key in keys[1:])
        for index, value in whole.items()
    }
    out = {}
    for coordinate in _indices(layout.mesh.axis_sizes):
        box = layout.box_at(coordinate)
        mine = terms[tuple(coordinate[axis] for axis in axes)]
        out[coordinate] = {
            index: mine[tuple(start + i for (start, _), i in zip(box, index))]
            for index in _indices(layout.local_shape_at(coordinate))
        }
    return out


def _local_sizes(rule: Rule, decision: Decision, coordinate: Index) -> dict[str, int]:
    """Sizes of the factors on one coordinate, which its operands must agree on."""
    sizes = dict(rule.sizes)
    seen: dict[str, int] = {}
    tensors = zip(
        (*rule.operands, *rule.results), (*decision.operands, *decision.results)
    )
    for dims, layout in tensors:
        assert dims is not None
        for factors, length in zip(dims, layout.local_shape_at(coordinate)):
            if not factors:
                assert length == 1
                continue
            inner = math.prod(rule.sizes[name] for name in factors[1:])
            assert length % inner == 0, "a cut inside of a compound dim"
            assert seen.setdefault(factors[0], length // inner) == length // inner
    sizes.update(seen)
    return sizes


def _evaluate(
    rule: Rule, operands: Sequence[Values], shapes: Sequence[Sequence[int]],
    sizes: Mapping[str, int], num_factors: int,
) -> list[Values]:
    """The results, by loops over all factors: reduce the product, then add the addends."""
    out = []
    for dims in rule.results:
        kept = [name for factors in dims for name in factors]
        gone = [name for name in rule.sizes if name not in kept and name != "1"]
        kind = max if "max" in rule.reduce.values() else sum
        result: Values = {}
        for values in _indices([sizes[name] for name in kept]):
            at = dict(zip(kept, values))
            points = [
                {**at, **dict(zip(gone, rest))} for rest in _indices([sizes[name] for name in gone])
            ]
            terms = [
                math.prod(
                    operands[place][_at(rule.operands[place], point, sizes)]
                    for place in range(num_factors)
                )
                for point in points
            ]
            added = sum(
                operands[place][_at(rule.operands[place], at, sizes)]
                for place in range(num_factors, len(operands))
            )
            empty = not terms and kind is max
            value = (-1000 if empty else kind(terms)) + added
            result[_at(dims, at, sizes)] = value
        out.append(result)
    return out


def _at(dims: FactorDims | None, at: Mapping[str, int], sizes: Mapping[str, int]) -> Index:
    assert dims is not None
    index = []
    for factors in dims:
        place = 0
        for name in factors:
            place = place * sizes[name] + at[name]
        index.append(place)
    return tuple(index)

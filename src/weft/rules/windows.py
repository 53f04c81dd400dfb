"""Ops with windows over positions: convolutions, pooling, resizing; and recurrent networks.

Batch dims pass, and channels: those of an input are what a convolution sums over, those of its
weight's rows are new ones. Positions are whole but where a window is a single position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.rules.factors import dims, linear_sets, names
from weft.rules.notation import Call, FactorDims, Rule

__all__ = ["RULES", "convolution"]

def _each(value: Any, count: int, default: Any) -> tuple[Any, ...]:
    """An argument that says something of each of `count` dims, or one thing of all."""
    if value is None or value == [] or value == ():
        value = default
    if isinstance(value, (list, tuple)):
        return tuple(value) * count if len(value) == 1 else tuple(value)
    return (value,) * count


def _points(
    source: tuple[int, ...], result: tuple[int, ...], single: tuple[bool, ...],
    sizes: dict[str, int],
) -> tuple[FactorDims, FactorDims, set[str]]:
    """The dims of positions in an input and a result, which are one factor where a window is a
    `single` position; and the factors that are whole."""
    before: list[tuple[str, ...]] = []
    after: list[tuple[str, ...]] = []
    whole: set[str] = set()
    for at, (old, new, alone) in enumerate(zip(source, result, single)):
        names_ = (f"s{at}", f"s{at}") if alone and old == new else (f"s{at}", f"t{at}")
        if names_[0] != names_[1]:
            whole.update(names_)
        sizes.update(zip(names_, (old, new)))
        before.append((names_[0],))
        after.append((names_[1],))
    return tuple(before), tuple(after), whole


def convolution(call: Call) -> Rule:
    """`conv(x, weight, bias, stride, padding, dilation, groups)` and its transpose: a contraction
    of channels. Groups are whole here, since their number is an argument."""
    x, weight, *bias = call.tensors
    count = len(weight.shape) - 2
    single, turned, groups = _window(call, count)
    sizes: dict[str, int] = {}
    before, after, whole = _points(x.shape[-count:], call.results[0].shape[-count:], single, sizes)
    lead: FactorDims = () if len(x.shape) == count + 1 else (("b",),)
    if lead:
        sizes["b"] = x.shape[0]
    inner, outer = (weight.shape[0] // groups, weight.shape[1]) if turned else (
        weight.shape[1], weight.shape[0] // groups
    )
    sizes.update(k=inner, n=outer)
    kernel = tuple(() if alone else (f"w{at}",) for at, alone in enumerate(single))
    sizes.update({f"w{at}": weight.shape[2 + at] for at in range(count) if kernel[at]})
    whole.update(f"w{at}" for at in range(count) if kernel[at])
    group: tuple[str, ...] = ("g",) if groups > 1 else ()
    if group:
        sizes["g"] = groups
        whole |= {"g", "k", "n"}
    first, second = (((*group, "k"), ("n",)) if turned else ((*group, "n"), ("k",)))
    operands: list[FactorDims] = [(*lead, (*group, "k"), *before), (first, second, *kernel)]
    operands += [((*group, "n"),)] * len(bias)
    sets = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    return Rule(
        tuple(operands), ((*lead, (*group, "n"), *after),), sizes, {} if group else {"k": "sum"},
        whole=frozenset(whole), linear=linear_sets(sets, call.tensors, call.results[0]),
        added=(2,) if bias else (),
        nonempty=frozenset(name for name in sizes if name != "b"),
    )


def _window(call: Call, count: int) -> tuple[tuple[bool, ...], bool, int]:
    """Which windows are single positions; whether it is a transpose; how many groups."""
    turned = "transpose" in call.op
    if call.op.startswith("aten.convolution"):
        _, _, _, stride, padding, _, turned, more, groups = call.args
    elif turned:
        _, _, _, stride, padding, more, groups, _ = call.args
    else:
        _, _, _, stride, padding, _, groups = call.args
        more = 0
    kernel = call.tensors[1].shape[2:]
    single = tuple(
        size == step == 1 and pad in (0, "valid", "same") and extra == 0
        for size, step, pad, extra in zip(
            kernel, _each(stride, count, 1), _each(padding, count, 0), _each(more, count, 0)
        )
    )
    return single, turned, groups


def _pool(count: int) -> Callable[[Call], Rule]:
    """`pool(x, kernel, stride, padding, ...)` over the last dims."""

    def rule(call: Call) -> Rule:
        kernel = _each(call.args[1], count, 1)
        stride = _each(call.args[2], count, list(kernel))
        padding = _each(call.args[3], count, 0)
        single = tuple(size == step == 1 and not pad
                       for size, step, pad in zip(kernel, stride, padding))
        return _last(call, count, single)

    return rule


def _resized(count: int) -> Callable[[Call], Rule]:
    """What gives the last dims another length: positions are whole."""
    return lambda call: _last(call, count, (False,) * count)


def _last(call: Call, count: int, single: tuple[bool, ...]) -> Rule:
    shape, result = call.tensors[0].shape, call.results[0].shape
    num = len(shape) - count
    lead = dims(num)
    sizes = dict(zip(names(num), shape))
    before, after, whole = _points(shape[num:], result[num:], single, sizes)
    # Kernels take a batch of nothing, and no other dim of length 0.
    filled = set(sizes) - ({names(num)[0]} if num > 1 else set())
    return Rule(
        ((*lead, *before),) * len(call.tensors), ((*lead, *after),) * len(call.results), sizes,
        whole=frozenset(whole), nonempty=frozenset(filled),
    )


def _drawn_pool(count: int) -> Callable[[Call], Rule]:
    """`fractional_max_pool(x, kernel, size, samples)`: samples are per batch and channel."""

    def rule(call: Call) -> Rule:
        found = _last(call, count, (False,) * count)
        num = len(call.tensors[0].shape) - count
        lead: FactorDims = found.operands[0][:num]  # type: ignore[index]
        samples = (*((),) * (2 - num), *lead, ("each",))
        return Rule(
            (found.operands[0], samples), found.results, {**found.sizes, "each": count},
            whole=found.whole | {"each"}, nonempty=found.nonempty,
        )

    return rule


def _columns(back: bool) -> Callable[[Call], Rule]:
    """`im2col` and, `back`, `col2im`: the dim of columns is of channels, then of the window."""

    def rule(call: Call) -> Rule:
        image, table = call.tensors[0].shape, call.results[0].shape
        if back:
            image, table = table, image
        lead: FactorDims = (("b",),) if len(image) == 4 else ()
        sizes = {"c": image[-3], "h": image[-2], "w": image[-1], "l": table[-1],
                 "k": table[-2] // max(image[-3], 1)}
        if lead:
            sizes["b"] = image[0]
        whole, cut = (*lead, ("c",), ("h",), ("w",)), (*lead, ("c", "k"), ("l",))
        return Rule(
            (cut if back else whole,), (whole if back else cut,), sizes,
            whole=frozenset("hwlk"), linear=linear_sets(((0,),), call.tensors, call.results[0]),
            nonempty=frozenset("c"),
        )

    return rule


def _sampled(call: Call) -> Rule:
    """`grid_sampler(x, grid, ...)`: each point of the grid reads the whole image of its sample."""
    x, grid = (tensor.shape for tensor in call.tensors)
    count = len(x) - 2
    image: FactorDims = tuple([(f"s{at}",) for at in range(count)])
    points: FactorDims = tuple([(f"t{at}",) for at in range(count)])
    sizes = {"b": x[0], "c": x[1], "each": count}
    sizes.update((f"s{at}", x[2 + at]) for at in range(count))
    sizes.update((f"t{at}", grid[1 + at]) for at in range(count))
    return Rule(
        ((("b",), ("c",), *image), (("b",), *points, ("each",))), ((("b",), ("c",), *points),),
        sizes, whole=frozenset(["each", *(name for (name,) in image)]),
        linear=linear_sets(((0,),), call.tensors, call.results[0]),
    )


def _recurrent(call: Call) -> Rule | None:
    """`lstm(x, states, weights, ...)` and its kin: the batch passes. Dropout is drawn elsewhere;
    packed sequences stay whole."""
    x = call.tensors[0]
    *_, dropout, train, _, batch_first = call.args
    if (dropout and train) or not call.op.endswith(".input") or len(x.shape) != 3:
        return None
    batch = 0 if batch_first else 1
    sizes = {"b": x.shape[batch]}
    whole: set[str] = set()

    def of(what: str, shape: tuple[int, ...], at: int | None) -> FactorDims:
        out: list[tuple[str, ...]] = []
        for dim, length in enumerate(shape):
            name = "b" if dim == at else f"{what}.{dim}"
            if name != "b":
                whole.add(name)
            sizes[name] = length
            out.append((name,))
        return tuple(out)

    num_states = 2 if "lstm" in call.op else 1
    operands = tuple(
        of(f"in{place}", tensor.shape,
           batch if place == 0 else 1 if place <= num_states else None)
        for place, tensor in enumerate(call.tensors)
    )
    results = tuple(
        of(f"out{place}", result.shape, 1 if place else batch)
        for place, result in enumerate(call.results)
    )
    return Rule(operands, results, sizes, whole=frozenset(whole))


def _cell(call: Call) -> Rule:
    """`lstm_cell(x, states, weights, ...)` and its kin: rows pass; a row may stand alone."""
    num_states = 2 if "lstm" in call.op else 1
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def of(what: str, shape: tuple[int, ...], has_rows: bool) -> FactorDims:
        rows = 1 if has_rows and len(shape) == 2 else 0
        found = ["b"] * rows + [f"{what}.{dim}" for dim in range(rows, len(shape))]
        sizes.update(zip(found, shape))
        whole.update(found[rows:])
        return tuple((name,) for name in found)

    operands = tuple(of(f"in{place}", tensor.shape, place <= num_states)
                     for place, tensor in enumerate(call.tensors))
    results = tuple(of(f"out{place}", result.shape, True)
                    for place, result in enumerate(call.results))
    return Rule(operands, results, sizes, whole=frozenset(whole))


_SPATIAL = (1, 2, 3)

RULES: dict[str, Callable[[Call], Rule | None]] = {
    **{f"aten.conv{count}d": convolution for count in _SPATIAL},
    **{f"aten.conv_transpose{count}d": convolution for count in _SPATIAL},
    "aten.convolution": convolution,
    **{f"aten.avg_pool{count}d": _pool(count) for count in _SPATIAL},
    **{f"aten.max_pool{count}d{more}": _pool(count)
       for count in _SPATIAL for more in ("", "_with_indices")},
    **{f"aten.adaptive_{kind}_pool{count}d": _resized(count)
       for count in _SPATIAL for kind in ("avg", "max")},
    **{f"aten.max_unpool{count}d": _resized(count) for count in (2, 3)},
    **{f"aten.fractional_max_pool{count}d": _drawn_pool(count) for count in (2, 3)},
    **{f"aten.{name}": _resized(int(name[-2])) for name in (
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
        "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
        "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    )},
    "aten._upsample_bilinear2d_aa": _resized(2), "aten._upsample_bicubic2d_aa": _resized(2),
    **{f"aten.grid_sampler{more}": _sampled for more in ("", "_2d", "_3d")},
    "aten.im2col": _columns(False), "aten.col2im": _columns(True),
    **{f"aten.{name}": _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"aten.{name}_cell": _cell for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}

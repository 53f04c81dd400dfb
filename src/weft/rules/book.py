"""The book of ops: one entry per op, with everything that weft knows about it.

An entry defines an op by a *rule* (`rule("... s~ -> ... s", along="dim")`), possibly with a
*kernel*, which runs on the shards where the op itself cannot; or by a *composition* of other ops.
Where the layouts of the operands, or data, determine the result, `layouts=` gives the decision
itself.

The names of an entry say what it covers:

- `softmax`: all overloads of an ATen op. `mean.dim`: one overload, which is looked up first.
- `uniform_`: an in-place op whose composition writes by itself. An in-place op without an entry is
  the functional op, written to its target.
- `torch.unique`, `torch.Tensor.unique`: a function of torch whose Python code hides the op. The
  composition takes the function's own arguments.

A composition is recorded once, and the ops it consists of are looked up in turn. With `each_call`
it runs anew at each call, on the ShardTensors themselves: because it draws random numbers, or
because data or layouts decide what it does. A composition that turns out to read data while it is
recorded runs at each call, too.

A page is the entries of one family of ops, in one file. The book is all pages: those of `weft.ops`,
and those of `weft.tensor.families`, which need the ShardTensor itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.rules.bind import bind, fits, operand_places
from weft.rules.call import Call
from weft.rules.factors import linear_sets
from weft.rules.notation import Pattern, parse
from weft.rules.rule import Rule
from weft.rules.window import OnBox, Tables

__all__ = ["Entry", "Page", "RuleText", "Text", "op", "page", "rule"]

Text = str | Callable[[Call, Sequence[bool]], "str | Rule | None"]
"""A factor string, or a function that gives one (or a Rule) for a call and its wanted gradients."""


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule, as pages write it by `rule`.

    Args:
        texts: factor strings (`weft.rules.notation`). The first one that fits the numbers of
            tensors and dims applies. Functions (call, wants_grad) may give one, or a `Rule`,
            or None if the rule does not cover the call.
        along: the name of the argument that names dims, or a function (call, ndim) that gives them.
        default: the dims if that argument is None or absent; None means all.
        linear: sets of operands of the string in which the op is jointly linear: there partial
            sums and means pass, when all of a set are partial.
        bias: operands that are added to the result of a contraction, in any dtype. Where the
            contracted factor is sharded, one rank adds them and the others add zeros.
        moves: elements only change position, so partial values of every kind pass through the
            linear sets; where the dtype changes, only sums.
        sizes: the name of the argument that gives the result's shape; with `along`, the lengths of
            the dims from there on.
        counts: arguments that are the size of a factor, {"groups": "g"}. Where the factor is
            sharded, a rank passes the size of its shard.
        serves: whether the rule covers a call, which knows the layouts of its operands.
        by_size: whether a function compares lengths, so that other lengths may have another rule.
        needs_kernel: whether the rule covers only calls of which the kernel combines shards,
            because the op itself would not do.
        fill: what fills boxes where they reach beyond an operand.
        on_box: what runs on such boxes: (call, `Boxed`) -> (function or None for the op, args,
            kwargs).
        tables: (call) -> per factor with `@`, its `Table`.
        keeps: whether autograd keeps such boxes. Otherwise they are freed after the call, and no
            other call of that step shares them.
    """

    texts: tuple[Text, ...]
    along: str | Callable[[Call, int], tuple[int, ...]] | None = None
    default: int | tuple[int, ...] | None = None
    linear: tuple[tuple[int, ...], ...] = ()
    bias: Sequence[int] = ()
    moves: bool = False
    sizes: str | None = None
    counts: Mapping[str, str] = field(default_factory=dict[str, str])
    serves: Callable[[Call], bool] | None = None
    by_size: bool = False
    needs_kernel: bool = False
    fill: float = 0.0
    on_box: OnBox | None = None
    tables: Tables | None = None
    keeps: bool = True

    @property
    def is_string(self) -> bool:
        """Whether it consists of strings only, so that no number of a call is read."""
        return self.serves is None and all(type(text) is str for text in self.texts)

    def bind(self, call: Call, wants_grad: Sequence[bool]) -> Rule | None:
        """The rule of a call; None if it does not cover the call. LayoutError if the string does
        not fit."""
        if self.serves is not None and not self.serves(call):
            return None
        shapes = [tensor.shape for tensor in call.tensors]
        results = [tensor.shape for tensor in call.results]
        has_along = self.along is not None
        for text in self.texts:
            found = text if isinstance(text, str) else text(call, wants_grad)
            if found is None:
                continue
            if isinstance(found, Rule):
                return found
            pattern = parse(found)
            places = operand_places(pattern, len(shapes), call.counts)
            if fits(pattern, places, shapes, results, has_along):
                return self._bound(pattern, places, call, shapes)
        return None

    def _bound(
        self, pattern: Pattern, places: tuple[int, ...] | None, call: Call, shapes: Any
    ) -> Rule:
        assert places is not None
        linear, bias, moves = self._linear(places, call)
        more: dict[str, Any] = {
            "linear": linear, "bias": bias, "moves": moves, "by_size": self.by_size,
            "needs_kernel": self.needs_kernel, "fill": self.fill, "on_box": self.on_box,
            "keeps": self.keeps,
        }
        if self.tables is not None and None in pattern.windows.values():
            more["tables"] = self.tables(call)
        along = None if self.along is None else self._along(call, shapes)
        if self.sizes is not None:
            more["size_arg"] = call.names.index(self.sizes)
            if along:
                first = along[0] % max(map(len, shapes))
                more["size_dims"] = first, first + len(call.get(self.sizes))
        if self.counts:
            counts = [one for one in self.counts.items() if one[1] in pattern.factors]
            more["counts"] = {call.names.index(name): factor for name, factor in counts}
            more["known_sizes"] = {factor: call.get(name) for name, factor in counts}
        return bind(
            pattern, shapes, [result.shape for result in call.results], along, places, **more
        )

    def _along(self, call: Call, shapes: Any) -> tuple[int, ...]:
        """The dims that the argument names; () for all."""
        if callable(self.along):
            return self.along(call, max(map(len, shapes)))
        value: Any = call.get(self.along or "")
        if value is None:
            value = self.default
        if value is None:
            return ()
        return (value,) if isinstance(value, int) else tuple(value)

    def _linear(
        self, places: tuple[int, ...], call: Call
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], bool]:
        """The linear sets and the added operands, as tensors of the call; and whether partial
        values of every kind pass."""
        def tensors(operands: Sequence[int]) -> tuple[int, ...] | None:
            found = [place for place, operand in enumerate(places) if operand in operands]
            return tuple(found) if {places[at] for at in found} == set(operands) else None

        bias = tensors(self.bias) or ()
        sets = [tensors(operands) for operands in self.linear]
        linear = tuple([tuple(sorted({*members, *bias})) for members in sets if members])
        given = (*call.args, *call.kwargs.values())
        # Partial values times inf may add up to nan where their sum times inf is inf.
        if any(type(one) is float and not math.isfinite(one) for one in given) or not call.results:
            return (), bias, False
        dtypes = {result.dtype for result in call.results}
        moves = self.moves and all(
            dtypes == {call.tensors[member].dtype} for members in linear for member in members)
        if not moves:
            linear = linear_sets(linear, call.tensors, call.results[0])
        return linear, bias, moves


def rule(
    *texts: Text, linear: Sequence[int | Sequence[int]] = (), **options: Any
) -> RuleText:
    """A rule of a page; see `RuleText` for its options.

    Args:
        linear: operands, each alone (a number) or several together, like those of a list.
    """
    sets = tuple([(one,) if isinstance(one, int) else tuple(one) for one in linear])
    return RuleText(texts, linear=sets, **options)


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything that weft knows about an op.

    Args:
        names: its names: "softmax", "mean.dim", "uniform_", "torch.unique".
        rules: the first one that covers a call applies.
        kernel: runs on the local tensors where a dim with `~` is sharded: `kernel(shards, *args,
            **kwargs)`, with the arguments of the op.
        compose: the op in terms of other ops, on global tensors. It takes the op's arguments with
            all defaults filled in, or those of the function. It applies where no rule covers a
            call. Where it returns NotImplemented, the op runs on full tensors.
        each_call: whether `compose` runs anew at each call and is never recorded.
        writes: whether `compose` writes to operands by itself, as that of an op in place does.
        layouts: (call, layouts, wants_grad) -> what to do, where layouts or data decide it;
            None leaves the call to the rules.
        floats_flow: whether no rule reads the value of a float.
        result: a meta tensor like the result, of the op's arguments on the meta device; None
            where torch is to be asked. For ops whose meta kernels take long, or are wrong.
        has_meta_gradient: whether torch can differentiate the op on the meta device.
        detaches: whether results have no gradient, though operands have.
        adds_up: whether the kernel adds up rows, in any order.
        widens: whether it is a view of which an element is several of the operand's.
        lists: of an op over lists, whose elements are calls of their own. "blocks": where the
            operands of each element have one layout, the op may take lists of local tensors
            instead.
        local: what runs on local tensors in place of the op, with its arguments, where a kernel of
            torch is wrong.
    """

    names: tuple[str, ...]
    rules: tuple[RuleText, ...] = ()
    kernel: Callable[..., Any] | None = None
    compose: Callable[..., Any] | None = None
    layouts: Callable[..., Any] | None = None
    floats_flow: bool = False
    each_call: bool = False
    writes: bool = False
    result: Callable[..., Any] | None = None
    has_meta_gradient: bool = True
    detaches: bool = False
    adds_up: bool = False
    widens: bool = False
    lists: Literal["", "elements", "blocks"] = ""
    local: Callable[..., Any] | None = None

    def covering(self, call: Call, wants_grad: Sequence[bool]) -> Iterator[Rule]:
        """The rules that cover a call. The first one applies that needs no kernel, or gets one."""
        for each in self.rules:
            found = each.bind(call, wants_grad)
            if found is not None:
                yield found


def op(names: str, *rules: RuleText, **options: Any) -> Entry:
    """An entry of a page; `names` are separated by spaces. See `Entry` for its options.

    If strings alone define the op, floats flow. An op in place writes.
    """
    given = tuple(names.split())
    packet = given[0].partition(".")[0]
    options.setdefault("writes", packet.endswith("_") and not packet.endswith("__"))
    options.setdefault("floats_flow", "layouts" not in options and all(
        each.is_string for each in rules))
    return Entry(given, rules, **options)


Page = Mapping[str, Entry]
"""The entries of a family by the names of its ops, "aten.softmax", and of functions of torch."""


def page(*entries: Entry) -> Page:
    """A page: names to entries. No op occurs in it twice."""
    found: dict[str, Entry] = {}
    for entry in entries:
        for name in entry.names:
            key = name if name.startswith("torch.") else f"aten.{name}"
            assert key not in found, f"{name} stands twice"
            found[key] = entry
    return found

"""`docs/ops.md`: the book of ops, printed. `python -m tests.soundness.page` writes it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import textwrap
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import weft.ops
import weft.tensor.families
from tests.cases.bounds import BOUNDS
from tests.cases.calls import CALLS
from tests.cases.named import MADE_WHOLE, by_name
from tests.soundness.calls import AtenCall, calls_of, entries
from tests.sweep.samples import database
from weft.core import Layout, Mesh
from weft.rules import Call, Entry, Rule, RuleText, Shift, Table, TensorArg
from weft.tensor.trace.calls import call_of, dtype_text, facts
from weft.tensor.trace.trees import flatten, map_tensors

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"

_HEAD = """# The book of ops

This page lists what each op requires of its operands, and what it moves. It is printed from the
entries of `weft.ops` and `weft.tensor.families` by `python -m tests.soundness.page`, and a test
compares the two. [Adding an op](adding_an_op.md) explains how to write an entry, [the
contract](semantics.md) defines layouts, and [the sweep](sweep.md) shows how each op was tested.

A rule is a string over *factors*, the index ranges that dims are made of. The position of a factor
in the rule determines what a mesh axis that shards it costs:

| in the rule | an axis that shards this factor | costs |
|---|---|---|
| `b` on both sides of the arrow | stays: the results are sharded alike, ragged shards included | \
nothing |
| `k` only on the left, or `k:max` | leaves partial values, P(sum) or P(max), reduced when used | \
the result's bytes, once |
| `s~` | stays: the op's kernel combines the shards | a few numbers per \
row |
| `t~s` | stays, even beside `s` in another operand: the kernel combines the shards | what \
the kernel sends |
| `s~:sum` | stays: the kernel leaves partial values | the result's bytes, once |
| `2*y+v-1` | stays: a window of y, of which ranks fetch the border that they read | the border \
that is read, forward and backward |
| `s!` | is gathered first: the op needs the dim whole | the operand's bytes over this axis |
| `(h d)` | factors of one dim; only the first can be sharded | as the factor |
| `s>0` | leaves no shard empty | a few rows, where a shard was empty |

`...` stands for leading dims, which broadcast, `[x]` for an operand that may be absent, `{x}` for a
list, `*x` for an operand of which only the layout is read, so that it stays as it is. `along` names
the argument that selects the dims of the factor beside `...`. `linear` lists the operands (from 0)
in which the op is linear, each alone or together (`0+1`): there partial sums pass. With `moves`,
elements only change position, and partial values of every kind pass. A rule in italics is that of
one call, where a function of the arguments gives the rule. "By layouts" means that data or the
operands' layouts decide. Without a rule, an op is composed of others: once for all calls of its
form, or "at each call" where it draws or where data decide what it does. `torch.unique` is a
function of torch; `uniform_` is an in-place op with an entry of its own.

An op over lists is the op of each element. With "blocks", if the operands of each element have one
layout, it runs once, on lists of local tensors.

In backward the same holds for the gradients: torch's own formulas run on the local tensors.
"Received" gives the bytes received by the rank that receives most, forward and backward, in the
example of `tests/cases/bounds.py`: 4,096 float64 on 4 ranks, as one dim ("line") or as 8 rows whose
columns are sharded ("columns").
"""

_TABLE = ["| op | rule | what the kernel or the composition does | received |", "|---|---|---|---|"]


def page() -> str:
    """The page as it should be."""
    examples = _examples()
    lines = [_HEAD]
    for module in _pages():
        said = " ".join(inspect.cleandoc(module.__doc__ or "").split("\n\n")[0].split())
        lines += [f"## {_title(module)}", "", *textwrap.wrap(said, 100), "", *_TABLE]
        found: dict[int, Entry] = {id(entry): entry for entry in module.PAGE.values()}
        rows = [_row(entry, examples) for entry in found.values() if _says(entry)]
        lines += [*sorted(rows), ""]
    lines += ["## What makes a dim whole", "", _whole_of_all(), ""]
    lines += [f"- `{name.split(': ')[1]}`: {why}" for name, why in MADE_WHOLE.items()]
    return "\n".join(lines) + "\n"


def _pages() -> list[ModuleType]:
    """The modules that are pages of the book, by name."""
    names = [one.name for room in (weft.ops, weft.tensor.families)
             for one in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
    modules = map(importlib.import_module, names)
    return sorted([one for one in modules if hasattr(one, "PAGE")], key=_title)


def _title(page: ModuleType) -> str:
    words = page.__name__.rpartition(".")[2].replace("_", " ")
    return words[0].upper() + words[1:]


def _says(entry: Entry) -> bool:
    """Whether it says more than what torch's meta kernel leaves unchecked."""
    return bool(entry.rules or entry.kernel or entry.compose or entry.layouts or entry.lists)


def _row(entry: Entry, examples: dict[str, AtenCall]) -> str:
    names = " ".join(f"`{name}`" for name in entry.names)
    rules = "<br>".join(dict.fromkeys(_rule(each, entry, examples) for each in entry.rules))
    if entry.layouts is not None:
        rules = f"{rules}<br>by layouts" if rules else "by layouts"
    if entry.each_call:
        rules = f"{rules}<br>else at each call" if rules else "at each call"
    if entry.lists:
        rules = "each element by itself" + ("; blocks" if entry.lists == "blocks" else "")
    does = [_said(one) for one in (entry.kernel, entry.compose, entry.layouts) if one is not None]
    return f"| {names} | {rules} | {'. '.join(does)} | {_received(entry)} |"


def _rule(each: RuleText, entry: Entry, examples: dict[str, AtenCall]) -> str:
    """The strings of a rule and its options; the rule of one call where a function gives them."""
    strings = [f"`{text}`" for text in each.texts if isinstance(text, str)]
    if len(strings) < len(each.texts):
        calls = [_call(examples[name]) for name in map("aten.{}".format, entry.names)
                 if name in examples]
        found = next(filter(None, (each.bind(call, []) for call in calls)), None)
        said = next(_said(text) for text in each.texts if not isinstance(text, str))
        strings.append((said or "a function of the call") if found is None else f"*{_text(found)}*")
    options = []
    if each.along is not None:
        along = f"`{each.along}`" if isinstance(each.along, str) else _said(each.along)
        options.append(f"along {along or 'dims of the call'}")
    if each.linear:
        sets = ["+".join(map(str, members)) for members in each.linear]
        options.append(f"linear {', '.join(sets)}")
    if each.moves:
        options.append("moves")
    where = f" ({_said(each.serves)})" if each.serves is not None and each.serves.__doc__ else ""
    return ", ".join([" or ".join(strings), *options]) + where


def _said(function: Any) -> str:
    """What a function says of itself: the first paragraph of its docstring."""
    said = " ".join(inspect.cleandoc(function.__doc__ or "").split("\n\n")[0].split())
    return said.rstrip(".").replace("|", "\\|")


_BYTES = {bound.name: bound.nbytes for bound in BOUNDS}


def _received(entry: Entry) -> str:
    """Bytes received in the example of one of the names."""
    for name in entry.names:
        nbytes = _BYTES.get(name.split(".")[0])
        for layout in ("line", "columns", "rows"):
            if nbytes is not None and layout in nbytes:
                there, back = nbytes[layout]
                return f"{there:,} and {back:,} ({layout})"
    return ""


def _whole_of_all() -> str:
    """How many of the named calls make no dim whole that they do not need whole."""
    names = by_name()
    lines = (
        f"`tests/cases/named.py` calls {len(names)} ops by name on 8 ranks and shards each dim "
        f"that the op does not need whole. In {len(names) - len(MADE_WHOLE)} of these calls no "
        f"rank receives half of its operand or more, forward or backward. The others are:"
    )
    return "\n".join(textwrap.wrap(lines, 100))


def _examples() -> dict[str, AtenCall]:
    """Per op of the book, and per overload, the call that shows most of it."""
    met: dict[str, list[AtenCall]] = defaultdict(list)
    for entry in entries():
        known = database()[entry].supported_dtypes("cpu")
        dtype = torch.float64 if torch.float64 in known else torch.int64
        for call in calls_of(entry, dtype, 4):
            met[call.op].append(call)
            met[facts(call.overload).functional].append(call)
    for name, make in CALLS.items():
        overload, *args = make()
        met[f"aten.{name}"].append(AtenCall(f"aten.{name}", overload, tuple(args), {}))
    return {op: max(calls, key=_worth) for op, calls in met.items()}


def _worth(call: AtenCall) -> tuple[Any, ...]:
    """Few dims of different lengths, none of them 0 or 1."""
    shapes = [shape for shape, _ in call.form()[1]]
    lengths = [length for shape in shapes for length in shape]
    most = max(map(len, shapes), default=0)
    return (
        bool(most) and min(lengths, default=0) > 1, -abs(most - 2), len(set(lengths)),
        str(call.form()),
    )


def _call(given: AtenCall) -> Call:
    arg = {id(one): TensorArg(tuple(one.shape), dtype_text(one.dtype))
           for one in flatten((given.args, given.kwargs))}
    with torch.no_grad():
        out = flatten(given.overload(*given.args, **given.kwargs))
    results = tuple(TensorArg(tuple(one.shape), dtype_text(one.dtype)) for one in out)
    args, kwargs = map_tensors(lambda one: arg[id(one)], (given.args, given.kwargs))
    whole = [Layout.replicated(Mesh({"x": 1}), one.shape) for one in arg.values()]
    return call_of(given.overload, args, kwargs, results, whole)


def _text(rule: Rule) -> str:
    """The rule of one call as a factor string."""
    given = ", ".join("any" if dims is None
                      else "\\*" * (at in rule.unread) + _tensor(rule, at, dims)
                      for at, dims in enumerate(rule.operands))
    return f"{given} -> {', '.join(_tensor(rule, None, dims) for dims in rule.results)}"


def _tensor(rule: Rule, operand: int | None, dims: Any) -> str:
    words = []
    for factors in dims:
        names = [_factor(rule, operand, name) for name in factors]
        words.append("1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})")
    return " ".join(words) or "()"


def _factor(rule: Rule, operand: int | None, name: str) -> str:
    if operand is None:
        return name
    window = rule.windows.get((operand, name))
    if isinstance(window, (Shift, Table)):
        return f"@{name}"
    if window is not None:
        far = f"{window.dilation}*" * (window.dilation > 1)
        pad = f"{-window.pad:+}" if window.pad else ""
        return f"{window.stride}*" * (window.stride > 1) + f"{name}+{far}w<{window.taps}{pad}"
    kind, is_finished = rule.reduce.get(name), (operand, name) in rule.finish
    marks = ">0" * (name in rule.nonempty) + "!" * (name in rule.whole) + "~" * is_finished
    marks += "".join([other for at, mine, other in rule.beside if (at, mine) == (operand, name)])
    return name + marks + (f":{kind}" if kind and (kind != "sum" or is_finished) else "")


if __name__ == "__main__":
    PAGE.write_text(page())

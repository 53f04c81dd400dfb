"""`docs/ops.md`: what the tables say of each op. `python -m tests.soundness.page` writes it."""

from __future__ import annotations

import inspect
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from tests.cases.named import MADE_WHOLE, by_name
from tests.soundness.calls import AtenCall, calls_of, entries
from tests.sweep.samples import database
from weft import ops
from weft.rules import Call, Rule, TensorArg
from weft.rules.factors import packet
from weft.rules.table import DECISIONS, RULES
from weft.tensor.trace.calls import dtype_text
from weft.tensor.trace.capture import map_tensors
from weft.tensor.trace.trees import flatten

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"

_HEAD = """# What each op asks of its operands

Printed from the tables by `tests/soundness/page.py` (`python -m tests.soundness.page`).

A rule is written over *factors*, the index ranges that dims are made of. A mesh axis that cuts a
factor costs by where the factor stands:

| in the rule | a cut of this factor | costs |
|---|---|---|
| `b` on both sides of the arrow | stays: results are cut alike, ragged blocks included | nothing |
| `k` on the left alone, or `k:max` | leaves terms, P(sum) or P(max), reduced when used | \
the result's bytes, once |
| `s!` | is undone first: the op needs the dim whole | the operand's bytes over this axis |
| `(h d)` | of a dim made of several; the first one can be cut | as the factor |

"Passes terms" names the operands that may stay P(sum) (or any kind, where elements only move), each
set all together. In a backward, the same holds of the gradients: torch's own formulas run on local
tensors. The rules are shown for one call; other shapes and arguments may say more or less.
"""


def page() -> str:
    """The page as it should be."""
    examples = _examples()
    lines = [_HEAD, "## By a rule", ""]
    lines += ["| op | the rule of a call | passes terms |", "|---|---|---|"]
    for name in sorted(set(RULES) & set(examples)):
        rule = RULES[name](_call(examples[name]))
        if rule is not None and name not in _algorithms():
            lines.append(f"| `{_short(name)}` | `{_text(rule)}` | {_linear(rule)} |")
    lines += ["", "## By an algorithm", "",
              "Where a dim that a rule would need whole is cut, these do better. Any dim of the "
              "operands may be cut, except where a line says which.", "",
              "| op | how |", "|---|---|"]
    lines += [f"| `{_short(name)}` | {said} |" for name, said in sorted(_algorithms().items())]
    lines += ["", "## By the operands' cuts", "",
              "Which rule serves follows from how the operands are cut; what is sliced, split or "
              "joined in a cut dim has ragged blocks and moves nothing.", "",
              " ".join(f"`{_short(name)}`" for name in sorted(DECISIONS))]
    lines += ["", "## What makes a dim whole", "", _whole_of_all(), ""]
    lines += [f"- `{name.split(': ')[1]}`: {why}" for name, why in MADE_WHOLE.items()]
    lines += ["", "## No call in torch's database of operators", "",
              " ".join(f"`{_short(name)}`" for name in sorted(
                  set(RULES) - set(examples) - set(_algorithms()))), ""]
    return "\n".join(lines)


def _whole_of_all() -> str:
    """How many of the named calls make no dim whole that they do not need whole."""
    names = by_name()
    lines = (
        f"Of {len(names)} calls of ops by name (`tests/cases/named.py`, on 8 ranks, with a cut in "
        f"each dim that the op does not need whole) {len(names) - len(MADE_WHOLE)} bring no rank "
        f"half of its operand or more, forward or backward. These do:"
    )
    return "\n".join(textwrap.wrap(lines, 100))


def _algorithms() -> dict[str, str]:
    """Op -> what the one that answers for it says of itself: its docstring's first paragraph."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, lookup in ops.TABLE.items():
        said = " ".join(inspect.cleandoc(lookup.__doc__ or "").split("\n\n")[0].split())
        assert said, f"{name}: a lookup without a docstring"
        if (text := said.rstrip(".")) not in found[packet(name)]:
            found[packet(name)].append(text)
    return {name: ". ".join(texts) for name, texts in found.items()}


def _short(name: str) -> str:
    return name.removeprefix("aten.")


def _examples() -> dict[str, AtenCall]:
    """Per op of the table, the call that shows most of it."""
    met: dict[str, list[AtenCall]] = defaultdict(list)
    for entry in entries():
        known = database()[entry].supported_dtypes("cpu")
        dtype = torch.float64 if torch.float64 in known else torch.int64
        for call in calls_of(entry, dtype, 4):
            met[call.op].append(call)
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
    return Call(str(given.overload), args, kwargs, results)


_LETTERS = {f"d{dim}": letter for dim, letter in enumerate("abcdefgh")}


def _text(rule: Rule) -> str:
    """The rule as a factor string."""
    given = [", ".join("any" if dims is None else _tensor(rule, dims) for dims in rule.operands)]
    return f"{given[0]} -> {', '.join(_tensor(rule, dims, False) for dims in rule.results)}"


def _tensor(rule: Rule, dims: Any, marked: bool = True) -> str:
    words = []
    for factors in dims:
        names = [_factor(rule, name, marked) for name in factors]
        words.append("1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})")
    return " ".join(words) or "()"


def _factor(rule: Rule, name: str, marked: bool) -> str:
    short = _LETTERS.get(name, name)
    if not marked:
        return short
    kind = rule.reduce.get(name, "sum")
    return short + "!" * (name in rule.whole) + (f":{kind}" if kind != "sum" else "")


def _linear(rule: Rule) -> str:
    sets = "; ".join(" and ".join(map(str, members)) for members in rule.linear)
    return f"{sets}{' (any kind)' if sets and rule.moves else ''}"


if __name__ == "__main__":
    PAGE.write_text(page())

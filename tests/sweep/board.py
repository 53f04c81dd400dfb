"""The scoreboard: how many ops are right in every layout, and what keeps the others from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.sweep.journal import Found
from tests.sweep.judge import VERDICTS
from tests.sweep.ways import WAYS

__all__ = ["page", "scoreboard"]

_WORST = ("crash", "hang", "wrong", "unclear", "refused", "gathered", "right")


_HEAD = """# torch's operators in every layout, here and on DTensor

What `make sweep ARGS="--system weft --system DTensor --out docs/sweep.md"` has found: the operators
of torch's own database, each on several samples in {num} ways to lay out its operands
(`tests/sweep/ways.py`): {ways}.
Value, global shape, dtype, strides and the gradients of a random cotangent are those of the plain
call, on every rank, or the op is not right.

An op counts by its worst call. *Gathered* is right, with a warning that operands were gathered;
*refused* an error that says so; *unclear* any other error. DTensor has no ragged layouts and no
other order of axes: it is not asked for those; plain operands it is told to take as replicated
(`implicit_replication`). Ops that draw random numbers have tests of their own. A row counts what
has been run so far, in the order of the database.

"""


def page(found: Sequence[Found]) -> str:
    """The scoreboard with its explanation, as it is kept in `docs/`."""
    return _HEAD.format(num=len(WAYS), ways=", ".join(WAYS)) + scoreboard(found)


def scoreboard(found: Sequence[Found]) -> str:
    """Markdown: ops by their worst verdict, for each system, dtype and variant; then every op of
    weft that is not right, and those of others that are wrong, with an example."""
    columns = ["system", "dtype", "variant", "ops", *VERDICTS, "right in all ways"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    groups: dict[tuple[str, str, str], dict[str, list[Found]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for it in found:
        groups[it.dtype, it.variant, it.system][it.op].append(it)
    for (dtype, variant, system), ops in groups.items():
        worst = Counter(_worst(its) for its in ops.values())
        counts = " | ".join(str(worst[kind]) for kind in VERDICTS)
        share = (worst["right"] + worst["gathered"]) / len(ops)
        lines.append(f"| {system} | {dtype} | {variant or 'function'} | {len(ops)} | {counts} "
                     f"| {share:.1%} |")
    for kind in _WORST[:-2]:
        its = [it for it in found if it.kind == kind and it.system == "weft"]
        lines += _section(f"weft: {kind}", its)
    for system in sorted({it.system for it in found} - {"weft"}):
        for kind in ("wrong", "hang", "crash"):
            its = [it for it in found if it.kind == kind and it.system == system]
            lines += _section(f"{system}: {kind}", its)
    return "\n".join(lines) + "\n"


def _section(title: str, its: Sequence[Found]) -> list[str]:
    if not its:
        return []
    return ["", f"## {title}", "", *[_example(op, same) for op, same in _by_op(its)]]


def _worst(its: Sequence[Found]) -> str:
    kinds = {it.kind for it in its}
    return next(kind for kind in _WORST if kind in kinds)


def _by_op(its: Sequence[Found]) -> list[tuple[str, list[Found]]]:
    ops: dict[str, list[Found]] = defaultdict(list)
    for it in its:
        ops[it.op].append(it)
    return sorted(ops.items())


def _example(op: str, its: Sequence[Found]) -> str:
    one = its[0]
    ways = ", ".join(sorted({it.way for it in its}))
    first = " ".join(one.detail.split())[:160]
    return f"- `{op}` ({len(its)}: {one.dtype}{one.variant and ' ' + one.variant}; {ways}): {first}"

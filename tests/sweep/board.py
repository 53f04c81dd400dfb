"""The scoreboard: how many ops are right in every layout, and what keeps the others from it."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from tests.sweep.budget import family
from tests.sweep.journal import Done, Found
from tests.sweep.judge import VERDICTS
from tests.sweep.samples import database
from tests.sweep.ways import MODULE_WAYS, WAYS

__all__ = ["module_page", "page", "scoreboard"]

_WORST = ("crash", "hang", "wrong", "unclear", "refused", "gathered", "costly", "right")
_RIGHT = ("right", "costly", "gathered")
"""Verdicts of calls whose results are right."""


_HEAD = """# The sweep: torch's operators in every layout

The operators of torch's own database, on ShardTensors and on DTensors. `make sweep
ARGS="--samples {samples} --journal J"` tries them for half an hour, and goes on from the journal
when it is run again; `--system DTensor --dtype float64 --dtype int64` adds DTensor's rows. `make
sweep ARGS="--seconds 0 --journal J --out docs/sweep.md"` writes this page from the journal. Each
operator ran on up to {samples} of its samples in {num} arrangements of operands
(`tests/sweep/ways.py`): {ways}. An op is right if value, global shape, dtype, strides and the
gradients of a random cotangent are those of the plain call, on every rank. [The book of
ops](ops.md) gives the rule of each op; modules have a [page of their own](sweep_modules.md).

*Left whole* counts ops of which some call leaves its largest result whole over a mesh axis that
shards an operand, although the result has more elements than a shard of that operand. Samples are
small: of a few elements a whole result may cost less than what it takes to shard it.

Narrow floats may differ as far as they round; `tests/sweep/rounding.py` says how far. Each rank
rounds its part of a sum. In float16 a part beyond 65,504 is infinite, and of infinities of both
signs the sum is NaN: elements whose terms can get there may be infinite or NaN, too.

An op counts by its worst call. *Gathered* is right, with a warning that operands were gathered.
*Costly* is right without a warning, but some rank received more bytes than the table of families
allows (`tests/sweep/budget.py`, {families} ops). *Refused* is an error that says so; *unclear* is
any other error. DTensor has neither ragged layouts nor other orders of axes and is not tested with
them; it takes plain operands as replicated (`implicit_replication`). Calls that fail with DTensor
are tried twice, and errors that occur only because the ranks are threads are left out. Ops that
draw random numbers have tests of their own. A row counts what has been run so far, in the order of
the database, and names the commits that ran it. In the rows *all* an op counts by its worst call in
any dtype and variant.

Variants: *function*; *inplace*, where the target must also hold the result afterwards; *out*, into
tensors like the results; *turned*, on operands whose dims are in reverse order in memory. Operands
that a call does not write to must hold the same bits after it. torch 2.13 itself does not write the
target of `fft.ihfft2` and `fft.ihfftn` over one dim. There the result of the call without a target
is required, and DTensor, which does as torch does, counts as wrong.
"""

_WHOLE = """
## What takes whole operands, and why

With a warning: `as_strided_scatter`, where a gradient of its first operand is wanted, because torch
gives it the gradient of the elements that are replaced. Without one, by a rule: matrices of
factorizations that are not tall (`geqrf`, `linalg.lstsq`, `linalg.tensorinv`), because each step
reads all of the matrix; channels and positions of `native_group_norm`, whose statistics have no
gradient of their own in torch (`group_norm` keeps them sharded).

Of the first sample of each of 619 entries (float64; rows, last, square, crossed), these leave the
result whole of an operand that is sharded:

- a matrix that is no batch, because each step reads all of it: `cholesky`, `linalg.cholesky`,
  `linalg.cholesky_ex`, `geqrf`, `linalg.householder_product`, `linalg.eigh`, `linalg.inv`,
  `linalg.inv_ex`, `linalg.ldl_factor`, `linalg.ldl_factor_ex`, `lu`, `lu_unpack`, `linalg.lu`,
  `linalg.lu_factor`, `linalg.lu_factor_ex`, `linalg.lstsq`, `linalg.lstsq.grad_oriented`,
  `linalg.pinv`, `linalg.pinv.hermitian`, `pinverse`, `matrix_exp`, `linalg.solve`,
  `linalg.solve_ex`, `linalg.solve_triangular`, `triangular_solve`, `linalg.tensorinv`,
  `linalg.tensorsolve`; `qr` and `linalg.qr` of a matrix that is not tall;
- segments of rows, of which there are few, joined from what each shard comes to:
  `_segment_reduce.lengths`, `_segment_reduce.offsets`;
- statistics that have no gradient of their own in torch: `native_group_norm`, `native_layer_norm`
  (`group_norm` and `layer_norm` keep everything sharded);
- `broadcast_tensors`: each result lies as the operand that it is a view of, so that of a whole one
  beside sharded ones is whole.
"""

Left = Mapping[Done, Sequence[str]]
"""Job -> why samples of it were not run."""


def page(found: Sequence[Found], left_out: Left, codes: Mapping[Done, str]) -> str:
    """The scoreboard with its explanation, as it is kept in `docs/`."""
    families = sum(family(name) is not None for name in database())
    samples: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for it in found:
        samples[it.system, it.op, it.dtype, it.variant].add(it.sample)
    head = _HEAD.format(
        num=len(WAYS), ways=", ".join(WAYS), families=families,
        samples=max(map(len, samples.values()), default=0),
    )
    return head + "\n" + scoreboard(found, codes) + _WHOLE + _never_run(found, left_out)


def _never_run(found: Sequence[Found], left_out: Left) -> str:
    """Entries of which nothing ran, in no dtype and variant, by the reason."""
    ran = {it.op for it in found}
    ops: dict[str, list[str]] = defaultdict(list)
    for (_, op, _, _), reasons in left_out.items():
        for reason in reasons:
            if op not in ran and f"`{op}`" not in ops[reason]:
                ops[reason].append(f"`{op}`")
    lines = [f"- {reason}: {', '.join(names)}" for reason, names in sorted(ops.items()) if names]
    return "\n".join(["", "## Not run", "", *lines, ""]) if lines else ""


_MODULE_HEAD = """# The sweep of modules: torch's modules in every layout

`make sweep ARGS="--modules --dtype float64 --out docs/sweep_modules.md"` wrote this page. It covers
the modules of torch's own database, and those that the database lacks or has only without a batch
(`tests/sweep/more_modules.py`, names with a dot or of their own), in training, in evaluation, and
in evaluation without gradients, in {num} arrangements of inputs, parameters and buffers
(`tests/sweep/ways.py`): {ways}. Tensors that an arrangement does not name stay plain.
[Modules](modules.md) shows how modules are distributed, [the sweep](sweep.md) has the operators.

Results, the buffers after the step, and the gradients of inputs and parameters must be those of the
plain module, on every rank; for modules that draw random numbers, those of one rank. A module
counts by its worst call. *Gathered* is right, with a warning that operands were gathered. At padded
positions torch's fused encoder gives zeros, but its modules in Python, and therefore weft, give
other values. These are compared under `torch.backends.mha.set_fastpath_enabled(False)`.
"""


def module_page(found: Sequence[Found], left_out: Left, codes: Mapping[Done, str]) -> str:
    """The scoreboard of modules with its explanation."""
    head = _MODULE_HEAD.format(num=len(MODULE_WAYS), ways=", ".join(MODULE_WAYS))
    return head + "\n" + scoreboard(found, codes) + _never_run(found, left_out)


def scoreboard(found: Sequence[Found], codes: Mapping[Done, str] | None = None) -> str:
    """Markdown: ops by their worst verdict, for each system, dtype and variant; then every op of
    weft that is not right, and those of others that are wrong, with an example."""
    columns = ["system", "dtype", "variant", "ops", "calls", *VERDICTS, "left whole",
               "right in all ways",
               *(["commits"] if codes else [])]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    groups: dict[tuple[str, str, str], list[Found]] = defaultdict(list)
    for it in found:
        groups[it.dtype, it.variant or "function", it.system].append(it)
    for system in dict.fromkeys(it.system for it in found):
        mine = [it for it in found if it.system == system]
        if len({(it.dtype, it.variant) for it in mine}) > 1:
            groups["all", "all", system] = mine
    for (dtype, variant, system), its in groups.items():
        lines.append(f"| {system} | {dtype} | {variant} | {_counts(its)} |"
                     f"{_of_row(codes or {}, dtype, variant, system)}")
    for system in sorted({it.system for it in found}, key=lambda name: name != "weft"):
        for kind in _WORST[:-1]:
            its = [it for it in found if it.kind == kind and it.system == system]
            briefly = kind == "gathered" or (system != "weft" and kind in ("unclear", "refused"))
            if briefly and its:
                of = Counter(it.op for it in found if it.system == system)
                lines += ["", f"## {system}: {kind}, of so many calls", "", _paragraph(its, of)]
            else:
                lines += _section(f"{system}: {kind}", its)
    return "\n".join(lines + _whole([it for it in found if it.system == "weft"])) + "\n"


def _whole(found: Sequence[Found]) -> list[str]:
    """Per op of which a call leaves a result whole: how many of its calls in each way do."""
    lines = []
    for op, its in _by_op([it for it in found if it.whole]):
        of = Counter(it.way for it in found if it.op == op)
        ways = Counter(it.way for it in its)
        words = ", ".join([f"{way} {count}/{of[way]}" for way, count in sorted(ways.items())])
        lines.append(f"- `{op}`: {words}")
    return ["", "## weft: left whole, of so many calls in a way", "", *lines] if lines else []


def _counts(its: Sequence[Found]) -> str:
    """The cells that count: ops, calls, the ops of each verdict, and the share that is right."""
    ops = _by_op(its)
    worst = Counter(_worst(same) for _, same in ops)
    share = sum(worst[kind] for kind in _RIGHT) / len(ops)
    whole = len({it.op for it in its if it.whole}) if its[0].system == "weft" else ""
    cells = [len(ops), len(its), *(worst[kind] for kind in VERDICTS), whole, f"{share:.1%}"]
    return " | ".join(map(str, cells))


def _of_row(codes: Mapping[Done, str], dtype: str, variant: str, system: str) -> str:
    """The commits of a row, as its last cell."""
    mine = {code or "unknown" for job, code in codes.items()
            if job[0] == system and dtype in ("all", job[2])
            and variant in ("all", job[3] or "function")}
    return f" {', '.join(sorted(mine))} |" if codes else ""


def _section(title: str, its: Sequence[Found]) -> list[str]:
    if not its:
        return []
    return ["", f"## {title}", "", *[_example(op, same) for op, same in _by_op(its)]]


def _paragraph(its: Sequence[Found], of: Mapping[str, int]) -> str:
    words = [f"`{op}` {len(same)}/{of[op]}" for op, same in _by_op(its)]
    return textwrap.fill(", ".join(words), 100, break_long_words=False, break_on_hyphens=False)


def _worst(its: Sequence[Found]) -> str:
    kinds = {it.kind for it in its}
    return next(kind for kind in _WORST if kind in kinds)


def _by_op(its: Sequence[Found]) -> list[tuple[str, list[Found]]]:
    ops: dict[str, list[Found]] = defaultdict(list)
    for it in its:
        ops[it.op].append(it)
    return sorted(ops.items())


def _example(op: str, its: Sequence[Found]) -> str:
    """How many calls, of which dtypes and variants, in which ways, and what one of them said."""
    forms = ", ".join(dict.fromkeys(f"{it.dtype}{it.variant and ' ' + it.variant}" for it in its))
    ways = ", ".join(sorted({it.way for it in its}))
    first = " ".join(its[0].detail.split())[:160]
    return f"- `{op}` ({len(its)}: {forms}; {ways}): {first}"

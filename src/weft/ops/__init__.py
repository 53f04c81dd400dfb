"""The book of ops: a page per family, and one entry per op with all that is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.core import Layout
from weft.ops import (
    adaptive_pools,
    attention,
    composed,
    contractions,
    convolutions,
    creation,
    ctc,
    decomposed,
    distances,
    elementwise,
    extrema,
    grouped_mm,
    joins,
    linalg,
    losses,
    margin_losses,
    moments,
    norms,
    order,
    pools,
    reads,
    recurrent,
    reductions,
    resizing,
    scans,
    searchsorted,
    shifts,
    slices,
    softmax,
    tall_factorizations,
    transforms,
    views,
    writes,
)
from weft.ops.algorithm import Composite, Kernel, Local, replicated
from weft.rules import Call, Decision, Entry, Rule
from weft.rules.factors import packet

__all__ = [
    "BOOK", "Composite", "Kernel", "Local", "find", "floats_flow", "replicated", "rule_of",
]

_PAGES = (
    adaptive_pools, attention, composed, contractions, convolutions, creation, ctc, decomposed,
    distances, elementwise, extrema, grouped_mm, joins, linalg, losses, margin_losses, moments,
    norms, order, pools, reads, recurrent, reductions, resizing, scans, searchsorted, shifts,
    slices, softmax, tall_factorizations, transforms, views, writes,
)

BOOK: dict[str, Entry] = {name: entry for page in _PAGES for name, entry in page.PAGE.items()}
"""The entries of all pages, by the name of the op, "aten.softmax"."""

assert len(BOOK) == sum(len(page.PAGE) for page in _PAGES), "an op stands on two pages"


def find(name: str) -> Entry | None:
    """The entry of an overload, "aten.mean.dim", or of all overloads of that name."""
    return BOOK.get(name) or BOOK.get(packet(name))


def floats_flow(name: str) -> bool:
    """Whether no rule of this op reads the values of its float arguments.

    One decision then serves every learning rate. The types of the arguments still count.
    """
    entry = find(name)
    return entry is not None and entry.floats_flow


def rule_of(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool] = ()
) -> Rule | Decision | None:
    """The rule or decision of a call whose op itself runs on the local tensors, without a kernel
    or a composition."""
    entry = find(call.op)
    if entry is None:
        return None
    given = None if entry.layouts is None else entry.layouts(call, layouts, wants_grad)
    if isinstance(given, Decision):
        return given
    rule = given if isinstance(given, Rule) else entry.rule(call, wants_grad)
    if rule is None or not rule.finish:
        return rule
    finished = {factor for _, factor in rule.finish}
    return replace(rule, finish=frozenset(), whole=rule.whole | finished)

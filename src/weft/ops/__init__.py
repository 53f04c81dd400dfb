"""The book of ops: a page per family, and one entry per op with all that is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from weft.core import Layout
from weft.ops import (
    adaptive_pools,
    attention,
    borders,
    composed,
    contractions,
    convolutions,
    covariance,
    creation,
    ctc,
    decomposed,
    distances,
    elementwise,
    extrema,
    grid_samples,
    joins,
    linalg,
    lists,
    losses,
    margin_losses,
    module_attention,
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
    segments,
    shifts,
    slices,
    softmax,
    spectrograms,
    stencils,
    tall_factorizations,
    transforms,
    verdicts,
    views,
    writes,
)
from weft.ops.algorithm import Composite, Kernel, Local, replicated
from weft.rules import Call, Decision, Entry, Page, Rule
from weft.rules.factors import packet

__all__ = [
    "BOOK", "FUNCTIONS", "Composite", "Kernel", "Local", "find", "find_exactly",
    "floats_flow", "join", "replicated", "rule_of",
]

_PAGES = (
    adaptive_pools, attention, borders, composed, contractions, convolutions, covariance,
    creation, ctc, decomposed, distances, elementwise, extrema, grid_samples, joins, linalg,
    lists, losses, margin_losses, module_attention, moments, norms, order, pools, reads, recurrent,
    reductions, resizing, scans, searchsorted, segments, shifts, slices, softmax, spectrograms,
    stencils, tall_factorizations, transforms, verdicts, views, writes,
)

BOOK: dict[str, Entry] = {}
"""The entries of all pages, by the name of the op, "aten.softmax"."""

FUNCTIONS: dict[Any, Entry] = {}
"""Functions of torch that have an entry, by themselves."""


def join(*pages: Page) -> None:
    """Add pages to the book."""
    for each in pages:
        for name, entry in each.items():
            assert name not in BOOK, f"{name} stands on two pages"
            BOOK[name] = entry
            if name.startswith("torch."):
                FUNCTIONS[reduce(getattr, name.split(".")[1:], torch)] = entry


join(*(each.PAGE for each in _PAGES))


def find(name: str) -> Entry | None:
    """The entry of an overload, "aten.mean.dim", or of all overloads of that name."""
    return BOOK.get(name) or BOOK.get(packet(name))


def find_exactly(name: str) -> Entry | None:
    """The entry of that name: in-place ops, "aten.uniform_.default", have few of their own."""
    return BOOK.get(name) or BOOK.get(name.rpartition(".")[0])


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
    entry, wants_grad = find(call.op), wants_grad or [False] * len(layouts)
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

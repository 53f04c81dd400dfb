"""The book of ops: a page per family, and one entry per op with everything that weft knows about
it."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from weft.ops import (
    adaptive_pools,
    affine_grids,
    attention,
    borders,
    composed,
    contractions,
    convolutions,
    covariance,
    creation,
    ctc,
    differences,
    distances,
    elementwise,
    extrema,
    fractional_pools,
    gradients,
    grid_samples,
    joins,
    linalg,
    lists,
    losses,
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
    tall_factorizations,
    transforms,
    verdicts,
    views,
    writes,
)
from weft.ops.algorithm import Composite, Kernel, Local, replicated
from weft.rules import Entry, Page
from weft.rules.factors import packet

__all__ = [
    "BOOK", "FUNCTIONS", "Composite", "Kernel", "Local", "find", "find_exactly",
    "floats_flow", "join", "replicated",
]

_PAGES = (
    adaptive_pools, affine_grids, attention, borders, composed, contractions, convolutions,
    covariance, creation, ctc, differences, distances, elementwise, extrema, fractional_pools,
    gradients, grid_samples, joins, linalg, lists, losses, module_attention, moments, norms,
    order, pools, reads, recurrent, reductions, resizing, scans, searchsorted, segments, shifts,
    slices, softmax, spectrograms, tall_factorizations, transforms, verdicts, views, writes,
)

BOOK: dict[str, Entry] = {}
"""The entries of all pages, by the name of the op, "aten.softmax"."""

FUNCTIONS: dict[Any, Entry] = {}
"""Functions of torch that have an entry, by themselves."""


def join(*pages: Page) -> None:
    """Add pages to the book; functions that this torch lacks are left out."""
    for each in pages:
        for name, entry in each.items():
            assert name not in BOOK, f"{name} stands on two pages"
            BOOK[name] = entry
            if name.startswith("torch."):
                _, *path, last = name.split(".")
                function = getattr(reduce(getattr, path, torch), last, None)
                if function is not None:
                    FUNCTIONS[function] = entry


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

"""Samples of torch's operator database: functions of a list of dense tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = [
    "DTYPES", "MAX_NUMEL", "LeftOut", "Sample", "aliases_of", "database", "is_pointwise",
    "samples_of",
]

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16,
    "complex64": torch.complex64, "int64": torch.int64, "bool": torch.bool,
    "float16": torch.float16, "complex128": torch.complex128, "int32": torch.int32,
    "uint8": torch.uint8,
}

UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
         "new_empty_strided")
"""What they hold is anybody's guess."""

MAX_NUMEL = 20_000
"""Elements of all operands together; larger samples take long and say nothing more."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call: `fn` takes the tensors that the database's arguments hold, in their order.

    `wants_grad` says which of them require a gradient, `adds` whether an element of a result may
    be a sum of many. `inplace`: the first operand is written to, and is the last result.
    `num_calls`: of the op. `roles`: of modules alone, what each tensor is.
    """

    name: str
    fn: Callable[[list[Tensor]], Any]
    tensors: tuple[Tensor, ...]
    wants_grad: tuple[bool, ...]
    adds: bool = True
    inplace: bool = False
    num_calls: int = 1
    roles: tuple[str, ...] = ()


class LeftOut(Exception):
    """Why a sample of the database is not run."""


@functools.cache
def database() -> dict[str, Any]:
    """Name (and variant) -> entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import (  # noqa: PLC0415
            common_methods_invocations as torchs,  # it takes ten seconds
        )
    # Entries that draw set one seed for each call: let them draw, so that nobody compares.
    torchs.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {entry.name + (entry.variant_test_name and f".{entry.variant_test_name}"): entry
            for entry in torchs.op_db if entry.name not in UNSET}


def aliases_of(name: str) -> dict[str, Callable[..., Any]]:
    """Other names of an entry's function, and what they name."""
    return {alias.name: alias.op for alias in database()[name].aliases if alias.op is not None}


def samples_of(
    name: str, dtype: torch.dtype, most: int, variant: str = "", alias: str = "",
    left_out: list[str] | None = None,
) -> Iterator[Sample]:
    """Up to `most` samples of an entry, evenly chosen; none where it has not the dtype.

    `variant` is "", "inplace", "out": then the call writes to tensors like its results, or
    "turned": then the dims of its operands lie in memory in the reverse order.
    `alias` calls the entry by another of its names. `left_out` learns why there is no sample.
    """
    entry = database()[name]
    op = entry.inplace_variant if variant == "inplace" else entry.op
    if alias:
        op = aliases_of(name)[alias]
    if op is None or dtype not in entry.supported_dtypes("cpu"):
        return
    if variant == "out":
        if not entry.supports_out:
            return
        op = _into_out(op, tells=name not in UNWRITTEN)
    if name == "topk":
        op = _without_ties(op)
    grad = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
    grad = grad and variant != "out"  # which torch differentiates nothing by
    torch.manual_seed(0)
    with warnings.catch_warnings(), _briefly():
        warnings.simplefilter("ignore")
        found = list(entry.sample_inputs("cpu", dtype, requires_grad=grad))
    usable, unusable = [], []
    for number, given in enumerate(found):
        try:
            usable.append(_sample(f"{number}", op, given, variant))
        except LeftOut as reason:
            unusable.append(str(reason))
    if left_out is not None and not usable:
        left_out.extend(dict.fromkeys(unusable))
    stride = max(len(usable) / most, 1)
    for place in sorted({int(place * stride) for place in range(min(most, len(usable)))}):
        yield dataclasses.replace(
            usable[place], adds=not is_pointwise(name), num_calls=1 + (variant == "out")
        )


@contextlib.contextmanager
def _briefly() -> Iterator[None]:
    """The database's samples, and its random numbers, without what takes it most of its time.

    Before each sample it reads the call stack for a unittest, and notes its seed, with the stack,
    for each kind of accelerator that is not there.
    """
    from torch.testing._internal import common_utils  # noqa: PLC0415 it takes seconds
    from torch.testing._internal.opinfo import core  # noqa: PLC0415

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)
        random.seed(value)
        np.random.seed(value)

    def no_unittest() -> None:
        return None

    with (
        patch.object(common_utils, "extract_test_fn", no_unittest),
        patch.object(core, "extract_test_fn", no_unittest),
        patch.object(common_utils, "set_rng_seed", seed),
    ):
        yield


def is_pointwise(name: str) -> bool:
    """Whether torch calls it a function of one or two operands, element by element."""
    return type(database()[name]).__name__ in ("UnaryUfuncInfo", "BinaryUfuncInfo")


UNWRITTEN = ("fft.ihfft2", "fft.ihfftn")
"""Ops of which torch 2.13 leaves a plain target as it was where they go over one dim: it hands
`conj_physical_out` what it has computed as the target, and the target as what to read. There the
result of the same call without a target is due."""


def _into_out(op: Callable[..., Any], tells: bool = True) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        like = op(*args, **kwargs)
        out = pytree.tree_map_only(Tensor, lambda one: torch.full_like(one, 1), like)
        given = op(*args, **kwargs, out=out)
        if not tells and type(out) is Tensor and bool((out == 1).all()):
            out.copy_(like)
        return out, [one is other for one, other in zip(*map(pytree.tree_leaves, (given, out)))]

    return run


def _turned(one: Tensor) -> Tensor:
    dims = tuple(reversed(range(one.dim())))
    return one.permute(dims).contiguous().permute(dims)


def _without_ties(topk: Callable[..., Any]) -> Callable[..., Any]:
    """Which of equal elements it names is nobody's promise: what stands there is."""
    def run(x: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        values, places = topk(x, k, dim, *args, **kwargs)
        return values, x.detach().take_along_dim(places, dim) if x.dim() else places

    return run


def _sample(name: str, op: Callable[..., Any], given: Any, variant: str) -> Sample:
    inplace = variant == "inplace"
    if inplace and getattr(given, "broadcasts_input", False):
        raise LeftOut("the first operand is broadcast, which no result in place can be")
    leaves, tree = pytree.tree_flatten((given.input, given.args, given.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not places:
        raise LeftOut("it takes no tensor")
    if any(leaves[place].layout != torch.strided for place in places):
        raise LeftOut("its operands are sparse")
    tensors = tuple(leaves[place].detach().contiguous() for place in places)
    if sum(t.numel() for t in tensors) > MAX_NUMEL:
        raise LeftOut(f"its operands have more than {MAX_NUMEL} elements")
    if variant == "turned":
        tensors = tuple(map(_turned, tensors))
        if all(t.is_contiguous() for t in tensors):
            raise LeftOut("its operands have less than two dims")

    def fn(own: list[Tensor]) -> Any:
        if inplace:
            own = [t.clone() if t.requires_grad else t for t in own]
        full = list(leaves)
        for place, tensor in zip(places, own):
            full[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(full, tree)
        result = op(first, *args, **kwargs)
        return (result, own[0].detach()) if inplace else result

    wants_grad = tuple(leaves[place].requires_grad for place in places)
    return Sample(name, fn, tensors, wants_grad, inplace=inplace)

"""Samples of torch's modules: functions of a module's inputs, parameters and buffers.

The database is torch's own (`common_modules.module_db`) and, for what it lacks, `more_modules`. A
sample's tensors are the inputs, then the parameters, then the buffers, so that each can be laid
out; its results are the module's, and the buffers after the step. Variants: in training, in
evaluation, and in evaluation without gradients, where torch takes other routes.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import weft
from tests.sweep.judge import Dense, backward, leaves
from tests.sweep.more_modules import MORE, Given
from tests.sweep.samples import MAX_NUMEL, Sample
from weft import ShardTensor
from weft.core import Mesh
from weft.tensor.placing import left_whole

__all__ = ["VARIANTS", "drawn", "modules", "samples_of"]

VARIANTS = ("train", "eval", "no_grad")

_Samples = Callable[[torch.dtype, bool], list[Given]]
"""Dtype and whether in training -> modules with what they are called on."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter or buffer stands."""

    owner: str
    name: str
    is_parameter: bool


@functools.cache
def modules() -> dict[str, _Samples]:
    """Name -> samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import (  # noqa: PLC0415
            module_db,  # it takes seven seconds
        )
    found: dict[str, _Samples] = {entry.name: functools.partial(_of_torch, entry)
                                  for entry in module_db}
    for name, make in MORE.items():
        found[f"nn.{name}"] = functools.partial(_of_ours, make)
    return found


def _of_torch(entry: Any, dtype: torch.dtype, training: bool) -> list[Given]:
    out = []
    for one in entry.module_inputs_func(
        entry, device="cpu", dtype=dtype, requires_grad=True, training=training
    ):
        given, called = one.constructor_input, one.forward_input
        if called is not None:
            out.append(Given(
                functools.partial(entry.module_cls, *given.args, **given.kwargs),
                tuple(called.args), dict(called.kwargs),
            ))
    return out


def _of_ours(make: Callable[[torch.dtype], list[Given]], dtype: torch.dtype, training: bool) -> Any:
    return make(dtype)


def samples_of(
    name: str, dtype: torch.dtype, most: int, variant: str, left_out: list[str] | None = None
) -> Iterator[Sample]:
    """Up to `most` samples of a module, evenly chosen; none where it has not the dtype.

    `left_out` learns why a sample is none.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = modules()[name](dtype, variant == "train")
        stride = max(len(found) / most, 1)
        for number in sorted({int(place * stride) for place in range(min(most, len(found)))}):
            sample = _sample(f"{number}", found[number], dtype, variant)
            if sample is not None:
                yield sample
            elif left_out is not None:
                left_out.append(f"it has no inputs, or more than {MAX_NUMEL} elements")


def _sample(name: str, given: Given, dtype: torch.dtype, variant: str) -> Sample | None:
    template = given.make().to(dtype).train(variant == "train")
    if any(isinstance(one, nn.parameter.UninitializedTensorMixin)
           for one in template.parameters()):  # a lazy module: its first call makes them
        with torch.no_grad():
            template(*copy.deepcopy(given.args), **copy.deepcopy(given.kwargs))
    _spread(template)
    leaves, tree = pytree.tree_flatten((given.args, given.kwargs))
    inputs = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    places = list(_places(template))
    states = [_at(template, place) for place in places]
    tensors = tuple(
        one.detach().contiguous().clone() for one in (*[leaves[at] for at in inputs], *states)
    )
    if not inputs or sum(one.numel() for one in tensors) > MAX_NUMEL:
        return None
    grads = variant != "no_grad"
    in_place = any(getattr(one, "inplace", False) for one in template.modules())

    def fn(own: list[Tensor]) -> Any:
        if any(type(one) is ShardTensor for one in own):
            torch.manual_seed(0)
            left_whole._WARNED.clear()  # each sample warns by itself
        module = copy.deepcopy(template)
        for place, tensor in zip(places, own[len(inputs):]):
            _put(module, place, tensor)
        full = list(leaves)
        for at, tensor in zip(inputs, own):
            full[at] = tensor.clone() if in_place and tensor.requires_grad else tensor
        args, kwargs = pytree.tree_unflatten(full, tree)
        # Of padded positions torch's fused encoder gives zeros, its modules something else.
        fused = "src_key_padding_mask" not in kwargs
        with torch.set_grad_enabled(grads), _fused(fused):
            out = module(*args, **kwargs)
        return out, [_at(module, place) for place in places if not place.is_parameter]

    return Sample(
        name, fn, tensors,
        (*[grads and leaves[at].requires_grad for at in inputs],
         *[grads and place.is_parameter for place in places]),
        roles=(*["input"] * len(inputs),
               *["parameter" if place.is_parameter else "buffer" for place in places]),
    )


@contextmanager
def _fused(allowed: bool) -> Iterator[None]:
    mha = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(allowed and before)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def drawn(sample: Sample) -> Dense | None:
    """What a sample that draws gives on one rank: the same numbers as on any.

    None where it raises on plain tensors, and in half precision: no wider call draws the same, so
    nothing tells how far it may be rounded.
    """
    if any(one.dtype in (torch.bfloat16, torch.float16) for one in sample.tensors):
        return None
    mesh = Mesh({"x": 1})

    def on_rank(bound: Any) -> Dense:
        own = [weft.distribute_tensor(one.clone(), bound).requires_grad_(wanted)
               for one, wanted in zip(sample.tensors, sample.wants_grad)]
        results = leaves(sample.fn(list(own)))
        backward(results)
        return Dense([_whole(one) for one in results], [_whole(one.grad) for one in own])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sample.fn([one.clone().requires_grad_(wanted)
                       for one, wanted in zip(sample.tensors, sample.wants_grad)])
        except Exception:
            return None
        return weft.testing.run(on_rank, 1, mesh)[0]


def _whole(one: Any) -> Any:
    one = one.detach() if isinstance(one, Tensor) else one
    return one.full_tensor() if type(one) is ShardTensor else one


def _spread(module: nn.Module) -> None:
    """Parameters that are all alike, as new norms' are, become different ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in module.parameters():
            if one.numel() > 1 and bool((one == one.flatten()[0]).all()):
                one += torch.rand(one.shape, generator=generator, dtype=torch.float64).to(one.dtype)


def _places(module: nn.Module) -> Iterator[_Place]:
    """Those that stand in two places once."""
    seen: set[int] = set()
    for owner, part in module.named_modules():
        for stored, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for name, one in stored.items():
                if one is not None and id(one) not in seen:
                    seen.add(id(one))
                    yield _Place(owner, name, is_parameter)


def _at(module: nn.Module, place: _Place) -> Tensor:
    return getattr(module.get_submodule(place.owner), place.name)


def _put(module: nn.Module, place: _Place, tensor: Tensor) -> None:
    """Also a tensor that is no Parameter, so that its gradient comes to the sample's own."""
    owner = module.get_submodule(place.owner)
    stored: dict[str, Any] = owner._parameters if place.is_parameter else owner._buffers
    stored[place.name] = tensor
    if isinstance(owner, nn.RNNBase):
        owner._flat_weights = [getattr(owner, name) for name in owner._flat_weights_names]

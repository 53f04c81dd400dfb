"""Between a recorded op, whose tensors are Slots, and a `Call`, whose tensors are TensorArgs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.rules import Call, TensorArg
from weft.tensor.trace.capture import Op, Trace
from weft.tensor.trace.trees import Slot, fill, flatten, replaced, slots_of

__all__ = [
    "Facts", "as_call", "call_of", "facts", "functional", "functional_name", "overload_named",
    "place_slots", "returned", "target_of", "with_dense_gradient", "written_by",
]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts from an overload's schema and tags; asking torch takes a microsecond each time.

    Args:
        name: "aten.add_.Tensor". functional: the name of the op that is not in place.
        writes: positions of the arguments that it writes to.
        is_view: whether results share memory with an operand. may_copy: whether they may not.
        is_random: whether it draws random numbers. reshapes: whether it changes a shape in place.
        sparse: the flag that makes the gradient of its first operand sparse, and its position.
        names: of the positional arguments.
        tensors: the arguments that tensors stand for, alone or in lists: positions, or names of
            keyword-only ones.
    """

    name: str
    functional: str
    writes: tuple[int, ...]
    is_view: bool
    may_copy: bool
    is_random: bool
    reshapes: bool
    sparse: tuple[str, int] | None
    names: tuple[str, ...]
    tensors: tuple[int | str, ...]


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes to: by the schema of its op, else by the function's name.

    Versions show most writes, but torch's fused updates and tensors of inference mode count none.
    """
    name = getattr(func, "__name__", "")
    is_named_so = name == "__setitem__" or (
        hasattr(torch.Tensor, f"__{name[3:]}") if name.startswith("__i")
        else name.endswith("_") and not name.endswith("__"))
    packet = getattr(torch.ops.aten, name, None) if is_named_so else None
    overloads = [func] if isinstance(func, OpOverload) else [] if packet is None else [
        getattr(packet, each) for each in packet.overloads()]
    found = flatten(kwargs.get("out"))
    for overload in overloads:
        names = [argument.name for argument in overload._schema.arguments]
        writes = facts(overload).writes
        found += flatten([
            args[at] if at < len(args) else kwargs.get(names[at]) for at in writes])
        if writes:
            break
    if is_named_so and not found:
        found = flatten([*args, *kwargs.values()][:1])
    return found


_MAY_COPY = frozenset((
    "contiguous", "flatten", "ravel", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "to",
    "type_as",
))


_WRITES = {"aten.native_batch_norm.default": (3, 4)}
"""Ops whose schema does not say what they write to: running statistics."""


_VIEWS = tuple(
    f"aten.unsafe_{name}." for name in ("chunk", "split", "split_with_sizes"))
"""Ops whose schema does not say that their results are views."""


@cache
def facts(overload: OpOverload) -> Facts:
    name, schema = str(overload), overload._schema
    infos = [argument.alias_info for argument in schema.arguments]
    returned = [one.alias_info for one in schema.returns]
    return Facts(
        name, functional_name(name),
        _WRITES.get(name) or tuple(
            [at for at, info in enumerate(infos) if info is not None and info.is_write]
        ),
        name.startswith(_VIEWS) or any(
            info is not None and not info.is_write for info in returned),
        name.split(".")[1] in _MAY_COPY,
        torch.Tag.nondeterministic_seeded in overload.tags,
        torch.Tag.inplace_view in overload.tags or name.startswith("aten.set_"),
        next(((argument.name, at) for at, argument in enumerate(schema.arguments)
              if argument.name in ("sparse", "sparse_grad")), None),
        tuple([argument.name for argument in schema.arguments if not argument.kwarg_only]),
        tuple([argument.name if argument.kwarg_only else at
               for at, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]),
    )


def as_call(
    op: Op, operands: Sequence[torch.Tensor], trace: Trace, layouts: Sequence[Layout]
) -> Call:
    """The op as rules see it, under its functional name; `operands` in the order of its Slots."""
    feed = iter([
        TensorArg(tuple(t.shape), dtype_text(t.dtype), _expanded(t)) for t in operands])
    results = tuple(
        TensorArg(tuple(meta.shape), dtype_text(meta.dtype))
        for meta in (trace.metas[slot.index] for slot in slots_of(op.results))
    )
    args, kwargs = replaced((op.args, op.kwargs), Slot, lambda _: next(feed))
    return call_of(op.overload, args, kwargs, results, layouts)


def _expanded(tensor: torch.Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    if 0 not in strides:
        return ()
    return tuple([dim for dim, step in enumerate(strides) if not step])


def call_of(
    overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
    results: tuple[TensorArg, ...], layouts: Sequence[Layout] = (),
) -> Call:
    """A call of an overload, TensorArgs standing for its tensors."""
    about = facts(overload)
    given = dict(enumerate(args)) | kwargs
    counts = [_num_tensors(given.get(at)) for at in about.tensors]
    return Call(
        about.functional, args, kwargs, results, about.names, tuple(counts), tuple(layouts))


def _num_tensors(value: Any) -> int:
    if type(value) is TensorArg:
        return 1
    return sum([type(one) is TensorArg for one in value]) if type(value) in (list, tuple) else 0


def place_slots(tree: Any, slots: Sequence[Slot]) -> Any:
    """`tree` with the Slots, in order, where its TensorArgs stand."""
    feed = iter(slots)
    return replaced(tree, TensorArg, lambda _: next(feed))


@cache
def dtype_text(dtype: torch.dtype) -> str:
    """"float32"."""
    return str(dtype)[6:]


def functional_name(name: str) -> str:
    """The name of the op that is not in place: `aten.add_.Tensor` -> `aten.add.Tensor`,
    `aten.__ior__.Tensor` -> `aten.__or__.Tensor`."""
    namespace, base, overload = name.split(".")
    if base.startswith("__i"):
        return f"{namespace}.__{base[3:]}.{overload}"
    if base.endswith("_") and not base.endswith("__"):
        return f"{namespace}.{base[:-1]}.{overload}"
    return name


@cache
def overload_named(name: str) -> OpOverload | None:
    """The overload that a name means, `aten.add.Tensor`, if torch has it."""
    namespace, base, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None or overload not in packet.overloads():
        return None
    return getattr(packet, overload)


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    return source.to(target.dtype).expand_as(target)


_UNLIKE = {
    "aten.copy.default": _copied,  # torch's own has no derivative
    # torch's has another order
    "aten.polygamma.default": lambda target, n: torch.polygamma(n, target),
}


def functional(op: Op) -> Callable[..., Any]:
    """The function that returns what an in-place or out= op writes.

    Raises:
        UnsupportedOpError: torch has none.
    """
    name = facts(op.overload).functional
    if name in _UNLIKE:
        return _UNLIKE[name]
    found = overload_named(name)
    if found is None or found._schema.is_mutable or _parameters(found) != _parameters(op.overload):
        found = _namesake(op.overload, name)
    if found is None:
        raise UnsupportedOpError(
            str(op.overload), "its operands have to move, and the op has no form that is "
            "not in place", "an in-place op on operands of other layouts is computed out "
            "of place, then written", [name], "x.copy_(out_of_place_computation)")
    return found


def _namesake(overload: OpOverload, name: str) -> OpOverload | None:
    """The op of the same parameters whose overload is named otherwise: `pow_.Scalar` is
    `pow.Tensor_Scalar`. Not of random ones, whose draws need more care."""
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return None
    packet = getattr(torch.ops.aten, name.split(".")[1], None)
    for other in () if packet is None else packet.overloads():
        found = getattr(packet, other)
        if not found._schema.is_mutable and _parameters(found) == _parameters(overload):
            return found
    return None


def _parameters(overload: OpOverload) -> list[str]:
    return [str(one.type) for one in overload._schema.arguments]


def with_dense_gradient(op: Op) -> Op:
    """The op that asks for no sparse gradient of its first operand; itself, where it asks for none.

    The blocks of a ShardTensor are dense; the value is the same, and an optimizer of any kind but
    SparseAdam takes it.
    """
    flag = facts(op.overload).sparse
    if flag is None:
        return op
    name, at = flag
    args, kwargs = list(op.args), dict(op.kwargs)
    if at < len(args):
        asked, args[at] = args[at], False
    else:
        asked = kwargs.pop(name, False)
    return replace(op, args=tuple(args), kwargs=kwargs) if asked else op


def returned(trace: Trace, tensors: Sequence[Any], results: Any, out: Any) -> Any:
    """What a call on these tensors returns, where `out` stands for the Slots `results`."""
    values: dict[int, Any] = dict(enumerate(tensors))
    values.update(zip([slot.index for slot in slots_of(results)], flatten(out)))
    return fill(trace.result, values)


def target_of(op: Op) -> int | None:
    """The slot that the op writes to, if it writes to one tensor."""
    for at in facts(op.overload).writes:
        if at < len(op.args):
            value = op.args[at]
            return value.index if type(value) is Slot else None
    return None

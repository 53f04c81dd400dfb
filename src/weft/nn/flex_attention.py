"""torch's `flex_attention` on shards: attention whose scores and masks are functions of positions.

Samples, heads and rows of queries stay sharded, as in `scaled_dot_product_attention`. Keys and
values come whole to the rows that read them. torch's own kernel runs on the local tensors, compiled
as the caller's is: the functions get the positions in the whole, and of a block mask a rank has the
rows of its queries. ShardTensors that these functions close over are gathered, with their
gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import _permute_strides, flex_attention
from torch._higher_order_ops.utils import setup_compilation_env
from torch.nn import functional as F
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from weft import propagate
from weft.comm import BoundMesh
from weft.core import Layout
from weft.errors import UnsupportedOpError
from weft.nn import flex_functions
from weft.nn.flex_functions import masks_from, scores_from
from weft.ops.precision import wide
from weft.rules import Call, Decision, TensorArg, rule
from weft.tensor import ShardTensor
from weft.tensor.call import dispatch, outside
from weft.tensor.call.anchor import tie
from weft.tensor.call.compiled import compile_options
from weft.tensor.meta import contiguous_strides
from weft.tensor.placing.freed import filled, watch
from weft.tensor.placing.layouts import layout_of, local_to_sharded
from weft.tensor.placing.operands import as_value, entered
from weft.tensor.trace.capture import unwatched
from weft.tensor.trace.trees import local_of
from weft.tensor.versions import version_of
from weft.transport.order import laid, order_due

__all__ = ["attention", "install"]

_NAME = "flex_attention"
_REASON = "each row reads all keys"
_OF_MASK = "the mask of a rank's samples, heads and rows"

_TABLES = slice(2, 6)
"""Of a block mask as a tuple: how many blocks of keys each row of blocks reads in part, and which;
and how many it reads whole, and which."""

_FURTHER = {1: "OUTPUT_LOGSUMEXP", 2: "OUTPUT_MAX"}
"""Results that a kernel gives only if it is asked for them, by its options."""

_Mod = Callable[..., Any]
_Mask = tuple[Any, ...]


def attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: _Mod, block_mask: _Mask,
    scale: float, kernel_options: dict[str, Any], *_: Any,
) -> tuple[Tensor | None, ...]:
    """torch's op of that name: the result, the logs of the rows' sums, and their largest scores;
    None for those that nobody wants.

    Further arguments are what functions of a compiled graph read, and no ShardTensor is in one.
    """
    given, held = [query, key, value], _held(score_mod)
    of_mask = [one for one in block_mask if isinstance(one, Tensor)]
    mesh = dispatch.mesh_of(_NAME, [
        one._meta for one in (*given, *held, *of_mask) if type(one) is ShardTensor])
    memories = filled([local_of(one) for one in (*given, *held)])
    values = [as_value(one) for one in (*given, *held)]
    wants = [torch.is_grad_enabled() and one.requires_grad for one in values[:3]]
    decision = _decided(given, [layout_of(one, mesh) for one in values[:3]], wants)
    _check_rows(decision.operands[0], block_mask)
    wanted = [0, *[at for at, name in _FURTHER.items() if kernel_options.get(name)]]
    if mesh.here is None:
        like = _like_kernel(*map(outside.twin, values[:3]))
        found = {at: outside.leave(like[at], query.device) for at in wanted}
    else:
        layouts = [*decision.operands, *map(_whole, held)]
        locals_ = entered(_NAME, mesh, values, layouts, _REASON)
        mask = _mask_on_rank(mesh, decision.operands[0], block_mask)
        scores = _closed(score_mod, dict(zip(map(id, held), locals_[3:])))
        try:
            found = _on_rank(
                mesh, decision.operands, locals_, wanted, scores, mask, scale, kernel_options)
        except Exception as error:
            raise dispatch.failed(error, flex_attention, given, mesh) from error.__cause__
    out = _sharded(found, mesh, decision, query)
    watch(out, memories)
    return out


def _on_rank(
    mesh: BoundMesh, layouts: Sequence[Layout], tensors: Sequence[Tensor], wanted: Sequence[int],
    scores: _Mod, mask: _Mask, scale: float, kernel_options: dict[str, Any],
) -> dict[int, Tensor]:
    """The wanted results on this rank, by their places, of its part of the queries."""
    assert mesh.here is not None
    q, k, v, *closed = tensors
    of_query, of_key = layouts[:2]
    box = of_query.box_at(mesh.here)
    groups = of_query.shape[1] // max(of_key.shape[1], 1)
    if groups > 1 and k.shape[1] * groups != q.shape[1]:  # heads of queries alone are sharded
        heads = torch.arange(*box[1], device=k.device) // groups
        k, v = k.index_select(1, heads), v.index_select(1, heads)
    if not q.numel() or not k.numel():
        none = q.new_zeros((*q.shape[:3], v.shape[3])), *[
            q.new_zeros(q.shape[:3], dtype=wide(q.dtype))] * 2
        return {at: tie(none[at], _with_gradient(tensors)) for at in wanted}
    if q.is_meta:
        like = _like_kernel(q, k, v)
        return {at: tie(like[at], _with_gradient(closed)) for at in wanted}
    if any(of_query.dims[:3]):
        scores = scores_from(scores, _firsts(box, q.device))
    return dict(zip(wanted, _compiled(wanted, q, k, v, scores, mask, scale, kernel_options)))


def _with_gradient(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one for one in tensors if one.requires_grad]


def _decided(
    given: Sequence[Tensor], layouts: Sequence[Layout], wants: Sequence[bool]
) -> Decision:
    """The layouts of queries, keys, values and results."""
    query, key, value = (tuple(one.shape) for one in given)
    rows = query[:3]
    shapes = query, key, value, (*rows, value[3]), rows, rows
    arguments = [TensorArg(shape, "float32") for shape in shapes]
    call = Call(_NAME, tuple(arguments[:3]), {}, tuple(arguments[3:]))
    heads, of_keys = "h", "h"
    if query[1] != key[1]:
        few = layouts[0].num_shards(1) > key[1]
        heads, of_keys = ("h", "g!") if few else ("(g r)", "g")
    batch = "b" if key[0] == query[0] else "c!"
    bound = rule(
        f"b {heads} s e!, {batch} {of_keys} t! e!, {batch} {of_keys} t! f! -> "
        f"b {heads} s f!, b {heads} s, b {heads} s").bind(call, wants)
    assert bound is not None
    return propagate.decide(bound, call, layouts, wants)


def _held(function: _Mod) -> list[ShardTensor]:
    """The ShardTensors that a function closes over, or finds in its module."""
    found: dict[int, ShardTensor] = {}
    _swapped(function, lambda one: found.setdefault(id(one), one))
    return [*found.values()]


def _closed(function: _Mod, known: Mapping[int, Tensor]) -> _Mod:
    """The function with other tensors in the place of its ShardTensors."""
    return _swapped(function, lambda one: known[id(one)])  # type: ignore[no-any-return]


def _swapped(value: Any, swap: Callable[[ShardTensor], Any], seen: tuple[Any, ...] = ()) -> Any:
    """The value with others in the place of its ShardTensors, in tuples, lists and functions;
    itself, where there are none."""
    if type(value) is ShardTensor:
        return swap(value)
    if any(value is one for one in seen):  # a function that calls itself
        return value
    inner = partial(_swapped, swap=swap, seen=(*seen, value))
    if type(value) in (tuple, list):
        parts = type(value)(map(inner, value))
        return value if all(map(is_, parts, value)) else parts
    if type(value) is dict:
        values = inner([*value.values()])
        return value if all(map(is_, values, value.values())) else dict(zip(value, values))
    if type(value) is partial:
        given = value.func, value.args, value.keywords
        func, args, keywords = taken = inner(given)
        return value if taken is given else partial(func, *args, **keywords)
    if type(value) is not FunctionType:
        return value
    cells = {name: cell.cell_contents for name, cell
             in zip(value.__code__.co_freevars, value.__closure__ or ()) if cell != CellType()}
    names = {name: found for name in value.__code__.co_names
             if type(found := value.__globals__.get(name)) is ShardTensor}
    given = cells, names, value.__defaults__, value.__kwdefaults__
    held, others, defaults, kwdefaults = taken = inner(given)
    if taken is given:
        return value
    made = FunctionType(
        value.__code__, value.__globals__ | others, value.__name__, defaults,
        tuple(CellType(held[name]) if name in held else CellType()
              for name in value.__code__.co_freevars))
    made.__kwdefaults__ = kwdefaults
    return made


def _whole(tensor: Tensor) -> Layout:
    return Layout.replicated(tensor.sharding.mesh, tensor.shape)  # type: ignore[attr-defined]


def _firsts(box: Sequence[tuple[int, int]], device: torch.device) -> list[Tensor]:
    """Where samples, heads and rows begin in the whole; not as numbers, on which a kernel would
    depend."""
    return [torch.tensor(start, dtype=torch.int32, device=device) for start, _ in box[:3]]


def _mask_on_rank(mesh: BoundMesh, of_query: Layout, mask: _Mask) -> _Mask:
    """The mask of this rank's samples, heads and rows, counted from its first; the mask itself,
    where it serves any."""
    assert mesh.here is not None
    tables = [one for one in mask[_TABLES] if one is not None]
    held = _held(mask[-1])
    is_plain = not any(type(one) is ShardTensor for one in (*held, *tables))
    is_none = _has_no_function(mask) and tables[0].numel() == 1
    if is_plain and (is_none or not any(of_query.dims[:3])):
        return mask
    # All layers of a model use one mask. What is kept of it does not hold the table that it is kept
    # for: it would never be freed.
    masks = mesh.cache.setdefault("masks", WeakTensorKeyDictionary())
    made_of = [*map(local_of, (*tables, *held))]
    key = of_query, mask[-1], [*map(version_of, made_of)]
    known = masks.get(made_of[0])
    if known is not None and known[0] == key and len(known[1]) == len(made_of) and all(
            ref() is one for ref, one in zip(known[1], made_of)):
        return known[2]
    layouts = [
        of_query.take((0, 1)).fitted(one.shape[:2]).insert(
            2, Layout.replicated(of_query.mesh, one.shape[2:]))
        for one in tables
    ]
    with torch.no_grad():
        found = entered(
            _NAME, mesh, [*tables, *held], [*layouts, *map(_whole, held)], _OF_MASK)
    function = _closed(mask[-1], dict(zip(map(id, held), found[len(tables):])))
    box = of_query.box_at(mesh.here)
    made = _of_rows(mask, [one.clone() for one in found[: len(tables)]], box, function)
    masks[made_of[0]] = key, [*map(TensorWeakRef, made_of)], made
    return made


def _has_no_function(mask: _Mask) -> bool:
    return mask[-1] is _module().noop_mask


def _check_rows(of_query: Layout, mask: _Mask) -> None:
    """Raise where ranks would have parts of a row of blocks, and only the tables say what it reads.
    """
    size = mask[-3]
    if mask[2].shape[2] > 1 and _has_no_function(mask) and any(
            cut % size for cut in of_query.cuts_of(2)[:-1]):
        raise UnsupportedOpError(
            _NAME, f"the queries are {of_query}, and the block mask has no mask_mod",
            f"a rank has whole blocks of {size} rows of such a mask", [str(of_query)],
            f"BlockMask.from_kv_blocks(..., mask_mod=...), or sizes in multiples of {size}")


def _of_rows(
    mask: _Mask, tables: Sequence[Tensor], box: Sequence[tuple[int, int]], function: _Mod
) -> _Mask:
    """The mask of the rows in a box, from its tables of the samples and heads in it."""
    if any(start == stop for start, stop in box[:3]):
        return ()  # nobody reads it
    sizes, (start, stop) = mask[-3:-1], box[2]
    size, first = sizes[0], tables[0]
    if first.shape[2] > 1:  # one row of blocks serves any rows
        if start % size or (stop % size and stop < mask[0]):
            tables = _between(tables, start, stop, size)
        else:
            tables = [one[:, :, start // size : -(-stop // size)] for one in tables]
    made = _module().BlockMask.from_kv_blocks(
        *tables, BLOCK_SIZE=sizes, mask_mod=masks_from(function, _firsts(box, first.device)),
        seq_lengths=(stop - start, mask[1]))
    return made.as_tuple()


def _between(tables: Sequence[Tensor], start: int, stop: int, size: int) -> Sequence[Tensor]:
    """The tables of rows that begin or end inside of a row of blocks: what any of two rows of
    blocks reads is read in part, and the mask's function decides."""
    dense: Any = sum([
        _module()._ordered_to_dense(num, which, which.shape[-1])
        for num, which in zip(tables[::2], tables[1::2])
    ])
    firsts = torch.arange(start, stop, size, device=dense.device)
    lasts = (firsts + size - 1).clamp(max=stop - 1)
    read = (dense[:, :, firsts // size] + dense[:, :, lasts // size]) > 0
    return _module()._dense_to_ordered(read)


def _module() -> Any:
    """torch's module of block masks. It takes long to import; whoever has a mask has it."""
    return sys.modules["torch.nn.attention.flex_attention"]


def _compiled(*args: Any) -> Sequence[Tensor]:
    """The op on local tensors, compiled as the caller's is."""
    rules: Any = torch._dynamo.trace_rules  # type: ignore[attr-defined]
    rules.get_legacy_mod_inlinelist().add(Path(flex_functions.__file__).as_posix())
    options = compile_options()
    if options is not None:
        return torch.compile(flex_functions.kernel, **options)(*args)  # type: ignore
    if _module()._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG:
        return flex_functions.kernel(*args)  # type: ignore[no-any-return]
    with setup_compilation_env() as backend:
        return torch.compile(  # type: ignore[no-any-return]
            flex_functions.kernel, backend=backend, fullgraph=True)(*args)


def _like_kernel(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Results of the same shapes, from a kernel that takes as much memory."""
    k, v = (one.expand(q.shape[0], *one.shape[1:]) for one in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out, *[out.sum(-1, dtype=wide(q.dtype)) for _ in range(2)]


def _sharded(
    found: Mapping[int, Tensor], mesh: BoundMesh, decision: Decision, query: Tensor
) -> tuple[Tensor | None, ...]:
    """The results as ShardTensors; the first is in memory as the queries are."""
    made: list[Tensor | None] = [None] * 3
    for at, one in found.items():
        layout = decision.results[at]
        plain = strides = contiguous_strides(layout.shape)
        if at == 0:
            with unwatched():
                like = torch.empty(layout.shape, device="meta")
                strides = tuple(_permute_strides(like, query.stride()).stride())
        due = order_due(layout.shape, strides, one)
        one = one if due is None else laid(one, due)
        made[at] = local_to_sharded(one, mesh, layout, None if strides == plain else strides)
    return tuple(made)


def install() -> None:
    """Take the op over."""
    dispatch.SPECIAL[flex_attention] = attention

"""Resizing: interpolation of positions to other lengths, sharded positions included.

Batch and channels pass. Each rank fetches the positions that its places of the result read. Along
sharded dims they are computed from the places and weights that torch's kernels take (`taps`); along
the others the kernel itself runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from weft.ops.taps import Making, Nearest, Parts, Resized, resampled, table_of, taps_of
from weft.rules import Boxed, BoxedDim, Call, OnRank, Table, op, page, rule

__all__ = ["PAGE"]


_MODES = {
    "upsample_linear1d": "linear", "upsample_bilinear2d": "linear",
    "upsample_trilinear3d": "linear", "upsample_bicubic2d": "cubic",
    "_upsample_bilinear2d_aa": "linear_aa", "_upsample_bicubic2d_aa": "cubic_aa",
    "_upsample_lanczos2d_aa": "lanczos_aa",
}


def _scales(call: Call) -> tuple[float | None, ...]:
    """Per dim of positions, the scale that the call gives."""
    num = len(call.results[0].shape) - 2
    given = call.get("scale_factors")
    if given is None and num == 1:
        given = (call.get("scales"),)
    elif given is None:
        given = [call.get(f"scales_{letter}") for letter in "dhw"[-num:]]
    return tuple(given)


def _aligned(call: Call) -> bool:
    return bool(call.get("align_corners", False))


def _resized(call: Call) -> list[Resized]:
    """Per dim of positions, how it gets its length."""
    x, out = call.tensors[0], call.results[0]
    dtype = torch.float64 if x.dtype == "float64" else torch.float32
    return [
        Resized(_MODES[call.base], before, after, _aligned(call), scale, dtype)
        for before, after, scale in zip(x.shape[2:], out.shape[2:], _scales(call))
    ]


def _nearest(call: Call) -> list[Nearest]:
    """The same of modes that copy single places."""
    lengths = zip(call.tensors[0].shape[2:], call.results[0].shape[2:], _scales(call))
    return [Nearest(*each, "exact" in call.op) for each in lengths]


def _tables(call: Call) -> Mapping[str, Table]:
    dims = _resized(call) if call.base in _MODES else _nearest(call)
    return {f"y{at}": table_of(dim) for at, dim in enumerate(dims)}


def _text(call: Call, wants_grad: Sequence[bool]) -> str:
    """Positions by a table of what each reads: of one dim, "b c @y0 -> b c y0"."""
    x, out = call.tensors[0], call.results[0]
    if "float" not in x.dtype and x.dtype != "uint8":  # its meta kernel takes it
        raise NotImplementedError(f"{call.base} is not implemented for {x.dtype}")
    if 0 in x.shape[2:] or 0 in out.shape[2:]:
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, but got input {list(x.shape[2:])} "
            f"output {list(out.shape[2:])}")
    # Integers are rounded once; of one column, the kernels with filters give other sums.
    whole = (call.base in _MODES and "float" not in x.dtype) or (
        call.base.endswith("_aa") and x.shape[-1] == out.shape[-1] == 1)
    given, made = ("s{}!", "t{}") if whole else ("@y{}", "y{}")
    dims = range(len(out.shape) - 2)
    return f"b c {' '.join(map(given.format, dims))} -> b c {' '.join(map(made.format, dims))}"


def _on_box(call: Call, boxed: Boxed) -> OnRank:
    """Weighted sums along dims of which boxes were fetched, torch's kernel along the others."""
    fetched = [dim for dim in boxed.dims if dim.box is not None]
    if not fetched:
        return None, boxed.args, boxed.kwargs
    if call.base not in _MODES:
        return _copied(call, boxed.dims), boxed.args[:1], {}
    # The kernels with filters take an image of one column for another one.
    dims = boxed.dims if call.base.endswith("_aa") else fetched
    return _weighted(call, dims), boxed.args[:1], {}


def _weighted(call: Call, dims: Sequence[BoxedDim]) -> Callable[[Tensor], Tensor]:
    """Weighted sums along some dims, torch's kernel along the others."""
    resized, scales = _resized(call), list(_scales(call))
    after = [dim.after for dim in resized]
    parts: list[tuple[int, int, Making]] = []
    for dim in dims:
        start, stop = dim.outputs
        scales[dim.dim - 2] = None
        after[dim.dim - 2] = stop - start
        parts.append((dim.dim, stop - start, partial(_taps, resized[dim.dim - 2], dim)))
    kernel = getattr(torch.ops.aten, call.base).default
    done = {dim.dim for dim in dims}
    others = any(
        at not in done and (dim.before != dim.after or scales[at - 2] is not None)
        for at, dim in enumerate(resized, 2))
    rest = (lambda x: kernel(x, after, _aligned(call), *scales)) if others else None
    return resampled(parts, rest)


def _taps(resized: Resized, dim: BoxedDim, start: int, stop: int, device: str) -> Parts:
    """The taps of some of the places of the result that a rank computes."""
    places = torch.arange(start, stop) + dim.outputs[0]
    origin = 0 if dim.box is None else dim.box[0]
    return taps_of(resized, places, device).of(0, stop - start, origin)


# Nearest: one place is copied, the very one that torch's kernel takes.


def _copied(call: Call, dims: Sequence[BoxedDim]) -> Callable[[Tensor], Tensor]:
    """torch's kernel on the box, where it copies the places of the whole; else an index."""
    known = [
        dim.known(*each.outputs) if each.box is not None else None
        for dim, each in zip(_nearest(call), dims)
    ]
    if all(each.box is None or _is_of_box(call, each, places)
           for each, places in zip(dims, known)):
        after = [dim.outputs[1] - dim.outputs[0] for dim in dims]
        kernel = getattr(torch.ops.aten, call.base).default
        return lambda x: kernel(x, after, *_scales(call))
    made: dict[Any, list[Tensor]] = {}

    def run(x: Tensor) -> Tensor:
        key = x.device, suggest_memory_format(x)
        if key not in made:
            with torch.inference_mode(False), torch.no_grad():
                made[key] = [
                    _places(call, x, dim) if places is None
                    else (places - dim.box[0]).to(x.device)  # type: ignore[index]
                    for dim, places in zip(dims, known)
                ]
        out = x
        for dim, places in zip(dims, made[key]):
            if dim.box is not None or dim.length != call.results[0].shape[dim.dim]:
                out = out.index_select(dim.dim, places)
        return out

    return run


def _is_of_box(call: Call, dim: BoxedDim, places: Tensor | None) -> bool:
    """Whether the kernel, on the box of a dim alone, copies these places."""
    if places is None or dim.box is None:
        return False
    (start, stop), (low, high) = dim.outputs, dim.box
    whole = _nearest(call)[dim.dim - 2]
    alone = Nearest(high - low, stop - start, whole.scale, whole.exact).known(0, stop - start)
    return alone is not None and torch.equal(alone, places - low)


_SIDE = 256
"""Dims beside the one in question are shorter: kernels of images ask whether they are small."""


def _places(call: Call, x: Tensor, dim: BoxedDim) -> Tensor:
    """Which places of its box the outputs copy. torch's kernels round the source of a place each
    in its own way, so the kernel runs on the whole tensor's places, digit by digit."""
    at, after = dim.dim - 2, call.results[0].shape[dim.dim]
    lengths = [min(one, _SIDE) if x.dim() == 4 else 1 for one in call.results[0].shape[2:]]
    lengths[at] = after
    given = [*lengths[:at], dim.length, *lengths[at + 1 :]]
    order = suggest_memory_format(x)
    channels = 1 if order is torch.contiguous_format else min(call.tensors[0].shape[1], 4)
    scales: list[float | None] = [None] * len(lengths)
    scales[at] = _scales(call)[at]
    kernel = getattr(torch.ops.aten, call.base).default
    view = [-1, *[1] * (len(lengths) - 1 - at)]
    places, unit = torch.zeros(after, dtype=torch.long, device=x.device), 1
    while unit < dim.length:
        digits = torch.arange(dim.length, device=x.device) // unit % 128
        shown = digits.to(x.dtype).view(view).expand(1, channels, *given)
        shown = shown.contiguous(memory_format=order)
        out = kernel(shown, lengths, *scales)[0, 0].movedim(at, 0)
        places += out.reshape(after, -1)[:, 0].long() * unit
        unit *= 128
    start, stop = dim.outputs
    if dim.box is None:
        return places[start:stop]
    return (places[start:stop] - dim.box[0]).clamp(0, dim.box[1] - dim.box[0] - 1)


PAGE = page(
    # Where a call gives scales, the lengths of the result come from floats.
    *[op(" ".join([f"upsample_nearest{num}d", f"_upsample_nearest_exact{num}d",
                   *[name for name in _MODES if f"{num}d" in name]]),
         rule(_text, on_box=_on_box, tables=_tables, keeps=False), floats_flow=False)
      for num in (1, 2, 3)],
)

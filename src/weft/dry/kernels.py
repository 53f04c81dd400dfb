"""Kernels of the CPU, whose results torch's meta kernels do not have.

Each decides what a step keeps: attention without its scores, an LSTM with the workspace of its
backward, convolutions in the order of their operands' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F

from weft.dry.operations import ATTENTION, LSTM

__all__ = ["AS_KERNELS", "fused_kernels"]

_aten = torch.ops.aten
_LSTM_MODE = 2
"""The number of this kind of network in oneDNN."""


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Inside, attention and recurrent networks on meta tensors are what they are on the CPU. For
    meta tensors torch chooses products, which keep scores and gates."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
    library.impl("mish_backward", _back_of_mish, "AutogradMeta")
    for name in _CELLS:
        library.impl(f"{name}.input", _network(name), "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> Any:
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    fused = (
        query.dim() == 4 and not dropout_p and query.numel() and key.numel()
        and query.shape[-1] == value.shape[-1]
        and (attn_mask is None or not attn_mask.requires_grad)
    )
    if not fused:
        enable_gqa = enable_gqa and key.shape[-3] != query.shape[-3]  # of no heads, it would divide
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
            enable_gqa=enable_gqa)[0]
    return ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _back_of_mish(grad: Tensor, x: Tensor) -> Tensor:
    """One kernel, unless it has a derivative."""
    if torch.is_grad_enabled():
        return _aten.mish_backward.default._op_dk(
            torch._C.DispatchKey.CompositeImplicitAutograd, grad, x)  # type: ignore[attr-defined]
    return torch.empty_like(x)


def _network(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """A recurrent network, layer by layer in each direction, as on the CPU."""
    is_lstm = name == "lstm"

    def run(
        x: Tensor, states: Any, weights: Sequence[Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:
        given = states if is_lstm else [states]
        ways = 2 if bidirectional else 1
        per = len(weights) // num_layers // ways
        is_fused = is_lstm and per == (4 if has_biases else 2) and _has_kernel(x)
        facts = (num_layers, has_biases, bidirectional, batch_first, train)
        x = x.transpose(0, 1) if batch_first else x
        x = x.contiguous() if is_fused else x
        left = []
        for layer in range(num_layers):
            made = []
            for way in range(ways):
                at = layer * ways + way
                own, before = weights[at * per : (at + 1) * per], [one[at] for one in given]
                if is_fused:
                    biases = own[2:] if has_biases else map(torch.zeros_like, own)
                    out, *after, steps = LSTM(
                        x, *own[:2], *biases, *before, way > 0, [], _LSTM_MODE,
                        before[0].shape[-1], *facts)
                else:
                    steps = F.linear(x, own[0], own[2] if has_biases else None)
                    out, *after = _by_steps(
                        _CELLS[name], steps, before, own[1:], has_biases, way > 0)
                made.append(out)
                left.append(after)
            x = torch.cat(made, -1) if ways > 1 else made[0]
            del out, made, steps
            if dropout and train and layer + 1 < num_layers:
                x = torch.dropout(x, dropout, True)
        return x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*left))

    return run


def _by_steps(
    cell: Callable[..., list[Tensor]], steps: Tensor, states: list[Tensor],
    weights: Sequence[Tensor], has_biases: bool, backwards: bool,
) -> tuple[Tensor, ...]:
    """One layer in one direction, from the product of all inputs: a product for each state."""
    square, *more = weights
    bias, outs = more[1] if has_biases else None, []

    def again(hidden: Tensor) -> Tensor:
        return F.linear(hidden, square, bias)

    for step in reversed(steps.unbind(0)) if backwards else steps.unbind(0):
        states = cell(step, again, *states)
        if len(more) % 2:  # a projection
            states[0] = F.linear(states[0], more[-1])
        outs.append(states[0])
    return torch.stack(outs[::-1] if backwards else outs), *states


_Product = Callable[[Tensor], Tensor]


def _cell_of_lstm(step: Tensor, again: _Product, hidden: Tensor, cell: Tensor) -> list[Tensor]:
    enters, stays, new, leaves = again(hidden).add_(step).unsafe_chunk(4, 1)
    cell = (stays.sigmoid_() * cell).add_(enters.sigmoid_() * new.tanh_())
    return [leaves.sigmoid_() * cell.tanh(), cell]


def _cell_of_gru(step: Tensor, again: _Product, hidden: Tensor) -> list[Tensor]:
    parts = step.unsafe_chunk(3, 1)
    resets, stays, new = again(hidden).unsafe_chunk(3, 1)
    resets.add_(parts[0]).sigmoid_()
    stays.add_(parts[1]).sigmoid_()
    new = (parts[2] + new.mul_(resets)).tanh_()
    return [(hidden - new).mul_(stays).add_(new)]


_CELLS: dict[str, Callable[..., list[Tensor]]] = {
    "lstm": _cell_of_lstm,
    "gru": _cell_of_gru,
    "rnn_tanh": lambda step, again, hidden: [again(hidden).add_(step).tanh()],
    "rnn_relu": lambda step, again, hidden: [again(hidden).add_(step).relu()],
}
"""One step each: it overwrites what overwriting on the CPU spares."""


def _has_kernel(x: Tensor) -> bool:
    """Whether oneDNN takes a network of these elements."""
    supported, has = torch.backends.mkldnn, torch.ops.mkldnn
    if not (x.numel() and supported.is_available() and supported.enabled):
        return False
    return (
        x.dtype is torch.float32
        or (x.dtype is torch.bfloat16 and has._is_mkldnn_bf16_supported())
        or (x.dtype is torch.float16 and has._is_mkldnn_fp16_supported()))


def _layer_of_lstm(made: Any, x: Tensor, *args: Any) -> Any:
    """The last result is the workspace, if there may be a backward: gates, states and their
    gradients, each a number of pages, in rows that fill cache lines (oneDNN's `rnn_utils`)."""
    *results, workspace = made
    if not torch.is_grad_enabled():
        return (*results, None)
    (length, batch, given), size = x.shape, args[9]
    width, step = x.element_size(), length * batch
    states = 2 * (length + 1) * batch
    widest = max(given, size)
    spaces = [
        step * _row(4 * size, width), step * _row(size, width),
        states * _row(widest, width), states * size * width,
        states * _row(widest, 4), states * _row(widest, 4), states * size * 4,
    ]
    nbytes = sum([-(-space // _PAGE) * _PAGE for space in spaces])
    return (*results, workspace.new_empty(nbytes))


_PAGE = 4096
_CACHE_LINE = 64


def _row(num: int, width: int) -> int:
    """Bytes of a row of so many elements of so many bytes. Rows of 256 elements get a line more."""
    line = _CACHE_LINE // width
    filled = -(-num // line) * line
    return (filled if filled % 256 else filled + line) * width


def _back_of_lstm(made: Any, *_: Any) -> Any:
    """The gradients of the two biases, alike, have memory of their own."""
    results = list(made)
    results[4] = torch.empty_like(results[3])
    return tuple(results)


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """In the order of the operands' memory, which torch's meta kernel does not follow."""
    orders = [suggest_memory_format(one) for one in (x, weight) if one.dim() == out.dim() > 3]
    turned = [order for order in orders if order is not torch.contiguous_format]
    if not turned or x.dtype is torch.float64 or suggest_memory_format(out) is turned[0]:
        return out
    return torch.empty_like(out, memory_format=turned[0])


def _loss(out: Tensor, x: Tensor, target: Tensor, *_: Any) -> Tensor:
    """A sum or mean in the memory of the losses of all elements, which the kernels make first."""
    if out.dim() or not x.dim():
        return out
    return x.new_empty(torch.broadcast_shapes(x.shape, target.shape)).resize_(())


AS_KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _convolution, LSTM.default: _layer_of_lstm,
    _aten.mkldnn_rnn_layer_backward.default: _back_of_lstm,
    **dict.fromkeys([
        _aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default,
        _aten.binary_cross_entropy.default], _loss),
}
"""What a kernel makes, from what torch's meta kernel made and the operands."""

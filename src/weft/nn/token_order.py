"""Tokens in another order than that of their positions, so that causal attention gives every rank
as much work.

Under a causal mask a query sees the keys before it. Of a sequence that is sharded in the order of
positions, the last rank has almost twice the average work and the first almost none. In zig-zag
order every shard has two stretches, one from the front and its mirror image from the back. All
shards have the same work (Dubey et al., The Llama 3 Herd of Models, 2024). The layout of tensors is
an ordinary one: the tokens are permuted, with their positions and labels. Everything but attention
works on each token by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.core import Interval
from weft.core.integers import integers
from weft.errors import LayoutError
from weft.ops.attending.ordered import RULE, default_scale, ordered
from weft.tensor import ShardTensor
from weft.tensor.call.own.functions import OwnFunction

__all__ = ["TokenOrder", "zigzag"]

_ATTEND = OwnFunction(RULE.name, ordered, ordered, RULE)


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """An order of the tokens of a sequence.

    Args:
        spans: the stretches of positions in this order, each as (first, one past the last).
    """

    spans: tuple[Interval, ...]

    @property
    def length(self) -> int:
        """The number of tokens."""
        return sum([stop - start for start, stop in self.spans])

    @property
    def positions(self) -> Tensor:
        """The position of each token in this order, as int64 of shape (length,): `position_ids`."""
        return torch.cat([torch.arange(*span) for span in self.spans] or [torch.arange(0)])

    def apply(self, x: Tensor, dim: int) -> Tensor:
        """A tensor in the order of positions, brought into this order.

        Args:
            x: tokens, labels or activations; `dim` has the length of this order.
            dim: the dim of positions.
        """
        return x.index_select(dim, self.positions.to(x.device))

    def restore(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `apply`: a tensor in this order, brought into the order of positions.

        Args:
            x: a tensor whose `dim` has the length of this order.
            dim: the dim of tokens.
        """
        return x.index_select(dim, self.positions.argsort().to(x.device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Causal attention of tokens in this order: each sees those of earlier positions and
        itself.

        Args:
            query: as `scaled_dot_product_attention` takes it, (..., heads, length, features).
            key: the same, with as many heads or fewer: several heads of queries may share one of
                keys.
            value: as `key`.
            scale: the factor of the scores, 1 / sqrt(features) by default.

        Raises:
            LayoutError: a sequence of another length than this order has.
        """
        lengths = [one.shape[-2] for one in (query, key, value)]
        if lengths != [self.length] * 3:
            raise LayoutError(
                "attend(query, key, value)", f"sequences of {', '.join(map(str, lengths))} tokens, "
                f"and an order of {self.length}", "an order is that of all tokens of a sequence",
                [f"{name}: {num}" for name, num in zip(("query", "key", "value"), lengths)
                 if num != self.length], f"weft.zigzag({lengths[0]}, num_shards)")
        given = query, key, value, self.spans, default_scale(query) if scale is None else scale
        if any(isinstance(one, ShardTensor) for one in given[:3]):
            return ShardTensor.__torch_function__(_ATTEND, (), given, {})
        return ordered(*given)

    def causal(self) -> TorchFunctionMode:
        """Within the block, `scaled_dot_product_attention` with `is_causal=True` is `attend`.

            with order.causal():
                model(tokens, position_ids=order.positions)

        A call with a mask or with dropout raises: a mask is in the order of positions. Activation
        checkpoints run the forward again in backward, which then belongs into the block as well.
        """
        return _Causal(self)


class _Causal(TorchFunctionMode):
    def __init__(self, order: TokenOrder) -> None:
        super().__init__()
        self.order = order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or (is_causal and dropout_p):
            raise LayoutError(
                "scaled_dot_product_attention(...)",
                "it has a mask or dropout, and tokens are in zig-zag order",
                "a mask does not know the order of tokens; order.causal() knows causal attention "
                "and attention of all to all",
                ["attn_mask"] * (attn_mask is not None) + ["dropout_p"] * (dropout_p > 0),
                "scaled_dot_product_attention(query, key, value, is_causal=True)")
        if is_causal:
            return self.order.attend(query, key, value, scale=scale)
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout_p, scale=scale, enable_gqa=enable_gqa)


def zigzag(length: int, num_shards: int) -> TokenOrder:
    """The zig-zag order of a sequence that is sharded into `num_shards` equal shards.

        order = weft.zigzag(length, mesh.size())
        tokens, labels = order.apply(tokens, 1), order.apply(labels, 1)

    Shard k has the k-th stretch from the front and the k-th from the back.

    Args:
        length: tokens of the sequence.
        num_shards: of the dim of tokens, with default cuts, over one mesh axis.

    Raises:
        LayoutError: a negative length, or no shards.
    """
    length, num_shards = integers(
        (length, num_shards), "zigzag(length, num_shards)", "lengths and numbers of shards",
        "weft.zigzag(4096, 4)")
    if length < 0 or num_shards < 1:
        raise LayoutError(
            "zigzag(length, num_shards)", f"length {length} and {num_shards} shards",
            "a length is at least 0, and there is at least one shard",
            [name for name, is_wrong in (("length", length < 0), ("num_shards", num_shards < 1))
             if is_wrong], "weft.zigzag(4096, 4)")
    each = -(-length // num_shards)
    sizes = [max(min(each, length - each * shard), 0) for shard in range(num_shards)]
    fronts = [0, *accumulate([size - size // 2 for size in sizes])]
    backs = [length - num for num in (0, *accumulate([size // 2 for size in sizes]))]
    spans = [
        span for shard in range(num_shards)
        for span in ((fronts[shard], fronts[shard + 1]), (backs[shard + 1], backs[shard]))
    ]
    return TokenOrder(tuple([span for span in spans if span[0] < span[1]]))

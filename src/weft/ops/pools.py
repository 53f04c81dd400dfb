"""What gives positions another length: pools, resizing, im2col; and grid_sample.

Batch and channels pass. Positions are whole but where a window is a single position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.ops.convolutions import each_of
from weft.rules import Call, RuleText, op, page, rule

__all__ = ["PAGE"]

_LEADS = ("b c>0", "c>0")
"""Kernels take a batch of nothing, and no other dim of length 0."""


def _resized(num: int, num_operands: int = 1, num_results: int = 1) -> RuleText:
    """Operands and results of `num` dims of positions, all of them whole."""
    before = " ".join([f"s{at}!" for at in range(num)])
    after = " ".join([f"t{at}" for at in range(num)])
    return rule(*[
        f"{', '.join([f'{lead} {before}'] * num_operands)} -> "
        f"{', '.join([f'{lead} {after}'] * num_results)}" for lead in _LEADS
    ])


def _pool(num: int) -> Callable[[Call, Sequence[bool]], str]:
    def text(call: Call, wants_grad: Sequence[bool]) -> str:
        """Of one dim, "b c>0 s0! -> b c t0"; s0 stays where a window is a single position."""
        kernel = each_of(call.get("kernel_size"), num, 1)
        alone = [size == step == 1 and not pad for size, step, pad in zip(
            kernel, each_of(call.get("stride"), num, kernel),
            each_of(call.get("padding"), num, 0))]
        before = " ".join([f"s{at}>0" if one else f"s{at}!" for at, one in enumerate(alone)])
        after = " ".join([f"s{at}" if one else f"t{at}" for at, one in enumerate(alone)])
        lead = _LEADS[len(call.tensors[0].shape) == num + 1]
        return f"{lead} {before} -> {', '.join([f'{lead} {after}'] * len(call.results))}"

    return text


_LENGTHS = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
       "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}

PAGE = page(
    *[op(f"avg_pool{num}d max_pool{num}d max_pool{num}d_with_indices", rule(_pool(num)))
      for num in (1, 2, 3)],
    *[op(f"adaptive_avg_pool{num}d", _resized(num)) for num in (1, 2, 3)],
    *[op(f"adaptive_max_pool{num}d", _resized(num, 1, 2)) for num in (1, 2, 3)],
    *[op(f"max_unpool{num}d", _resized(num, 2)) for num in (2, 3)],
    # Where a call gives scales, the lengths of the result come from floats.
    *[op(names, _resized(num), floats_flow=False) for num, names in _LENGTHS.items()],
    op("fractional_max_pool2d", rule(
        "b c>0 h! w!, b c 2 -> b c y x, b c y x", "c>0 h! w!, 1 c 2 -> c y x, c y x")),
    op("fractional_max_pool3d", rule(
        "b c>0 d! h! w!, b c 3 -> b c z y x, b c z y x",
        "c>0 d! h! w!, 1 c 3 -> c z y x, c z y x")),
    op("im2col", rule("b c>0 h! w! -> b (c k) l", "c>0 h! w! -> (c k) l", linear=[0])),
    op("col2im", rule("b (c>0 k!) l! -> b c h w", "(c>0 k!) l! -> c h w", linear=[0])),
    # Each point of the grid reads the whole image of its sample.
    op("grid_sampler grid_sampler_2d grid_sampler_3d", rule(
        "b c h! w!, b y x 2 -> b c y x", "b c d! h! w!, b z y x 3 -> b c z y x", linear=[0])),
)

"""How many bytes a call of the database may receive from others, by the family of its op.

The samples have hundreds of shapes in eleven ways, so what stands here are formulas; the table of
`tests.cases.bounds` pins numbers for operands long enough to tell a block from the whole.

Every call may receive what its layouts ask for, whatever the op:
- a partial operand may be reduced: twice what a rank holds of it;
- of operands that differ, the smaller ones may come whole to the largest (as broadcast ones do);
- an operand with a cut dim of one element, which only one rank holds, may come whole;
- a plain target of an in-place op receives the result whole, and terms that are written to a
  target are reduced;
- in backward, gradients may go back the way operands came: of an operand that came whole each rank
  has a term, and receives those of its block from all others (of ragged ones it may be most of the
  operand). Those of replicated and of partial operands are summed or made whole: twice the operand.

To that the family adds what the op itself needs of other blocks:
- `still`: nothing;
- `parts`: a reduction is of the size of its results: a few numbers of each other block for each
  element of them, or an all-reduce of them; of what is true or false of all blocks together, each
  rank is told by a byte of each other;
- `scans`: the same for each row of the result;
- `moves`: each rank receives its own block of the results (whole, where the cut dim is gone), what
  names places (every operand but the largest), and a count of each rank; in backward its own block
  of the results and, from each result by itself, of each operand;
- `searches`: what is searched. How many of all the numbers are less, no rank knows of its own block
  alone: it receives the others, or the values that lie where those are, or both lie anew by rows;
- `halves`: as `moves`, of two elements for each of the results: where two ranks hold these, and the
  result is cut evenly over all, a rank that held none of both receives both;
- `asks`: how many classes there are, where the call does not say: the largest element of all, which
  no rank can tell from its own block, all-reduced;
- `products`: as `moves`, and the results may be reduced.

Ops that are not named have no bound that samples of a few dozen elements could break: sorting by
samples costs more than such operands do, and what works on whole matrices needs them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.sweep.samples import Sample, database, is_pointwise
from weft.core import Layout, Mesh

__all__ = ["FAMILIES", "allowed", "family"]

_NUMBERS = 3
"""A block is summed up by so many numbers at most: a count, a mean and a sum of squares. Each comes
from every other block, or is all-reduced, which is at most twice its bytes."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "still": (
        "addcmul", "addcdiv", "clamp", "lerp", "where", "nan_to_num", "complex", "polar", "clone",
        "positive", "real", "imag", "view_as_real", "contiguous", "alias_copy",
        "conj", "resolve_conj", "resolve_neg", "expand", "expand_as", "expand_copy",
        "broadcast_to", "broadcast_tensors", "unsqueeze", "unsqueeze_copy", "transpose",
        "transpose_copy", "permute", "permute_copy", "movedim", "T", "H", "mT", "mH", "t",
        "t_copy", "masked_fill", "fill", "zero_", "zeros_like", "ones_like", "full_like",
        "new_zeros", "new_ones", "new_full", "tril", "triu", "bfloat16", "bool", "byte", "char",
        "double", "float", "half", "int", "long", "short", "cdouble", "cfloat", "to", "isclose",
        "nn.functional.hardswish", "nn.functional.relu", "nn.functional.leaky_relu",
        "nn.functional.elu", "nn.functional.celu", "nn.functional.selu", "nn.functional.silu",
        "nn.functional.silu.complex", "nn.functional.hardsigmoid", "nn.functional.logsigmoid",
        "nn.functional.mish", "nn.functional.softsign", "nn.functional.tanhshrink",
        "nn.functional.threshold", "nn.functional.softshrink", "nn.functional.hardshrink",
        "nn.functional.hardtanh", "nn.functional.gelu", "nn.functional.relu6",
        "nn.functional.softplus", "squeeze", "squeeze.multiple", "squeeze_copy", "narrow",
        "narrow_copy", "split", "split.list_args", "split_with_sizes", "split_with_sizes_copy",
        "unsafe_split",
    ),
    "asks": ("nn.functional.one_hot",),
    "searches": ("searchsorted", "bucketize"),
    "parts": (
        "dot", "vdot", "trace", "equal", "allclose", "dist", "max.reduction_no_dim",
        "min.reduction_no_dim", "max.reduction_with_dim", "min.reduction_with_dim", "aminmax",
        "var_mean", "var_mean.unbiased", "std_mean", "std_mean.unbiased", "logsumexp", "norm",
        "norm.fro", "norm.inf", "linalg.vector_norm", "linalg.vecdot", "item", "mean", "sum",
        "nansum", "nanmean", "prod", "all", "any", "amax", "amin", "argmax", "argmin",
        "count_nonzero", "std", "std.unbiased", "var", "var.unbiased", "sum_to_size",
        "nn.functional.mse_loss", "nn.functional.l1_loss", "nn.functional.smooth_l1_loss",
        "nn.functional.huber_loss", "nn.functional.binary_cross_entropy",
        "nn.functional.binary_cross_entropy_with_logits", "nn.functional.poisson_nll_loss",
        "nn.functional.gaussian_nll_loss", "nn.functional.hinge_embedding_loss",
        "nn.functional.kl_div", "nn.functional.soft_margin_loss",
        "nn.functional.margin_ranking_loss", "nn.functional.cosine_similarity",
        "nn.functional.pairwise_distance", "bincount", "trapz", "trapezoid",
    ),
    "scans": (
        "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "softmax.with_dtype",
        "log_softmax", "log_softmax.with_dtype", "nn.functional.softmin",
        "nn.functional.softmin.with_dtype", "nn.functional.normalize", "renorm",
        "nn.functional.rms_norm", "nn.functional.layer_norm", "diff",
        "cumulative_trapezoid",
    ),
    "moves": (
        "flip", "fliplr", "flipud", "roll", "rot90", "cat", "hstack", "vstack", "dstack", "stack",
        "column_stack", "select", "slice", "select_scatter", "slice_scatter", "diagonal",
        "diagonal_copy", "diagonal_scatter", "diag", "diag_embed", "diagflat", "chunk",
        "unsafe_chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "unbind_copy",
        "repeat", "tile", "repeat_interleave", "reshape", "reshape_as", "view", "view_as",
        "view_copy", "flatten", "ravel", "unfold", "unfold_copy", "gather", "take",
        "take_along_dim", "index_select", "index_add", "index_copy", "index_fill",
        "scatter", "scatter_add", "scatter_reduce.sum", "scatter_reduce.prod",
        "scatter_reduce.mean", "scatter_reduce.amin", "scatter_reduce.amax", "masked_select",
        "masked_scatter", "nonzero", "argwhere", "nn.functional.embedding", "__getitem__",
        "index_put", "put", "constant_pad_nd", "nn.functional.pad.constant", "fft.fftshift",
        "fft.ifftshift", "nn.functional.channel_shuffle", "linalg.diagonal",
        "view_as_complex", "unflatten",
    ),
    "halves": ("nn.functional.glu",),
    "products": (
        "mm", "bmm", "mv", "matmul", "addmm", "addmm.decomposed", "addmv", "addbmm", "baddbmm",
        "addr", "outer", "inner", "tensordot", "einsum", "kron", "nn.functional.linear",
        "nn.functional.bilinear", "__rmatmul__", "cdist", "linalg.multi_dot",
    ),
}

_FAMILY = {name: which for which, names in FAMILIES.items() for name in names}


def family(name: str) -> str | None:
    """The family of an entry; functions that torch calls elementwise need nothing of others."""
    return _FAMILY.get(name) or ("still" if is_pointwise(name) else None)


def allowed(
    name: str, sample: Sample, results: Sequence[Any], layouts: Sequence[Layout | None], mesh: Mesh
) -> tuple[int, int] | None:
    """Most bytes that a rank may receive, forward and backward; None where no bound is known."""
    which = family(name) if name in database() else None
    if which is None:
        return None
    there, back = _due(sample, layouts)
    tensors = [one for one in results if isinstance(one, Tensor)]
    size = sum(map(_nbytes, tensors))
    if sample.inplace and layouts[0] is None:
        there, back = there + size, back + size
    if sample.num_calls > 1 and any(one is not None and one.is_partial for one in layouts):
        there += 2 * size
    largest = max(share for _, share in _shares(sample, layouts))
    own = sum(
        _nbytes(one) if one.dim() < max(t.dim() for t in sample.tensors)
        else math.ceil(_nbytes(one) * largest) for one in tensors
    )
    mine = sum(
        math.ceil(_nbytes(t) * share)
        for (t, share), wanted in zip(_shares(sample, layouts), sample.wants_grad) if wanted
    )
    named = sum(map(_nbytes, sample.tensors)) - _nbytes(sample.tensors[_largest(sample)])
    named += 8 * mesh.size()
    summed = [max(2 * _nbytes(one), _summary(one.numel(), mesh)) for one in tensors]
    summed += [2 * (mesh.size() - 1) for one in results if isinstance(one, bool)]
    rows = [_summary(one.numel() // max(min(one.shape, default=1), 1), mesh) for one in tensors]
    needs = {
        "still": (0, 0), "asks": (_asked(sample, tensors) if which == "asks" else 0, 0),
        "parts": (sum(summed),) * 2,
        "scans": (sum(rows),) * 2,
        "moves": (own + named, own + mine * max(len(tensors), 1)),
        "searches": (named, 0), "halves": (2 * own + named, 2 * own + mine),
        "products": (own + 2 * size, 2 * size + mine),
    }[which]
    return sample.num_calls * (there + needs[0]), sample.num_calls * (back + needs[1])


def _largest(sample: Sample) -> int:
    """The operand of most elements, of equals of most bytes: these alone would say the index into
    bools."""
    return max(range(len(sample.tensors)), key=lambda place: (
        sample.tensors[place].numel(), _nbytes(sample.tensors[place])
    ))


def _asked(sample: Sample, results: Sequence[Tensor]) -> int:
    """The largest of all classes, which no block tells, where the results have no more than that
    says."""
    (classes,), (found,) = sample.tensors[:1], results[:1]
    told = not classes.numel() or int(classes.max()) + 1 != found.shape[-1]
    return 0 if told else 2 * classes.element_size()


def _summary(count: int, mesh: Mesh) -> int:
    return _NUMBERS * 8 * max(mesh.size() - 1, 2) * count


def _due(sample: Sample, layouts: Sequence[Layout | None]) -> tuple[int, int]:
    """What layouts ask for, whatever the op, forward and backward."""
    there = back = 0
    largest = _largest(sample)
    given = zip(sample.tensors, layouts, sample.wants_grad)
    for place, (tensor, layout, wanted) in enumerate(given):
        nbytes = _nbytes(tensor)
        if layout is not None and layout.is_partial:
            there += math.ceil(2 * nbytes * _share(layout))
        if layout is not None and any(
            axes and length == 1 for axes, length in zip(layout.dims, layout.shape)
        ):
            there += nbytes
            back += nbytes * wanted
        differs = tensor.shape != sample.tensors[largest].shape or layout != layouts[largest]
        if place != largest and differs:
            there += nbytes
            back += max(nbytes, _reduced_to(layout, nbytes)) * wanted
        if layout is None or len(layout.sharded_axes) < layout.mesh.ndim:
            back += 2 * nbytes * wanted
    return there, back


def _reduced_to(layout: Layout | None, nbytes: int) -> int:
    """What a rank receives where the terms of all are reduced to its block, which may be most."""
    if layout is None or not layout.sharded_axes:
        return 0
    others = math.prod(layout.mesh.axis_sizes[axis] for axis in layout.sharded_axes) - 1
    return others * math.ceil(nbytes * _share(layout))


def _shares(sample: Sample, layouts: Sequence[Layout | None]) -> list[tuple[Tensor, float]]:
    return [(tensor, 1.0 if layout is None else _share(layout))
            for tensor, layout in zip(sample.tensors, layouts)]


def _share(layout: Layout) -> float:
    """How much of the tensor is the largest block."""
    places = itertools.product(*map(range, layout.mesh.axis_sizes))
    most = max(math.prod(layout.local_shape_at(place)) for place in places)
    return most / max(math.prod(layout.shape), 1)


def _nbytes(one: Tensor) -> int:
    return one.numel() * one.element_size()

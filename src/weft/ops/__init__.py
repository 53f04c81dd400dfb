"""Algorithms that are more than a rule, in one table: op name -> who answers for it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core import Layout
from weft.ops import (
    decomposed,
    distances,
    experts,
    grouped,
    loss,
    margins,
    normalize,
    products,
    search,
    sequences,
    statistics,
    tall,
    weight_norm,
)
from weft.ops.algorithm import Algorithm, Composite, Local, Lookup
from weft.ops.blocks import logsum, moments, places, reduce, scan
from weft.ops.indexing import composed, pick, read, shifts, write
from weft.ops.sorting import order, sort, unsigned
from weft.rules import Call, Decision

__all__ = ["TABLE", "Algorithm", "Composite", "Local", "lookup"]

TABLE: dict[str, Lookup] = {
    "aten.softmax.int": normalize.softmax_lookup,
    "aten.log_softmax.int": normalize.softmax_lookup,
    "aten._softmax.default": normalize.softmax_lookup,
    "aten._log_softmax.default": normalize.softmax_lookup,
    "aten._safe_softmax.default": normalize.softmax_lookup,
    "aten.layer_norm.default": normalize.layer_norm_lookup,
    "aten.rms_norm.default": normalize.rms_norm_lookup,
    "aten.batch_norm.default": statistics.batch_norm_lookup,
    "aten.instance_norm.default": statistics.instance_norm_lookup,
    "aten.group_norm.default": statistics.group_norm_lookup,
    **{f"aten.{name}": grouped.convolution_lookup for name in (
        "conv1d.default", "conv1d.padding", "conv2d.default", "conv2d.padding", "conv3d.default",
        "conv3d.padding", "conv_transpose1d.default", "conv_transpose2d.input",
        "conv_transpose3d.input", "convolution.default",
    )},
    "aten._grouped_mm.default": experts.grouped_lookup,
    "aten.einsum.default": products.einsum_lookup,
    "aten.mean.default": reduce.mean_lookup,
    "aten.mean.dim": reduce.mean_lookup,
    "aten.amax.default": reduce.amax_lookup,
    "aten.amin.default": reduce.amax_lookup,
    "aten.max.default": reduce.amax_lookup,
    "aten.min.default": reduce.amax_lookup,
    "aten.aminmax.default": reduce.aminmax_lookup,
    "aten.prod.default": reduce.prod_lookup,
    "aten.prod.dim_int": reduce.prod_lookup,
    "aten.max.dim": places.max_lookup,
    "aten.min.dim": places.max_lookup,
    "aten.argmax.default": places.argmax_lookup,
    "aten.argmin.default": places.argmax_lookup,
    "aten.logsumexp.default": logsum.logsumexp_lookup,
    "aten.special_logsumexp.default": logsum.logsumexp_lookup,
    **{f"aten.{name}.{overload}": moments.variance_lookup
       for name in ("std", "std_mean", "var", "var_mean")
       for overload in ("default", "dim", "correction")},
    **{f"aten.norm.{overload}": moments.norm_lookup
       for overload in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype")},
    "aten.linalg_vector_norm.default": moments.norm_lookup,
    "aten.linalg_matrix_norm.default": moments.matrix_norm_lookup,
    "aten.linalg_matrix_norm.str_ord": moments.matrix_norm_lookup,
    "aten.cosine_similarity.default": moments.cosine_lookup,
    "aten.linalg_vecdot.default": moments.vecdot_lookup,
    "aten.nanmean.default": moments.nanmean_lookup,
    "aten.renorm.default": moments.renorm_lookup,
    **{f"aten.{name}.default": scan.scan_lookup
       for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")},
    "aten.sort.default": unsigned.by_order(sort.sort_lookup),
    "aten.sort.stable": unsigned.by_order(sort.sort_lookup),
    "aten.argsort.default": unsigned.by_order(sort.sort_lookup),
    "aten.argsort.stable": unsigned.by_order(sort.sort_lookup),
    "aten.msort.default": sort.msort_lookup,
    "aten.topk.default": sort.topk_lookup,
    "aten.mode.default": order.mode_lookup,
    "aten.kthvalue.default": order.kthvalue_lookup,
    **{f"aten.{name}.{overload}": order.median_lookup
       for name in ("median", "nanmedian") for overload in ("default", "dim")},
    **{f"aten.{name}.{overload}": order.quantile_lookup
       for name in ("quantile", "nanquantile") for overload in ("default", "scalar")},
    **{f"aten.{name}": search.search_lookup for name in (
        "bucketize.Scalar", "bucketize.Tensor", "searchsorted.Scalar", "searchsorted.Tensor",
    )},
    "aten.embedding.default": pick.embedding_lookup,
    "aten.embedding_renorm.default": pick.renorm_lookup,
    "aten.gather.default": read.gather_lookup,
    "aten.index.Tensor": unsigned.by_bits(read.index_lookup),
    "aten.index_select.default": read.index_select_lookup,
    "aten.index_put.default": write.index_put_lookup,
    "aten.put.default": write.put_lookup,
    **dict.fromkeys((
        "aten.index_add.default", "aten.index_copy.default", "aten.index_fill.int_Scalar",
        "aten.index_fill.int_Tensor", "aten.index_reduce.default",
    ), write.index_write_lookup),
    **dict.fromkeys((
        "aten.scatter.src", "aten.scatter.value", "aten.scatter.reduce",
        "aten.scatter.value_reduce", "aten.scatter_add.default", "aten.scatter_reduce.two",
    ), write.scatter_lookup),
    "aten.take.default": read.take_lookup,
    "aten.take_along_dim.default": read.take_along_dim_lookup,
    "aten.repeat_interleave.Tensor": pick.repeats_lookup,
    "aten.select.int": pick.select_lookup,
    "aten.pdist.default": distances.pdist_lookup,
    "aten.cdist.default": distances.cdist_lookup,
    "aten.linalg_qr.default": tall.qr_lookup,
    "aten.linalg_svdvals.default": tall.svdvals_lookup,
    "aten.linalg_svd.default": tall.svd_lookup,
    "aten.linalg_pinv.atol_rtol_float": tall.pinv_lookup,
    "aten.linalg_pinv.atol_rtol_tensor": tall.pinv_lookup,
    "aten.ctc_loss.IntList": sequences.ctc_lookup,
    "aten.ctc_loss.Tensor": sequences.ctc_lookup,
    "aten.cross_entropy_loss.default": loss.cross_entropy_lookup,
    "aten.nll_loss.default": loss.nll_loss_lookup,
    "aten.nll_loss_nd.default": loss.nll_loss_lookup,
    "aten.nll_loss2d.default": loss.nll_loss_lookup,
    "aten.diag_embed.default": shifts.diag_embed_lookup,
    "aten.flip.default": shifts.flip_lookup,
    "aten.roll.default": shifts.roll_lookup,
    "aten.fliplr.default": shifts.flip_sides_lookup,
    "aten.flipud.default": shifts.flip_sides_lookup,
    "aten.repeat.default": shifts.repeat_lookup,
    "aten.tile.default": shifts.repeat_lookup,
    "aten.unfold.default": shifts.unfold_lookup,
    "aten.unfold_copy.default": shifts.unfold_lookup,
    "aten.pad.default": shifts.pad_lookup,
    "aten.channel_shuffle.default": shifts.shuffle_lookup,
    "aten.native_channel_shuffle.default": shifts.shuffle_lookup,
    **composed.TABLE,
    **decomposed.TABLE,
    **margins.TABLE,
    **weight_norm.TABLE,
    **dict.fromkeys(loss.REDUCED_AT, loss.elementwise_lookup),
}


def lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """The algorithm for this call on these layouts, if its rule alone does not serve."""
    found = TABLE.get(call.op)
    return None if found is None else found(call, layouts, wants_grad)

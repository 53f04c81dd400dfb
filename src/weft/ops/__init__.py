"""Algorithms that are more than a rule, in one table: op name -> who answers for it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core import Layout
from weft.ops import loss, normalize, pick, reduce
from weft.ops.algorithm import Algorithm, Composite, Local, Lookup
from weft.rules import Call, Decision

__all__ = ["TABLE", "Algorithm", "Composite", "Local", "lookup"]

TABLE: dict[str, Lookup] = {
    "aten.softmax.int": normalize.softmax_lookup,
    "aten.log_softmax.int": normalize.softmax_lookup,
    "aten._softmax.default": normalize.softmax_lookup,
    "aten._log_softmax.default": normalize.softmax_lookup,
    "aten.layer_norm.default": normalize.layer_norm_lookup,
    "aten.rms_norm.default": normalize.rms_norm_lookup,
    "aten.mean.default": reduce.mean_lookup,
    "aten.mean.dim": reduce.mean_lookup,
    "aten.amax.default": reduce.amax_lookup,
    "aten.amin.default": reduce.amax_lookup,
    "aten.max.default": reduce.amax_lookup,
    "aten.min.default": reduce.amax_lookup,
    "aten.linalg_vector_norm.default": reduce.vector_norm_lookup,
    "aten.embedding.default": pick.embedding_lookup,
    "aten.gather.default": pick.gather_lookup,
    "aten.select.int": pick.select_lookup,
    "aten.cross_entropy_loss.default": loss.cross_entropy_lookup,
    "aten.nll_loss.default": loss.nll_loss_lookup,
    "aten.nll_loss_nd.default": loss.nll_loss_lookup,
    "aten.nll_loss2d.default": loss.nll_loss_lookup,
    **dict.fromkeys(loss.REDUCED_AT, loss.elementwise_lookup),
}


def lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | Decision | None:
    """The algorithm for this call on these layouts, if its rule alone does not serve."""
    found = TABLE.get(call.op)
    return None if found is None else found(call, layouts, wants_grad)

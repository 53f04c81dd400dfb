"""Ops whose meaning depends on a length decide by the global one, wherever the shards end.

Each is run with its first operand cut at every place of every dim over 2 ranks, so that some block
has whatever length would mislead it: 0, 1, 3, or that of another dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import seed_of
from tests.harness import check_op
from weft import P
from weft.core import Layout, Mesh

_L: Any = torch.linalg


def _good(a: Tensor) -> Tensor:
    return a @ a.mT + 5 * torch.eye(a.shape[-1], dtype=a.dtype)


CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    # The first dim of length 3.
    "cross": (lambda a, b: torch.cross(a, b), ((5, 3), (5, 3))),
    "cross of rows": (lambda a, b: torch.cross(a, b), ((3, 5), (3, 5))),
    "cross of both": (lambda a, b: torch.cross(a, b), ((3, 3), (3, 3))),
    "cross late": (lambda a, b: torch.cross(a, b), ((4, 5, 3), (4, 5, 3))),
    # Dims of length 1.
    "squeeze": (lambda a: a.squeeze(), ((3, 1, 4),)),
    "squeeze of one": (lambda a: a.squeeze(0), ((3, 4),)),
    "squeeze of some": (lambda a: a.squeeze((0, 1)), ((3, 1, 4),)),
    "cov": (lambda a: torch.cov(a), ((2, 5),)),
    "corrcoef": (lambda a: torch.corrcoef(a), ((3, 4),)),
    # What broadcasts: a block of length 1 is no row for all.
    "add": (lambda a, b: a + b, ((3, 4), (4,))),
    "add alike": (lambda a, b: a * b, ((3, 4), (3, 4))),
    "add column": (lambda a, b: a + b, ((3, 4), (3, 1))),
    "where": (lambda a, b: torch.where(a > 0, a, b), ((3, 4), (4,))),
    "expand": (lambda a: a.expand(2, 3, 4), ((3, 4),)),
    "expand_as": (lambda a, b: a.expand_as(b), ((3, 1), (3, 4))),
    "broadcast_to": (lambda a: a.broadcast_to(2, 3), ((3,),)),
    "sum_to_size": (lambda a: a.sum_to_size(1, 4), ((3, 4),)),
    "sum_to_size kept": (lambda a: a.sum_to_size(3, 1), ((3, 4),)),
    "repeat_interleave": (lambda a: a.repeat_interleave(torch.tensor([2]), 0), ((3, 2),)),
    "repeat_interleave each": (lambda a: a.repeat_interleave(torch.tensor([2, 0, 1]), 0),
                               ((3, 2),)),
    "take_along_dim": (lambda a: a.take_along_dim(torch.tensor([[2, 0]]), 1), ((3, 4),)),
    "take_along_dim round": (lambda a: a.take_along_dim(torch.tensor([[2, -2, 5]]), 1), ((3, 4),)),
    "index_put": (lambda a: a.index_put((torch.tensor([0, 2]),), torch.ones(1, 4).double()),
                  ((3, 4),)),
    "prelu": (lambda a, w: F.prelu(a, w), ((2, 3, 2), (3,))),
    "prelu of weights": (lambda w, a: F.prelu(a, w), ((3,), (2, 3, 2))),
    "pairwise": (lambda a, b: F.pairwise_distance(a, b), ((3, 4), (4,))),
    "cosine": (lambda a, b: F.cosine_similarity(a, b, 0), ((3, 4), (3, 1))),
    "cdist": (lambda a, b: torch.cdist(a, b), ((2, 3, 4), (1, 2, 4))),
    "lerp": (lambda a, w: torch.lerp(a, a * 2, w), ((3, 4), (4,))),
    "addmm": (lambda b, a: torch.addmm(b, a, a.t()), ((3,), (3, 4))),
    "addcmul": (lambda a, b: torch.addcmul(a, b, b), ((3, 4), (4,))),
    "masked_fill": (lambda a, m: a.masked_fill(m > 0, 2), ((3, 4), (3, 1))),
    "einsum of one": (lambda a, b: torch.einsum("ij,ij->i", a, b), ((3, 4), (3, 1))),
    "weighted loss": (lambda a, w: F.binary_cross_entropy(
        a.sigmoid(), (a > 0).double(), w.detach()), ((3, 4), (4,))),
    # Vectors and matrices.
    "matmul": (lambda a, b: a @ b, ((2, 3, 4), (4,))),
    "matmul rows": (lambda a, b: a @ b, ((3,), (2, 3, 4))),
    "linear": (lambda a, w: F.linear(a, w), ((3, 4), (4,))),
    "solve": (lambda a, b: _L.solve(_good(a), b), ((2, 3, 3), (2, 3))),
    "solve columns": (lambda b, a: _L.solve(_good(a), b), ((3, 3), (3, 3))),
    "solve one": (lambda b, a: _L.solve(_good(a), b), ((3, 3), (2, 3, 3))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), ((2, 3, 4), (3, 4))),
    "kron": (lambda a, b: torch.kron(a, b), ((3, 2), (2,))),
    "norm of two": (lambda a: _L.norm(a, 1), ((3, 4),)),
    "norm of both": (lambda a: torch.norm(a, "fro", (0, 1)), ((3, 4),)),
    # Shapes with a length that follows from the others.
    "flatten": (lambda a: a.flatten(1), ((3, 2, 2),)),
    "reshape": (lambda a: a.reshape(-1, 2), ((3, 4),)),
    "view": (lambda a: a.view(3, -1), ((3, 2, 2),)),
    "unflatten": (lambda a: a.unflatten(0, (-1, 2)), ((4, 3),)),
    "chunk": (lambda a: a.chunk(3), ((4, 2),)),
    "tensor_split": (lambda a: a.tensor_split(3), ((4, 2),)),
    "hsplit": (lambda a: a.hsplit(2), ((3, 4),)),
    "diag": (lambda a: a.diag(), ((3, 4),)),
    "diagonal": (lambda a: a.diagonal(1), ((3, 4),)),
    "vander": (lambda a: torch.vander(a.detach()) + a.sum(), ((4,),)),
    "rot90": (lambda a: a.rot90(), ((3, 2),)),
    "unfold": (lambda a: a.unfold(0, 2, 1) * 1, ((4, 2),)),
    "unfold select": (lambda a: a.unfold(0, 2, 1)[..., 1].contiguous().view(-1), ((4, 2),)),
    "pixel_shuffle": (lambda a: F.pixel_shuffle(a, 2), ((2, 4, 2, 3),)),
    "pad reflect": (lambda a: F.pad(a, (2, 1), mode="reflect"), ((2, 4),)),
    "glu": (lambda a: F.glu(a, 0), ((4, 2),)),
    "gradient": (lambda a: torch.gradient(a, dim=0), ((4, 2),)),
    "gradient at places": (lambda a: torch.gradient(
        a, spacing=(torch.arange(a.shape[0]).double() ** 2,), dim=0), ((4, 2),)),
    "trapezoid": (lambda a: torch.trapezoid(a, dim=0), ((4, 2),)),
    "cumulative_trapezoid": (lambda a: torch.cumulative_trapezoid(a, dim=0), ((4, 2),)),
    # Counts: means, degrees of freedom, batches, classes.
    "mean": (lambda a: (a.mean(), a.mean(0)), ((3, 4),)),
    "var": (lambda a: (a.var(), a.var(0), a.std(1)), ((3, 4),)),
    "median": (lambda a: (a.median(), a.median(0)[0]), ((4, 3),)),
    "quantile": (lambda a: a.quantile(0.4, 0), ((4, 3),)),
    "argmax": (lambda a: (a.argmax(), a.sum()), ((3, 4),)),
    "batchmean": (lambda a, b: F.kl_div(a, b, reduction="batchmean"), ((3, 4), (3, 4))),
    "multilabel": (lambda a, b: F.multilabel_soft_margin_loss(a, (b > 0).double()),
                   ((3, 4), (3, 4))),
    "multi_margin": (lambda a: F.multi_margin_loss(a, torch.tensor([1, 0, 3])), ((3, 4),)),
    "cross_entropy": (lambda a: F.cross_entropy(a, torch.tensor([1, 0, 3])), ((3, 4),)),
    "cross_entropy square": (lambda a, b: F.cross_entropy(a, b.softmax(1)), ((3, 3), (3, 3))),
    "cross_entropy line": (lambda a: F.cross_entropy(a, torch.tensor(1)), ((3,),)),
    "nll_loss line": (lambda a: F.nll_loss(a, torch.tensor(1)), ((3,),)),
    "gaussian": (lambda a, v: F.gaussian_nll_loss(a, a * 2, v.abs() + 1), ((3, 4), (3, 1))),
    "cosine_embedding": (lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(3)),
                         ((3, 4), (3, 4))),
    "normalize": (lambda a: F.normalize(a, dim=0), ((3, 4),)),
    "layer_norm": (lambda a: F.layer_norm(a, (4,)), ((3, 4),)),
    "instance_norm": (lambda a: F.instance_norm(a), ((2, 3, 4),)),
    "batch_norm": (lambda a: F.batch_norm(a, None, None, training=True), ((3, 2),)),
    "group_norm": (lambda a: F.group_norm(a, 2), ((3, 4, 2),)),
    "softmax": (lambda a: F.softmax(a, 0), ((3, 4),)),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
                  ((2, 3, 4), (2, 3, 4))),
    "grouped attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
                          ((1, 4, 3, 2), (1, 2, 3, 2))),
    "bags": (lambda w: F.embedding_bag(torch.tensor([[0, 2], [1, 1]]), w, mode="max"), ((3, 2),)),
    "pdist": (lambda a: F.pdist(a), ((4, 3),)),
    "histogram": (lambda a: (a.detach().histc(3), a.sum()), ((3, 4),)),
    "atleast_3d": (lambda a: torch.atleast_3d(a), ((3, 4),)),
    "column_stack": (lambda a, b: torch.column_stack([a, b]), ((3,), (3, 2))),
    "hstack": (lambda a, b: torch.hstack([a, b]), ((3,), (1,))),
    "block_diag": (lambda a, b: torch.block_diag(a, b), ((3,), (1, 2))),
    "nonzero": (lambda a: ((a > 0).nonzero(), a.sum()), ((3, 4),)),
}

def _cuts(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(dim, at) for dim, length in enumerate(shape) for at in range(length + 1)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_wherever_the_shards_end(name: str) -> None:
    fn, shapes = CASES[name]
    shape_cut = shapes[0]
    generator = torch.Generator().manual_seed(seed_of(name))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mesh = Mesh({"x": 2})
    for dim, at in _cuts(shape_cut):
        def laid(shape: tuple[int, ...], cut: bool, dim: int = dim, at: int = at) -> Layout:
            skip = len(shape_cut) - len(shape)
            mine = dim - skip
            if not cut or mine < 0 or shape[mine] != shape_cut[dim]:
                return Layout(mesh, shape, P())
            return Layout(mesh, shape, P(*(None,) * mine, "x"), sizes={
                mine: (at, shape[mine] - at)
            })

        check_op(fn, tensors, {"x": 2}, [laid(shape, True) for shape in shapes])
        if len(shapes) > 1:
            first = [laid(shapes[0], True), *(None for _ in shapes[1:])]
            check_op(fn, tensors, {"x": 2}, first)

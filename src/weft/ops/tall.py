"""Factorizations of tall matrices whose rows are cut: qr, and what follows from its small factor.

Each shard factors its rows, the small factors of all are factored again (Demmel, Grigori, Hoemmen
and Langou, Communication-optimal Parallel and Sequential QR, 2012), so no rank receives more than
one square a shard. Columns get the signs that Householder reflections give them, by the first rows
of Q (Ballard, Demmel, Grigori et al., Reconstructing Householder Vectors from TSQR, 2015).

Gradients go another way, since blocks may be singular where the matrix is not: with the known
factor R0, A = (A R0^-1) R0, and the Cholesky factor of the Gram matrix of A R0^-1, which is nearly
the identity, tells how R depends on A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm import BoundMesh
from weft.core import Layout
from weft.ops.algorithm import Algorithm, Composite, Local
from weft.ops.blocks.summaries import Blocks, whole_terms
from weft.rules import Call, Decision

__all__ = ["is_tall", "pinv_lookup", "qr_lookup", "svd_lookup", "svdvals_lookup"]

_L: Any = torch.linalg


def is_tall(x: Layout) -> bool:
    """Whether rows are cut, and so many that the small factors of all shards are less than they."""
    if x.ndim < 2 or not x.dims[-2] or 0 in x.shape:
        return False
    return x.shape[-2] >= 2 * x.num_shards(x.ndim - 2) * x.shape[-1]


def qr_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Algorithm | None:
    """`linalg.qr` of tall matrices whose rows are cut, by small factors of the shards"""
    x, mode = layouts[0], call.args[1]
    if mode == "complete" or not is_tall(x):
        return None
    x = whole_terms(x)
    rows, lead = x.ndim - 2, x.ndim - 2
    x = Layout.make(x.mesh, x.shape, (*x.dims[:-1], ()), (*x.cuts[:-1], None))
    square = Layout.make(
        x.mesh, (*x.shape[:lead], x.shape[-1], x.shape[-1]), (*x.dims[:lead], (), ()),
        (*x.cuts[:lead], None, None),
    )
    results = (x if mode == "reduced" else Layout.replicated(x.mesh, (0,)), square)

    def bind(bound: BoundMesh) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        blocks = Blocks(bound, x, (rows,))

        def local(block: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                q, r = _factors(blocks, block.detach())
            if wants_grad[0]:
                q, r = _followed(blocks, block, q, r)
            return (q if mode == "reduced" else q.new_empty(0)), r

        return local

    return Local(Decision((x,), results), bind, communicates=x.dims[rows])


def _factors(blocks: Blocks, block: Tensor) -> tuple[Tensor, Tensor]:
    """This shard's rows of Q, and R."""
    num, size = block.shape[-2:]
    own, small = None, block
    if num >= size:
        own, small = _L.qr(block)
    else:  # no factor has less rows than these
        small = torch.nn.functional.pad(block, (0, 0, 0, size - num))
    (every,) = blocks.gather(small)
    stacked = every.movedim(0, -3).flatten(-3, -2)
    q, r = _L.qr(stacked)
    mine = q.narrow(-2, blocks.mine * size, size)
    q = mine.narrow(-2, 0, num) if own is None else own @ mine
    start, _ = blocks.layout.interval(block.dim() - 2, blocks.mine)
    first = torch.zeros_like(r)
    held = max(min(size - start, num), 0)
    if held:
        first[..., start : start + held, :] = q[..., :held, :]
    signs = _signs(blocks.gather(first)[0].sum(0))
    return q * signs.unsqueeze(-2), signs.unsqueeze(-1) * r


def _signs(first: Tensor) -> Tensor:
    """Of the first rows of Q, the signs by which Householder reflections have its columns."""
    rest, found = first.clone(), []
    for at in range(rest.shape[-1]):
        sign = torch.where(rest[..., at, at].real < 0, 1.0, -1.0).to(rest.dtype)
        found.append(sign)
        rest[..., at, at] -= sign
        below = rest[..., at + 1 :, at] / rest[..., at, at].unsqueeze(-1)
        rest[..., at + 1 :, at + 1 :] -= below.unsqueeze(-1) * rest[..., at, at + 1 :].unsqueeze(-2)
    return torch.stack(found, -1)


def _followed(blocks: Blocks, block: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The factors, with a gradient."""
    near = _L.solve_triangular(r, block, upper=True, left=False)
    gram = blocks.gather(near.mH @ near)[0].sum(0)
    step = _L.cholesky_ex(gram)[0].mH
    return (
        _with(q, _L.solve_triangular(step, near, upper=True, left=False)), _with(r, step @ r),
    )


def _with(value: Tensor, source: Tensor) -> Tensor:
    """The value, with the gradient of `source`, which is equal to it but for rounding."""
    apart = source - source.detach()
    return value + torch.where(apart.isnan(), 0, apart)


def svdvals_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """`linalg.svdvals` of tall matrices whose rows are cut: those of R"""
    if not is_tall(layouts[0]):
        return None
    return Composite(lambda x, *, driver=None: _L.svdvals(_L.qr(x)[1]))


def svd_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """`linalg.svd` of tall matrices whose rows are cut: Q times that of R"""
    if call.args[1] or not is_tall(layouts[0]):
        return None

    def svd(x: Tensor, full_matrices: bool, *, driver: Any = None) -> tuple[Tensor, ...]:
        q, r = _L.qr(x)
        u, s, v = _L.svd(r, full_matrices=False)
        return (u.mT @ q.mT).mT, s, v  # columns lie together, as torch's do

    return Composite(svd)


def pinv_lookup(
    call: Call, layouts: Sequence[Layout], wants_grad: Sequence[bool]
) -> Composite | None:
    """`linalg.pinv` of tall matrices whose rows are cut, without gradient: that of R times Q"""
    if wants_grad[0]:  # it has one where the rank is not full, and Q and R do not
        return None
    more = call.kwargs
    if more.get("hermitian") or more.get("rtol") is not None or more.get("atol") is not None:
        return None
    if not is_tall(layouts[0]):
        return None

    def pinv(x: Tensor, **_: Any) -> Tensor:
        q, r = _L.qr(x)
        return _L.pinv(r, rtol=x.shape[-2] * torch.finfo(x.dtype).eps) @ q.mH

    return Composite(pinv)

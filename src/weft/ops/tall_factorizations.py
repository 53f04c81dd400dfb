"""Factorizations of matrices: qr, and for tall matrices those that follow from its small factor R.

If the rows of a tall matrix are sharded, each shard factors its rows, and all small factors
together are factored again (Demmel, Grigori, Hoemmen and Langou, Communication-optimal Parallel and
Sequential QR, 2012), so no rank receives more than one square matrix per shard. Columns get the
signs of Householder reflections, derived from the first rows of Q (Ballard, Demmel, Grigori et al.,
Reconstructing Householder Vectors from TSQR, 2015).

Gradients are computed differently, because a shard may be singular where the matrix is not: with
the known factor R0, A = (A R0^-1) R0. The Gram matrix of A R0^-1 is nearly the identity, and its
Cholesky factor gives the dependence of R on A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core import Layout
from weft.rules import Call, RuleText, Text, op, page, rule
from weft.transport import Shards

__all__ = ["PAGE", "is_tall"]

_L: Any = torch.linalg


def is_tall(x: Layout) -> bool:
    """Whether rows are sharded and outnumber the small factors of all shards together."""
    if x.ndim < 2 or not x.dims[-2] or 0 in x.shape:
        return False
    return x.shape[-2] >= 2 * x.num_shards(x.ndim - 2) * x.shape[-1]


def _tall(text: Text) -> RuleText:
    """The rule of tall matrices, whose rows may stay sharded."""
    return rule(text, by_size=True, serves=_is_of_tall)


def _is_of_tall(call: Call) -> bool:
    """Rows of a tall matrix stay sharded; other matrices are gathered."""
    return any(map(is_tall, call.layouts[:1]))


def _qr_text(call: Call, wants_grad: Any) -> str | None:
    match call.get("mode"):
        case "reduced":
            return "... m~ n! -> ... m n!, ... n n"
        case "r":
            return "... m~ n! -> none!, ... n n"
    return None


def _svd_text(call: Call, wants_grad: Any) -> str | None:
    return None if call.get("full_matrices") else "... m~ n! -> ... m n!, ... n!, ... n n"


def _pinv_text(call: Call, wants_grad: Sequence[bool]) -> str | None:
    if True in wants_grad:  # it has a gradient where the matrix is rank-deficient; Q and R do not
        return None
    given = any(call.get(name) is not None for name in ("rtol", "atol", "rcond"))
    return None if given or call.get("hermitian") else "... m~ n! -> ... n! m"


def _qr(shards: Shards, x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Each shard's own factors; all small factors together give R and each shard's rows of Q."""
    with torch.no_grad():
        q, r = _factors(shards, x.detach())
    if x.requires_grad and torch.is_grad_enabled():
        q, r = _followed(shards, x, q, r)
    return (q if mode == "reduced" else q.new_empty(0)), r


def _svdvals(shards: Shards, x: Tensor, *, driver: str | None = None) -> Tensor:
    """The singular values of R."""
    return _L.svdvals(_qr(shards, x)[1])


def _svd(
    shards: Shards, x: Tensor, full_matrices: bool, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Q times the svd of R."""
    q, r = _qr(shards, x)
    u, s, v = _L.svd(r, full_matrices=False)
    return (u.mT @ q.mT).mT, s, v  # columns are contiguous, as in torch


def _pinv(shards: Shards, x: Tensor, **_: Any) -> Tensor:
    """The pseudoinverse of R times Q transposed."""
    q, r = _qr(shards, x)
    return _L.pinv(r, rtol=shards.layout.shape[-2] * torch.finfo(x.dtype).eps) @ q.mH


def _factors(shards: Shards, block: Tensor) -> tuple[Tensor, Tensor]:
    """This shard's rows of Q, and R."""
    num, size = block.shape[-2:]
    own, small = None, block
    if num >= size:
        own, small = _L.qr(block)
    else:  # no factor has fewer rows than these
        small = torch.nn.functional.pad(block, (0, 0, 0, size - num))
    (every,) = shards.gather(small)
    stacked = every.movedim(0, -3).flatten(-3, -2)
    q, r = _L.qr(stacked)
    mine = q.narrow(-2, shards.index * size, size)
    q = mine.narrow(-2, 0, num) if own is None else own @ mine
    start = shards.starts[-2]
    first = torch.zeros_like(r)
    held = max(min(size - start, num), 0)
    if held:
        first[..., start : start + held, :] = q[..., :held, :]
    signs = _signs(shards.psum(first))
    return q * signs.unsqueeze(-2), signs.unsqueeze(-1) * r


def _signs(first: Tensor) -> Tensor:
    """From the first rows of Q, the signs that Householder reflections give its columns."""
    rest, found = first.clone(), []
    for at in range(rest.shape[-1]):
        sign = torch.where(rest[..., at, at].real < 0, 1.0, -1.0).to(rest.dtype)
        found.append(sign)
        rest[..., at, at] -= sign
        below = rest[..., at + 1 :, at] / rest[..., at, at].unsqueeze(-1)
        rest[..., at + 1 :, at + 1 :] -= below.unsqueeze(-1) * rest[..., at, at + 1 :].unsqueeze(-2)
    return torch.stack(found, -1)


def _followed(shards: Shards, block: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The factors with a gradient."""
    near = _L.solve_triangular(r, block, upper=True, left=False)
    gram = shards.psum(near.mH @ near)
    step = _L.cholesky_ex(gram)[0].mH
    return (
        _with(q, _L.solve_triangular(step, near, upper=True, left=False)), _with(r, step @ r),
    )


def _with(value: Tensor, source: Tensor) -> Tensor:
    """The value with the gradient of `source`, which equals it up to rounding."""
    apart = source - source.detach()
    return value + torch.where(apart.isnan(), 0, apart)


PAGE = page(
    op("linalg_qr", _tall(_qr_text),
       rule("...>0 m! n! -> ... m! q!, ... q! n!", "...>0 m! n! -> none!, ... k! n!"), kernel=_qr),
    op("linalg_svdvals", _tall("... m~ n! -> ... n!"), rule("...>0 m! n! -> ... k!"),
       kernel=_svdvals),
    op("linalg_svd", _tall(_svd_text), rule("...>0 m! n! -> ... m! u!, ... k!, ... v! n!"),
       kernel=_svd),
    op("linalg_pinv", _tall(_pinv_text), rule("...>0 m! n!, [...], [...] -> ... n! m!"),
       kernel=_pinv),
)

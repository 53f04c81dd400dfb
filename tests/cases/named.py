"""Every op that weft promises not to gather for, by torch's name, with a call of it.

Each call runs on 4 or 8 ranks with its first operand cut in one dim (`ways` says in which, and how
the others lie), once for every dim that the op's mathematics does not need whole. A dim counts as
made whole when some rank receives half or more of what making the operand whole would bring it,
forward or backward. What is known to do so stands in `MADE_WHOLE`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_L: Any = torch.linalg
_T: Any = torch

Way = tuple[int | None, ...]
"""Per operand, the dim that it is cut in; None (or nothing) leaves it replicated."""


@dataclass(frozen=True, slots=True)
class Named:
    """One op: `fn` is a call of it on operands of these shapes.

    `ints`: how large integers are that an operand holds instead of reals (0: it holds reals, -1:
    bools).
    """

    name: str
    group: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ints: tuple[int, ...]
    ways: tuple[Way, ...]
    grad: bool

    def operands(self) -> list[Tensor]:
        """The full operands, drawn at random, the same at every call."""
        generator = torch.Generator().manual_seed(3)
        made: list[Tensor] = []
        for place, shape in enumerate(self.shapes):
            high = self.ints[place] if place < len(self.ints) else 0
            if high > 0:
                made.append(torch.randint(high, shape, generator=generator))
            elif high < 0:
                made.append(torch.rand(shape, generator=generator) < 0.4)
            else:
                made.append(torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3)
        return made


GRID = (128, 96)
LINE = (4096,)
PILE = (64, 8, 8)
TALL = (2048, 3)
"""Of which no dim but the first is long enough for the axis."""

EVERY: list[Named] = []


def _add(
    group: str, name: str, fn: Callable[..., Any], *shapes: tuple[int, ...],
    ints: tuple[int, ...] = (), ways: tuple[Way, ...] | None = None,
) -> None:
    if ways is None:
        ways = tuple((dim,) for dim in range(len(shapes[0])))
    grad = name.split()[0] not in _NO_GRADIENT
    EVERY.append(Named(name, group, fn, shapes, ints, ways, grad))


_NO_GRADIENT = """
    floor_divide heaviside igamma igammac special.gammainc special.gammaincc special.zeta unique
    unique_consecutive histogram histogramdd vander linalg.eig linalg.householder_product
    special.airy_ai nextafter
""".split()  # noqa: SIM905
"""Ops that torch has no derivative of, or none of some matrix."""


def _each(group: str, names: str, call: Callable[[str], Callable[..., Any]],
          *shapes: tuple[int, ...], **more: Any) -> None:
    for name in names.split():
        _add(group, name, call(name), *shapes, **more)


def _of_torch(name: str) -> Callable[..., Any]:
    at: Any = torch
    for part in name.split("."):
        at = getattr(at, part)
    return at


def _functional(name: str) -> Callable[..., Any]:
    return getattr(F, name)


_BOTH: tuple[Way, ...] = ((0, 0), (1, 1), (0,))
"""Two operands cut alike, or the first alone."""

# All pointwise, comparison and conversion ops.

_each("pointwise", """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan
    atanh ceil conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac
    frexp isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not
    logit nan_to_num neg negative positive rad2deg real reciprocal relu round rsqrt selu sgn sigmoid
    sign signbit sin sinc sinh sqrt square tan tanh trunc clone detach
    special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.digamma
    special.entr special.erf special.erfc special.erfcx special.erfinv special.exp2 special.expit
    special.expm1 special.gammaln special.i0 special.i0e special.i1 special.i1e special.log1p
    special.log_ndtr special.logit special.modified_bessel_i0 special.modified_bessel_i1
    special.modified_bessel_k0 special.modified_bessel_k1 special.ndtr special.ndtri special.psi
    special.round special.sinc special.airy_ai special.scaled_modified_bessel_k0
    special.scaled_modified_bessel_k1 special.spherical_bessel_j0
""", _of_torch, GRID)
_each("pointwise", """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 silu
    softplus softshrink softsign tanhshrink
""", _functional, GRID)
_each("pointwise", """
    add atan2 arctan2 copysign div divide true_divide dist eq fmax fmin float_power floor_divide
    fmod ge greater greater_equal gt heaviside hypot igamma igammac isclose le less less_equal
    logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne
    nextafter not_equal polar pow remainder rsub sub subtract xlogy complex ldexp
    special.gammainc special.gammaincc special.xlog1py special.xlogy special.zeta
""", _of_torch, GRID, GRID, ways=_BOTH)
_each("pointwise", """
    bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm
""", _of_torch, GRID, GRID, ints=(9, 9), ways=_BOTH)
_add("pointwise", "bitwise_not", torch.bitwise_not, GRID, ints=(9,))
_add("pointwise", "clamp", lambda a: a.clamp(0, 0.5), GRID)
_add("pointwise", "clip", lambda a: a.clip(0, 0.5), GRID)
_add("pointwise", "threshold", lambda a: F.threshold(a, 0.1, 2), GRID)
_add("pointwise", "polygamma", lambda a: torch.polygamma(1, a), GRID)
_add("pointwise", "mvlgamma", lambda a: torch.mvlgamma(a + 3, 2), GRID)
_add("pointwise", "prelu", lambda a, w: F.prelu(a, w), GRID, (96,))
_add("pointwise", "glu", lambda a: F.glu(a, 1), GRID, ways=((0,),))
_add("pointwise", "where", lambda c, a: torch.where(c > 0, a, 0.0), GRID, GRID, ways=_BOTH)
_add("pointwise", "masked_fill", lambda a, c: a.masked_fill(c > 0, 2.0), GRID, GRID, ways=_BOTH)
_add("pointwise", "lerp", lambda a, b: torch.lerp(a, b, 0.3), GRID, GRID, ways=_BOTH)
_add("pointwise", "addcmul", lambda a, b: torch.addcmul(a, a, b), GRID, GRID, ways=_BOTH)
_add("pointwise", "addcdiv", lambda a, b: torch.addcdiv(a, a, b), GRID, GRID, ways=_BOTH)
_each("conversion", """
    bfloat16 bool byte cdouble cfloat char double float half int long short
""", lambda name: lambda a: getattr(a, name)(), GRID)
_add("conversion", "to", lambda a: a.to(torch.float32), GRID)
_add("conversion", "type_as", lambda a: a.type_as(torch.ones(1)), GRID)
_add("conversion", "view_as_real", lambda a: torch.view_as_real(torch.complex(a, a)), GRID)
_add("conversion", "view_as_complex", lambda a: torch.view_as_complex(a), (128, 96, 2),
     ways=((0,), (1,)))

# Every reduction.

_each("reduction", """
    sum prod mean std var logsumexp amax amin median quantile_ nanmedian norm_ all any argmax argmin
    count_nonzero nansum nanmean max min aminmax var_mean std_mean mode
""".replace("quantile_", "").replace("norm_", ""),
      lambda name: lambda a: (
          getattr(torch, name)(a, dim=1) if name != "mode" else torch.mode(a, 1)), GRID)
_each("reduction", "sum prod mean std var all any argmax argmin max min median nanmedian aminmax",
      lambda name: lambda a: getattr(torch, name)(a), GRID)
for order in (0.5, 1, 2, 3, torch.inf, -torch.inf):
    _add("reduction", f"norm {order}", lambda a, order=order: a.norm(order), GRID)
    _add("reduction", f"linalg.vector_norm {order}",
         lambda a, order=order: _L.vector_norm(a, order, 1), GRID)
_add("reduction", "quantile", lambda a: a.quantile(0.3, 1), GRID)
_add("reduction", "quantile all", lambda a: a.quantile(0.3), GRID)
_add("reduction", "nanquantile", lambda a: a.nanquantile(0.3, 1), GRID)
_add("reduction", "kthvalue", lambda a: a.kthvalue(3, 1), GRID)
_add("reduction", "trace", lambda a: a.trace(), GRID)
# Of cut variables each meets all others, as in any product.
_add("reduction", "cov", torch.cov, (8, 2048), ways=((1,),))
_add("reduction", "corrcoef", torch.corrcoef, (8, 2048), ways=((1,),))
_add("reduction", "trapezoid", torch.trapezoid, GRID)
_add("reduction", "trapz", torch.trapz, GRID)
_add("reduction", "cumulative_trapezoid", torch.cumulative_trapezoid, GRID)
_add("reduction", "renorm", lambda a: a.renorm(2, 0, 1.0), GRID)

# Scans.

_each("scan", "cumsum cumprod cummax cummin logcumsumexp",
      lambda name: lambda a: getattr(torch, name)(a, 0), GRID)
_each("scan", "cumsum cumprod cummax cummin logcumsumexp",
      lambda name: lambda a: getattr(torch, name)(a, 0), LINE)

# Orders and counts.

_add("order", "sort", lambda a: a.sort(0), GRID)
_add("order", "sort line", lambda a: a.sort(), LINE)
_add("order", "argsort", lambda a: a.argsort(0), GRID)
_add("order", "msort", lambda a: a.msort(), GRID)
_add("order", "topk", lambda a: a.topk(3, 0), GRID)
_add("order", "topk line", lambda a: a.topk(3), LINE)
_add("order", "kthvalue line", lambda a: a.kthvalue(9), LINE)
_add("order", "unique", lambda a: (a * 9).round().unique(), GRID)
_add("order", "unique dim", lambda a: (a > 0).long().unique(dim=0), (512, 3), ways=((0,),))
_add("order", "unique_consecutive", lambda a: a.unique_consecutive(), LINE, ints=(2,))
_add("order", "unique_consecutive dim", lambda a: a.unique_consecutive(dim=0), (512, 3),
     ints=(2,), ways=((0,),))
_add("order", "searchsorted", lambda a, b: torch.searchsorted(b.sort()[0], a), GRID, (64,))
_add("order", "searchsorted among", lambda b, a: torch.searchsorted(b, a), LINE, (8,))
_add("order", "bucketize", lambda a, b: torch.bucketize(a, b.sort()[0]), GRID, (64,))
_add("order", "histc", lambda a: a.histc(9), GRID)
_add("order", "histogram", lambda a: torch.histogram(a, 9), GRID)
_add("order", "histogram edges", lambda a, e: torch.histogram(a, e.sort()[0]), GRID, (9,))
_add("order", "histogramdd", lambda a: torch.histogramdd(a, [3, 4]), (512, 2), ways=((0,),))
_add("order", "bincount", lambda a: a.bincount(), LINE, ints=(9,))
_add("order", "isin", lambda a, b: torch.isin(a, b), GRID, (9,), ints=(20, 20))
_add("order", "isin among", lambda b, a: torch.isin(a, b), LINE, (9,), ints=(20, 20))
_add("order", "combinations", lambda a: torch.combinations(a), (64,))
_add("order", "cartesian_prod", lambda a, b: torch.cartesian_prod(a, b), LINE, (9,))

# By index.

_add("index", "gather", lambda a, i: a.gather(0, i), GRID, (16, 96), ints=(0, 64))
_add("index", "scatter", lambda a, i, s: a.scatter(0, i, s), GRID, (16, 96), (16, 96), ints=(0, 64))
_add("index", "scatter_add", lambda a, i, s: a.scatter_add(0, i, s), GRID, (16, 96), (16, 96),
     ints=(0, 64))
_add("index", "scatter_reduce", lambda a, i, s: a.scatter_reduce(0, i, s, "amax"), GRID, (16, 96),
     (16, 96), ints=(0, 64))
_add("index", "index_select", lambda a, i: a.index_select(0, i), GRID, (16,), ints=(0, 64))
_add("index", "index_put", lambda a, i, s: a.index_put((i,), s), GRID, (16,), (16, 96),
     ints=(0, 64))
_add("index", "index_add", lambda a, i, s: a.index_add(0, i, s), GRID, (16,), (16, 96),
     ints=(0, 64))
_add("index", "index_copy", lambda a, s: a.index_copy(0, torch.arange(16), s), GRID, (16, 96))
_add("index", "index_fill", lambda a, i: a.index_fill(0, i, 2.0), GRID, (16,), ints=(0, 64))
_add("index", "index_reduce", lambda a, i, s: a.index_reduce(0, i, s, "amax"), GRID, (16,),
     (16, 96), ints=(0, 64))
_add("index", "take", lambda a, i: a.take(i), GRID, (64,), ints=(0, 12000))
_add("index", "put", lambda a, i, s: a.put(i, s), GRID, (64,), (64,), ints=(0, 12000))
_add("index", "take_along_dim", lambda a, i: a.take_along_dim(i, 0), GRID, (16, 96), ints=(0, 64))
_add("index", "masked_select", lambda a, m: a.masked_select(m), GRID, GRID, ints=(0, -1),
     ways=((0, 0), (0,)))
_add("index", "masked_scatter", lambda a, m, s: a.masked_scatter(m, s), GRID, GRID, GRID,
     ints=(0, -1), ways=((0, 0), (0,)))
_add("index", "nonzero", lambda m: m.nonzero(), GRID, ints=(-1,), ways=((0,),))
_add("index", "argwhere", lambda m: m.argwhere(), GRID, ints=(-1,), ways=((0,),))
_add("index", "x[mask]", lambda a, m: a[m], GRID, (128,), ints=(0, -1))
_add("index", "x[list]", lambda a: a[[3, 1, 60]], GRID)
_add("index", "x[tensor, tensor]", lambda a, i: a[i, i], GRID, (16,), ints=(0, 90))
_add("index", "x[list] = v", lambda a: _set(a, [3, 1, 60], 2.0), GRID)
_add("index", "x[mask] = v", lambda a, m: _set(a, m, 2.0), GRID, GRID, ints=(0, -1),
     ways=((0, 0), (0,)))
_add("index", "embedding", lambda w, i: F.embedding(i, w), GRID, (16,), ints=(0, 64))
_add("index", "one_hot", lambda i: F.one_hot(i, 9), LINE, ints=(9,))


def _set(x: Tensor, key: Any, value: Any) -> Tensor:
    x = x.clone()
    x[key] = value
    return x


# Shapes and places.

_SHAPED: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda a: a[3:50, 1:40:3], "select": lambda a: a.select(0, 5),
    "narrow": lambda a: a.narrow(0, 3, 40), "split": lambda a: a.split(10),
    "chunk": lambda a: a.chunk(3), "unsafe_split": lambda a: a.unsafe_split(10),
    "unsafe_chunk": lambda a: a.unsafe_chunk(3), "hsplit": lambda a: a.hsplit(3),
    "vsplit": lambda a: a.vsplit([10, 20]), "tensor_split": lambda a: a.tensor_split(5),
    "flip": lambda a: a.flip(0), "flipud": lambda a: a.flipud(), "fliplr": lambda a: a.fliplr(),
    "roll": lambda a: a.roll(3, 0), "rot90": lambda a: a.rot90(),
    "repeat": lambda a: a.repeat(2, 1), "tile": lambda a: a.tile(2, 1),
    "repeat_interleave": lambda a: a.repeat_interleave(2, 0),
    "expand": lambda a: a.unsqueeze(0).expand(3, -1, -1), "diagonal": lambda a: a.diagonal(),
    "diag": lambda a: a.diag(), "tril": lambda a: a.tril(), "triu": lambda a: a.triu(1),
    "movedim": lambda a: a.movedim(0, 1), "moveaxis": lambda a: a.moveaxis(0, 1),
    "swapaxes": lambda a: a.swapaxes(0, 1), "swapdims": lambda a: a.swapdims(0, 1),
    "transpose": lambda a: a.transpose(0, 1), "t": lambda a: a.t(), "mT": lambda a: a.mT,
    "permute": lambda a: a.permute(1, 0), "adjoint": lambda a: a.adjoint(),
    "squeeze": lambda a: a.unsqueeze(1).squeeze(1), "unsqueeze": lambda a: a.unsqueeze(1),
    "atleast_3d": lambda a: torch.atleast_3d(a), "flatten": lambda a: a.flatten(),
    "ravel": lambda a: a.ravel(), "view": lambda a: a.view(16, 8, -1),
    "reshape": lambda a: a.reshape(-1, 8, 12), "unflatten": lambda a: a.unflatten(0, (16, 8)),
    "pad constant": lambda a: F.pad(a, (1, 2, 3, 4)), "diff": lambda a: a.diff(dim=0),
    "gradient": lambda a: torch.gradient(a, dim=0), "unfold": lambda a: a.unfold(0, 4, 2),
    "unfold step 1": lambda a: a.unfold(0, 3, 1), "vander": lambda a: torch.vander(a[:, 0], 3),
    "diagonal_copy": lambda a: torch.diagonal_copy(a), "contiguous": lambda a: a.t().contiguous(),
    "logical scan": lambda a: (a > 0).cumsum(0),
}
for _name, _fn in _SHAPED.items():
    _add("shape", _name, _fn, GRID)
    if _name not in ("fliplr", "hsplit", "unflatten"):
        _add("shape", _name, _fn, TALL, ways=((0,),))
_add("shape", "unbind", lambda a: a.unbind(), GRID, ways=((1,),))
_add("shape", "diag_embed", lambda a: a.diag_embed(), GRID)
_add("shape", "diagflat", lambda a: a.diagflat(), (256,))
_add("shape", "swap halves", lambda a: torch.cat([a[64:], a[:64]]), GRID)
for _mode in ("reflect", "replicate", "circular"):
    _add("shape", f"pad {_mode}", lambda a, mode=_mode: F.pad(a, (2, 3), mode=mode), (8, 16, 64))
    _add("shape", f"pad {_mode} two", lambda a, mode=_mode: F.pad(a, (2, 3, 1, 1), mode=mode),
         (8, 8, 32, 16))
_PAIRED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda a, b: torch.cat([a, b]), "concat": lambda a, b: torch.concat([a, b]),
    "concatenate": lambda a, b: torch.concatenate([a, b], 1),
    "stack": lambda a, b: torch.stack([a, b]), "hstack": lambda a, b: torch.hstack([a, b]),
    "vstack": lambda a, b: torch.vstack([a, b]), "dstack": lambda a, b: torch.dstack([a, b]),
    "column_stack": lambda a, b: torch.column_stack([a, b]),
    "row_stack": lambda a, b: torch.vstack([a, b]),
    "broadcast_tensors": lambda a, b: torch.broadcast_tensors(a, b),
}
for _name, _two in _PAIRED.items():
    _add("shape", _name, _two, GRID, GRID, ways=((0, 0), (1, 1)))
_add("shape", "select_scatter", lambda a, b: a.select_scatter(b, 0, 5), GRID, (96,))
_add("shape", "slice_scatter", lambda a, b: a.slice_scatter(b, 0, 3, 19), GRID, (16, 96))
_add("shape", "diagonal_scatter", lambda a, b: a.diagonal_scatter(b), GRID, (96,))
_add("shape", "meshgrid", lambda a, b: torch.meshgrid(a, b, indexing="ij"), LINE, (9,))
_add("shape", "block_diag", lambda a, b: torch.block_diag(a, b), GRID, (3, 3))
_add("shape", "pixel_shuffle", lambda a: F.pixel_shuffle(a, 2), (16, 32, 16, 16))
_add("shape", "pixel_unshuffle", lambda a: F.pixel_unshuffle(a, 2), (16, 8, 32, 32))
_add("shape", "channel_shuffle", lambda a: F.channel_shuffle(a, 4), (16, 32, 16, 16))
_add("shape", "native_channel_shuffle", lambda a: torch.native_channel_shuffle(a, 4),
     (16, 32, 16, 16), ways=((0,), (2,), (3,)))

# Products.

_PRODUCTS = """
    i j, j k -> i k | b i j, b j k -> b i k | i j, i j -> | i j, k j -> i k | i j -> j i |
    i j, i k -> i j k | i j, j k -> k | a i i -> a | i i -> | i j, i j -> j
"""
for _equation in _PRODUCTS.replace("\n", " ").split("|"):
    _text = _equation.replace(" ", "")
    _given = _text.split("->")[0].split(",")
    _length = {"a": 16, "b": 16, "i": 128, "j": 96, "k": 32}
    _shapes = [tuple(_length[letter] for letter in one) for one in _given]
    _free = [dim for dim, letter in enumerate(_given[0]) if _given[0].count(letter) == 1]
    _add("product", f"einsum {_text}", lambda *a, text=_text: torch.einsum(text, *a), *_shapes,
         ways=tuple((dim,) for dim in _free))
_add("product", "matmul", torch.matmul, GRID, (96, 32))
_add("product", "mm", torch.mm, GRID, (96, 32))
_add("product", "mv", torch.mv, GRID, (96,))
_add("product", "bmm", torch.bmm, (16, 32, 24), (16, 24, 8))
_add("product", "dot", torch.dot, LINE, LINE, ways=((0,), (0, 0)))
_add("product", "vdot", torch.vdot, LINE, LINE, ways=((0,), (0, 0)))
_add("product", "inner", torch.inner, GRID, (8, 96))
_add("product", "outer", torch.outer, LINE, (8,))
_add("product", "ger", torch.ger, LINE, (8,))
_add("product", "kron", torch.kron, GRID, (2, 2))
_add("product", "tensordot", lambda a, b: torch.tensordot(a, b, 1), GRID, (96, 8))
_add("product", "addmm", torch.addmm, (128, 32), GRID, (96, 32), ways=((None, 0), (None, 1)))
_add("product", "addmv", torch.addmv, (128,), GRID, (96,), ways=((None, 0), (None, 1)))
_add("product", "addbmm", torch.addbmm, (32, 8), (16, 32, 24), (16, 24, 8),
     ways=((None, 0), (None, 1), (None, 2)))
_add("product", "baddbmm", torch.baddbmm, (16, 32, 8), (16, 32, 24), (16, 24, 8),
     ways=((None, 0), (None, 1), (None, 2)))
_add("product", "addr", torch.addr, GRID, (128,), (96,))
_add("product", "chain_matmul", lambda a, b: _L.multi_dot([a, b, b.t()]), GRID, (96, 8))
_add("product", "linear", F.linear, GRID, (32, 96))
_add("product", "bilinear", F.bilinear, (512, 6), (512, 4), (8, 6, 4), ways=((0,), (0, 0)))
_add("product", "cosine_similarity", F.cosine_similarity, GRID, GRID, ways=_BOTH)
_add("product", "pairwise_distance", F.pairwise_distance, GRID, GRID, ways=_BOTH)
_add("product", "cdist", torch.cdist, (512, 4), (8, 4), ways=((0,),))
_add("product", "cdist columns", torch.cdist, (4, 512), (3, 512), ways=((1,), (1, 1)))
_add("product", "pdist", F.pdist, (256, 4), ways=((0,),))
_add("product", "embedding_bag sum", lambda w, i: F.embedding_bag(i, w, mode="sum"), GRID, (4, 4),
     ints=(0, 64))
_add("product", "embedding_bag mean", lambda w, i: F.embedding_bag(i, w), GRID, (4, 4),
     ints=(0, 64))
_add("product", "embedding_bag max", lambda w, i: F.embedding_bag(i, w, mode="max"), GRID, (4, 4),
     ints=(0, 64))
_add("product", "embedding_bag offsets", lambda w, i: F.embedding_bag(
    i, w, torch.tensor([0, 2, 2, 9]), mode="sum"), GRID, (16,), ints=(0, 64))
_add("product", "embedding_bag of cut indices", lambda i, w: F.embedding_bag(i, w, mode="max"),
     (512, 4), (9, 2), ints=(9,), ways=((0,),))

# Losses: every reduction.

for _reduction in ("none", "mean", "sum"):
    _PAIR_LOSSES = """
        mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss kl_div soft_margin_loss
        binary_cross_entropy_with_logits hinge_embedding_loss multilabel_soft_margin_loss
    """
    for _name in _PAIR_LOSSES.split():
        _add("loss", f"{_name} {_reduction}",
             lambda a, b, name=_name, red=_reduction: getattr(F, name)(a, b, reduction=red),
             GRID, GRID, ways=_BOTH)
    _LOSSES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
        "binary_cross_entropy": (lambda a, b, red: F.binary_cross_entropy(
            a.sigmoid(), b.sigmoid(), reduction=red), (GRID, GRID), ()),
        "cross_entropy": (lambda a, i, red: F.cross_entropy(
            a, i, reduction=red, ignore_index=3), (GRID, (128,)), (0, 90)),
        "cross_entropy weighted": (lambda a, i, w, red: F.cross_entropy(
            a, i, w, reduction=red), (GRID, (128,), (96,)), (0, 90)),
        "cross_entropy probabilities": (lambda a, b, red: F.cross_entropy(
            a, b.softmax(1), reduction=red), (GRID, GRID), ()),
        "nll_loss": (lambda a, i, w, red: F.nll_loss(
            a, i, w, reduction=red, ignore_index=3), (GRID, (128,), (96,)), (0, 90)),
        "multi_margin_loss": (lambda a, i, red: F.multi_margin_loss(
            a, i, reduction=red), (GRID, (128,)), (0, 90)),
        "multilabel_margin_loss": (lambda a, i, red: F.multilabel_margin_loss(
            a, i, reduction=red), (GRID, GRID), (0, 90)),
        "margin_ranking_loss": (lambda a, b, c, red: F.margin_ranking_loss(
            a, b, c, reduction=red), (LINE, LINE, LINE), ()),
        "cosine_embedding_loss": (lambda a, b, c, red: F.cosine_embedding_loss(
            a, b, c.sign(), reduction=red), (GRID, GRID, (128,)), ()),
        "triplet_margin_loss": (lambda a, b, c, red: F.triplet_margin_loss(
            a, b, c, reduction=red), (GRID, GRID, GRID), ()),
        "triplet_margin_with_distance_loss": (
            lambda a, b, c, red: F.triplet_margin_with_distance_loss(
                a, b, c, reduction=red), (GRID, GRID, GRID), ()),
        "gaussian_nll_loss": (lambda a, b, c, red: F.gaussian_nll_loss(
            a, b, c.abs(), reduction=red), (GRID, GRID, GRID), ()),
        "ctc_loss": (lambda a, i, red: F.ctc_loss(
            a.log_softmax(2), i + 1, torch.full((64,), 6), torch.full((64,), 2), reduction=red),
            ((6, 64, 8), (64, 2)), (0, 7)),
    }
    for _name, (_loss, _shapes, _ints) in _LOSSES.items():
        _free: Any = [0] if "multilabel_margin" in _name else range(len(_shapes[0]))
        _free = [1] if _name == "ctc_loss" else _free
        _add("loss", f"{_name} {_reduction}",
             lambda *a, loss=_loss, red=_reduction: loss(*a, red), *_shapes, ints=_ints,
             ways=tuple((dim,) for dim in _free))

# Linear algebra: matrices are whole, batches are cut, and tall ones where blocks will do.

_OF_BATCH = """
    linalg.det linalg.slogdet linalg.inv linalg.pinv linalg.qr linalg.svdvals linalg.eigvals
    linalg.matrix_exp linalg.cond linalg.matrix_rank linalg.lu linalg.lu_factor linalg.svd
    linalg.eig logdet pinverse
"""
_each("linalg", _OF_BATCH, _of_torch, PILE, ways=((0,),))
_LINALG: dict[str, Callable[[Tensor], Any]] = {
    "linalg.cholesky": lambda a: _L.cholesky(_good(a)), "linalg.eigh": lambda a: _L.eigh(_good(a)),
    "linalg.eigvalsh": lambda a: _L.eigvalsh(_good(a)),
    "linalg.matrix_power": lambda a: _L.matrix_power(a, 3),
    "linalg.matrix_norm fro batch": lambda a: _L.matrix_norm(a),
    "linalg.matrix_norm nuc batch": lambda a: _L.matrix_norm(a, "nuc"),
    "linalg.matrix_norm 2 batch": lambda a: _L.matrix_norm(a, 2),
    "cholesky_inverse": lambda a: torch.cholesky_inverse(_L.cholesky(_good(a))),
    "linalg.tensorinv": lambda a: _L.tensorinv(a.reshape(64, 8, 8), ind=1),
    "linalg.vander": lambda a: _L.vander(a[..., 0]),
}
for _name, _fn in _LINALG.items():
    _add("linalg", _name, _fn, PILE, ways=((0,),) if "tensorinv" not in _name else ())
_LINALG_TWO: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linalg.solve": lambda a, b: _L.solve(_good(a), b),
    "linalg.solve_ex": lambda a, b: _L.solve_ex(_good(a), b)[0],
    "linalg.solve_triangular": lambda a, b: _L.solve_triangular(a, b, upper=True),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, _L.cholesky(_good(a))),
    "triangular_solve": lambda a, b: torch.triangular_solve(b, a),
    "linalg.lstsq batch": lambda a, b: _L.lstsq(a, b)[0],
    "linalg.lu_solve": lambda a, b: _L.lu_solve(*_L.lu_factor(_good(a)), b),
    "linalg.householder_product": lambda a, b: _L.householder_product(a, b[..., 0]),
    "ormqr": lambda a, b: torch.ormqr(a, b[..., 0], b),
    "linalg.cross": lambda a, b: _L.cross(a[:, :3, :2], b[:, :3, :2], dim=1),
    "linalg.vecdot": lambda a, b: _L.vecdot(a[..., 0], b[..., 0]),
}
for _name, _two in _LINALG_TWO.items():
    _add("linalg", _name, _two, PILE, (64, 8, 4), ways=((0,), (0, 0)))


def _good(a: Tensor) -> Tensor:
    return a @ a.mT + 5 * torch.eye(a.shape[-1], dtype=a.dtype)


_TALL = (2048, 4)
_add("linalg", "linalg.qr tall", lambda a: _L.qr(a), _TALL, ways=((0,),))
_add("linalg", "linalg.lstsq tall", lambda a, b: _L.lstsq(a, b)[0], _TALL, (2048, 2),
     ways=((0, 0),))
_add("linalg", "linalg.svdvals tall", lambda a: _L.svdvals(a), _TALL, ways=((0,),))
_add("linalg", "linalg.svd tall", lambda a: _L.svd(a, full_matrices=False)[1], _TALL,
     ways=((0,),))
_add("linalg", "linalg.pinv tall", lambda a: _L.pinv(a), _TALL, ways=((0,),))
for _order in (1, -1, torch.inf, -torch.inf, "fro"):
    _add("linalg", f"linalg.matrix_norm {_order}", lambda a, order=_order: _L.matrix_norm(a, order),
         GRID)
_add("linalg", "linalg.norm", lambda a: _L.norm(a), GRID)
_add("linalg", "linalg.diagonal", lambda a: _L.diagonal(a), GRID)
_add("linalg", "linalg.solve many columns", lambda b, a: _L.solve(_good(a), b), (8, 512), (8, 8),
     ways=((1,),))
_add("linalg", "cross", lambda a, b: torch.cross(a, b, dim=1), (512, 3), (512, 3),
     ways=((0,), (0, 0)))
_add("linalg", "cross without dim", lambda a, b: torch.cross(a, b), (512, 3), (512, 3),
     ways=((0,), (0, 0)))
_add("linalg", "tril of batch", lambda a: a.tril(), PILE)

MADE_WHOLE: dict[str, str] = {
    "linalg: linalg.pinv tall": "it has a gradient for any matrix rank, where Q and R have none",
    "order: combinations": "each shard of the result names nearly all elements",
    "product: pdist": "each row is paired with all later rows",
}
"""Calls of which some way makes a dim whole, by group and name, and why that is so."""


def by_name() -> dict[str, list[Named]]:
    """The calls, those of one name together."""
    found: dict[str, list[Named]] = {}
    for one in EVERY:
        found.setdefault(f"{one.group}: {one.name}", []).append(one)
    return found

"""How many bytes a call may receive from others, per op and layout, in one table.

A bound is what the rank that receives most gets: of the call's transitions and collectives, then
of its gradient's. Operands are float64 and drawn at random; "line" is 4,096 numbers on 4 ranks
(a block is 8,192 bytes, the others' blocks 24,576), "columns" 8 rows of 512 cut along, "rows" 512
rows of 8, "square" a line cut by both axes of a mesh of 2 by 2, "grid" 64 rows of 64 cut by an axis
each, "ragged" a line of which one rank has nothing and another nearly all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from weft import P
from weft.core import Layout, Mesh

LINE, SQUARE = Mesh({"x": 4}), Mesh({"dp": 2, "tp": 2})

LAYOUTS: dict[str, Layout] = {
    "line": Layout(LINE, (4096,), P("x")),
    "ragged": Layout(LINE, (4096,), P("x"), sizes={0: (0, 3000, 1000, 96)}),
    "square": Layout(SQUARE, (4096,), P(("tp", "dp"))),
    "columns": Layout(LINE, (8, 512), P(None, "x")),
    "rows": Layout(LINE, (512, 8), P("x")),
    "grid": Layout(SQUARE, (64, 64), P("dp", "tp")),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """One op on one operand, and the bytes that it may receive, forward and backward, by layout.

    `grad`: whether the results have one.
    """

    name: str
    fn: Callable[[torch.Tensor], Any]
    nbytes: dict[str, tuple[int, int]]
    grad: bool = True


def _same(nbytes: tuple[int, int], *names: str) -> dict[str, tuple[int, int]]:
    return dict.fromkeys(names, nbytes)


def _steps(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0.25, 0.5, 0.9], dtype=dtype)


def _places(a: torch.Tensor) -> torch.Tensor:
    """An index into the last dim for each element, cut as the elements are."""
    return (a.abs() * 1e6).long() % a.shape[-1]


def _some(a: torch.Tensor) -> torch.Tensor:
    """An index of 64 places of the last dim, the same on all ranks."""
    return torch.arange(64) * 97 % a.shape[-1]


def _rows(a: torch.Tensor) -> torch.Tensor:
    return torch.arange(64) * 97 % a.shape[0]


def _attention(q: torch.Tensor, k: torch.Tensor, num_heads: int = 1) -> torch.Tensor:
    """Causal, of rows of heads beside each other."""
    rows, columns = [one.unflatten(1, (num_heads, -1)).transpose(0, 1) for one in (q, k)]
    return F.scaled_dot_product_attention(
        rows, columns, columns, is_causal=num_heads == 1 and q is k)


_LINES = ("line", "ragged", "square")

BOUNDS: list[Bound] = [
    # Blocks of keys and values that a rank sees, three of others, and their gradients; of several
    # heads queries, keys, values and the result; of one query itself, a row and two numbers.
    Bound("scaled_dot_product_attention", lambda a: _attention(a, a), {"rows": (49152, 49152)}),
    Bound("sdpa_heads", lambda a: _attention(a, a, 4), {"rows": (24576, 24576)}),
    Bound("sdpa_one_query", lambda a: _attention(a[:1], a), {"rows": (184, 288)}),
    # Of each other block a number or two per row.
    Bound("cumsum", lambda a: a.cumsum(-1), _same((24, 24), *_LINES) | {"columns": (192, 192)}),
    Bound("cumprod", lambda a: a.cumprod(-1), {"line": (24, 24), "columns": (192, 192)}),
    Bound("cummax", lambda a: a.cummax(-1), {"line": (48, 24), "columns": (384, 192)}),
    Bound("logcumsumexp", lambda a: a.logcumsumexp(-1),
          {"line": (48, 48), "columns": (384, 384)}),
    Bound("max", lambda a: a.max(-1), _same((48, 24), *_LINES) | {"columns": (384, 192)}),
    Bound("argmax", lambda a: a.argmax(-1), {"line": (48, 0), "columns": (384, 0)}, False),
    Bound("argmax_flat", lambda a: a.argmax(), _same((48, 0), "line", "square", "columns", "rows"),
          False),
    Bound("var", lambda a: a.var(-1), _same((48, 48), *_LINES) | {"columns": (384, 384)}),
    Bound("std", lambda a: a.std(), _same((48, 48), "line", "columns", "rows")),
    Bound("norm", lambda a: a.norm(), _same((24, 24), *_LINES, "columns", "rows")),
    Bound("norm_3", lambda a: torch.linalg.vector_norm(a, 3, -1),
          {"line": (24, 24), "columns": (192, 192)}),
    Bound("logsumexp", lambda a: a.logsumexp(-1),
          _same((48, 48), *_LINES) | {"columns": (384, 384)}),
    Bound("renorm", lambda a: a.renorm(2, 0, 1.0), {"columns": (192, 192), "rows": (0, 0)}),
    # Each block's candidates, or its own block of all that is sorted, and samples.
    Bound("topk_8", lambda a: a.topk(8, -1),
          _same((384, 192), *_LINES) | {"columns": (3072, 1536)}),
    Bound("topk_3000", lambda a: a.topk(3000, -1), {"line": (12392, 6128)}),
    Bound("sort", lambda a: a.sort(-1), {"line": (12572, 6248), "ragged": (12884, 6456),
                                         "square": (12572, 6248), "columns": (6144, 6144)}),
    Bound("argsort", lambda a: a.argsort(-1), {"line": (12572, 0), "columns": (6144, 0)}, False),
    Bound("msort", lambda a: a.msort(), {"line": (12572, 6248), "rows": (6144, 6144)}),
    # Samples, and one element.
    Bound("kthvalue", lambda a: a.kthvalue(100, -1),
          _same((3144, 24), *_LINES) | {"columns": (6144, 6144)}),
    Bound("median", lambda a: a.median(-1), {"line": (3168, 24), "columns": (6144, 6144)}),
    Bound("median_all", lambda a: a.median(), _same((3168, 0), "line", "columns", "rows"), False),
    Bound("quantile", lambda a: a.quantile(_steps(a.dtype), -1),
          {"line": (5320, 144), "columns": (6144, 6144)}),
    Bound("mode", lambda a: a.mode(-1), {"line": (12700, 6264), "columns": (6144, 6144)}),
    # What is distinct in each block.
    Bound("unique", lambda a: a.round().unique(return_inverse=True, return_counts=True),
          _same((384, 0), "line", "square", "rows"), False),
    Bound("unique_many", lambda a: a.unique(), {"line": (9472, 0)}, False),
    Bound("unique_rows", lambda a: a.sign().long().unique(dim=0), {"rows": (11368, 0)}, False),
    Bound("consecutive_rows", lambda a: a.unique_consecutive(dim=0), {"rows": (192, 0)}, False),
    Bound("unique_consecutive", lambda a: a.unique_consecutive(),
          _same((24, 0), "line", "rows"), False),
    Bound("isin", lambda a: torch.isin((a * 9).long(), torch.arange(5)), _same((0, 0), *LAYOUTS),
          False),
    Bound("histogram", lambda a: torch.histogram(a, 10), _same((32, 0), *LAYOUTS), False),
    # What is the same in the whole of a product, and distances of blocks.
    Bound("cov", lambda a: torch.cov(a), {"columns": (96, 96)}),
    Bound("dist", lambda a: torch.dist(a, a * 2), _same((24, 24), *LAYOUTS)),
    Bound("cosine", lambda a: F.cosine_similarity(a[:4], a[4:], 1), {"columns": (192, 192)}),
    Bound("bilinear", lambda a: F.bilinear(a[0], a[1], a.new_ones(3, 512, 512)),
          {"columns": (3072, 3072)}),
    Bound("amax", lambda a: a.amax(), _same((24, 16), *LAYOUTS)),
    Bound("flip_nothing", lambda a: a.flip(()), _same((0, 0), *LAYOUTS)),
    Bound("number_masked", lambda a: a.sum().masked_select(a > 0), {"line": (40, 16)}),
    Bound("nonzero_static", lambda a: (a > 0).nonzero_static(size=64), {"line": (24, 0)}, False),
    Bound("cdist", lambda a: torch.cdist(a[:4], a[4:]), {"columns": (192, 192)}),
    Bound("bags_max", lambda a: F.embedding_bag(torch.arange(64).view(8, 8) % a.shape[0], a,
                                                mode="max"), {"rows": (1152, 0)}),
    # A square of each shard, and sums of squares.
    Bound("linalg_qr", lambda a: torch.linalg.qr(a), {"rows": (3072, 1536)}),
    Bound("svdvals", lambda a: torch.linalg.svdvals(a), {"rows": (3072, 768)}),
    Bound("lstsq", lambda a: torch.linalg.lstsq(a, a[:, :1])[0], {"rows": (3168, 768)}),
    # Borders and windows: what neighbours hold of them; repeats: what a block shows of the whole.
    Bound("pad_reflect", lambda a: F.pad(a, (3, 3), mode="reflect"), {"columns": (0, 0)}),
    Bound("pad_circular", lambda a: F.pad(a, (3, 3), mode="circular"), {"columns": (192, 192)}),
    Bound("unfold", lambda a: a.unfold(-1, 5, 1),
          _same((32, 32), *_LINES) | {"columns": (256, 256)}),
    # Each row once to each rank that names it, and none where the rank holds it.
    Bound("select_often", lambda a: a.index_select(0, torch.arange(2000) % 5),
          {"line": (40, 120), "rows": (320, 960)}),
    # What torch composes of others goes by its parts.
    Bound("trapezoid", torch.trapezoid, {"line": (32, 0), "columns": (80, 96)}),
    # Counts are sums of counts; where bins begin and end is a reduction.
    Bound("bincount", lambda a: (a.abs() * 4).long().bincount(), {"line": (32, 0)}, False),
    Bound("histc_of_data", lambda a: a.histc(), _same((32, 0), "line", "rows"), False),
    Bound("searchsorted", lambda a: torch.searchsorted(a, _steps(a.dtype)), _same((0, 0), *_LINES),
          False),
    Bound("bucketize", lambda a: torch.bucketize(a, _steps(a.dtype)),
          _same((0, 0), "line", "columns"), False),
    Bound("bucketize_among", lambda a: torch.bucketize(torch.ones(64, 64), a[:64]).abs(),
          {"line": (512, 0)}, False),
    Bound("histc", lambda a: torch.histc(a, 10, -3, 3), _same((0, 0), "line", "columns"), False),
    # Each index goes to the holder of what it names, and that comes back.
    Bound("gather", lambda a: a.gather(-1, _places(a)),
          _same((8480, 5616), "line", "square") | {"ragged": (7796, 5904),
          "columns": (8332, 5608), "rows": (0, 0)}),
    Bound("take_along_dim", lambda a: a.take_along_dim(_places(a), -1),
          _same((8480, 5616), "line", "square") | {"ragged": (7796, 5904),
          "columns": (8332, 5608), "rows": (0, 0)}),
    Bound("index_select", lambda a: a.index_select(-1, _some(a)),
          _same((128, 128), "line", "square") | {"ragged": (128, 296), "columns": (768, 768),
          "rows": (0, 0)}),
    Bound("index_rows", lambda a: a[_rows(a)],
          _same((128, 128), "line", "square") | {"ragged": (128, 296), "columns": (0, 0),
          "rows": (768, 768)}),
    # Fewer places than ranks: each rank has a part of both.
    Bound("index_few", lambda a: a[torch.tensor([200, 300])], {"rows": (32, 48)}),
    Bound("scatter_add", lambda a: torch.zeros_like(a).scatter_add(-1, _places(a), a),
          _same((9360, 6240), "line", "square") | {"ragged": (9636, 6512),
          "columns": (9576, 6232), "rows": (0, 0)}),
    Bound("scatter_amax", lambda a: torch.zeros_like(a).scatter_reduce(
        -1, _places(a), a, "amax", include_self=False),
          _same((9360, 6240), "line", "square") | {"ragged": (9636, 6512),
          "columns": (9576, 6232), "rows": (0, 0)}),
    # Tables of ten numbers are joined: the extrema, what attains them, and its shares.
    Bound("scatter_amax_to_few", lambda a: a.new_zeros(10).scatter_reduce(
        0, (a.abs() * 1e6).long() % 10, a, "amax"), _same((360, 120), "line", "ragged", "square")),
    Bound("scatter_mean_to_few", lambda a: a.new_zeros(10).scatter_reduce(
        0, (a.abs() * 1e6).long() % 10, a, "mean"), _same((240, 120), "line", "ragged", "square")),
    Bound("index_add", lambda a: a.index_add(-1, _some(a), a.narrow(-1, 0, 64)),
          _same((288, 344), "line", "square") | {"ragged": (156, 96), "columns": (1176, 3072)}),
    Bound("index_copy", lambda a: a.index_copy(-1, _some(a), a.narrow(-1, 0, 64)),
          _same((288, 344), "line", "square") | {"ragged": (156, 96), "columns": (1176, 3072)}),
    Bound("index_put", lambda a: a.index_put((_rows(a),), a[:64] * 2),
          _same((288, 344), "line", "square") | {"ragged": (156, 96), "rows": (1176, 3072)}),
    Bound("index_fill", lambda a: a.index_fill(-1, _some(a), 0.0), _same((0, 0), *LAYOUTS)),
    Bound("embedding", lambda a: F.embedding(_rows(a), a),
          _same((0, 0), "columns", "rows")),
    Bound("embedding_terms", lambda a: F.embedding((a > 9).sum(), a), {"rows": (16, 0)}),
    # How many each rank has, and of masks that move the bits.
    Bound("masked_select", lambda a: a[a > 0],
          _same((24, 0), "line", "ragged", "square", "rows") | {"columns": (3256, 3168)}),
    Bound("masked_spread", lambda a: a[:, None, :1].masked_select(a[:, :1] > 0),
          {"rows": (408, 0)}),
    Bound("nonzero", lambda a: (a > 0).nonzero(),
          _same((24, 0), "line", "ragged", "square", "rows") | {"columns": (120, 0)}, False),
    Bound("masked_fill", lambda a: a.masked_fill(a > 0, 0.0), _same((0, 0), *LAYOUTS)),
    # A piece of what is cut stays where it is; what changes its place moves once.
    Bound("slice", lambda a: a[..., 100:-50], _same((0, 0), *LAYOUTS)),
    Bound("steps", lambda a: a[..., ::3], _same((0, 0), *LAYOUTS)),
    Bound("split", lambda a: a.split(100, -1), _same((0, 0), *LAYOUTS)),
    Bound("select", lambda a: a.select(-1, 7),
          _same((8, 0), *_LINES) | {"columns": (0, 0), "rows": (0, 0)}),
    Bound("flip", lambda a: a.flip(-1),
          _same((8192, 8192), "line", "square", "columns") | {"ragged": (8768, 8768),
          "rows": (0, 0)}),
    Bound("flip_both", lambda a: a.flip(0, 1), {"grid": (8192, 8192), "rows": (8192, 8192)}),
    Bound("fftshift", lambda a: torch.fft.fftshift(a), {"grid": (8192, 8192)}),
    Bound("broadcast_tensors", lambda a: torch.broadcast_tensors(a, a.t()), {"grid": (0, 0)}),
    Bound("roll", lambda a: a.roll(5, -1),
          _same((40, 40), *_LINES) | {"columns": (320, 320), "rows": (0, 0)}),
    Bound("cat", lambda a: torch.cat([a, a], -1),
          _same((16384, 16384), "line", "square", "columns") | {"ragged": (16384, 40384),
          "rows": (0, 0)}),
    Bound("stack", lambda a: torch.stack([a, a], -1), _same((0, 0), *LAYOUTS)),
    Bound("repeat", lambda a: a.repeat(*[1] * (a.dim() - 1), 2),
          _same((16384, 16384), "line", "square") | {"ragged": (16384, 40384),
          "columns": (6144, 6144), "rows": (0, 0)}),
    Bound("diagonal", lambda a: a.diagonal(), _same((0, 0), "columns", "rows")),
    Bound("tril", lambda a: a.tril(), _same((0, 0), "columns", "rows")),
    # The other rows, for each product of two matrices; their gradients go back.
    Bound("matrix_power", lambda a: torch.linalg.matrix_power(a.view(64, 64), 4),
          {"line": (49152, 49152)}),
    # Every element has its own line of powers.
    Bound("powers", lambda a: torch.linalg.vander(a, N=3), _same((0, 0), "line", "columns")),
    Bound("vander", lambda a: torch.vander(a, 3), {"line": (0, 0)}, False),
    Bound("diff", lambda a: a.diff(),
          _same((8, 8), *_LINES) | {"columns": (64, 64), "rows": (0, 0)}),
    # Windows: the border that they read.
    Bound("conv1d", lambda a: F.conv1d(a[None], torch.ones(1, a.shape[0], 5, dtype=a.dtype),
                                       padding=2), {"columns": (256, 256), "rows": (0, 0)}),
    Bound("conv2d", lambda a: F.conv2d(a[None, None], torch.ones(1, 1, 3, 3, dtype=a.dtype),
                                       padding=1), {"columns": (128, 128), "rows": (128, 128),
                                                    "grid": (520, 520)}),
    Bound("conv2d_patches", lambda a: F.conv2d(
        a[None, None], torch.ones(2, 1, 4, 4, dtype=a.dtype), stride=4),
          {"columns": (0, 0), "rows": (0, 0), "grid": (0, 0)}),
    Bound("max_pool2d", lambda a: F.max_pool2d(a[None, None], 3, 2, 1),
          {"columns": (64, 64), "rows": (64, 64), "grid": (520, 520)}),
    Bound("interpolate", lambda a: F.interpolate(a[None, None], scale_factor=2),
          {"columns": (0, 0), "rows": (0, 0), "grid": (0, 0)}),
    Bound("interpolate_bilinear", lambda a: F.interpolate(
        a[None, None], scale_factor=2, mode="bilinear"),
          {"columns": (128, 128), "rows": (128, 128), "grid": (520, 520)}),
    Bound("avg_pool1d", lambda a: F.avg_pool1d(a[None], 2), {"columns": (0, 0)}),
    # One exchange per sharded dim, of complex numbers; a line as a matrix takes three.
    Bound("fft", lambda a: torch.fft.fft(a + 0j), {"line": (36864, 36864), "ragged": (53248, 68480),
          "square": (36864, 36864), "columns": (12288, 12288), "rows": (0, 0)}),
    Bound("rfft", lambda a: torch.fft.rfft(a), {"line": (24576, 24640), "columns": (6144, 6192)}),
    Bound("fftn", lambda a: torch.fft.fftn(a + 0j), {"grid": (20480, 20480),
          "columns": (12288, 12288), "rows": (12288, 12288)}),
    Bound("fft_ifft", lambda a: torch.fft.ifftn(torch.fft.fftn(a + 0j)), {"rows": (24576, 24576)}),
    # A mean, and what a stencil or a frame reads beyond a border.
    Bound("adaptive_mean", lambda a: F.adaptive_avg_pool1d(a[None], 1), {"columns": (0, 0)}),
    Bound("adaptive_max", lambda a: F.adaptive_max_pool1d(a[None], 1), {"columns": (384, 192)}),
    Bound("adaptive_means", lambda a: F.adaptive_avg_pool1d(a[None], 64), {"columns": (0, 0)}),
    Bound("gradient", lambda a: torch.gradient(a, dim=-1), {
        "line": (16, 16), "square": (16, 16), "columns": (128, 128), "rows": (0, 0)}),
    Bound("stft", lambda a: torch.stft(a, 16, 4, center=False, return_complex=True,
          window=torch.ones(16).double()), {"line": (96, 96), "columns": (768, 768)}),
    Bound("segments", lambda a: torch.segment_reduce(
        a, "mean", lengths=torch.tensor([a.shape[0] - 2, 2])),
          {"line": (24, 24), "rows": (192, 192)}),
    # Rows whose class or feature is cut.
    Bound("softmax", lambda a: a.softmax(-1),
          _same((24, 12), *_LINES) | {"columns": (192, 96), "rows": (0, 0)}),
    Bound("log_softmax", lambda a: a.log_softmax(-1),
          _same((24, 12), *_LINES) | {"columns": (192, 96), "rows": (0, 0)}),
    Bound("layer_norm", lambda a: F.layer_norm(a, a.shape[-1:]),
          _same((24, 24), *_LINES) | {"columns": (192, 192), "rows": (0, 0)}),
    Bound("cross_entropy", lambda a: F.cross_entropy(
        a, torch.arange(a.shape[0]) % a.shape[-1]), {"columns": (192, 112), "rows": (12, 16)}),
    # Products: the smaller operand, or the result's terms.
    Bound("gram", lambda a: a @ a.mT, {"columns": (0, 0), "rows": (24576, 24576)}),
    Bound("by_plain", lambda a: a @ torch.ones(a.shape[-1], 3, dtype=a.dtype),
          _same((0, 0), *LAYOUTS)),
    Bound("einsum", lambda a: torch.einsum("ij,ij->i", a, a), _same((0, 0), "columns", "rows")),
    Bound("sum", lambda a: a.sum(-1), _same((0, 16), *_LINES) | _same((0, 0), "columns", "rows")),
    # Terms are summed before they grow wider.
    Bound("widened", lambda a: a.float().sum(-1).to(torch.complex128).abs(), {"columns": (48, 0)}),
    Bound("mse_loss", lambda a: F.mse_loss(a, a * 2), _same((0, 16), *LAYOUTS)),
]

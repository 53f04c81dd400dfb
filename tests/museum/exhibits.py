"""The exhibits: each the smallest program that shows a public report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.museum.halls import Exhibit, Program, Put

__all__ = ["EXHIBITS"]

EXHIBITS: list[Exhibit] = []


def exhibit(number: str, says: str, mesh: tuple[int, ...] = (4,),
            rows: tuple[int, ...] = (8, 7, 2)) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        EXHIBITS.append(Exhibit(number, says, program, mesh, rows))
        return program
    return add


def _loss_parallel(x: torch.Tensor) -> AbstractContextManager[None]:
    """What DTensor needs for scores with sharded classes; others need nothing."""
    return loss_parallel() if isinstance(x, DTensor) else nullcontext()


def _grads(loss: torch.Tensor, *leaves: torch.Tensor) -> list[object]:
    loss.backward()
    return [loss, *[leaf.grad for leaf in leaves]]


@exhibit("162692", "mean of uneven rows")
def mean(put: Put, n: int) -> object:
    return put(torch.arange(4.0 * n).view(n, 4), 0).mean()


@exhibit("179502", "a view that splits a sharded dim")
def view(put: Put, n: int) -> object:
    return put(torch.arange(n * 18.0).view(n * 3, 6), 1).view(-1, 9)


@exhibit("194457", "rows over two axes, gathered", mesh=(2, 2), rows=(8, 5, 3))
def two_axes(put: Put, n: int) -> object:
    return put(torch.arange(n * 3.0).view(n, 3), 0, 0)


@exhibit("161368", "rows over two axes, a slice of them", mesh=(2, 2), rows=(8, 5, 3))
def slice_of_two_axes(put: Put, n: int) -> object:
    return put(torch.arange(n * 3.0).view(n, 3), 0, 0)[1:n - 1]


@exhibit("185167", "class weights in the loss of a sharded batch")
def weighted_loss(put: Put, n: int) -> object:
    x = put(torch.randn(n, 3).log_softmax(1), 0)
    return F.nll_loss(x, put(torch.arange(n) % 3, 0), weight=put(torch.tensor([1.0, 5, 9])))


@exhibit("190746", "log_softmax over a sharded dim under loss_parallel, and its gradient",
         rows=(8, 7))
def log_softmax(put: Put, n: int) -> object:
    x = put(torch.randn(3, n), 1).requires_grad_()
    with _loss_parallel(x):
        return _grads((x.log_softmax(1) * put(torch.randn(3, n), 1)).sum(), x)


@exhibit("166638", "item() of a partial value")
def item(put: Put, n: int) -> object:
    return put(torch.arange(float(n)), 0).sum().item()


@exhibit("149768", "a number added to a partial value")
def partial_plus_number(put: Put, n: int) -> object:
    return put(torch.ones(n, 3), "sum") + 1


@exhibit("152249", "the gradient of a norm")
def norm(put: Put, n: int) -> object:
    x = put(torch.randn(n, 3), 0).requires_grad_()
    return _grads(torch.norm(x, p=2, dim=0).sum(), x)


@exhibit("172932", "a partial value in two factors, and its gradient")
def partial_gradient(put: Put, n: int) -> object:
    x = put(torch.randn(n, 3), 0).requires_grad_()
    total = x.sum(0)
    return _grads((total * total).sum(), x)


@exhibit("168058", "dropout draws a mask of its own for each row; how many masks differ")
def dropout(put: Put, n: int) -> object:
    masks = F.dropout(put(torch.ones(n, 64), 0), 0.5) != 0
    whole = masks.full_tensor() if hasattr(masks, "full_tensor") else masks
    return len(torch.unique(whole, dim=0))


@exhibit("186129", "a depthwise convolution over sharded channels", rows=(8, 6, 2))
def depthwise(put: Put, n: int) -> object:
    x = put(torch.randn(2, n, 5, 5), 1)
    return F.conv2d(x, put(torch.randn(n, 1, 3, 3), 0), groups=n, padding=1)


@exhibit("191926", "a convolution over a sharded width, and its gradient")
def convolution(put: Put, n: int) -> object:
    x = put(torch.randn(1, 2, 5, 4 * n), 3).requires_grad_()
    w = put(torch.randn(3, 2, 3, 3)).requires_grad_()
    return _grads(F.conv2d(x, w, padding=1).square().sum(), x, w)


@exhibit("139735", "a write to a slice of the sharded dim")
def write_to_slice(put: Put, n: int) -> object:
    x = put(torch.ones(n, 3), 0)
    x[:2].zero_()
    return x


@exhibit("147724", "one row of a sharded dim")
def select(put: Put, n: int) -> object:
    return put(torch.arange(n * 3.0).view(n, 3), 0)[1]


@exhibit("179136", "the gradient of an index")
def index(put: Put, n: int) -> object:
    x = put(torch.randn(3, n), 1).requires_grad_()
    return _grads(x[:, put(torch.tensor([1, 0, 1]))].square().sum(), x)


@exhibit("170934", "index_put on the sharded dim")
def index_put(put: Put, n: int) -> object:
    x = put(torch.zeros(n), 0)
    return x.index_put((put(torch.arange(n), 0),), put(torch.arange(1.0, n + 1), 0))


@exhibit("172350", "index_put of values that are sharded alike", rows=(4, 7))
def index_put_rows(put: Put, n: int) -> object:
    x, at = put(torch.zeros(n, n), 0), put(torch.arange(n))
    return x.index_put((at, at), put(torch.arange(1.0, n + 1), 0))


@exhibit("152717", "a boolean mask")
def mask(put: Put, n: int) -> object:
    x = torch.arange(n * 3.0).view(n, 3)
    return put(x, 0)[put(x % 2 == 0, 0)]


@exhibit("124990", "nonzero")
def nonzero(put: Put, n: int) -> object:
    return torch.nonzero(put(torch.arange(2 * n).view(n, 2) % 3, 0))


@exhibit("124990", "a diagonal")
def diagonal(put: Put, n: int) -> object:
    return torch.diagonal(put(torch.arange(n * 3.0).view(n, 3), 0))


@exhibit("144286", "view(dtype)")
def view_dtype(put: Put, n: int) -> object:
    return put(torch.arange(n * 2.0).view(n, 2), 0).view(torch.int32)


@exhibit("147578", "amax over a sharded dim")
def amax(put: Put, n: int) -> object:
    return put(torch.randn(n, 3), 0).amax(0)


@exhibit("173936", "argmax over a sharded dim")
def argmax(put: Put, n: int) -> object:
    return put(torch.randn(n, 3), 0).argmax(0)


@exhibit("151071", "cumsum over a sharded dim, and its gradient")
def cumsum(put: Put, n: int) -> object:
    x = put(torch.randn(n, 3), 0).requires_grad_()
    return _grads(x.cumsum(0).square().sum(), x)


@exhibit("167917", "detach_")
def detach(put: Put, n: int) -> object:
    return put(torch.ones(n, 3), 0).mul(2).detach_()


@exhibit("142190", "a matrix product in inference mode")
def inference(put: Put, n: int) -> object:
    x, w = put(torch.randn(n, 4)), put(torch.randn(4, n), 0)
    with torch.inference_mode():
        return torch.matmul(x, w)


@exhibit("172102", "a linear over a sharded sequence, and its gradients")
def linear(put: Put, n: int) -> object:
    x = put(torch.randn(2, n, 4), 1).requires_grad_()
    w, b = put(torch.ones(4, 4)).requires_grad_(), put(torch.ones(4)).requires_grad_()
    return _grads(F.linear(x, w, b).square().sum(), x, w, b)


@exhibit("103306", "shards, gathered by a product with one")
def gathered(put: Put, n: int) -> object:
    return put(torch.arange(n * 2.0).view(n, 2), 0) @ put(torch.eye(2))


@exhibit("115310", "the sum of rows and their gather")
def uneven_gather(put: Put, n: int) -> object:
    x = put(torch.arange(n * 2.0).view(n, 2), 0)
    return x, x.sum(1), x.t()


@exhibit("153354", "a plain tensor among the operands")
def mixed(put: Put, n: int) -> object:
    return put(torch.ones(n, 3), 0) + torch.arange(3.0)


@exhibit("own sweep", "the gradient of mse_loss over a sharded batch")
def mse(put: Put, n: int) -> object:
    x = put(torch.randn(n, 3), 0).requires_grad_()
    return _grads(F.mse_loss(x, put(torch.randn(n, 3), 0)), x)


@exhibit("own sweep", "the gradient of huber_loss over a sharded batch")
def huber(put: Put, n: int) -> object:
    x = put(torch.randn(n, 3), 0).requires_grad_()
    return _grads(F.huber_loss(x, put(torch.randn(n, 3), 0)), x)


@exhibit("own sweep", "the gradient of binary_cross_entropy over a sharded batch")
def bce(put: Put, n: int) -> object:
    x = put(torch.rand(n), 0).requires_grad_()
    return _grads(F.binary_cross_entropy(x, put((torch.arange(n) % 2).float(), 0)), x)


@exhibit("own sweep", "cross_entropy where ranks ignore different numbers of targets")
def ignored(put: Put, n: int) -> object:
    x, target = put(torch.randn(n, 3), 0).requires_grad_(), torch.arange(n) % 3
    target[0] = -100
    return _grads(F.cross_entropy(x, put(target, 0)), x)


@exhibit("own sweep", "integers: a partial value plus a replicated one")
def integers(put: Put, n: int) -> object:
    return put(torch.arange(n), 0).sum() + put(torch.tensor(1))


@exhibit("own sweep", "fill_ of a partial value")
def fill_partial(put: Put, n: int) -> object:
    return put(torch.ones(n), "sum").fill_(3.0)


@exhibit("own sweep", "sort over a sharded dim")
def sort(put: Put, n: int) -> object:
    return list(put(torch.randn(n, 3), 0).sort(0))


@exhibit("own sweep", "median over a sharded dim")
def median(put: Put, n: int) -> object:
    return put(torch.randn(n, 3), 0).median(0).values


@exhibit("own sweep", "searchsorted in a sharded sequence")
def searchsorted(put: Put, n: int) -> object:
    return torch.searchsorted(put(torch.arange(float(n)), 0), put(torch.tensor([0.5, 1.0])))


@exhibit("own sweep", "unfold along a sharded dim")
def unfold(put: Put, n: int) -> object:
    return put(torch.arange(float(n)), 0).unfold(0, 2, 1)


@exhibit("own sweep", "a reflecting pad of a sharded dim")
def pad(put: Put, n: int) -> object:
    return F.pad(put(torch.randn(1, 2, n), 2), (1, 1), mode="reflect")


@exhibit("own sweep", "cdist of sharded points")
def cdist(put: Put, n: int) -> object:
    return torch.cdist(put(torch.randn(n, 3), 0), put(torch.randn(4, 3)))


@exhibit("own sweep", "std over a sharded dim")
def std(put: Put, n: int) -> object:
    return put(torch.randn(n, 3), 0).std(0)


@exhibit("own sweep", "batch_norm over a sharded batch, and its gradient")
def batch_norm(put: Put, n: int) -> object:
    x = put(torch.randn(n, 3), 0).requires_grad_()
    return _grads(F.batch_norm(x, None, None, training=True).pow(3).sum(), x)


@exhibit("own sweep", "avg_pool over a sharded dim, and its gradient")
def avg_pool(put: Put, n: int) -> object:
    x = put(torch.randn(1, 2, 2 * n), 2).requires_grad_()
    return _grads(F.avg_pool1d(x, 3, 2, 1).square().sum(), x)


@exhibit("own sweep", "scatter_reduce into a sharded tensor")
def scatter_reduce(put: Put, n: int) -> object:
    return put(torch.zeros(n), 0).scatter_reduce(
        0, put(torch.arange(n) // 2, 0), put(torch.arange(1.0, n + 1), 0), "amax")


@exhibit("own sweep", "flip and roll of a sharded dim")
def flip(put: Put, n: int) -> object:
    x = put(torch.arange(float(n)), 0)
    return x.flip(0), x.roll(1)


@exhibit("own sweep", "causal attention over a sharded sequence")
def attention(put: Put, n: int) -> object:
    q, k, v = (put(torch.randn(1, 2, n, 4), 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@exhibit("jax 15680", "the FFT of a dim that is not sharded, and of one that is")
def fft(put: Put, n: int) -> object:
    x = put(torch.randn(n, 4), 0)
    return torch.fft.fft(x, dim=1), torch.fft.fft(x, dim=0)

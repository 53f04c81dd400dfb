"""More bodies of blocks: recurrences, norms with state, weights that are made from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

__all__ = ["KINDS", "Cube"]


class _Recurrent(nn.Module):
    def __init__(self, width: int, kind: Any) -> None:
        super().__init__()
        self.cell = kind(width, width, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.cell(x)[0]


class _Both(nn.Module):
    """A recurrence in both directions, its first state learnt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.start = nn.Parameter(torch.randn(2, 1, width // 2) / 4)

    def forward(self, x: Any) -> Any:
        return self.cell(x, self.start.expand(-1, x.shape[0], -1).contiguous())[0]


class _Batch(nn.Module):
    """Statistics over the whole batch, and running ones."""

    def __init__(self, width: int, kind: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = kind(width)

    def forward(self, x: Any) -> Any:
        rows = x.flatten(0, 1)
        return (self.norm(rows) if rows.shape[0] > 1 else rows).view_as(x)


class _Reused(nn.Module):
    """One layer twice, the second time with its weight transposed, and a slice of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        half = x.shape[-1] // 2
        part = F.linear(x[..., :half], self.lin.weight[:, :half])
        return F.linear(self.lin(x).tanh(), self.lin.weight.T) + part


class Cube(torch.autograd.Function):
    """A Function of the user's, of rows and a weight for each column."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x ** 3 * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return 3 * x ** 2 * weight * grads[0], (grads[0] * x ** 3).flatten(0, -2).sum(0)


class _Custom(nn.Module):
    """A Function of the user's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width) / 8)

    def forward(self, x: Any) -> Any:
        return Cube.apply(x, self.scale)


class _Made(nn.Module):
    """A weight that is the output of a layer; its code is a parameter without other uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(2)), nn.Linear(2, width * width)

    def forward(self, x: Any) -> Any:
        weight = self.maker(self.code).view(x.shape[-1], -1)
        return F.linear(x, weight / weight.norm())


class _Written(nn.Module):
    """What a layer gives, and buffers, written in place, and a running mean without gradient."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        if self.training:  # first: a checkpoint need not come to what nothing is saved after
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
                self.count += 1
        out = self.lin(x).mul_(0.5)
        out[:, 0] += x[:, -1]
        return F.relu(out) - self.mean


class _Prefix(nn.Module):
    """Learnt tokens in front, which attention sees, and which are dropped again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Parameter(torch.randn(1, 2, width)), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        every = torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], 1)
        score = self.mix(every) @ every.transpose(1, 2) / x.shape[-1]
        return (score.softmax(-1) @ every)[:, 2:]


class _Listed(nn.Module):
    """Parameters in lists, one of them without dims, and one that is never in a module's call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(width) / 4 for _ in range(2))
        self.last = nn.ParameterDict({"of": torch.tensor(0.5)})

    def forward(self, x: Any) -> Any:
        return sum(torch.sin(x * scale) for scale in self.scales) * self.last["of"].exp()


class _Masked(nn.Module):
    """The sum of some tokens, picked by what they are: a mask, a maximum, a sort."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x: Any) -> Any:
        score = self.score(x).squeeze(-1)
        most, place = score.max(1)
        picked = x.gather(1, place[:, None, None].expand(-1, 1, x.shape[-1]))
        kept = torch.where((score < most[:, None]).unsqueeze(-1), x, picked)
        return kept.masked_fill((score > 1).unsqueeze(-1), 0) * score.sort(1).values.unsqueeze(-1)


class _Symmetric(nn.Module):
    """A parametrization of the user's."""

    def forward(self, weight: Any) -> Any:
        return weight.triu() + weight.triu(1).T


def _parametrized(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    register_parametrization(layer, "weight", _Symmetric())
    return layer


class _Groups(nn.Module):
    """Norms over channels and over tokens, and one without a mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        num = 1 if width == 2 else 2  # torch refuses groups of one value
        self.groups, self.square = nn.GroupNorm(num, width, 0.1), nn.RMSNorm(width, 0.1)

    def forward(self, x: Any) -> Any:
        return self.square(self.groups(x.transpose(1, 2)).transpose(1, 2))


class _Heads(nn.Module):
    """torch's own module of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return self.heads(x, x, x)[0]


class _Several(nn.Module):
    """Sums along the tokens, products of three, and a layer that is called with keywords."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pair, self.mix = nn.Bilinear(width, width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        both = torch.einsum("btw,bsw->bts", x, before).tril() @ self.mix(input=x)
        return self.pair(x, before) + both.tanh()


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "lstm": lambda width: _Recurrent(width, nn.LSTM), "gru": _Both,
    "batch": _Batch, "sync": lambda width: _Batch(width, nn.SyncBatchNorm),
    "weight norm": lambda width: weight_norm(nn.Linear(width, width)),
    "spectral": lambda width: spectral_norm(nn.Linear(width, width)),
    "reused": _Reused, "custom": _Custom, "made": _Made, "written": _Written,
    "orthogonal": lambda width: orthogonal(nn.Linear(width, width)),
    "parametrized": _parametrized, "groups": _Groups, "heads": _Heads, "several": _Several,
    "prefix": _Prefix, "listed": _Listed, "masked": _Masked,
}

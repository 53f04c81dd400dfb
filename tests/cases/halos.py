"""Fields in windows: convolutions and pools over sharded positions, judged to second order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.cases import seed_of
from tests.effort import EFFORT
from tests.harness import held
from tests.oracle import check
from weft import Layout, P

WAYS: dict[str, tuple[dict[str, int], Any, dict[int, tuple[int, ...]]]] = {
    "rows": ({"x": 4}, ("x",), {}),
    "two ranks": ({"x": 2}, ("x",), {}),
    "uneven": ({"x": 3}, ("x",), {}),
    "ragged": ({"x": 3}, ("x",), {0: (1, 5, 2)}),
    "one row each": ({"x": 8}, ("x",), {}),
    "empty": ({"x": 4}, ("x",), {0: (5, 0, 3, 0)}),
    "first empty": ({"x": 3}, ("x",), {0: (0, 1, 7)}),
    "nested": ({"x": 2, "y": 2}, (("y", "x"),), {}),
    "grid": ({"x": 2, "y": 2}, ("x", "y"), {}),
    "ragged grid": ({"x": 2, "y": 3}, ("x", "y"), {0: (7, 1), 1: (1, 0, 6)}),
    "columns": ({"y": 3}, (None, "y"), {}),
}
"""Mesh, the axes over positions, and sizes of shards of 8 rows and 7 columns."""

_ALWAYS = ("one row each", "empty", "ragged grid")


def ways_of(name: str) -> list[str]:
    """The ways in which a field is tried: those that ask most, and of the others as many as
    `EFFORT` says (1: all), drawn by its name."""
    others = [way for way in WAYS if way not in _ALWAYS]
    count = min(len(others), math.floor(EFFORT * len(others)))
    return [*_ALWAYS, *random.Random(seed_of(name)).sample(others, count)]


@dataclass(frozen=True, slots=True)
class Field:
    """A program on a field and weights."""

    name: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def _anywhere(x: Tensor, *sizes: int) -> Tensor:
    """For each element of x a place in planes of these sizes, none of them twice."""
    planes, num = math.prod(x.shape[: -len(sizes)]), math.prod(x.shape[-len(sizes) :])
    places = 31 * torch.arange(num) + 7 * torch.arange(planes)[:, None]
    return (places % math.prod(sizes)).view(x.shape)


def _conv(name: str, kernel: Sequence[int], groups: int = 1, **options: Any) -> Field:
    num = len(kernel)
    function = (F.conv1d, F.conv2d, F.conv3d)[num - 1]
    field = (2, 4, *(8, 7, 3)[:num])
    return Field(
        name, lambda x, w, b: function(x, w, b, groups=groups, **options),
        (field, (8, 4 // groups, *kernel), (8,)),
    )


def _transposed(name: str, kernel: Sequence[int], groups: int = 1, **options: Any) -> Field:
    num = len(kernel)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[num - 1]
    field = (2, 4, *(8, 7, 3)[:num])
    return Field(
        name, lambda x, w, b: function(x, w, b, groups=groups, **options),
        (field, (4, 8 // groups, *kernel), (8,)),
    )


def _padded(mode: str) -> Field:
    """As nn.Conv2d does it for a padding mode: the field is padded, then convolved."""
    return Field(
        mode, lambda x, w: F.conv2d(F.pad(x, (1, 1, 2, 2), mode), w, stride=(2, 1)),
        ((2, 4, 8, 7), (3, 4, 5, 3)),
    )


def _by_slices(u: Tensor) -> Tensor:
    """Three steps between walls: reads are joined in the third."""
    for _ in range(3):
        inner = u[:, :, 1:-1, 1:-1]
        around = u[:, :, :-2, 1:-1] + u[:, :, 2:, 1:-1] + u[:, :, 1:-1, :-2] + u[:, :, 1:-1, 2:]
        new = u.clone()
        new[:, :, 1:-1, 1:-1] = (inner + 0.1 * (around - 4 * inner)).sin()
        u = new
    return u


def _by_rolls(u: Tensor) -> Tensor:
    for _ in range(3):
        around = u.roll(1, 2) + u.roll(-1, 2) + u.roll(1, 3) + u.roll(-1, 3)
        u = (u + 0.1 * (around - 4 * u)).sin()
    return u


def _in_place(u: Tensor) -> Tensor:
    u = u.clone()
    for _ in range(3):
        u[:, :, 1:-1] += 0.1 * (u[:, :, 2:] - u[:, :, :-2]).sin()
    return u


def _by_fluxes(u: Tensor) -> Tensor:
    for _ in range(3):
        flow = (u[:, :, 1:] + u[:, :, :-1]) * (u[:, :, 1:] - u[:, :, :-1])
        inner = u[:, :, 1:-1] - 0.1 * (flow[:, :, 1:] - flow[:, :, :-1])
        u = torch.cat([u[:, :, :1], inner, u[:, :, -1:]], 2)
    return u


def _apart(u: Tensor) -> Tensor:
    """Slices of slices, one of which is used where it lies as well."""
    some = u[:, :, 2:]
    inner = some[:, :, :-1, 1:]
    return (inner - u[:, :, :-3, :-1]) * inner.exp() + (some * 1.5)[:, :, 1:, 1:]


def _rolled_by_cat(u: Tensor) -> Tensor:
    """Both ends beside each other; other parts of `u` in another order, with a roll of it."""
    for _ in range(3):
        around = torch.cat([u[:, :, 1:], u[:, :, :1]], 2)
        around = around + torch.cat([u[:, :, -3:], u[:, :, :-3]], 2)
        halves = torch.cat([u[:, :, :, 4:], u[:, :, :, :4]], 3) - u.roll(1, 3)
        u = (u + 0.1 * around * halves).sin()
    return u


def _pool(name: str, function: Callable[..., Any], num: int, *args: Any, **options: Any) -> Field:
    return Field(name, lambda x: function(x, *args, **options), ((2, 3, *(8, 7, 3)[:num]),))


FIELDS = [
    _conv("line", (3,), padding=1),
    _conv("plain", (3, 3), padding=1),
    _conv("valid", (3, 3)),
    _conv("strided", (3, 3), padding=1, stride=2),
    _conv("even", (4, 2), padding=(1, 0), stride=(2, 1)),
    _conv("patches", (2, 2), stride=2),
    _conv("gaps", (2, 1), stride=(3, 2)),
    _conv("dilated", (3, 2), padding=(2, 1), dilation=(2, 3)),
    _conv("far", (7, 7), padding=3),
    _conv("same", (3, 3), padding="same"),
    _conv("same_even", (4, 2), padding="same"),
    _conv("groups", (3, 3), groups=2, padding=1),
    _conv("by_channel", (5, 3), groups=4, padding=(2, 1)),
    _conv("points", (1, 1)),
    _conv("solid", (3, 2, 3), padding=(1, 0, 1), stride=(2, 1, 1)),
    _transposed("back", (4, 4), stride=2, padding=1),
    _transposed("back_line", (3,), stride=2, padding=1, output_padding=1),
    _transposed("back_gaps", (2, 1), stride=(3, 2), output_padding=(2, 0)),
    _transposed("back_dilated", (3, 2), padding=(1, 0), dilation=(2, 3)),
    _transposed("back_groups", (5, 3), groups=2, stride=(1, 2), padding=(2, 2)),
    _transposed("back_solid", (2, 2, 3), stride=2, output_padding=1),
    Field("one_sample", lambda x, w: F.conv2d(x, w, padding=1), ((4, 8, 7), (3, 4, 3, 3))),
    Field("convolution", lambda x, w, b: torch.ops.aten.convolution.default(
        x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), ((2, 4, 8, 7), (3, 4, 3, 3), (3,))),
    *[_padded(mode) for mode in ("circular", "reflect", "replicate")],
    Field("roll", lambda x: x.roll((3, 5, -2, 1), (2, 2, 3, 0)), ((2, 3, 8, 7),)),
    Field("pad_reflect", lambda x: F.pad(x, (6, -2, -3, 7), "reflect"), ((2, 3, 8, 7),)),
    Field("pad_replicate", lambda x: F.pad(x, (9, 1, -1, 2), "replicate"), ((2, 3, 8, 7),)),
    Field("pad_circular", lambda x: F.pad(x, (7, 7, 8, 1), "circular"), ((2, 3, 8, 7),)),
    Field("pad_cropped", lambda x: F.pad(x, (1, 2, 3, -1), "circular"), ((2, 3, 8, 7),)),
    Field("windows", lambda x: x.unfold(2, 3, 2).unfold(3, 2, 1), ((2, 3, 8, 7),)),
    *[Field(one.__name__[1:], one, ((2, 3, 8, 7),))
      for one in (_by_slices, _by_rolls, _in_place, _by_fluxes, _apart, _rolled_by_cat)],
    Field("gradients", lambda x: torch.stack(torch.gradient(x, dim=(2, 3))), ((2, 3, 8, 7),)),
    Field("diff", lambda x: x.diff(n=2, dim=2, prepend=x[:, :, :1]), ((2, 3, 8, 7),)),
    Field("unfold", lambda x: F.unfold(x, 3, padding=1), ((2, 3, 8, 7),)),
    Field("unfold_and_fold", lambda x: F.fold(
        F.unfold(x, (3, 2), 1, (1, 0), (2, 1)), (8, 7), (3, 2), 1, (1, 0), (2, 1)),
          ((2, 3, 8, 7),)),
    Field("fold", lambda x: F.fold(x, (5, 4), (2, 3)), ((2, 12, 8),)),
    Field("fold_gaps", lambda x: F.fold(x, (5, 8), (3, 2), (2, 1), (1, 0), 2), ((2, 12, 8),)),
    Field("unpool", lambda x: F.max_unpool2d(*F.max_pool2d(
        x, 2, return_indices=True), [2, 2], output_size=(8, 7)), ((2, 3, 8, 7),)),
    Field("unpool_line", lambda x: F.max_unpool1d(*F.max_pool1d(
        x, 3, 2, return_indices=True), [3], [2], output_size=(8,)), ((2, 3, 8),)),
    Field("unpool_far", lambda x: F.max_unpool2d(
        x, _anywhere(x, 15, 13), [2, 2], output_size=(15, 13)), ((2, 3, 8, 7),)),
    Field("unpool_solid", lambda x: F.max_unpool3d(
        x, _anywhere(x, 8, 14, 5), (1, 2, 2), output_size=(8, 14, 5)), ((3, 8, 7, 3),)),
    _pool("max", F.max_pool2d, 2, 2),
    _pool("max_overlapping", F.max_pool2d, 2, 3, 2, 1),
    _pool("max_places", F.max_pool2d, 2, 3, 2, 1, return_indices=True),
    _pool("max_ceil", F.max_pool2d, 2, 3, 2, 1, dilation=(2, 1), ceil_mode=True,
          return_indices=True),
    _pool("max_points", F.max_pool2d, 2, 1, return_indices=True),
    _pool("max_line", F.max_pool1d, 1, 3, 1, 1),
    _pool("max_solid", F.max_pool3d, 3, 2, 1, return_indices=True),
    _pool("mean", F.avg_pool2d, 2, 2),
    _pool("mean_padded", F.avg_pool2d, 2, 3, 2, 1),
    _pool("mean_inside", F.avg_pool2d, 2, 3, 2, 1, count_include_pad=False),
    _pool("mean_ceil", F.avg_pool2d, 2, 4, 3, 2, ceil_mode=True),
    _pool("mean_by", F.avg_pool2d, 2, 3, 1, 1, divisor_override=5, count_include_pad=False),
    _pool("mean_line", F.avg_pool1d, 1, 3, 2, 1, count_include_pad=False),
    _pool("mean_solid", F.avg_pool3d, 3, 3, 1, 1),
]


def outcome(field: Field, operands: Sequence[Any]) -> list[Any]:
    """Results, gradients, and gradients of the gradients' squares; these in the order of dims."""
    out = field.fn(*operands)
    values = [out] if isinstance(out, Tensor) else list(out)
    first = torch.autograd.grad((values[0] ** 3).sum(), operands, create_graph=True)
    squares = torch.stack([one.square().sum() for one in first])
    second = torch.autograd.grad(squares.sum(), operands)
    return [*values, *[one.contiguous() for one in (*first, *second)]]


def drawn(field: Field) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=torch.float64) for shape in field.shapes]


def layout_of(mesh: Any, shape: Sequence[int], way: str) -> Layout:
    """The field's layout: its first dim of positions is 8 long."""
    _, axes, sizes = WAYS[way]
    first = shape.index(8)
    axes = axes[: len(shape) - first]
    return Layout(mesh, shape, P(*[None] * first, *axes), sizes={
        first + dim: its for dim, its in sizes.items() if dim < len(axes)})


def judge(field: Field, way: str, got: Sequence[Sequence[Any]]) -> None:
    expected = outcome(field, [one.requires_grad_() for one in drawn(field)])
    for place, due in enumerate(expected):
        most = due.abs().max().item() if due.is_floating_point() and due.numel() else 0.0
        check(due.detach(), [mine[place] for mine in got], f"{field.name} {way} {place}",
              1e-12 * max(most, 1.0) if due.is_floating_point() else None)


def on_rank(mesh: Any, field: Field, way: str) -> list[Any]:
    x, *weights = drawn(field)
    layouts = [layout_of(mesh.abstract, x.shape, way), *[
        Layout.replicated(mesh.abstract, one.shape) for one in weights]]
    operands = [
        weft.distribute_tensor(one, mesh, layout, src_data_rank=None).requires_grad_()
        for one, layout in zip([x, *weights], layouts)
    ]
    found = outcome(field, operands)
    assert set(layouts[0].sharded_axes) <= set(found[0].sharding.sharded_axes)
    return [held(one.detach()) for one in found]

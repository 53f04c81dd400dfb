"""Interpolation and adaptive pools of sharded positions, in all modes, judged to second order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.cases.halos import WAYS, Field, judge, on_rank, ways_of
from tests.harness import held
from tests.oracle import check
from weft import P
from weft.ops import taps
from weft.testing import peak_memory


def _resize(name: str, num: int, *args: Any, **options: Any) -> Field:
    return Field(name, lambda x: F.interpolate(x, *args, **options),
                 ((2, 3, *(8, 7, 3)[:num]),))


def _pool(name: str, function: Any, num: int, *args: Any, **options: Any) -> Field:
    return Field(name, lambda x: function(x, *args, **options), ((2, 3, *(8, 7, 3)[:num]),))


FIELDS = [
    _resize("nearest", 2, scale_factor=2),
    _resize("nearest_line", 1, 13),
    _resize("nearest_solid", 3, (11, 7, 5)),
    _resize("nearest_down", 2, (5, 10)),
    _resize("nearest_exact", 2, scale_factor=(1.7, 0.6), mode="nearest-exact"),
    _resize("nearest_exact_solid", 3, (16, 6, 4), mode="nearest-exact"),
    _resize("linear", 1, scale_factor=2, mode="linear"),
    _resize("linear_corners", 1, 11, mode="linear", align_corners=True),
    _resize("bilinear", 2, scale_factor=2, mode="bilinear"),
    _resize("bilinear_scales", 2, scale_factor=(1.3, 2.6), mode="bilinear"),
    _resize("bilinear_recomputed", 2, scale_factor=(1.3, 0.6), mode="bilinear",
            recompute_scale_factor=True),
    _resize("bilinear_corners", 2, (16, 3), mode="bilinear", align_corners=True),
    _resize("bilinear_smooth", 2, (3, 11), mode="bilinear", antialias=True),
    _resize("bicubic", 2, (16, 14), mode="bicubic"),
    _resize("bicubic_corners", 2, (5, 9), mode="bicubic", align_corners=True),
    _resize("bicubic_smooth", 2, (5, 9), mode="bicubic", antialias=True),
    _resize("trilinear", 3, (4, 14, 5), mode="trilinear"),
    _resize("trilinear_corners", 3, (12, 7, 4), mode="trilinear", align_corners=True),
    _resize("area", 2, (3, 14), mode="area"),
    _pool("mean_parts", F.adaptive_avg_pool2d, 2, 4),
    _pool("mean_more", F.adaptive_avg_pool1d, 1, 11),
    _pool("mean_solid", F.adaptive_avg_pool3d, 3, (3, 5, 2)),
    _pool("max_parts", F.adaptive_max_pool2d, 2, (4, 3), return_indices=True),
    _pool("max_more", F.adaptive_max_pool1d, 1, 11, return_indices=True),
    _pool("mean_aligned", F.adaptive_avg_pool2d, 2, (4, 7)),
    _pool("max_aligned", F.adaptive_max_pool3d, 3, (4, 7, 3), return_indices=True),
    _pool("max_solid", F.adaptive_max_pool3d, 3, (3, 5, 1), return_indices=True),
]


@pytest.mark.parametrize("field, way", [
    pytest.param(field, way, id=f"{field.name}-{way}")
    for field in FIELDS for way in ways_of(field.name)
])
def test_fields_stay_sharded(field: Field, way: str) -> None:
    """Every rank's part of results and gradients; the axes that shard x shard the result."""
    axes = WAYS[way][0]
    judge(field, way, weft.testing.run(lambda mesh: on_rank(mesh, field, way), mesh=axes))


SOLID = [field for field in FIELDS if len(field.shapes[0]) == 5]


@pytest.mark.parametrize("spec", [P(None, None, "x", "y", "z"), P("x", "y", "z"),
                                  P("x", None, "z", None, "y")], ids=str)
@pytest.mark.parametrize("field", SOLID, ids=lambda it: it.name)
def test_all_dims_sharded(field: Field, spec: Any) -> None:
    """Three dims of positions; batch and channels as well."""
    torch.manual_seed(3)
    x = torch.randn(field.shapes[0], dtype=torch.float64)

    def outcome(x: Any) -> list[Any]:
        out = field.fn(x.requires_grad_())
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        (grad,) = torch.autograd.grad((outs[0] ** 3).sum(), x)
        return [*[one.detach() for one in outs], grad]

    got = weft.testing.run(
        lambda mesh: [held(one) for one in outcome(weft.distribute_tensor(
            x.clone(), mesh, spec, src_data_rank=None))], mesh={"x": 2, "y": 2, "z": 2})
    for place, due in enumerate(outcome(x.clone())):
        check(due, [mine[place] for mine in got], f"{field.name} {place}", 1e-11)


MODES: dict[str, dict[str, Any]] = {
    "nearest": {}, "nearest-exact": {}, "bilinear": {}, "bicubic": {},
    "bilinear, corners": {"align_corners": True}, "bilinear, smooth": {"antialias": True},
}
LENGTHS = [(107, 41), (60, 180), (24, 96), (82, 164), (190, 57)]


NARROW = [(mode, dtype) for mode in MODES for dtype in (torch.float32, torch.float16, torch.uint8)
          if dtype != torch.float16 or "smooth" not in mode]  # torch has no kernel of these


@pytest.mark.parametrize("mode, dtype", NARROW, ids=str)
def test_single_precision(mode: str, dtype: torch.dtype) -> None:
    """Narrow floats within rounding; nearest takes the very places that torch's kernel takes."""
    name, options = mode.split(",")[0], MODES[mode]

    def resized(x: Any, after: int) -> Any:
        return F.interpolate(x, (after, 6), mode=name, **options)

    for before, after in LENGTHS:
        torch.manual_seed(before)
        x = (torch.rand(1, 2, before, 5) * 100).to(dtype)
        due = resized(x, after)
        got = weft.testing.run(lambda mesh, x=x, after=after: held(resized(
            weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None), after)),
            mesh={"x": 3})
        exact = name.startswith("nearest") or dtype == torch.uint8
        size = {torch.float32: 1e-3, torch.float16: 0.2}.get(dtype)
        check(due, got, f"{mode} {before} {after}", None if exact else size)


CHOICES = [(41, 246), (47, 235), (50, 315), (55, 121), (123, 369), (161, 23), (64, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_kernels_own_places(mode: str, channels_last: bool, dtype: torch.dtype) -> None:
    """torch's kernels differ where a source falls upon a border: by memory format, by dtype, and
    by the size of the image. Each is repeated."""
    for before, after in CHOICES:
        for side in (3, 140):
            x = torch.arange(before, dtype=dtype).view(1, 1, -1, 1).expand(1, 4, before, 2)
            x = x.contiguous(memory_format=torch.channels_last) if channels_last else x.contiguous()
            due = F.interpolate(x, (after, side), mode=mode)

            def program(mesh: Any, x: Tensor = x, due: Tensor = due) -> Any:
                whole = weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None)
                return held(F.interpolate(whole, tuple(due.shape[2:]), mode=mode))

            check(due, weft.testing.run(program, mesh={"x": 2}), f"{mode} {before} {after}", None)


def test_places_that_round_up_to_a_border() -> None:
    """In double precision torch rounds a source to single before the floor."""
    x = torch.arange(484.0, dtype=torch.float64).view(1, 1, -1)
    got = weft.testing.run(lambda mesh: held(F.interpolate(weft.distribute_tensor(
        x, mesh, P(None, None, "x"), src_data_rank=None), 822)), mesh={"x": 3})
    check(F.interpolate(x, 822), got, "484 822", None)


@pytest.mark.parametrize("mode, corners, given, after", [
    ("linear", False, (2414,), (4103,)), ("linear", True, (9024,), (15917,)),
    ("bicubic", False, (6004, 1), (16514, 2)),
])
def test_weights_of_sources_that_round_up(
    mode: str, corners: bool, given: Any, after: Any
) -> None:
    """As above; the source then lies upon the place, and not just before it."""
    torch.manual_seed(0)
    x = torch.rand(1, 1, *given, dtype=torch.float64).requires_grad_()
    due = F.interpolate(x, after, mode=mode, align_corners=corners)
    (due * due.detach()).sum().backward()

    def program(mesh: Any) -> tuple[Tensor, Tensor]:
        mine = weft.distribute_tensor(x.detach(), mesh, P(None, None, "x")).requires_grad_()
        out = F.interpolate(mine, after, mode=mode, align_corners=corners)
        (out * out.detach()).sum().backward()
        return out.full_tensor(), mine.grad.full_tensor()

    for out, grad in weft.testing.run(program, mesh={"x": 3}):
        torch.testing.assert_close(out, due, rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, x.grad, rtol=0, atol=1e-12)


def test_a_channel_of_nothing() -> None:
    """Ranks without any channel have the same graph, and torch's kernel never sees them."""
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def program(mesh: Any) -> Any:
        mine = weft.distribute_tensor(x, mesh, P(None, "x", "y"), src_data_rank=None)
        out = F.interpolate(mine.requires_grad_(), 12, mode="linear")
        out.square().sum().backward()
        assert mine.grad is not None
        return held(out.detach()), held(mine.grad)

    due = F.interpolate(whole := x.clone().requires_grad_(), 12, mode="linear")
    due.square().sum().backward()
    got = weft.testing.run(program, mesh={"x": 4, "y": 2})
    check(due.detach(), [out for out, _ in got], "out", 1e-12)
    assert whole.grad is not None
    check(whole.grad, [grad for _, grad in got], "grad", 1e-12)


# Bytes.

ROW = 2 * 3 * 7 * 8
"""Bytes of a row of a field of 2 x 3 x 8 x 7."""

BYTES = {
    "nearest": [0, 0, 0, 0],
    "bilinear": [ROW, 2 * ROW, 2 * ROW, ROW],
    "bicubic": [2 * ROW, 4 * ROW, 4 * ROW, 2 * ROW],
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_the_rows_read(name: str) -> None:
    (field,) = [one for one in FIELDS if one.name == name]

    def program(mesh: Any) -> tuple[int, int]:
        x = torch.randn(field.shapes[0], dtype=torch.float64)
        x = weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None)
        with weft.explain() as log:
            field.fn(x.requires_grad_()).sum().backward()
        assert {event.collective for event in log.events} <= {"Halo", "HaloSum", "AllReduce"}
        totals = [sum(event.nbytes for event in log.events if event.collective == name)
                  for name in ("Halo", "HaloSum")]
        return totals[0], totals[1]

    got = weft.testing.run(program, mesh={"x": 4})
    assert [one for one, _ in got] == BYTES[name]
    assert sum(two for _, two in got) == sum(BYTES[name])


# Memory, forward and backward, in parts of one rank in four of what one process takes.


def _doubled(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size, mode="bilinear")


ROOM = {
    "max": (F.adaptive_max_pool2d, (32, 48), 1.05), "mean": (F.adaptive_avg_pool2d, (32, 48), 1.05),
    # Two rows of seven are more than a quarter, and they are read beside a rank's own rows.
    "max of sevenths": (F.adaptive_max_pool2d, (7, 7), 1.75),
    "mean of sevenths": (F.adaptive_avg_pool2d, (7, 7), 1.75),
    "bilinear": (_doubled, (256, 256), 1.6),
    "max of windows": (lambda x, _: F.max_pool2d(x, 3, 2, 1), (), 1.45),
    "mean of windows": (lambda x, _: F.avg_pool2d(x, 3, 2, 1), (), 1.5),
}


@pytest.mark.parametrize("name", ROOM)
def test_resampling_takes_a_part_of_the_memory(name: str) -> None:
    function, size, most = ROOM[name]
    x = torch.randn(1, 8, 128, 128, requires_grad=True)
    with peak_memory(x) as alone:
        due = function(x, size)
        due.sum().backward()

    def program(mesh: Any) -> int:
        mine = weft.distribute_tensor(x.detach(), mesh, P(None, None, "x")).requires_grad_()
        with peak_memory(mine) as memory:
            out = function(mine, size)
            out.sum().backward()
        torch.testing.assert_close(out.full_tensor(), due)
        torch.testing.assert_close(mine.grad.full_tensor(), x.grad)
        return memory.peak

    assert max(weft.testing.run(program, mesh={"x": 4})) <= most / 4 * alone.peak


LONG = {
    "nearest": (4, 3.0, 1.05), "nearest-exact": (4, 0.7, 1.1), "linear": (1, 2.0, 2.0),
}
"""Channels, the scale, and the most that a rank may take, in parts of one process's peak."""


@pytest.mark.parametrize("mode", LONG)
def test_a_long_dim_takes_a_part_of_the_memory(mode: str) -> None:
    """Its places are computed where ranks need them, in the first call too; where a kernel on the
    box copies what it copies on the whole, no places are kept. Weights are not kept either."""
    channels, scale, most = LONG[mode]
    x = torch.randn(1, channels, 160_000 // channels, dtype=torch.float64, requires_grad=True)
    with peak_memory(x) as alone:
        due = F.interpolate(x, scale_factor=scale, mode=mode)
        due.sum().backward()

    def program(mesh: Any) -> int:
        mine = weft.distribute_tensor(x.detach(), mesh, P(None, None, "x")).requires_grad_()
        with peak_memory(mine) as memory:
            out = F.interpolate(mine, scale_factor=scale, mode=mode)
            out.sum().backward()
        torch.testing.assert_close(out.full_tensor(), due)
        torch.testing.assert_close(mine.grad.full_tensor(), x.grad)
        return memory.peak

    assert max(weft.testing.run(program, mesh={"x": 4})) <= most / 4 * alone.peak


@pytest.mark.parametrize("before, after", [(40, 64), (63, 21), (50, 100), (7, 7), (100, 1)])
def test_tables_of_long_dims_say_the_same(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = "linear", "cubic", "linear_aa", "cubic_aa", "lanczos_aa"
    dims = [taps.Resized(mode, before, after, aligned, None, torch.float32)
            for mode in modes for aligned in (False, True)]
    dims += [taps.Nearest(before, after, None, exact) for exact in (False, True)]
    short = [taps.table_of(dim) for dim in dims]
    monkeypatch.setattr(taps, "_SHORT", 0)
    for one, other in zip(short, map(taps.table_of, dims)):
        assert one.starts == tuple(other.starts) and one.stops == tuple(other.stops)
        assert list(one.starts) == sorted(one.starts) and list(one.stops) == sorted(one.stops)
        assert one.overlap(after) == other.overlap(after)
        assert one.read(0, after) == other.read(0, after)

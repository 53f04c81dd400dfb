"""`grid_sample` of images whose positions are sharded, in all modes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from tests.cases.halos import WAYS
from tests.harness import held
from tests.oracle import check
from weft import Layout, P
from weft.testing import peak_memory

MODES = ["bilinear", "nearest", "bicubic"]
PADS = ["zeros", "border", "reflection"]
SAMPLERS = list(itertools.product(MODES, PADS, [False, True]))


def _identity(*lengths: int, aligned: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """The grid whose points are the places themselves, last dim first."""
    lines = [torch.linspace(-1, 1, n, dtype=dtype) if aligned
             else (2 * torch.arange(n, dtype=dtype) + 1) / n - 1 for n in lengths]
    return torch.stack(torch.meshgrid(*reversed(lines), indexing="xy"), -1)[None] if (
        len(lengths) == 2) else torch.stack(torch.meshgrid(*lines, indexing="ij")[::-1], -1)[None]


def _grids(lengths: tuple[int, ...], aligned: bool) -> dict[str, Tensor]:
    """Per name, a grid of two samples, of positions of another length than the image's."""
    torch.manual_seed(5)
    smooth = _identity(*[n + 1 for n in lengths], aligned=aligned).repeat(
        2, *[1] * (len(lengths) + 1))
    smooth = smooth + 0.15 * torch.rand_like(smooth) - 0.1
    return {"smooth": smooth, "far": smooth.flip(1) * 2.5, "one point": smooth[:, :1, :1] * 0.3}


def _outcome(x: Any, grid: Any, *args: Any) -> list[Any]:
    out = F.grid_sample(x.requires_grad_(), grid.requires_grad_(), *args)
    grads = torch.autograd.grad(out, (x, grid), out.detach().cos())
    return [out.detach(), *grads]


def _judge(x: Tensor, grid: Tensor, args: Any, axes: Any, of_x: Any, of_grid: Any,
           size: float = 1e-11) -> None:
    def on_rank(mesh: Any) -> list[Any]:
        mine = [weft.distribute_tensor(
            one.clone(), mesh, Layout(mesh, one.shape, *way), src_data_rank=None)
            for one, way in ((x, of_x), (grid, of_grid))]
        return [held(one) for one in _outcome(*mine, *args)]

    got = weft.testing.run(on_rank, mesh=axes)
    for place, due in enumerate(_outcome(x.clone(), grid.clone(), *args)):
        most = max(1.0, due.abs().max().item())
        check(due, [mine[place] for mine in got], f"{args} {place}", size * most)


@pytest.mark.parametrize("at, way", [*enumerate(WAYS)])
def test_positions_stay_sharded(at: int, way: str) -> None:
    """Every rank's part of the result and of both gradients, for grids sharded as the image is."""
    axes, spec, sizes = WAYS[way]
    torch.manual_seed(2)
    x = torch.randn(2, 3, 8, 7, dtype=torch.float64)
    cuts = {dim + 2: given for dim, given in sizes.items()}
    for sampler in SAMPLERS[at :: len(WAYS)]:
        for name in ("smooth", "far"):
            grid = _grids((8, 7), sampler[2])[name]
            _judge(x, grid, sampler, axes, (P(None, None, *spec), cuts), (P(None, *spec), {}))


ACROSS: dict[str, tuple[Any, Any]] = {
    "grid whole": (P(None, None, "x", "y"), P()),
    "grid turned": (P(None, None, "x", "y"), P(None, "y", "x")),
    "grid of another dim": (P(None, None, None, ("x", "y")), P(None, ("y", "x"))),
    "grid by batch": (P(None, None, "x", "y"), P("x", None, "y")),
    "image by batch": (P("x", None, "y"), P(None, "x", "y")),
    "grid of another batch": (P("x", None, "y"), P("y", "x")),
    "channels": (P(None, "x", "y"), P(None, "x", None)),
    "partial": (P(None, None, "x", partial={"y": "sum"}), P(None, None, "y")),
    "grid partial": (P(None, None, "x"), P(None, "x", partial={"y": "sum"})),
}


@pytest.mark.parametrize("name", ACROSS)
def test_operands_sharded_apart(name: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 3, 8, 7, dtype=torch.float64)
    for grid in _grids((8, 7), False).values():
        _judge(x, grid, ("bilinear", "border", False), {"x": 2, "y": 3},
               (ACROSS[name][0],), (ACROSS[name][1],))


@pytest.mark.parametrize("spec", [("x", "y", "z"), (None, ("z", "x"), "y"), ("y", None, "x")])
@pytest.mark.parametrize("mode, pad", [("bilinear", "zeros"), ("bilinear", "reflection"),
                                       ("nearest", "border")])
def test_solids(mode: str, pad: str, spec: Any) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 2, 5, 4, 6, dtype=torch.float64)
    grid = _grids((5, 4, 6), True)["smooth"]
    _judge(x, grid, (mode, pad, True), {"x": 2, "y": 2, "z": 2}, (P(None, None, *spec),),
           (P(None, *spec),))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_points_upon_places(mode: str, aligned: bool) -> None:
    """Points upon places, or in the middle between two, of single precision: rounding decides to
    which side the gradient and the nearest place belong, and decides as in torch's kernel."""
    torch.manual_seed(2)
    for height, width in ((8, 7), (33, 100), (128, 41)):
        x = torch.randn(1, 2, height, width)
        places = _identity(height, width, aligned=aligned, dtype=torch.float32)
        between = _identity(-(-height // 2), -(-width // 2), aligned=aligned, dtype=torch.float32)
        for grid in (places, between):
            _judge(x, grid, (mode, "border", aligned), {"x": 4}, (P(None, None, "x"),),
                   (P(None, "x"),), 2e-6 * max(height, width))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_single_precision_is_as_far_from_double_as_torch_is(mode: str, aligned: bool) -> None:
    """The place of a point is rounded by a part of a long dim, in one process as well."""
    torch.manual_seed(2)
    x, points = torch.randn(1, 2, 512, 16), 2 * torch.rand(1, 512, 16, 2) - 1
    points[..., 1] = torch.linspace(-1, 1, 512)[:, None] + 0.003 * torch.randn(512, 16)
    args = mode, "zeros", aligned
    due = F.grid_sample(x.double(), points.double(), *args)
    off = (F.grid_sample(x, points, *args) - due).abs()
    got = weft.testing.run(lambda mesh: F.grid_sample(
        weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None),
        weft.distribute_tensor(points, mesh, P(None, "x"), src_data_rank=None),
        *args).full_tensor(), mesh={"x": 4})
    for one in got:
        mine = (one - due).abs()
        assert mine.mean() < 1.1 * off.mean() and mine.max() < 1.2 * off.max()


def test_points_nowhere() -> None:
    """Points without a number or beyond all numbers, a grid of one place, and narrow floats."""
    torch.manual_seed(2)
    x = torch.randn(1, 2, 8, 7)
    grid = torch.tensor([0.3, torch.nan, torch.inf, -torch.inf, 1e20, -1e20]).repeat(6, 1)
    grid = torch.stack([grid, grid.T], -1)[None]
    for mode, pad in itertools.product(MODES[:2], PADS[:2]):
        for points in (grid, grid[:, 1:2, 1:2]):
            due = F.grid_sample(x, points, mode, pad, False)
            for dtype, size in ((torch.float32, 1e-5), (torch.bfloat16, 0.3)):
                got = weft.testing.run(lambda mesh, p=points, d=dtype, m=mode, b=pad: F.grid_sample(
                    weft.distribute_tensor(x.to(d), mesh, P(None, None, "x"), src_data_rank=None),
                    p.to(d), m, b, False).full_tensor(), mesh={"x": 4})
                for one in got:
                    torch.testing.assert_close(
                        one.float(), due, atol=size, rtol=size, equal_nan=True)


@pytest.mark.parametrize("sizes", [(0, 2, 1), (3, 0, 0)])
def test_second_derivatives_where_shards_are_empty(sizes: tuple[int, ...]) -> None:
    """A rank without rows sends the gradients' gradients as the others do."""
    torch.manual_seed(2)
    x = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    grid = torch.rand(2, 3, 4, 2, dtype=torch.float64) - 0.4

    def twice(x: Any, grid: Any) -> list[Any]:
        operands = x.requires_grad_(), grid.requires_grad_()
        out = F.grid_sample(*operands, "bilinear", "border", False).sin()
        grads = torch.autograd.grad(out.sum(), operands, create_graph=True)
        squares = (grads[0].sin() * grads[0]).sum() + grads[1].sin().sum()
        return [*torch.autograd.grad(squares, operands)]

    def on_rank(mesh: Any) -> list[Tensor]:
        image = Layout(mesh, x.shape, P(None, None, "x"), {2: sizes})
        points = Layout(mesh, grid.shape, P(None, "x"), {1: sizes})
        image = weft.distribute_tensor(x, mesh, image)
        points = weft.distribute_tensor(grid, mesh, points)
        return [one.full_tensor() for one in twice(image, points)]

    due = twice(x.clone(), grid.clone())
    for got in weft.testing.run(on_rank, mesh={"x": 3}):
        torch.testing.assert_close(got, due)


ROW = 3 * 8 * 8
"""Bytes of a row of 8 columns and 3 channels."""


def test_bytes_and_memory_of_a_warp() -> None:
    """A rank receives the rows around its points that it does not own, each once: of points half a
    row below their places one, of an image that is turned over all. No rank has the whole image. A
    cubic needs one row more at either side, and beyond the ends rows of the same rank."""
    x, near = torch.randn(1, 3, 64, 8, dtype=torch.float64), _identity(64, 8, aligned=False)
    near[..., 1] += 1 / 64
    far = near.flip(1)

    def on_rank(mesh: Any, grid: Tensor, *how: str) -> tuple[dict[str, int], float]:
        image = weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None)
        points = weft.distribute_tensor(grid, mesh, P(None, "x"), src_data_rank=None)
        image.requires_grad_()
        with weft.explain() as log, peak_memory(image, points) as memory:
            F.grid_sample(image, points, *how, align_corners=False).sum().backward()
        totals = {name: sum(event.nbytes for event in log.events if event.collective == name)
                  for name in ("AllToAll", "AllGather")}
        return totals, memory.peak

    with peak_memory(x, near) as one:
        whole = x.clone().requires_grad_()
        F.grid_sample(whole, near, align_corners=False).sum().backward()
    got = weft.testing.run(lambda mesh: on_rank(mesh, near), mesh={"x": 4})
    assert [found["AllToAll"] for found, _ in got] == [ROW, 2 * ROW, 2 * ROW, ROW]
    assert max(peak for _, peak in got) < 1.5 * one.peak / 4
    for pad in ("border", "reflection"):
        got = weft.testing.run(lambda mesh, p=pad: on_rank(mesh, near, "bicubic", p), mesh={"x": 4})
        assert [found["AllToAll"] for found, _ in got] == [3 * ROW, 6 * ROW, 6 * ROW, 3 * ROW], pad
    got = weft.testing.run(lambda mesh: on_rank(mesh, far), mesh={"x": 4})
    assert [found["AllToAll"] for found, _ in got] == [32 * ROW, 34 * ROW, 32 * ROW, 34 * ROW]
    assert max(peak for _, peak in got) < 1.5 * one.peak / 4
    assert {found["AllGather"] for found, _ in got} == {3 * 2 * 8}


@pytest.mark.parametrize("pad", ["zeros", "reflection"])
def test_memory_of_a_field_of_one_channel(pad: str) -> None:
    """The points take most of it: they are computed a piece at a time, and none of them are kept
    but those that the kernel reads."""
    x, points = torch.randn(1, 1, 512, 64, dtype=torch.float64), _identity(512, 64, aligned=False)

    def carried(x: Any, points: Any) -> Any:
        out = F.grid_sample(
            x.requires_grad_(), points.requires_grad_() + 1 / 512, "bilinear", pad, False)
        out.sum().backward()
        return x.grad, points.grad

    def on_rank(mesh: Any) -> tuple[Any, int]:
        mine = [weft.distribute_tensor(one, mesh, spec, src_data_rank=None)
                for one, spec in ((x, P(None, None, "x")), (points, P(None, "x")))]
        with peak_memory(*mine) as memory:
            grads = carried(*mine)
        return [held(one) for one in grads], memory.peak

    got = weft.testing.run(on_rank, mesh={"x": 4})
    with peak_memory(x, points) as one:
        due = carried(x.clone(), points.clone())
    for place, each in enumerate(due):
        check(each, [mine[place] for mine, _ in got], f"{place}", 1e-10)
    assert max(peak for _, peak in got) < 1.3 * one.peak / 4


# Grids of matrices: they are made where they are used.

LATE: dict[str, tuple[dict[str, int], Any, Any]] = {
    "rows": ({"x": 4}, P(None, None, "x"), P()),
    "rows and columns": ({"x": 2, "y": 2}, P(None, None, "y", "x"), P()),
    "samples and rows": ({"dp": 2, "x": 2}, P("dp", None, "x"), P("dp")),
    "samples, matrices whole": ({"dp": 2, "x": 2}, P("dp", None, "x"), P()),
    "samples elsewhere": ({"dp": 2, "x": 2}, P(None, None, "x", "dp"), P("dp")),
    "matrices sharded": ({"x": 3}, P(None, None, "x"), P(None, None, "x")),
    "matrices partial": ({"x": 3}, P(None, None, None, "x"), P(partial={"x": "sum"})),
}


def _transformed(x: Any, theta: Any, aligned: bool) -> list[Any]:
    """Two uses of one grid, and one use of a part of another one that is whole; first and second
    derivatives."""
    size = list(x.shape)
    grid = F.affine_grid(theta.requires_grad_(), size, align_corners=aligned)
    once = F.grid_sample(x.requires_grad_(), grid, align_corners=aligned)
    twice = F.grid_sample(once, grid, align_corners=aligned)
    other = F.affine_grid(2 * theta, size, align_corners=aligned)[:, 0].sin()
    loss = (twice * twice).sum() + other.sum()
    grads = torch.autograd.grad(loss, (x, theta), create_graph=True)
    return [twice.detach(), other.detach(), *[one.detach().contiguous() for one in grads],
            *[one.contiguous() for one in torch.autograd.grad(
                grads[0].sin().sum() + grads[1].sin().sum(), (x, theta))]]


@pytest.mark.parametrize("name", LATE)
def test_grids_of_matrices(name: str) -> None:
    torch.manual_seed(4)
    axes, of_x, of_theta = LATE[name]
    solid = name == "rows"
    x = torch.randn(2, 1, *((7, 3, 4) if solid else (9, 6)), dtype=torch.float64)
    theta = torch.eye(*((3, 4) if solid else (2, 3)), dtype=torch.float64)
    theta = theta.repeat(2, 1, 1) + torch.randn(2, *theta.shape, dtype=torch.float64) / 8

    def on_rank(mesh: Any, aligned: bool) -> list[Any]:
        mine = [weft.distribute_tensor(one.clone(), mesh, spec, src_data_rank=None)
                for one, spec in ((x, of_x), (theta, of_theta))]
        return [held(one) for one in _transformed(mine[0], mine[1], aligned)]

    for aligned in (False, True):
        got = weft.testing.run(lambda mesh, a=aligned: on_rank(mesh, a), mesh=axes)
        for place, due in enumerate(_transformed(x.clone(), theta.clone(), aligned)):
            most = max(1.0, due.abs().max().item())
            check(due, [mine[place] for mine in got], f"{place}", 1e-11 * most)


def test_a_grid_that_waits_is_that_of_its_call() -> None:
    """Matrices that change afterwards do not change it, nor does the mode in which it is used."""
    theta = torch.tensor([[[0.9, 0.1, 0.05], [-0.1, 0.95, 0.02]]])
    x = torch.randn(1, 1, 8, 5)
    due = F.affine_grid(theta, [1, 1, 8, 5], align_corners=False)

    def on_rank(mesh: Any) -> None:
        image = weft.distribute_tensor(x, mesh, P(None, None, "x"), src_data_rank=None)
        given = weft.distribute_tensor(theta.clone(), mesh, P()).requires_grad_()
        with torch.no_grad():
            calm = F.affine_grid(given, [1, 1, 8, 5], align_corners=False)
        with torch.inference_mode():
            still = F.affine_grid(given.detach(), [1, 1, 8, 5], align_corners=False)
        grids = [F.affine_grid(given, [1, 1, 8, 5], align_corners=False) for _ in range(3)]
        with torch.no_grad():
            given.zero_()
        assert grids[0].requires_grad and not calm.requires_grad
        for grid in (calm, grids[0]):
            out = F.grid_sample(image, grid, align_corners=False)
            torch.testing.assert_close(
                out.full_tensor(), F.grid_sample(x, due, align_corners=False))
            assert out.requires_grad == grid.requires_grad
        for grid in (calm, still, *grids):  # used already, or not yet
            torch.testing.assert_close(grid.to_local(), due)
        kept: list[Any] = []
        grids[2].register_hook(kept.append)
        F.grid_sample(image, grids[2], align_corners=False).sum().backward()
        assert kept[0].shape == due.shape

    weft.testing.run(on_rank, mesh={"x": 2})


@pytest.mark.parametrize("spec", [P(None, None, "x"), P(None, None, "x", "y")])
def test_no_rank_makes_a_whole_grid(spec: Any) -> None:
    """In a spatial transformer, where it takes most of the memory; the gradient of the matrices is
    all that is sent beside halos."""
    x = torch.randn(2, 1, 96, 96, dtype=torch.float64)
    theta = torch.tensor([[[0.9123, 0.0971, 0.01], [-0.1013, 0.951, 0.02]]] * 2).double()

    def step(x: Any, theta: Any) -> list[Any]:
        grid = F.affine_grid(theta.requires_grad_(), list(x.shape), align_corners=False)
        out = F.grid_sample(x, grid, align_corners=False)
        out.sum().backward()
        return [out.detach(), theta.grad]

    def on_rank(mesh: Any) -> tuple[Any, int, int]:
        field = weft.distribute_tensor(x, mesh, spec, src_data_rank=None)
        given = weft.distribute_tensor(theta, mesh, P(), src_data_rank=None)
        with peak_memory(field) as memory, weft.explain() as log:
            out, grad = step(field, given)
        assert out.sharding == field.sharding
        back = sum(event.nbytes for event in log.events if event.direction == "backward")
        return (held(out), held(grad)), memory.peak, back

    axes = {"x": 4} if len(spec) < 4 else {"x": 2, "y": 2}
    got = weft.testing.run(on_rank, mesh=axes)
    with peak_memory(x) as one:
        due = step(x.clone(), theta.clone())
    for place, each in enumerate(due):
        check(each, [mine[place] for mine, _, _ in got], f"{place}", 1e-9)
    assert max(peak for _, peak, _ in got) < 1.45 * one.peak / 4
    assert max(back for _, _, back in got) < 4 * theta.numel() * 8

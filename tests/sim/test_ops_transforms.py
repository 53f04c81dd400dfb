"""Fourier transforms equal the one-process result in every layout, and stay sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.cases import Trial, case, reals, trials, trials_of
from tests.cases.transforms import CASES, complexes
from tests.harness import check_trial, held, local_part, ranks
from tests.oracle import Held, check
from weft import P, ShardTensor
from weft.core import Layout, Mesh

LONG = [one for one in CASES if "line" in one.name]
MORE = [trial for one in LONG for trial in trials(one, [{"x": 4}, {"x": 7}, {"dp": 2, "tp": 3}])]


@pytest.mark.parametrize("trial", trials_of(CASES) + MORE, ids=lambda trial: trial.id)
def test_transforms(trial: Trial) -> None:
    check_trial(trial)


SECOND = [
    case("fft2", lambda a: torch.fft.fft2(a).abs().square(), reals(4, 6), per_mesh=5),
    case("rfft", lambda a: torch.fft.rfft(a.square(), dim=0).abs().square(), reals(6, 3)),
    case("irfft2", lambda a: torch.fft.irfft2(a * a).square(), complexes(4, 3), per_mesh=5),
    case("line", lambda a: torch.fft.fft(a * a).abs().square(), complexes(24), per_mesh=5),
]


def penalty(x: Tensor, fn: Any) -> Tensor:
    """The gradient of the squared norm of the gradient of `fn`."""
    x.requires_grad_()
    first, = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
    return torch.autograd.grad(first.abs().square().sum(), x)[0]


@pytest.mark.parametrize("trial", [
    trial for one in SECOND for trial in trials(one, [{"x": 2}, {"x": 3}, {"dp": 2, "tp": 2}])
], ids=lambda trial: trial.id)
def test_second_derivatives(trial: Trial) -> None:
    (full,), (layout,) = trial.case.tensors(), trial.layouts
    assert layout is not None

    def on_rank(mesh: Any) -> Held:
        x = ShardTensor.from_local(local_part(layout, full, mesh.here, 3), mesh, layout)
        return held(penalty(x, trial.case.fn))

    found = weft.testing.run(on_rank, mesh=dict(trial.axes))
    check(penalty(full, trial.case.fn).contiguous(), found, trial.id)


def laid(fn: Any, shape: tuple[int, ...], axes: dict[str, int], spec: P) -> tuple[str, int]:
    """The layout of a result, as text, and the bytes that the busiest rank has received."""
    def on_rank(mesh: Any) -> tuple[str, int]:
        layout = Layout(Mesh(axes), shape, spec)
        x = ShardTensor.from_local(
            torch.zeros(layout.local_shape_at(mesh.here), dtype=torch.float64), mesh, layout)
        with weft.explain() as log:
            out = fn(x)
        return str(out.sharding), sum(event.nbytes for event in log.events)

    found = weft.testing.run(on_rank, mesh=axes)
    return found[0][0], max(nbytes for _, nbytes in found)


MESH, LINE = {"dp": 2, "x": 2}, {"x": 4}
STAYS = [
    # A slab: the exchange of complex numbers of which a rank has a quarter.
    ("slab", lambda x: torch.fft.fftn(x.to(torch.complex128)), (16, 16, 16), LINE, P("x"),
     "[16, 16@x, 16]", 16**3 * 16 // 4 * 3 // 4),
    ("back", lambda x: torch.fft.irfftn(torch.fft.rfftn(x)), (16, 16, 14), LINE, P("x"),
     "[16@x, 16, 14]", 2 * 16 * 16 * 8 * 16 // 4 * 3 // 4),
    ("pencils", lambda x: torch.fft.fftn(x.to(torch.complex128)), (16, 16, 16), MESH,
     P("dp", "x"), "[16, 16@dp, 16@x]", 2 * 16**3 * 16 // 4 // 2),
    ("batch", torch.fft.fft2, (2, 3, 64, 32), MESH, P("dp", None, "x"), "[2@dp, 3, 64, 32@x]",
     2 * 3 * 64 * 32 * 16 // 4 // 2),
    ("few channels", torch.fft.rfft2, (1, 3, 32, 30), LINE, P(None, None, "x"),
     "[1, 3, 32, 16@x]", 3 * 32 * 16 * 16 // 4 * 3 // 4),
    # A convolution over twice the length: the zeros are not sent, nor is the second half back.
    ("long convolution", lambda x: torch.fft.irfft(torch.fft.rfft(x, n=64), n=64)[..., :32],
     (1, 8, 32), LINE, P(None, None, "x"), "[1, 8@x, 32]", 8 * 32 * 8 // 4 * 3 // 4),
    # Three exchanges of a quarter's three quarters, where a gather brings three quarters.
    ("line", lambda x: torch.fft.fft(x.to(torch.complex128)), (1024,), LINE, P("x"), "[1024@x]",
     3 * 1024 * 16 // 4 * 3 // 4),
    ("gathered", lambda x: torch.fft.fft(x.to(torch.complex128)), (1024,), {"x": 2}, P("x"),
     "[1024@x]", 1024 * 16 // 2),
    ("prime", lambda x: torch.fft.ifft(x.to(torch.complex128)), (1021,), LINE, P("x"),
     "[1021@x]", 16 * (1021 - 253)),
]


@pytest.mark.parametrize("name, fn, shape, axes, spec, due, nbytes", STAYS,
                         ids=[row[0] for row in STAYS])
def test_stays_sharded(name: str, fn: Any, shape: Any, axes: Any, spec: P, due: str,
                       nbytes: int) -> None:
    got, received = laid(fn, shape, axes, spec)
    assert got.endswith(due), got
    assert received <= nbytes, f"{received} bytes, allowed {nbytes}"


@ranks(x=4)
def test_a_spectral_convolution_keeps_the_field_sharded(mesh: Any) -> None:
    """Of a Fourier neural operator: the spectrum crosses once, and on the way back its modes."""
    layout = Layout(Mesh({"x": 4}), (1, 4, 64, 64), P(None, None, "x"))
    zeros = torch.zeros(layout.local_shape_at(mesh.here), dtype=torch.float64)
    field = ShardTensor.from_local(zeros, mesh, layout).requires_grad_()
    weight = torch.ones(4, 4, 64, 8, dtype=torch.complex128)
    with weft.explain() as log:
        modes = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(field)[..., :8], weight)
        out = torch.fft.irfft2(modes, s=(64, 64))
        out.sum().backward()
    assert out.sharding == field.grad.sharding == layout
    found = sum(event.nbytes for event in log.events if event.direction == "forward")
    assert found <= 4 * 64 * (33 + 8) * 16 // 4, f"{found} bytes"


def test_modes_that_are_dropped_dim_by_dim_do_not_travel() -> None:
    """As docs/fields.md says: what the next dim's transform does not read is not sent."""
    modes, x = 3, torch.randn(1, 4, 16, 12, dtype=torch.float64)

    def low(x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(torch.fft.rfft(x)[..., :modes], dim=-2)
        return torch.fft.irfft(torch.fft.ifft(spectrum, dim=-2), n=x.shape[-1])

    def on_rank(mesh: Any) -> tuple[int, Tensor]:
        given = weft.distribute_tensor(x, mesh, P(None, None, "x"))
        with weft.explain() as log:
            out: Any = low(given)
        return log.nbytes, out.full_tensor()

    own = 4 * 16 * modes * 16 // 4
    for nbytes, out in weft.testing.run(on_rank, mesh={"x": 4}):
        torch.testing.assert_close(out, low(x))
        assert nbytes == own * 3 // 4  # all but what a rank has; channels then take the axis


def test_an_fno_on_a_sharded_target_keeps_the_field_sharded() -> None:
    """As users write it: modes are written into zeros of the spectrum's size, which are sharded as
    the spectrum; `explain` says how fewer bytes travel."""
    modes = 3
    x = torch.randn(2, 3, 16, 12, dtype=torch.float64)
    one, two = torch.randn(2, 3, 5, modes, modes, dtype=torch.complex128).unbind()

    def layer(x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out = spectrum.new_zeros(2, 5, *spectrum.shape[2:])
        for rows, weight in ((slice(modes), one), (slice(-modes, None), two)):
            part = spectrum[:, :, rows, :modes]
            out[:, :, rows, :modes] = torch.einsum("bixy,ioxy->boxy", part, weight)
        return torch.fft.irfft2(out, s=x.shape[-2:])

    x.requires_grad_()
    layer(x).square().sum().backward()

    def on_rank(mesh: Any) -> tuple[str, str, Tensor, Tensor]:
        given = weft.distribute_tensor(x.detach(), mesh, P(None, None, "x")).requires_grad_()
        with weft.explain() as log:
            out: Any = layer(given)
        out.square().sum().backward()
        return str(out.sharding), log.events[0].reason, out.full_tensor(), given.grad.full_tensor()

    for layout, reason, out, grad in weft.testing.run(on_rank, mesh={"x": 4}):
        assert layout == "[2, 5, 16@x, 12]"
        assert reason.endswith("weft.sharded_factories() only the modes that slices read do")
        torch.testing.assert_close(out, layer(x))
        torch.testing.assert_close(grad, x.grad)

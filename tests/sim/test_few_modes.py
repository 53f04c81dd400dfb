"""Fourier layers inside `weft.sharded_factories()` send only modes that are read or written."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fft
from torch.utils.checkpoint import checkpoint

import weft
from weft import P

FIELD = torch.linspace(-1, 1, 2 * 4 * 16 * 12, dtype=torch.float64).view(2, 4, 16, 12).sin()
CUBE = torch.linspace(-1, 1, 2 * 16 * 12 * 8, dtype=torch.float64).view(1, 2, 16, 12, 8).sin()
MODES = 3


def weights(channels: int, parts: int) -> Tensor:
    generator = torch.Generator().manual_seed(parts)
    shape = parts, channels, channels
    return torch.randn(shape, dtype=torch.complex128, generator=generator)


def corners(x: Tensor) -> Tensor:
    """Blocks are written to zeros, as in the networks of Li et al. (2021)."""
    dims, lengths = tuple(range(2, x.dim())), x.shape[2:]
    spectrum = fft.rfftn(x, dim=dims)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    rows = product((slice(MODES), slice(-MODES, None)), repeat=len(dims) - 1)
    for at, weight in zip(rows, weights(x.shape[1], 2 ** (len(dims) - 1))):
        index = (slice(None), slice(None), *at, slice(MODES))
        out[index] = torch.einsum("bi...,io->bo...", spectrum[index], weight)
    return fft.irfftn(out, lengths, dim=dims)


def padded(x: Tensor) -> Tensor:
    """Blocks are padded and added, as PhysicsNeMo does."""
    spectrum = fft.rfft2(x)
    rows, columns = spectrum.shape[-2:]
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    for rest, at, weight in zip(
        ((0, rows - MODES), (rows - MODES, 0)), (slice(MODES), slice(-MODES, None)),
        weights(x.shape[1], 2),
    ):
        part = torch.einsum("bixy,io->boxy", spectrum[..., at, :MODES].contiguous(), weight)
        out = out + F.pad(part, (0, columns - MODES, *rest))
    return fft.irfft2(out, s=x.shape[-2:])


def centred(x: Tensor, norm: str = "forward") -> Tensor:
    """Zero frequencies lie in the middle, as in neuraloperator."""
    spectrum = fft.fftshift(fft.rfft2(x, norm=norm), dim=-2)
    centre = spectrum.shape[-2] // 2
    at = (..., slice(centre - 2, centre + 3), slice(None, MODES))
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[at] = torch.einsum("bixy,io->boxy", spectrum[at], weights(x.shape[1], 1)[0])
    out = fft.ifftshift(out, dim=-2)
    return fft.irfft2(out, s=x.shape[-2:], norm=norm)


def of_complex(x: Tensor) -> Tensor:
    spectrum = fft.fft2(x * (1 + 2j), norm="ortho")
    out = spectrum.new_zeros(spectrum.shape)
    for rows, columns in product((slice(2), slice(-3, None)), repeat=2):
        out[:, :, rows, columns] = 2 * spectrum[:, :, rows, columns]
    return fft.ifft2(out, norm="ortho").abs()


def finer(x: Tensor) -> Tensor:
    """More columns come out than went in, and blocks are of some channels and one sample."""
    spectrum = fft.rfft2(x)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[:1, :2, :, 1:MODES] = spectrum[1:, 2:, :, 1:MODES].conj()
    return fft.irfft2(out, s=(x.shape[-2], 2 * x.shape[-1]))


def on_ranks(
    program: Callable[[Tensor], Any], placements: Any, mesh: dict[str, int], given: Tensor = FIELD
) -> list[Any]:
    """What `program(x)` gives on each rank, with the bytes of its forward."""
    def on_rank(mesh: Any) -> Any:
        x = weft.distribute_tensor(given, mesh, placements).requires_grad_()
        with weft.sharded_factories(), weft.explain() as log:
            return program(x), x, log.nbytes

    return weft.testing.run(on_rank, mesh=mesh)


def gradients(out: Any, x: Any) -> list[Tensor]:
    """The value, its gradient, and the gradient of that."""
    (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    return [out.detach(), first.detach(), second]


PLACES = [
    (P(None, None, "x"), {"x": 4}), (P(None, None, None, "x"), {"x": 4}),
    (P(None, None, "x", "y"), {"x": 2, "y": 2}), (P("x", None, "y"), {"x": 2, "y": 3}),
    (P(None, "x", None, "y"), {"x": 2, "y": 3}), (P(None, None, ("x", "y")), {"x": 2, "y": 2}),
]


def one_dim(x: Tensor) -> Tensor:
    rows = fft.fft(x, dim=-2)[:, :, :MODES].abs()
    spectrum = fft.rfft(x, norm="ortho")
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[..., :MODES] = spectrum[..., :MODES] * 2j
    return fft.irfft(out, n=x.shape[-1], norm="ortho")[:, :, :MODES] + rows


def many(x: Tensor) -> Tensor:
    """More rows than a rank has, and few columns, or the reverse."""
    spectrum = fft.rfft2(x)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[:, :, :, 1:3] = spectrum[:, :, :, 1:3] * 2
    wide = fft.rfft2(x)[:, :, 1:3, :].abs()
    return fft.irfft2(out, s=x.shape[-2:])[:, :, :2, :7] + wide


@pytest.mark.parametrize("program", [corners, padded, centred, of_complex, finer, one_dim, many])
@pytest.mark.parametrize("placements, mesh", PLACES, ids=str)
def test_values_and_gradients(program: Any, placements: Any, mesh: dict[str, int]) -> None:
    def both(x: Any) -> list[Any]:
        return [one.full_tensor() for one in gradients(program(x), x)]  # type: ignore[attr-defined]

    x = FIELD.clone().requires_grad_()
    due = gradients(program(x), x)
    for found, _, _ in on_ranks(both, placements, mesh):
        torch.testing.assert_close(found, due)


@pytest.mark.parametrize("placements, mesh", [
    (P(None, None, "x"), {"x": 4}), (P(None, None, "x", "y"), {"x": 2, "y": 2}),
    (P(None, None, None, "x", "y"), {"x": 2, "y": 2}),
], ids=str)
def test_three_dims(placements: Any, mesh: dict[str, int]) -> None:
    x = CUBE.clone().requires_grad_()
    due = gradients(corners(x), x)
    for found, _, _ in on_ranks(
        lambda x: [one.full_tensor() for one in gradients(corners(x), x)],  # type: ignore
        placements, mesh, CUBE,
    ):
        torch.testing.assert_close(found, due)


def test_ragged_rows() -> None:
    x = FIELD.clone().requires_grad_()
    due = gradients(corners(x), x)

    def on_rank(mesh: Any) -> None:
        layout = weft.Layout(mesh.abstract, FIELD.shape, P(None, None, "x"), sizes={2: (9, 0, 7)})
        x = weft.distribute_tensor(FIELD, mesh, layout).requires_grad_()
        with weft.sharded_factories():
            found = gradients(corners(x), x)
        torch.testing.assert_close([one.full_tensor() for one in found], due)  # type: ignore

    weft.testing.run(on_rank, mesh={"x": 3})


@pytest.mark.parametrize("program", [corners, padded, centred])
@pytest.mark.parametrize("placements, mesh", PLACES[:3], ids=str)
def test_modes_alone_are_sent(program: Any, placements: Any, mesh: dict[str, int]) -> None:
    """Of k modes the busiest of four ranks receives three parts of a quarter, and then the three
    quarters that it lacks. Blocks and what is put together of them are cut in other places."""
    modes = 2 * 4 * 2 * MODES * MODES * 16
    for out, x, nbytes in on_ranks(program, placements, mesh, FIELD):
        assert out.sharding == x.sharding
        assert nbytes <= 3 * modes


def test_bytes_of_a_layer() -> None:
    """The figure in docs/fields.md."""
    field = torch.linspace(-1, 1, 6 * 64 * 64, dtype=torch.float64).view(1, 6, 64, 64).sin()

    def layer(x: Tensor) -> Tensor:
        spectrum = fft.rfft2(x)
        out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
        for rows in (slice(4), slice(-4, None)):
            out[:, :, rows, :4] = spectrum[:, :, rows, :4] * 2
        return fft.irfft2(out, s=x.shape[-2:])

    for placements, mesh in PLACES[:3]:
        for out, x, nbytes in on_ranks(layer, placements, mesh, field):
            assert nbytes <= 6144 and out.sharding == x.sharding

    def dry(mesh: Any) -> None:
        x = weft.zeros(1, 6, 64, 64, mesh=mesh, placements=P(None, None, "x"), dtype=torch.float64)
        with weft.sharded_factories():
            layer(x)

    assert 5376 <= weft.dry_run(dry, {"x": 4}).log.nbytes <= 6144


ROWS = P(None, None, "x")


def of_spectrum(use: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: use(fft.rfft2(x))


def changed(x: Tensor, *steps: Callable[[Tensor], Any]) -> Tensor:
    for step in steps:
        step(x)
    return x


def written(x: Tensor) -> Tensor:
    x[..., :2] = 3
    return x


def scaled(x: Tensor) -> Tensor:
    x[..., :2] *= 3
    x[..., 2:3, :2] += 1
    return x


def filtered(x: Tensor) -> Tensor:
    x[..., :2] = x[..., :2] * 3
    x[..., 4:] = 0
    return x


def over_others(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[..., :3] = x[..., :3]
    out[..., 1:4] = x[..., 1:4] * 2
    return fft.irfft2(out)


def read_before(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[..., :2] = x[..., :2]
    out[..., 3:4] += x[..., :1]
    return fft.irfft2(out)[..., :6] + out[..., :6].abs() + fft.irfft2(out + 1)[..., :6]


def shifted_blocks(x: Tensor) -> Tensor:
    """Blocks that are rolled over the end of a dim."""
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[:, :, 5:11, :2] = x[:, :, 5:11, :2]
    return fft.irfft2(fft.fftshift(out, dim=(-2,)))


def summed(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    rows = x.shape[-2]
    out += F.pad(x[..., :2, :2], (0, 5, 0, rows - 2))
    out.add_(F.pad(x[..., -2:, :2], (0, 5, rows - 2, 0)))
    return fft.irfft2(out)


@pytest.mark.parametrize("use", [
    lambda x: x.abs(), lambda x: x[..., :2].abs() + x.abs()[..., :2], lambda x: x[:, :, :3].abs(),
    lambda x: x[0, 1, :, 2].abs(), lambda x: x[..., ::2].abs(), lambda x: x[..., 3:3].abs(),
    lambda x: x[:, :, -2:, -2:].abs(), lambda x: x[..., [0, 2]].abs(),
    lambda x: sum(x[..., at].abs() for at in range(7)), lambda x: x.sum().abs(),
    lambda x: written(x).abs(), lambda x: changed(x, lambda x: x.mul_(2)).abs(),
    lambda x: fft.fftshift(x, dim=(-1, -2))[..., 3, 2:5].abs(),
    lambda x: fft.ifftshift(fft.fftshift(x))[..., :2].abs(), lambda x: fft.fftshift(x).abs(),
    lambda x: scaled(x).abs(), lambda x: filtered(x).abs(),
    lambda x: x[:, :, :1, :2].abs() + x[:, :, :1, :2].real,
    lambda x: torch.zeros_like(x).abs() + x[..., :1].abs(), over_others, read_before,
    shifted_blocks, summed,
])
def test_every_other_use_sees_the_spectrum(use: Any) -> None:
    x = FIELD.clone().requires_grad_()
    due = gradients(of_spectrum(use)(x), x)

    def both(x: Any) -> list[Tensor]:
        return [one.full_tensor() for one in gradients(of_spectrum(use)(x), x)]  # type: ignore

    for found, _, _ in on_ranks(both, ROWS, {"x": 2}):
        torch.testing.assert_close(found, due)


@pytest.mark.parametrize("ask", [
    lambda s: (s.dtype, s.shape, s.dim(), s.is_complex(), s.requires_grad, s.device),
    lambda s: (s[..., :2].requires_grad, s[..., :2].shape),
])
def test_questions_move_nothing_more(ask: Any) -> None:
    due = ask(fft.rfft2(FIELD.clone().requires_grad_()))
    for found, _, nbytes in on_ranks(of_spectrum(ask), ROWS, {"x": 2}):
        assert found == due and nbytes <= 2 * 4 * 8 * 2 * 16


def test_what_only_sharded_tensors_have() -> None:
    def program(x: Any) -> None:
        assert str(fft.rfft2(x).sharding) == "[2, 4, 16, 7@x]"  # type: ignore[attr-defined]
        zeros: Any = blocks(x, (..., slice(2)), fft.rfft2(x)[..., :2])
        torch.testing.assert_close(
            zeros.full_tensor(), blocks(FIELD, (..., slice(2)), fft.rfft2(FIELD)[..., :2]))
        assert not hasattr(torch.zeros(2, dtype=torch.complex64), "sharding")
        assert not hasattr(fft.rfft2(x), "no_such_name")

    on_ranks(program, ROWS, {"x": 2})


def test_meshes_of_other_ranks_know_their_own_fields() -> None:
    """A rank that transforms a field of its own goes on as the others do."""
    def program() -> None:
        mesh, own = weft.init_mesh({"x": 2}), weft.init_mesh({"x": 1}, ranks=(0,))
        x = weft.distribute_tensor(FIELD, mesh, ROWS)
        with weft.sharded_factories():
            spectrum = fft.rfft2(x)[..., :2]
            if mesh.get_rank() == 0:
                fft.rfft2(weft.distribute_tensor(FIELD, own, P(None, None, None, "x")))
            out: Any = fft.irfft2(blocks(x, (..., slice(2)), spectrum), s=x.shape[-2:])
        due = fft.irfft2(blocks(FIELD, (..., slice(2)), fft.rfft2(FIELD)[..., :2]), s=(16, 12))
        torch.testing.assert_close(out.full_tensor(), due)

    weft.testing.run(lambda mesh: program(), num_ranks=2)


def test_no_graph_where_torch_makes_none() -> None:
    def program(x: Any) -> None:
        spectrum = fft.rfft2(x)
        with torch.no_grad():
            other = fft.rfft2(x)
        assert spectrum[..., :2].requires_grad and not other[..., :2].requires_grad
        assert not other.requires_grad and not other.abs().requires_grad

    on_ranks(program, ROWS, {"x": 2})


def test_the_source_may_change() -> None:
    def program(x: Any) -> Tensor:
        x = x.detach().clone()
        spectrum = fft.rfft2(x)
        x.zero_()
        value = spectrum[..., :2] * 1
        out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
        out[..., :2] = value
        value.zero_()
        return fft.irfft2(out)

    due = program(FIELD)
    on_ranks(lambda x: torch.testing.assert_close(
        program(x).full_tensor(), due), ROWS, {"x": 2})  # type: ignore[attr-defined]


def put(spectrum: Tensor, value: Any) -> None:
    spectrum[..., 2:4] = value


def test_what_cannot_be_right_is_refused() -> None:
    def program(x: Any) -> None:
        with weft.strict(), pytest.raises(weft.StrictError, match="rfftn"):
            print(fft.rfft2(x)[..., :2])
        spectrum = fft.rfft2(x)
        part = spectrum[..., :2]
        with torch.no_grad():
            part.detach().mul_(2)
        with pytest.raises(weft.UnsupportedOpError, match="written to"):
            spectrum.abs()
        spectrum = fft.rfft2(x)
        parts = [spectrum[..., :2]]
        for write in (lambda: spectrum.mul_(2), lambda: put(spectrum, 0),
                      lambda: put(spectrum, parts[0]), lambda: torch.abs(x, out=spectrum)):
            with pytest.raises(weft.UnsupportedOpError, match="slice of it is in use"):
                write()
        parts.clear()
        put(spectrum, 0)
        spectrum = fft.rfft2(x)
        assert spectrum[..., :2].abs().sum() > 0
        with pytest.raises(weft.UnsupportedOpError, match="retain_grad"):
            spectrum.retain_grad()
        with pytest.raises(weft.UnsupportedOpError, match="before the first slice"):
            torch.autograd.grad(spectrum.abs().sum(), spectrum)

    on_ranks(program, ROWS, {"x": 2})


@pytest.mark.parametrize("wrong", [
    lambda x: fft.rfft2(x)[..., 7], lambda x: fft.rfft2(x)[..., :2, -8],
    lambda x: fft.rfft2(x)[:, :, :, :2, 0], lambda x: fft.rfft2(x)[..., :2, 1.0],
    lambda x: fft.rfftn(x, dim=(1, 1))[:, :1], lambda x: fft.rfft2(x, dim=(-1, 9)),
    lambda x: fft.rfft(x, dim=(3,)), lambda x: fft.rfft(x * 1j),
    lambda x: fft.rfft2(x, norm="x")[..., :2],
    lambda x: written(torch.zeros(2, 4, 9, 12, dtype=x.dtype.to_complex()) * fft.rfft2(x)),
    lambda x: blocks(x, (..., slice(3)), fft.rfft2(x)[..., :2]),
    lambda x: fft.irfft2(blocks(x, (..., slice(2)), fft.rfft2(x)[..., :2]), dim=(0, 0)),
    lambda x: fft.irfft2(blocks(x, (..., slice(2)), fft.rfft2(x)[..., :2]), s=(3,)),
    lambda x: fft.irfft2(blocks(x, (..., slice(2)), fft.rfft2(x)[..., :2]), norm="x"),
])
def test_errors_are_torchs(wrong: Any) -> None:
    with pytest.raises(Exception) as due:
        wrong(FIELD)

    def program(x: Any) -> None:
        with pytest.raises(type(due.value)):
            print(wrong(x))

    on_ranks(program, ROWS, {"x": 2})


def blocks(x: Tensor, index: Any, value: Tensor) -> Tensor:
    out = torch.zeros(2, 4, 16, 7, dtype=x.dtype.to_complex())
    out[index] = value
    return out


def test_a_gradient_asked_for_before_is_complete() -> None:
    def program(x: Any) -> Any:
        spectrum = fft.rfft2(x)
        spectrum.retain_grad()
        (spectrum[..., :2].abs().sum() + spectrum.abs().sum()).backward()
        return spectrum.grad

    due = program(FIELD.clone().requires_grad_())
    on_ranks(lambda x: torch.testing.assert_close(
        program(x).full_tensor(), due), ROWS, {"x": 2})


def test_autocast_does_not_narrow_it() -> None:
    def program(x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            spectrum = fft.rfft2(x)
            out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
            out[:, :, :MODES, :MODES] = 2 * spectrum[:, :, :MODES, :MODES]
            return fft.irfft2(out, s=x.shape[-2:])

    x = FIELD.float().requires_grad_()
    due = gradients(program(x), x)
    for placements, mesh in PLACES[:3]:
        on_ranks(lambda x: torch.testing.assert_close(
            [one.full_tensor() for one in gradients(program(x), x)], due),  # type: ignore
            placements, mesh, FIELD.float())


def test_a_spectrum_is_gone_with_its_last_use() -> None:
    def program(x: Any) -> None:
        spectrum: Any = fft.rfft2(x)
        part, field = spectrum[..., :2], weakref.ref(spectrum._wait)
        del spectrum
        assert field() is None and part.requires_grad

    on_ranks(program, ROWS, {"x": 2})


def test_in_checkpoints_and_outside() -> None:
    x = FIELD.clone().requires_grad_()
    due = torch.autograd.grad(corners(x).pow(2).sum(), x)[0]

    def program(x: Any) -> Any:
        out: Any = checkpoint(corners, x, use_reentrant=False)
        out.pow(2).sum().backward()
        return x.grad, fft.rfft2(x), torch.zeros(4, 4, dtype=torch.complex64)

    for (grad, late, zeros), _, _ in on_ranks(program, ROWS, {"x": 1}):
        torch.testing.assert_close(grad.full_tensor(), due)
        torch.testing.assert_close((late * 1).full_tensor(), fft.rfft2(x))
        assert zeros.sum() == 0

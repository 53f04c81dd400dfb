"""Fourier transforms of one, two and n dims, real and complex, cropped and padded."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cases import Case, Operand, case, reals


def complexes(*shape: int) -> Operand:
    """Complex numbers whose parts are normal, in steps of 1/256."""
    def make(generator: torch.Generator) -> Tensor:
        parts = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex((parts * 256).round() / 256)

    return Operand(shape, make)


def _fno(u: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A spectral convolution (Li et al., Fourier neural operator, 2021): few modes, mixed."""
    spectrum = torch.fft.rfft2(u)
    modes = low.shape[-1]
    mixed = [
        torch.einsum("bixy,ioxy->boxy", part, weight)
        for part, weight in ((spectrum[..., :3, :modes], low), (spectrum[..., -3:, :modes], high))
    ]
    rows = spectrum.shape[-2]
    middle = mixed[0].new_zeros(*mixed[0].shape[:2], rows - 6, modes)
    full = torch.cat([mixed[0], middle, mixed[1]], -2)
    return torch.fft.irfft2(full, s=u.shape[-2:])


CASES: list[Case] = [
    case("fft", lambda a: torch.fft.fft(a), complexes(4, 6), per_mesh=6),
    case("fft_of_rows", lambda a: torch.fft.fft(a, dim=0, norm="ortho"), complexes(5, 3)),
    case("ifft", lambda a: torch.fft.ifft(a, n=5, dim=-2), complexes(7, 6)),
    case("ifft_longer", lambda a: torch.fft.ifft(a, n=9, norm="forward"), complexes(4, 6)),
    case("fft_of_reals", lambda a: torch.fft.fft(a, dim=1), reals(3, 5, 2)),
    case("rfft", lambda a: torch.fft.rfft(a, dim=0), reals(6, 5), per_mesh=6),
    case("rfft_longer", lambda a: torch.fft.rfft(a, n=8), reals(5, 6)),
    case("rfft_twice_as_long", lambda a: torch.fft.rfft(a, n=14, dim=1, norm="forward"),
         reals(5, 7, 2), per_mesh=6),
    case("irfft", lambda a: torch.fft.irfft(a, n=5, norm="ortho"), complexes(4, 3), per_mesh=6),
    case("hfft", lambda a: torch.fft.hfft(a, n=7), complexes(4, 4)),
    case("ihfft", lambda a: torch.fft.ihfft(a, dim=0), reals(6, 3)),
    case("fft2", lambda a: torch.fft.fft2(a), complexes(3, 6, 4), per_mesh=8),
    case("fft2_of_reals", lambda a: torch.fft.fft2(a, s=(5, 7)), reals(6, 6), per_mesh=6),
    case("ifft2", lambda a: torch.fft.ifft2(a, dim=(0, 2), norm="ortho"), complexes(4, 3, 5)),
    case("rfft2", lambda a: torch.fft.rfft2(a), reals(2, 6, 5), per_mesh=8),
    case("rfft2_longer", lambda a: torch.fft.rfft2(a, s=(9, 4), norm="ortho"), reals(6, 5),
         per_mesh=6),
    case("fft2_longer", lambda a: torch.fft.fft2(a, (-1, 8), dim=(2, 0)), complexes(6, 2, 5),
         per_mesh=6),
    case("ifft2_longer", lambda a: torch.fft.ifft2(a, (7, 7)), complexes(5, 8), per_mesh=6),
    case("irfft2", lambda a: torch.fft.irfft2(a, s=(6, 7)), complexes(6, 4), per_mesh=8),
    case("irfft_of_few", lambda a: torch.fft.irfft(a, n=12, norm="ortho"), complexes(2, 3),
         per_mesh=6),
    case("irfftn_of_few", lambda a: torch.fft.irfftn(a, s=(5, 3, 9), dim=(0, 1, 2)),
         complexes(3, 4, 2), per_mesh=8),
    case("irfft2_of_many", lambda a: torch.fft.irfft2(a, s=(3, 4), norm="forward"),
         complexes(4, 2, 5), per_mesh=6),
    case("irfft2_of_reals", lambda a: torch.fft.irfft2(a, s=(-1, 9)), reals(3, 4), per_mesh=6),
    case("hfft2", lambda a: torch.fft.hfft2(a), complexes(3, 4, 3)),
    case("ihfft2", lambda a: torch.fft.ihfft2(a), reals(3, 4, 6)),
    case("fftn", lambda a: torch.fft.fftn(a), complexes(4, 3, 5), per_mesh=8),
    case("fftn_longer", lambda a: torch.fft.fftn(a, (4, 6, 6)), complexes(4, 3, 5), per_mesh=6),
    case("rfftn_longer", lambda a: torch.fft.rfftn(a, (7,), dim=(0,)), reals(5, 4), per_mesh=6),
    case("ifftn", lambda a: torch.fft.ifftn(a, s=(3, 4), dim=(2, 0)), complexes(4, 3, 5)),
    case("rfftn", lambda a: torch.fft.rfftn(a), reals(4, 3, 5), per_mesh=8),
    case("irfftn", lambda a: torch.fft.irfftn(a, dim=(0, 1), norm="forward"), complexes(4, 3, 2)),
    case("hfftn", lambda a: torch.fft.hfftn(a), complexes(3, 3, 3)),
    case("ihfftn", lambda a: torch.fft.ihfftn(a, dim=(1, 0)), reals(5, 4, 2)),
    case("there_and_back", lambda a: torch.fft.irfftn(torch.fft.rfftn(a), a.shape),
         reals(4, 6, 5)),
    case("shifted", lambda a: torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft2(a), -1)),
         complexes(6, 5)),
    case("derivative", lambda a: torch.fft.ifft(
        torch.fft.fft(a, dim=0) * (2j * torch.pi * torch.fft.fftfreq(8, dtype=torch.float64))[
            :, None], dim=0).real, reals(8, 3)),
    case("spectral_convolution", _fno, reals(2, 2, 8, 6), complexes(2, 3, 3, 2),
         complexes(2, 3, 3, 2), layouts=(None, ("r", "s0", "s1"), ("r", "s0", "s1")), per_mesh=6),
    # One line, which no other dim can take over.
    case("line", lambda a: torch.fft.fft(a), complexes(36), per_mesh=6),
    case("line_of_prime_length", lambda a: torch.fft.ifft(a), complexes(13), per_mesh=6),
    case("line_longer", lambda a: torch.fft.rfft(a, n=40), reals(18), per_mesh=6),
    case("line_beside_one", lambda a: torch.fft.fft2(a), complexes(1, 24, 1), per_mesh=6),
    case("real_line", lambda a: torch.fft.rfft(a, norm="ortho"), reals(36), per_mesh=6),
    case("back_line", lambda a: torch.fft.irfft(a), complexes(19), per_mesh=6),
    case("short_batch_of_lines", lambda a: torch.fft.rfft(a), reals(2, 30), per_mesh=6),
]

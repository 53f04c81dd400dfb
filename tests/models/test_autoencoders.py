"""The autoencoders of diffusers on sharded images and videos: values, memory, and no gather."""
# pyright: reportArgumentType=false
# diffusers writes tuple[int] for tuples of any length.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import diffusers  # of which what follows is imported when it is used: it takes seconds
import pytest
import torch
from torch import nn

import weft
from tests.effort import EFFORT
from tests.models.peaks import SHARE, small_tiles
from weft import P
from weft.testing import peak_memory

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "kl": (lambda: diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 8), norm_num_groups=2), (3, 64, 60)),
    "cogvideox": (lambda: diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4), latent_channels=2, layers_per_block=1,
        norm_num_groups=2), (3, 5, 32, 32)),
    "wan": (lambda: diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1), (3, 5, 32, 32)),
    "ltx": (lambda: diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4),
        decoder_block_out_channels=(4, 4, 4, 4), layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5, spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), patch_size=2), (3, 9, 64, 64)),
    "mochi": (lambda: diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
        latent_channels=4, layers_per_block=(1,) * 5), (3, 7, 32, 32)),
}
"""Random weights, and channels and positions of a sample."""

MESHES: dict[str, tuple[dict[str, int], Callable[[int], P]]] = {
    "rows": ({"x": 4}, lambda ndim: P(*[None] * (ndim - 2), "x")),
    "rows and columns": ({"x": 2, "y": 2}, lambda ndim: P(*[None] * (ndim - 2), "x", "y")),
    "samples and rows": ({"dp": 2, "x": 2}, lambda ndim: P("dp", *[None] * (ndim - 3), "x")),
}

ROWS = [
    ("kl", "rows and columns"), ("cogvideox", "samples and rows"), ("wan", "rows and columns"),
    ("ltx", "samples and rows"), ("mochi", "rows"),
]
MORE = [
    ("kl", "rows"), ("kl", "samples and rows"), ("cogvideox", "rows"), ("wan", "samples and rows"),
    ("ltx", "rows and columns"),
]


def used(mesh: Any, name: str, batch: int, spec: P) -> tuple[Any, ...]:
    """The peak of a pass there and back, the latent, the result, and all gradients."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    x = torch.randn((batch, *shape), dtype=torch.float64)
    if mesh is not None:
        weft.distribute_module(model, mesh)
        x = weft.distribute_tensor(x, mesh, spec)
    x.requires_grad_()
    with peak_memory(model, x) as memory:
        latent = model.encode(x).latent_dist.mode()  # type: ignore[operator]
        out = model.decode(latent).sample  # type: ignore[operator]
        (out * out).mean().backward()
    found = [latent, out, x.grad, *[one.grad for one in model.parameters()]]
    found = [one.detach() for one in found if one is not None]
    if mesh is not None:
        found = [one.full_tensor() for one in found]
    return memory.peak, found


@pytest.mark.parametrize("name, mesh", ROWS if EFFORT < 1 else ROWS + MORE)
def test_an_autoencoder_keeps_its_field_sharded(name: str, mesh: str) -> None:
    share, expected, ranks = measured(name, mesh)
    for found in ranks:
        for mine, due in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, due, rtol=1e-7, atol=1e-9)
    assert share <= SHARE, f"{share:.2f} of a rank's part"


def measured(name: str, mesh: str) -> tuple[float, Any, list[Any]]:
    """The peak of a rank in its part of one process's, and the values of that and of all ranks."""
    axes, spec_of = MESHES[mesh]
    shape = MODELS[name][1]
    batch, spec = axes.get("dp", 1), spec_of(1 + len(shape))
    with small_tiles():
        alone, expected = used(None, name, batch, P())
    with small_tiles(whole=8 * batch * math.prod(shape) // 4):  # warnings are errors
        ranks = weft.testing.run(lambda mesh: used(mesh, name, batch, spec), mesh=axes)
    share = max(peak for peak, _ in ranks) / alone * len(ranks)
    return share, expected, [found for _, found in ranks]

"""Models of fields, as their users write them: plain PyTorch that knows of no mesh.

Small in channels, so that the field and not the weights takes the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FIELDS", "Field"]


class UNet(nn.Module):
    """Two levels down and up, with skips, group norms and circular padding at the entrance."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, width, 3, padding=1, padding_mode="circular")
        self.down1, self.down2 = self._block(width, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = self._block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = self._block(2 * width, width)
        self.leave = nn.Conv2d(width, 2, 1)

    def _block(self, given: int, made: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(2, made), nn.SiLU(),
            nn.Conv2d(made, made, 3, padding=1), nn.GroupNorm(2, made), nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(self.enter(x))
        second = self.down2(F.max_pool2d(first, 2))
        x = self.up2(self.middle(F.max_pool2d(second, 2)))
        x = self.up1(self.join2(torch.cat([x, second], 1)))
        return self.leave(self.join1(torch.cat([x, first], 1)))


class ConvNeXt(nn.Module):
    """A stem of patches, then depthwise convolutions of 7 x 7 and a layer norm over channels."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, width, 2, stride=2)
        self.blocks = nn.Sequential(*[ConvNeXt.Block(width) for _ in range(2)])
        self.shrink = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.last = ConvNeXt.Block(2 * width)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.shrink(self.blocks(self.stem(x))))
        return self.head(x.mean((-2, -1)))


class FNO(nn.Module):
    """Fourier layers: the lowest modes times complex weights, beside a 1 x 1 convolution."""

    class Layer(nn.Module):
        def __init__(self, width: int, modes: int) -> None:
            super().__init__()
            self.modes = modes
            shape = (2, width, width, modes, modes)
            self.weight = nn.Parameter(torch.randn(shape, dtype=torch.cdouble) / width)
            self.beside = nn.Conv2d(width, width, 1)

        def forward(self, x: Tensor) -> Tensor:
            modes = self.modes
            spectrum = torch.fft.rfft2(x)
            low = torch.einsum("bixy,ioxy->boxy", spectrum[..., :modes, :modes], self.weight[0])
            high = torch.einsum("bixy,ioxy->boxy", spectrum[..., -modes:, :modes], self.weight[1])
            rows, columns = spectrum.shape[-2:]
            low = F.pad(torch.cat([low, F.pad(high, (0, 0, rows - 2 * modes, 0))], -2),
                        (0, columns - modes))
            return F.gelu(torch.fft.irfft2(low, s=x.shape[-2:]) + self.beside(x))

    def __init__(self, width: int = 6, modes: int = 4) -> None:
        super().__init__()
        self.lift = nn.Conv2d(2, width, 1)
        self.layers = nn.Sequential(*[FNO.Layer(width, modes) for _ in range(2)])
        self.project = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.layers(self.lift(x)))


class Attention(nn.Module):
    """Self-attention over tokens, then a hidden layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(*[one.transpose(1, 2) for one in (q, k, v)])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches to tokens, by a convolution or by a reshape; attention with three heads."""

    def __init__(self, size: tuple[int, int], by_reshape: bool, width: int = 36) -> None:
        super().__init__()
        self.by_reshape = by_reshape
        self.patches = nn.Linear(2 * 16, width) if by_reshape else nn.Conv2d(2, width, 4, 4)
        count = (size[0] // 4) * (size[1] // 4)
        self.places = nn.Parameter(torch.randn(1, count, width) / 8)
        self.blocks = nn.Sequential(*[Attention(width, 3) for _ in range(2)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_reshape:
            b, c, h, w = x.shape
            x = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5)
            x = self.patches(x.reshape(b, (h // 4) * (w // 4), c * 16))
        else:
            x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x + self.places).mean(1))


class Swin(nn.Module):
    """Attention inside of windows of 4 x 4 positions, every second time of shifted ones."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, width, 2, stride=2)
        self.blocks = nn.ModuleList([Attention(width, 2) for _ in range(2)])
        self.leave = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).permute(0, 2, 3, 1)
        for at, block in enumerate(self.blocks):
            x = torch.roll(x, (-2 * at, -2 * at), (1, 2))
            b, h, w, c = x.shape
            windows = x.view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
            windows = block(windows).view(b, h // 4, w // 4, 4, 4, c)
            x = torch.roll(windows.transpose(2, 3).reshape(b, h, w, c), (2 * at, 2 * at), (1, 2))
        return self.leave(x)


class VAE3d(nn.Module):
    """Strided convolutions of a volume down to two fields, a sample, and interpolation up again."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv3d(1, width, 3, padding=1)
        self.down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 2 * width)
        self.latent, self.up = nn.Conv3d(2 * width, 4, 1), nn.Conv3d(2, width, 3, padding=1)
        self.leave = nn.Conv3d(width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.down(F.silu(self.enter(x))))
        mean, logvar = self.latent(F.silu(x)).chunk(2, 1)
        z = mean + (logvar / 2).exp() * torch.randn_like(mean)
        return self.leave(F.silu(self.up(F.interpolate(z, scale_factor=2, mode="nearest"))))


@dataclass(frozen=True, slots=True)
class Field:
    """A model with the shape of its field: batch, channels, then positions.

    `uneven` is a size that the model takes and that four ranks do not divide.
    """

    build: Callable[[tuple[int, ...]], nn.Module]
    even: tuple[int, ...]
    uneven: tuple[int, ...]

    def make(self, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
        """The model and its field in float64, the same each time."""
        torch.manual_seed(0)
        model = self.build(shape[2:]).double()
        return model, torch.randn(shape, dtype=torch.float64)


FIELDS = {
    "unet": Field(lambda _: UNet(), (1, 2, 64, 64), (1, 2, 60, 68)),
    "convnext": Field(lambda _: ConvNeXt(), (1, 2, 64, 64), (1, 2, 60, 68)),
    "fno": Field(lambda _: FNO(), (1, 2, 64, 64), (1, 2, 62, 65)),
    "vit by conv": Field(lambda size: ViT(size, False), (1, 2, 128, 128), (1, 2, 112, 144)),  # type: ignore[arg-type]
    "vit by reshape": Field(lambda size: ViT(size, True), (1, 2, 128, 128), (1, 2, 112, 144)),  # type: ignore[arg-type]
    "swin": Field(lambda _: Swin(), (1, 2, 64, 64), (1, 2, 56, 72)),
    "vae": Field(lambda _: VAE3d(), (1, 1, 16, 16, 16), (1, 1, 14, 18, 16)),
}

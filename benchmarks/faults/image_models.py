"""The image models of the open list: a residual network, a vision transformer, a diffusion model; and their data."""

import torch
from models import Block, Images
from torch import Tensor, nn

DIRECTIONS = 8
LEVELS = 50


class Residual(nn.Module):
    """Two convolutions with batch norm beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.ReLU()
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map after the residual."""
        return x + self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))


class ResNet(nn.Module):
    """A stem, three residual blocks, a linear head on the mean."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(3))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, DIRECTIONS)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, 8)."""
        x = self.stem_norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.relu().mean((2, 3))))


class Vit(nn.Module):
    """A stem of two convolutions with batch norm (arXiv 2106.14881), a class token, three blocks, a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.patch = nn.Conv2d(16, width, 3, 3)
        self.cls = nn.Parameter(0.05 * torch.randn(1, 1, width))
        self.pos = nn.Parameter(0.05 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(3))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, DIRECTIONS)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, 8)."""
        x = self.patch(self.stem_norm(self.stem(x)).relu()).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)[:, 0])


class DiffusionBlock(nn.Module):
    """A convolution behind a group norm, told the level of noise, beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(4, width), nn.SiLU()
        self.conv, self.time, self.drop = nn.Conv2d(width, width, 3, padding=1), nn.Linear(16, width), nn.Dropout(0.1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Return the feature map after the residual."""
        return x + self.drop(self.conv(self.act(self.norm(x)) + self.time(level)[:, :, None, None]))


class Denoiser(nn.Module):
    """A small U: down, blocks in the middle, up beside a skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU())
        self.into, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(3))
        self.up, self.out = nn.ConvTranspose2d(width, width, 4, 2, 1), nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Return the noise that is in x, of its shape; `level` has shape (batch,)."""
        waves = level[:, None] / LEVELS * 2.0 ** torch.arange(4)
        told = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        first = self.into(x)
        y = self.down(first)
        for block in self.blocks:
            y = block(y, told)
        return self.out(torch.cat([first, self.up(y)], 1))


class Diffusion(nn.Module):
    """Adds noise by its schedule and predicts it (arXiv 2006.11239)."""

    signal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = Denoiser()
        self.register_buffer("signal", torch.linspace(1e-3, 0.12, LEVELS).neg().add(1).cumprod(0))

    def forward(self, images: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        """Return the predicted noise, of the shape of the images."""
        signal = self.signal[level][:, None, None, None]
        return self.net(signal.sqrt() * images + (1 - signal).sqrt() * noise, level)


class NoisedImages:
    """Stripes, a level of noise for each, and the noise, which is also the target."""

    def __init__(self) -> None:
        self.images = Images(DIRECTIONS)

    def batch(self, size: int, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return (images, levels, noise) and the noise."""
        images, _ = self.images.batch(size, generator)
        level = torch.randint(LEVELS, (size,), generator=generator)
        noise = torch.randn(images.shape, generator=generator)
        return (images, level, noise), noise

"""Models of one to six million parameters, on real text (the source of Python's library) and on drawn images."""

import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1]))

from clean_tasks import Task
from gpt import PRESETS, Chain, Gpt, Preset
from llama import Llama, Shape
from torch import Tensor, nn


@cache
def library_text() -> Tensor:
    """Return some megabytes of Python source as bytes, shape (n,), int64."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in files)[: 2**22]
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


def text_batch(size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return random windows of the text and the next bytes, shape (size, length) each."""
    text = library_text()
    at = torch.randint(0, len(text) - length - 1, (size, 1)) + torch.arange(length + 1)
    return text[at[:, :-1]], text[at[:, 1:]]


def language_model(model: nn.Module, size: int, length: int, clip: float) -> Task:
    """Return the task of training a byte-level model that returns logits."""

    def loss() -> Tensor:
        x, y = text_batch(size, length)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return Task(model, loss, clip=clip)


def markov_gpt() -> Task:
    """Return the model of the cost benchmarks on its random Markov chain."""
    preset = PRESETS["default"]
    model, data = Gpt(preset), Chain(preset, int(torch.randint(2**31, ())))

    def loss() -> Tensor:
        x, y = data.batch()
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return Task(model, loss, clip=1.0)


def text_gpt() -> Task:
    """Return a GPT on text."""
    return language_model(Gpt(Preset(4, 192, 4, 96, 8, 256, 1)), 8, 96, 1.0)


def text_llama() -> Task:
    """Return a Llama on text: RMS norms, grouped keys, gated layers."""
    model = Llama(Shape(4, 192, 6, 2, 512, 256, 96, 8))
    return Task(model, lambda: model(*text_batch(8, 96)), clip=1.0)


class Lstm(nn.Module):
    """Two recurrent layers between an embedding and a head."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, length, 256)."""
        logits: Tensor = self.head(self.lstm(self.embed(x))[0])
        return logits


def text_lstm() -> Task:
    """Return an LSTM on text, with gradients clipped at norm 0.25, as is usual."""
    return language_model(Lstm(), 16, 64, 0.25)


def drawings(size: int) -> tuple[Tensor, Tensor]:
    """Return images of discs, rings, squares and crosses, shape (size, 3, 32, 32), and their labels."""
    label, grid = torch.randint(0, 4, (size,)), torch.linspace(-1, 1, 32)
    centre, radius = torch.rand(size, 2, 1, 1) - 0.5, 0.25 + 0.3 * torch.rand(size, 1, 1)
    dx, dy = (grid - centre[:, 0]).abs().expand(size, 32, 32), (grid[:, None] - centre[:, 1]).abs().expand(size, 32, 32)
    far = (dx**2 + dy**2).sqrt()
    shapes = [
        far < radius,
        (far - radius).abs() < 0.1,
        dx.maximum(dy) < radius,
        (dx.minimum(dy) < 0.1) & (far < radius),
    ]
    drawn = torch.stack(shapes, 1)[torch.arange(size), label].float()
    colour = torch.rand(2, size, 3, 1, 1)
    image = colour[0] + (colour[1] - colour[0]) * drawn[:, None] + 0.1 * torch.randn(size, 3, 32, 32)
    return (image - 0.5) / 0.3, label


class Residual(nn.Module):
    """Two convolutions with batch norms, and a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Identity() if into == out else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, shape (batch, out, height / stride, width / stride)."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def image_task(model: nn.Module, size: int) -> Task:
    """Return the task of training a classifier of drawings."""

    def loss() -> Tensor:
        x, label = drawings(size)
        return F.cross_entropy(model(x), label, label_smoothing=0.1)

    return Task(model, loss)


def image_resnet() -> Task:
    """Return a residual network of eleven convolutions on drawings."""
    blocks = [Residual(*sizes) for sizes in ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))]
    stem = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return image_task(nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 4)), 16)


class Vit(nn.Module):
    """A vision transformer that classifies the mean of its tokens."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, 64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, 4)."""
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.place
        logits: Tensor = self.head(self.layers(tokens).mean(1))
        return logits


def image_vit() -> Task:
    """Return a vision transformer on drawings."""
    return image_task(Vit(), 16)


class Unet(nn.Module):
    """Predicts the noise in an image, given its level; the last layer starts at zero."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.into, self.down = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, 1, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(8, 2 * width) for _ in range(3))
        self.up, self.out = nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.Conv2d(2 * width, 3, 3, 1, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the noise, of the shape of x, (batch, 3, 32, 32); t has shape (batch,)."""
        waves = t[:, None] * 2.0 ** torch.arange(8)
        first = F.silu(self.into(x))
        y = self.down(first) + self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]
        for conv, norm in zip(self.middle, self.norms, strict=True):
            y = y + conv(F.silu(norm(y)))
        noise: Tensor = self.out(torch.cat([first, F.silu(self.up(y))], 1))
        return noise


def image_diffusion() -> Task:
    """Return a diffusion model of drawings."""
    model = Unet()

    def loss() -> Tensor:
        x, _ = drawings(8)
        t, noise = torch.rand(8), torch.randn_like(x)
        angle = (t * torch.pi / 2)[:, None, None, None]
        return F.mse_loss(model(angle.cos() * x + angle.sin() * noise, t), noise)

    return Task(model, loss, clip=1.0)


LARGER: list[Callable[[], Task]] = [
    markov_gpt,
    text_gpt,
    text_llama,
    text_lstm,
    image_resnet,
    image_vit,
    image_diffusion,
]

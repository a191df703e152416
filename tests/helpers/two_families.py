"""Two model families with their data: a decoder over tokens, and a convolutional net with batch norm."""

import math

import torch
from torch import nn


class Gpt(nn.Module):
    """A decoder of two blocks over tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 32)
        self.register_buffer("mask", torch.full((12, 12), -math.inf).triu(1))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x)


class ResNet(nn.Module):
    """A convolutional net with batch norm and a residual."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(x.mean((2, 3)))


def text(generator):
    tokens = torch.randint(0, 32, (8, 1), generator=generator) + torch.arange(13)
    tokens = (tokens + torch.randint(0, 2, tokens.shape, generator=generator)) % 32
    return tokens[:, :-1], tokens[:, 1:].flatten()


def images(generator):
    labels = torch.randint(0, 4, (16,), generator=generator)
    pixels = torch.randn(16, 3, 8, 8, generator=generator)
    pixels[:, 0] += 0.3 * (labels[:, None, None] - 1.5)
    return pixels, labels


FAMILIES = {
    "gpt": (Gpt, text, "head.weight", "embedding.weight"),
    "resnet": (ResNet, images, "head.weight", "stem.0.weight"),
}

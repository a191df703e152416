"""Small models and a plain training loop that many tests share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

EVERY_STEP = {part: {"every": 1} for part in ("gradients", "parameters", "optimizer_state", "updates", "activations")}


def mlp(width=8):
    """Two linear layers and a ReLU between them."""
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))


class Attention(nn.Module):
    """Causal self-attention of one head."""

    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    """A transformer block with dropout, so that a disturbed random state shows."""

    def __init__(self, width):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.attn(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, layers=2, width=32, vocabulary=64, context=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.02)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Residual(nn.Module):
    """A ResNet block with in-place ReLU and an in-place addition."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """A small ResNet."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Residual(8), Residual(8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


@dataclass
class Ran:
    """The result of a training run."""

    losses: list
    model: nn.Module


def batch_for(model, generator):
    """Return inputs and targets that fit the model."""
    if isinstance(model, Gpt):
        tokens = torch.randint(0, 64, (4, 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].flatten()
    if isinstance(model, ResNet):
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def train(model, optimizer, steps, monitor=None, before_step=None, seed=0):
    """Train as a user would; `before_step(step)` runs before each forward pass."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        inputs, targets = batch_for(model, generator)
        if before_step is not None:
            before_step(step)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets)
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None:
            monitor.log(loss=loss)
        optimizer.step()
        losses.append(loss.item())
    return Ran(losses, model)


def step(model, optimizer):
    """Train a step on two rows of ones, of the model's first layer's width 4."""
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip_bit(parameter, element=0, bit=30):
    """Flip a bit in the storage of a float32 parameter; torch counts no write, as it counts none of faulty memory."""
    parameter.data.view(-1).view(torch.int32)[element] ^= 1 << bit

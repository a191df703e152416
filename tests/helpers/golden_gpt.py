"""The model whose records msprobe wrote to `tests/data/msprobe_monitor`: same names, shapes and dtypes."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention of one head."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, width):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width)
        self.ln2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GoldenGpt(nn.Module):
    """A GPT of two blocks; vocabulary 64, width 32, context 16."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def train_golden(model, optimizer, steps, before_step=None):
    """Train on batches of 2 × 16 tokens; `before_step(step)` runs between the backward pass and the update."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        tokens = torch.randint(0, 64, (2, 17), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if before_step is not None:
            before_step(step)
        optimizer.step()
        optimizer.zero_grad()

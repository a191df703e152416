"""The model of the cost benchmarks, a GPT on a random Markov chain in two sizes, and its training step."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Preset:
    """The sizes of a model and its batch, and the number of threads."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int
    threads: int


PRESETS = {
    "default": Preset(6, 256, 4, 128, 8, 1024, 2),
    "many_small": Preset(48, 64, 2, 32, 2, 256, 1),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended sequence, shape (batch, length, width)."""
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """Two linear layers around a GELU, as three modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed sequence."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after both residuals."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """Token and position embeddings, blocks, a head."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.tok = nn.Embedding(preset.vocabulary, preset.width)
        self.pos = nn.Embedding(preset.length, preset.width)
        self.blocks = nn.ModuleList(Block(preset.width, preset.heads) for _ in range(preset.layers))
        self.ln_f = nn.LayerNorm(preset.width)
        self.head = nn.Linear(preset.width, preset.vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Chain:
    """Batches from a fixed random Markov chain with four successors a token, so that the loss can fall."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self.preset = preset
        self.next = torch.randint(
            preset.vocabulary, (preset.vocabulary, 4), generator=torch.Generator().manual_seed(99)
        )
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, shape (batch, length) each."""
        p = self.preset
        tokens = torch.empty(p.batch, p.length + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(p.vocabulary, (p.batch,), generator=self.generator)
        choice = torch.randint(4, (p.batch, p.length), generator=self.generator)
        for i in range(p.length):
            tokens[:, i + 1] = self.next[tokens[:, i], choice[:, i]]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Training:
    """One model with its optimizer and data, and an optional monitor."""

    def __init__(self, preset: Preset, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Gpt(preset)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.data = Chain(preset, seed)
        self.losses: list[float] = []
        self.monitor: Any = None

    def step(self) -> float:
        """Train one step; return its seconds, without those of making the batch."""
        inputs, targets = self.data.batch()
        start = time.perf_counter()
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        self.losses.append(loss.item())
        return seconds

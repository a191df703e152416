"""The training of the GPU benchmark: a Llama-like model, and AdamW with bf16 weights and float32 moments."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch. The first one has 1.24 billion parameters and 32,768 tokens a step."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    key_heads: int = 8
    inner: int = 8192
    vocabulary: int = 128_256
    length: int = 2048
    batch: int = 16


TINY = Shape(2, 64, 4, 2, 128, 256, 32, 2)


class Attention(nn.Module):
    """Causal attention with grouped keys."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = s.heads, s.key_heads, s.width // s.heads
        self.q = nn.Linear(s.width, s.width, bias=False)
        self.k = nn.Linear(s.width, self.key_heads * self.size, bias=False)
        self.v = nn.Linear(s.width, self.key_heads * self.size, bias=False)
        self.o = nn.Linear(s.width, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended sequence."""
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(s.width, s.inner, bias=False)
        self.up = nn.Linear(s.width, s.inner, bias=False)
        self.down = nn.Linear(s.inner, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed sequence."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each after an RMS norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(s.width), Attention(s)
        self.norm2, self.mlp = nn.RMSNorm(s.width), Mlp(s)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after both residuals."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Embedding, blocks, norm, tied head."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, computed in pieces so that all logits are never in memory."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).flatten(0, 1)
        pieces = zip(x.chunk(8), targets.flatten().chunk(8), strict=True)
        losses = [F.cross_entropy(F.linear(h, self.embedding.weight), t, reduction="sum") for h, t in pieces]
        return torch.stack(losses).sum() / targets.numel()


class WideMoments(torch.optim.Optimizer):
    """AdamW with float32 moments for weights of any dtype."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight, foreach."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for p in weights:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
            for p in weights:  # one at a time, so that only one float32 copy of a gradient exists
                gradient = p.grad.float()
                mean, square = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                mean.lerp_(gradient, 0.1)
                square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                p.addcdiv_(mean, square.sqrt().add_(1e-8), value=-group["lr"])

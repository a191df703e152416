"""The model families of the fault benchmark, and their data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention whose parts are modules, so that each can be watched, and harmed."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.logits = nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended sequence, shape (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = (
            p(x).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = torch.full((length, length), -1e4 if self.causal else 0.0).triu(1)
        logits = self.logits(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5)
        y = (logits + mask).softmax(-1) @ v
        return self.out_proj(self.drop(y.transpose(1, 2).reshape(batch, length, width)))


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed sequence."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads, causal=causal)
        self.ln2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence after both residuals."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """Embeddings, four blocks, a head tied to the token embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 64, layers: int = 4, length: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.05)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, length, vocabulary)."""
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Stage(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map."""
        return self.act(self.norm(self.conv(x)))


class Cnn(nn.Module):
    """Four stages and a linear head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(1 if i == 0 else width, width) for i in range(4))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (batch, 4)."""
        for stage in self.stages:
            x = stage(x)
        return self.head(self.drop(x.mean((2, 3))))


class Text:
    """Sequences of a random Markov chain with four successors a token."""

    def __init__(self, vocabulary: int = 64, length: int = 32) -> None:
        self.length, self.vocabulary = length, vocabulary
        self.following = torch.randint(vocabulary, (vocabulary, 4), generator=torch.Generator().manual_seed(99))

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, shape (size, length) each."""
        tokens = [torch.randint(self.vocabulary, (size,), generator=generator)]
        choice = torch.randint(4, (size, self.length), generator=generator)
        for i in range(self.length):
            tokens.append(self.following[tokens[-1], choice[:, i]])
        found = torch.stack(tokens, dim=1)
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()


class Images:
    """Noisy stripes of some directions, four unless more are asked for."""

    def __init__(self, directions: int = 4) -> None:
        self.heavy, self.directions = False, directions

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images of shape (size, 1, 12, 12) and labels of shape (size,)."""
        label = torch.randint(0, self.directions, (size,), generator=generator)
        direction, grid = label * torch.pi / self.directions, torch.arange(12.0)
        wave = direction.cos()[:, None, None] * grid + direction.sin()[:, None, None] * grid[:, None]
        noise = torch.randn(size, 1, 12, 12, generator=generator)
        if self.heavy:
            chi = torch.randn(size, 3, 1, 1, generator=generator).square().mean(1, keepdim=True)
            noise = noise / chi.sqrt()
        return (1.5 * wave).sin()[:, None] + noise, label


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

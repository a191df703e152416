"""Small models and their data for the practices of `practices.py`; each learns something."""

import random

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

WORDS, WIDTH, LENGTH = 48, 32, 24


class Layer(nn.Module):
    """A layer of a decoder: attention and a perceptron, each ahead of a shortcut."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence, shape (batch, length, width)."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.proj(mixed))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """A language model; `left_out` is the share of its layers that a training pass leaves out."""

    def __init__(self, layers: int = 3, dropout: float = 0.1, left_out: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.left_out = left_out

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the next words."""
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            if not self.training or random.random() >= self.left_out:
                x = layer(x)
        return self.head(self.norm(x))


_CHAIN = torch.softmax(2.0 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7)), 1)


def sentences(count: int, length: int = LENGTH) -> Tensor:
    """Return word sequences of a Markov chain, shape (count, length + 1)."""
    words = [torch.randint(WORDS, (count,))]
    for _ in range(length):
        words.append(torch.multinomial(_CHAIN[words[-1]], 1)[:, 0])
    return torch.stack(words, 1)


def language_loss(model: nn.Module, words: Tensor) -> Tensor:
    """Return the cross entropy of the next words."""
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Convolutions(nn.Module):
    """A small residual network with batch norms and a head."""

    def __init__(self, classes: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.block1 = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.block2 = nn.Sequential(nn.Conv2d(12, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU())
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(24, classes)

    def features(self, images: Tensor) -> Tensor:
        """Return the pooled features, shape (batch, 24)."""
        x = self.stem(images)
        return self.drop(self.block2(x + self.block1(x)).mean((2, 3)))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        return self.head(self.features(images))


_SHAPES = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(3))


def images(count: int, noise: float = 0.8, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return noisy images of six shapes, shape (count, 1, size, size), and their classes."""
    classes = torch.randint(6, (count,))
    drawn = _SHAPES[classes] + noise * torch.randn(count, 1, 12, 12)
    return F.interpolate(drawn, size=(size, size)) if size != 12 else drawn, classes


def generator() -> nn.Module:
    """Return a generator of images from 8 numbers, with batch norms."""
    return nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 144), nn.Tanh(), nn.Unflatten(1, (1, 12, 12))
    )


def critic() -> nn.Module:
    """Return a critic of images."""
    return nn.Sequential(nn.Conv2d(1, 12, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(432, 1))


def perceptron(inputs: int = 8, outputs: int = 1, width: int = 48) -> nn.Module:
    """Return a perceptron of two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


class PointPolicy(nn.Module):
    """Steers points towards the origin: actions of a normal distribution, and the value of where a point is."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.action, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, seen: Tensor) -> tuple[Normal, Tensor]:
        """Return the distribution of actions, and the values, shape (n,), of states, shape (n, 4)."""
        inner = self.body(seen)
        return Normal(self.action(inner), 1.0), self.value(inner)[:, 0]

    def evaluate(self, seen: Tensor) -> tuple[Normal, Tensor]:
        """Return what the losses of a minibatch need."""
        found: tuple[Normal, Tensor] = self(seen)
        return found

    @torch.no_grad()
    def rollout(self, points: int = 32, steps: int = 32, discount: float = 0.97) -> list[Tensor]:
        """Return states, actions, their logarithmic densities, advantages and returns of `points` × `steps` moves."""
        place, speed, seen = torch.randn(points, 2), torch.zeros(points, 2), []
        for _ in range(steps):
            state = torch.cat([place, speed], 1)
            actions, value = self(state)
            action = actions.sample()
            speed = 0.9 * speed + 0.1 * action.clamp(-1, 1)
            place = place + 0.2 * speed
            seen.append((state, action, actions.log_prob(action).sum(1), value, -0.1 * place.square().sum(1)))
        later, returns = self(torch.cat([place, speed], 1))[1], []
        for *_, reward in reversed(seen):
            returns.append(later := reward + discount * later)
        states, actions, densities, values, _ = (torch.cat(part) for part in zip(*seen, strict=True))
        gained = torch.cat(returns[::-1])
        return [states, actions, densities, gained - values, gained]


class ActingPolicy(PointPolicy):
    """Acts by a call of the model, and is trained through a method of its own that never makes one."""

    def evaluate(self, seen: Tensor) -> tuple[Normal, Tensor]:
        """Return what the model's call does, by its parts."""
        return self.forward(seen)


class Lion(torch.optim.Optimizer):
    """Moves by the sign of averaged gradients (Chen et al., "Symbolic discovery of optimization algorithms", 2023)."""

    def __init__(self, params: object, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * (first * average + (1 - first) * p.grad).sign())
                average.lerp_(p.grad, 1 - second)

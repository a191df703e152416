"""Small models of many kinds with their data; each run is healthy, so every incident is a false alarm."""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from policy_tasks import actor_critic, policy_gradient, q_learning
from task import Task
from torch import Tensor, nn
from torch.nn.utils import parametrizations


def spirals() -> Task:
    """Return a perceptron on two interleaved spirals."""
    angle, label = torch.rand(4096) * 12, torch.randint(0, 2, (4096,))
    turn, radius = angle + torch.pi * label, angle / 12 + 0.03 * torch.randn(4096)
    points = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def loss() -> Tensor:
        rows = torch.randint(0, 4096, (256,))
        return F.cross_entropy(model(points[rows]), label[rows])

    return Task(model, loss)


def wide_perceptron() -> Task:
    """Return a perceptron whose first layer has two inputs and whose others have 256."""
    sizes = (2, 256, 256, 256, 256)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 1))

    def loss() -> Tensor:
        x = torch.randn(64, 2)
        return F.mse_loss(model(x), (3 * x[:, :1]).sin() * x[:, 1:])

    return Task(model, loss)


def stripes(size: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of stripes in four directions, (size, 1, 12, 12), and their labels."""
    label, grid = torch.randint(0, 4, (size,)), torch.arange(12.0)
    direction = label * torch.pi / 4
    wave = direction.cos()[:, None, None] * grid + direction.sin()[:, None, None] * grid[:, None]
    return (1.5 * wave).sin()[:, None] + torch.randn(size, 1, 12, 12), label


def images() -> Task:
    """Return a convolutional network with batch norm; its convolutions have biases, whose gradient is rounding."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip

    def loss() -> Tensor:
        x, label = stripes(32)
        return F.cross_entropy(model(x), label)

    return Task(model, loss)


class Residual(nn.Module):
    """A block whose last norm starts at zero gain, as in large residual networks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(4, width),
        )  # fmt: skip
        nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return x, (batch, width, height, width), plus the body's output."""
        return F.relu(x + self.body(x))


def residual_network() -> Task:
    """Return a residual network with group norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), *(Residual(16) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )

    def loss() -> Tensor:
        x, label = stripes(32)
        return F.cross_entropy(model(x), label)

    return Task(model, loss)


def autoencoder() -> Task:
    """Return a convolutional autoencoder."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.LeakyReLU(0.1), nn.ConvTranspose2d(8, 1, 4, 2, 1),
    )  # fmt: skip

    def loss() -> Tensor:
        x, _ = stripes(32)
        return F.mse_loss(model(x), x)

    return Task(model, loss)


def variational_autoencoder() -> Task:
    """Return a variational autoencoder, some of whose latent units collapse, as is usual."""
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 32)),
            "decoder": nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 144)),
        }
    )

    def loss() -> Tensor:
        x = stripes(64)[0].flatten(1)
        mean, log_variance = model["encoder"](x).chunk(2, dim=1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return ((model["decoder"](z) - x) ** 2).sum(1).mean() / 144 + divergence / 144

    return Task(model, loss)


def markov_chain(size: int, length: int, following: Tensor) -> Tensor:
    """Return sequences of tokens, (size, length); each token has a few possible successors."""
    tokens = [torch.randint(0, len(following), (size,))]
    for _ in range(length - 1):
        tokens.append(following[tokens[-1], torch.randint(0, following.shape[1], (size,))])
    return torch.stack(tokens, dim=1)


def sequences(dtype: torch.dtype | None = None, micro_steps: int = 1, clip: float | None = None) -> Task:
    """Return a small transformer on a Markov chain."""
    following = torch.randint(0, 64, (64, 3))
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"token": nn.Embedding(64, 32), "body": body, "head": nn.Linear(32, 64)})
    mask = nn.Transformer.generate_square_subsequent_mask(16)  # filled with -Inf, as real masks are

    def loss() -> Tensor:
        batch = markov_chain(16, 17, following)
        logits = model["head"](model["body"](model["token"](batch[:, :-1]), mask=mask))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return Task(model, loss, dtype, micro_steps, clip)


def mixed_precision() -> Task:
    """Return the transformer under autocast in bfloat16."""
    return sequences(torch.bfloat16)


def loss_scaling() -> Task:
    """Return the transformer under autocast in float16, with a loss scaler."""
    return sequences(torch.float16)


def accumulation() -> Task:
    """Return the transformer with four micro-batches a step and clipped gradients."""
    return sequences(micro_steps=4, clip=1.0)


def recurrent() -> Task:
    """Return a two-layer LSTM on the chain, with clipped gradients and sequences of many lengths."""
    following = torch.randint(0, 64, (64, 3))
    model = nn.ModuleDict({
        "token": nn.Embedding(64, 32), "body": nn.LSTM(32, 48, 2, batch_first=True, dropout=0.2),
        "head": nn.Linear(48, 64),
    })  # fmt: skip

    def loss() -> Tensor:
        batch = markov_chain(16, int(torch.randint(6, 25, ())), following)
        logits = model["head"](model["body"](model["token"](batch[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return Task(model, loss, clip=1.0)


def heavy_tails() -> Task:
    """Return a perceptron on targets with Student's t noise of three degrees of freedom."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    weights, noise = torch.randn(16, 1), torch.distributions.StudentT(3.0)

    def loss() -> Tensor:
        x = torch.randn(64, 16)
        return F.smooth_l1_loss(model(x), x @ weights + noise.sample((64, 1)))

    return Task(model, loss)


class Patches(nn.Module):
    """A small vision transformer with a class token and a small gain on each branch (layer scale)."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 10, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, width)) for _ in range(depth)
        )
        self.gains = nn.ParameterList(nn.Parameter(1e-4 * torch.ones(width)) for _ in range(2 * depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (batch, 4), of images of shape (batch, 1, 12, 12)."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        for i, (attend, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            y = self.norms[2 * i](x)
            x = x + self.gains[2 * i] * attend(y, y, y, need_weights=False)[0]
            x = x + self.gains[2 * i + 1] * mlp(self.norms[2 * i + 1](x))
        logits: Tensor = self.head(x[:, 0])
        return logits


def vision_transformer() -> Task:
    """Return a vision transformer with layer scale and dropout."""
    model = Patches()

    def loss() -> Tensor:
        x, label = stripes(32)
        return F.cross_entropy(model(x), label)

    return Task(model, loss)


def denoiser() -> Task:
    """Return a diffusion model of points on a ring, whose last layer starts at zero."""
    model = nn.Sequential(nn.Linear(2 + 16, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))
    nn.init.zeros_(model[-1].weight)  # type: ignore[arg-type]
    average = [p.detach().clone() for p in model.parameters()]

    def loss() -> Tensor:
        angle, t = torch.rand(128, 1) * 2 * math.pi, torch.rand(128, 1)
        clean, noise = torch.cat([angle.cos(), angle.sin()], 1), torch.randn(128, 2)
        time = torch.cat([(t * 2**k).sin() for k in range(8)] + [(t * 2**k).cos() for k in range(8)], 1)
        mixed = (t * math.pi / 2).cos() * clean + (t * math.pi / 2).sin() * noise
        return F.mse_loss(model(torch.cat([mixed, time], 1)), noise)

    def after() -> None:
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.01)

    return Task(model, loss, after=after)


def recommender() -> Task:
    """Return a factorisation with embeddings of users and items drawn by a power law: most rows are rarely used."""
    model = nn.ModuleDict({"user": nn.Embedding(2000, 16), "item": nn.Embedding(500, 16), "top": nn.Linear(16, 1)})
    likes, rank = torch.randn(2000, 500).sign(), 1.0 / torch.arange(1, 501)

    def loss() -> Tensor:
        user, item = torch.randint(0, 2000, (64,)), torch.multinomial(rank, 64, replacement=True)
        score = model["top"](model["user"](user) * model["item"](item))[:, 0]
        return F.binary_cross_entropy_with_logits(score, (likes[user, item] + 1) / 2)

    return Task(model, loss)


def contrastive() -> Task:
    """Return two towers with a learned temperature."""
    model = nn.ModuleDict(
        {
            "left": nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)),
            "right": nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16)),
            "temperature": nn.ParameterList([nn.Parameter(torch.tensor(math.log(10.0)))]),
        }
    )
    views = torch.randn(8, 32), torch.randn(8, 24)

    def loss() -> Tensor:
        hidden = torch.randn(64, 8)
        left = F.normalize(model["left"](hidden @ views[0] + 0.1 * torch.randn(64, 32)), dim=1)
        right = F.normalize(model["right"](hidden @ views[1] + 0.1 * torch.randn(64, 24)), dim=1)
        logits = model["temperature"][0].exp() * left @ right.T
        return (F.cross_entropy(logits, torch.arange(64)) + F.cross_entropy(logits.T, torch.arange(64))) / 2

    return Task(model, loss)


class Experts(nn.Module):
    """Four experts behind a router; each token goes to one, and an expert may get none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' output for x, (tokens, width), and the load-balancing loss."""
        share = self.router(x).softmax(1)
        best, chosen = share.max(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, best[mine, None] * expert(x[mine]))
        load = torch.bincount(chosen, minlength=4) / len(x)
        return x + out, 4 * (load * share.mean(0)).sum()


def experts() -> Task:
    """Return a mixture of experts on a piecewise function."""
    model = nn.ModuleDict({"first": nn.Linear(4, 32), "experts": Experts(32), "last": nn.Linear(32, 1)})

    def loss() -> Tensor:
        x = torch.randn(128, 4)
        target = torch.where(x[:, :1] > 0, x[:, 1:2] * x[:, 2:3], (3 * x[:, 3:]).sin())
        hidden, balance = model["experts"](model["first"](x))
        return F.mse_loss(model["last"](hidden), target) + 0.01 * balance

    return Task(model, loss)


def adapters() -> Task:
    """Return a frozen network with low-rank adapters, whose second factor starts at zero."""
    model = nn.ModuleDict({
        "body": nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)),
        "down": nn.Linear(16, 4, bias=False), "up": nn.Linear(4, 16, bias=False),
    })  # fmt: skip
    model["body"].requires_grad_(requires_grad=False)
    nn.init.zeros_(model["up"].weight)
    goal = torch.randn(16, 16) / 4

    def loss() -> Tensor:
        x = torch.randn(64, 16)
        return F.mse_loss(model["body"](x) + model["up"](model["down"](x)), model["body"](x) + x @ goal)

    return Task(model, loss)


def two_heads() -> Task:
    """Return a trunk with two heads that train alternately: each has a gradient every other step."""
    model = nn.ModuleDict(
        {
            "trunk": nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU()),
            "heads": nn.ModuleList([parametrizations.weight_norm(nn.Linear(64, 1)), nn.Linear(64, 3)]),
        }
    )
    turn = [0]

    def loss() -> Tensor:
        turn[0] ^= 1
        x = torch.randn(64, 8)
        out = model["heads"][turn[0]](F.dropout(model["trunk"](x), 0.5))
        if turn[0]:
            return F.cross_entropy(out, x[:, :3].argmax(1))
        return F.mse_loss(out[:, 0], x.prod(1))

    return Task(model, loss)


TASKS: list[Callable[[], Task]] = [
    spirals, wide_perceptron, images, residual_network, autoencoder, variational_autoencoder, sequences,
    mixed_precision, loss_scaling, accumulation, recurrent, heavy_tails, vision_transformer, denoiser, recommender,
    contrastive, experts, q_learning, policy_gradient, adapters, two_heads, actor_critic,
]  # fmt: skip

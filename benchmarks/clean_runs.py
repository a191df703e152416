"""What the monitor reports on runs in which nothing is wrong: every incident is a false alarm.

    python benchmarks/clean_runs.py [--steps 300] [--seeds 3]

Trains four kinds of model (a perceptron on two spirals, a small convolutional network with batch norm, a small
transformer, a regression on heavy-tailed targets) with AdamW at two learning rates and SGD with momentum, with a
warm-up and a tenfold drop of the learning rate, each under the default configuration and with everything collected
at every step.
"""

import argparse
import itertools
import logging
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from machine import describe_machine
from torch import Tensor, nn

import trainsentry

EVERYTHING = {p: {"every": 1} for p in ("gradients", "parameters", "optimizer_state", "updates", "activations")}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW 1e-3": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "AdamW 1e-2": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "SGD 5e-2": lambda m: torch.optim.SGD(m.parameters(), lr=5e-2, momentum=0.9),
}
Task = tuple[nn.Module, Callable[[], Tensor]]


def spirals() -> Task:
    """Return a perceptron and its loss on two interleaved spirals."""
    angle, label = torch.rand(4096) * 12, torch.randint(0, 2, (4096,))
    turn, radius = angle + torch.pi * label, angle / 12 + 0.03 * torch.randn(4096)
    points = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def loss() -> Tensor:
        rows = torch.randint(0, 4096, (256,))
        return F.cross_entropy(model(points[rows]), label[rows])

    return model, loss


def images() -> Task:
    """Return a convolutional network with batch norm and its loss on noisy stripes of four directions."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    grid = torch.arange(12.0)

    def loss() -> Tensor:
        label = torch.randint(0, 4, (32,))
        direction = label * torch.pi / 4
        wave = direction.cos()[:, None, None] * grid + direction.sin()[:, None, None] * grid[:, None]
        noisy = (1.5 * wave).sin()[:, None] + torch.randn(32, 1, 12, 12)
        return F.cross_entropy(model(noisy), label)

    return model, loss


def sequences() -> Task:
    """Return a small transformer and its loss on a Markov chain."""
    following = torch.randint(0, 64, (64, 3))
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"token": nn.Embedding(64, 32), "body": body, "head": nn.Linear(32, 64)})
    mask = nn.Transformer.generate_square_subsequent_mask(16)  # filled with -Inf, as real masks are

    def loss() -> Tensor:
        tokens = [torch.randint(0, 64, (16,))]
        for _ in range(16):
            tokens.append(following[tokens[-1], torch.randint(0, 3, (16,))])
        batch = torch.stack(tokens, dim=1)
        logits = model["head"](model["body"](model["token"](batch[:, :-1]), mask=mask))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return model, loss


def heavy_tails() -> Task:
    """Return a perceptron and its loss on targets with Student's t noise of three degrees of freedom."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    weights = torch.randn(16, 1)
    noise = torch.distributions.StudentT(3.0)

    def loss() -> Tensor:
        x = torch.randn(64, 16)
        return F.smooth_l1_loss(model(x), x @ weights + noise.sample((64, 1)))

    return model, loss


def run(task: Callable[[], Task], optimizer_name: str, collect: dict[str, object], steps: int, seed: int) -> list[str]:
    """Train once; return the summaries of the incidents."""
    torch.manual_seed(seed)
    model, loss_of_batch = task()
    optimizer = OPTIMIZERS[optimizer_name](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 20, 1) * (0.1 if s > steps * 0.7 else 1)
    )
    with tempfile.TemporaryDirectory() as directory:
        config = {"output_dir": directory, "collect": collect, "on_incident": {"dump": False}}
        with trainsentry.TrainMonitor(config).watch(model, optimizer) as monitor:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = loss_of_batch()
                loss.backward()
                monitor.log(loss=loss, learning_rate=schedule.get_last_lr()[0])
                optimizer.step()
                schedule.step()
    return [incident.summary for incident in monitor.incidents]


def main() -> None:
    """Run every combination and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("trainsentry").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{describe_machine()}\n")
    print("| model | configuration | clean steps | incidents reported |\n|---|---|---|---|")
    for task, (name, collect) in itertools.product(
        (spirals, images, sequences, heavy_tails), {"default": {}, "everything, every step": EVERYTHING}.items()
    ):
        found = [
            line
            for optimizer, seed in itertools.product(OPTIMIZERS, range(options.seeds))
            for line in run(task, optimizer, collect, options.steps, seed)
        ]
        steps = options.steps * len(OPTIMIZERS) * options.seeds
        print(f"| {task.__name__} | {name} | {steps} | {len(found)} |", flush=True)
        for line in found:
            print(f"<!-- {line} -->", flush=True)


if __name__ == "__main__":
    main()

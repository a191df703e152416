"""A monitored run of a practice: what `practices.py` calls to watch a model and to take its steps."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from practice_models import PointPolicy
from torch import Tensor, nn

import trainsentry


class Training:
    """A monitored run: `watch` once, then `steps` to go through its steps, and `update` in each."""

    def __init__(self, directory: str, collect: dict[str, Any], seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        config = {"output_dir": str(Path(directory) / "run"), "collect": collect, "on_incident": {"dump": False}}
        self.file, self.config = Path(directory) / "config.json", config
        self.file.write_text(json.dumps(config))
        self.monitor = trainsentry.TrainMonitor(self.file)
        self.number = steps

    def sample(self, **collect: Any) -> None:
        """Edit the configuration file, which the monitor looks at once a second."""
        self.file.write_text(json.dumps({**self.config, "collect": {**self.config["collect"], **collect}}))
        time.sleep(1.2)

    def watch(self, model: Any, *optimizers: torch.optim.Optimizer) -> None:
        """Watch a model, or several, and what updates it."""
        self.monitor.watch(model, list(optimizers) if len(optimizers) > 1 else optimizers[0])

    def adam(self, model: nn.Module, rate: float = 2e-3, **options: Any) -> torch.optim.Optimizer:
        """Return AdamW over a model's parameters, which is watched with it."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **options)
        self.watch(model, optimizer)
        return optimizer

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps."""
        yield from range(self.number)

    def update(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, clip: float | None = 1.0, name: str = "loss"
    ) -> None:
        """Update by the gradients of a loss, and log it."""
        loss.backward()
        self.monitor.log(**{name: loss.detach()})
        if clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
        optimizer.zero_grad()


def train_policy(run: Training, policy: PointPolicy, points: int, epochs: int, minibatches: int) -> None:
    """Train a policy by proximal updates: epochs of shuffled minibatches of each of its rollouts."""
    optimizer, batches = run.adam(policy, 3e-4), []
    for _ in run.steps():
        if not batches:
            rollout = policy.rollout(points)
            for _ in range(epochs):
                batches += [
                    [part[rows] for part in rollout] for rows in torch.randperm(len(rollout[0])).chunk(minibatches)
                ]
        seen, actions, densities, advantages, returns = batches.pop()
        chosen, values = policy.evaluate(seen)
        ratio = (chosen.log_prob(actions).sum(1) - densities).exp()
        gain = (advantages - advantages.mean()) / advantages.std()
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + (values - returns).square().mean() / 2
        run.update(loss, optimizer, clip=0.5)

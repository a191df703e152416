"""What a clean run trains: a model, its loss, and its settings."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A model, the loss of its next batch, and its training settings."""

    model: nn.Module
    loss: Callable[[], Tensor]
    dtype: torch.dtype | None = None
    micro_steps: int = 1
    clip: float | None = None
    after: Callable[[], None] | None = None

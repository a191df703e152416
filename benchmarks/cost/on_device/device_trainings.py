"""The trainings of the benchmark on a device: two GPTs, bound by launches, and two Llamas, bound by work."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[2]))

from llama import TINY, Llama, Shape, WideMoments

from trainsentry.monitor.demo.model import Gpt, GptConfig


class SmallTraining:
    """A byte-level GPT in float32 with foreach AdamW, and one batch of eight windows."""

    def __init__(self, sizes: GptConfig, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Gpt(sizes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)
        self.tokens = torch.randint(256, (8, sizes.context + 1), device=device)

    def step(self) -> None:
        """Train one step; nothing waits for the device."""
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()


class LargeTraining:
    """A Llama-like model with bf16 weights, and one batch; the moments are bf16, or float32 with `wide`."""

    def __init__(self, shape: Shape, device: torch.device, *, wide: bool) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Llama(shape).to(torch.bfloat16)
            self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            WideMoments(parameters) if wide else torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
        )

    def step(self) -> None:
        """Train one step; nothing waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.optimizer.step()


Training = SmallTraining | LargeTraining

GPT, DEEP_GPT, LLAMA, LARGE_LLAMA = "GPT 6×384", "GPT 48×128", "Llama 0.75 B", "Llama 1.24 B"


def trainings(device: torch.device, *, tiny: bool) -> dict[str, Callable[[], Training]]:
    """Return a maker of each training, by name; tiny ones check the benchmark itself."""
    if tiny:
        small = GptConfig(layers=1, width=32, heads=2, context=16)
        return {
            GPT: lambda: SmallTraining(small, device),
            DEEP_GPT: lambda: SmallTraining(small, device),
            LLAMA: lambda: LargeTraining(TINY, device, wide=False),
            LARGE_LLAMA: lambda: LargeTraining(TINY, device, wide=True),
        }
    shape = Shape(layers=10, width=2048, vocabulary=32_000, batch=4)
    return {
        GPT: lambda: SmallTraining(GptConfig(layers=6, width=384, heads=6), device),
        DEEP_GPT: lambda: SmallTraining(GptConfig(layers=48, width=128, heads=4), device),
        LLAMA: lambda: LargeTraining(shape, device, wide=False),
        LARGE_LLAMA: lambda: LargeTraining(Shape(), device, wide=True),
    }

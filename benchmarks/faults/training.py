"""A training run of the fault benchmark."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case import Case
from models import Cnn, Gpt, Images, Text, loss_of
from torch import nn

import trainsentry

STEPS = 130
FAULT_STEP = 90
BATCH = 16
EVERYTHING = {
    **{p: {"every": 1} for p in ("parameters", "optimizer_state", "updates", "activations")},
    "communication": {"every": 1, "reducer": True},
    "gradients": {"every": 1, "before_reduction": True},
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9),
}


class Run:
    """One model with its optimizer and data; a case harms it while it trains."""

    def __init__(self, case: Case, family: str, optimizer: str, seed: int, *, faulty: bool = True) -> None:
        self.case, self.family, self.seed, self.is_faulty = case, family, seed, faulty
        self.rank = dist.get_rank() if case.ranks > 1 else 0
        self.fault_step = 0 if case.from_start else FAULT_STEP + seed % 7
        self.steps = case.steps or STEPS
        torch.manual_seed(seed)
        self.model: Any = Gpt() if family == "gpt" else Cnn()
        self.data: Any = Text() if family == "gpt" else Images()
        self.plain = self.model
        self.generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.size, self.accumulation = BATCH, 1
        self.step, self.notes = 0, {}
        self.monitor: Any = None
        self.declared: dict[str, float] = {}
        self.optimizer_name = optimizer
        if faulty or case.expect.silent:
            case.build(self)
        if case.ranks > 1 and self.plain is self.model:
            self.model = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.05)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate: a warm-up and a cosine decay."""
        return min((step + 1) / 20, 1.0) * (0.55 + 0.45 * math.cos(math.pi * min(step / 400, 1.0)))

    @property
    def harmed(self) -> bool:
        """Whether the fault has set in."""
        return self.is_faulty and self.step >= self.fault_step

    @property
    def at_fault(self) -> bool:
        """Whether the fault sets in at this step."""
        return self.is_faulty and self.step == self.fault_step

    def module(self, gpt: str, cnn: str) -> Any:
        """Return the module of that name in the family's model."""
        return self.plain.get_submodule(gpt if self.family == "gpt" else cnn)

    def parameter(self, gpt: str, cnn: str) -> Any:
        """Return the parameter of that name in the family's model."""
        return self.plain.get_parameter(gpt if self.family == "gpt" else cnn)

    def train(self, out: Path, collect: Any) -> None:
        """Train under the monitor."""
        config = {"output_dir": str(out), "collect": collect, "on_incident": {"dump": False}, **self.case.config}
        self.monitor = trainsentry.TrainMonitor(config).watch(self.model, self.optimizer)
        with suppress(trainsentry.TrainingStopped):
            for step in range(self.steps):
                self.step = step
                self._train_step()
        self.monitor.flush()
        if self.case.ranks > 1:
            dist.barrier()
            self.monitor.flush()
        self.monitor.close()
        if self.case.ranks > 1:
            dist.barrier()  # what every rank has written is read by the first

    def _train_step(self) -> None:
        active = self.is_faulty or self.case.expect.silent
        if active:
            self.case.before_step(self)
        total = 0.0
        for _ in range(self.accumulation):
            inputs, targets = self.data.batch(self.size // self.accumulation, self.generator)
            if active and self.case.batch is not None:
                inputs, targets = self.case.batch(self, inputs, targets)
            loss = loss_of(self.model(inputs), targets)
            total += float(loss.detach()) / self.accumulation
            scaled = loss / self.accumulation
            if active and self.case.loss is not None:
                scaled = self.case.loss(self, scaled)
            scaled.backward()
        if active:
            self.case.before_update(self)
        self.monitor.log(loss=total, learning_rate=self.schedule.get_last_lr()[0], **self.declared)
        self.optimizer.step()
        if active:
            self.case.after_update(self)
        self.optimizer.zero_grad()
        with suppress(AttributeError):
            self.schedule.step()


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip a bit of one fp32 element, in place."""
    with torch.no_grad():
        flat = tensor.detach().view(-1).view(torch.int32)
        flat[index] ^= 1 << bit if bit < 31 else -(2**31)

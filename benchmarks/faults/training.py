"""A training run of the fault benchmark."""

import copy
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case import Case
from families import FAMILIES
from models import Cnn, Gpt, Images, Text, loss_of
from torch import Tensor, nn

import trainsentry
from trainsentry.collectors.alignment import ALIGNMENT
from trainsentry.collectors.statistics import STATISTICS

STEPS = 130
FAULT_STEP = 90
KEPT_BEFORE = 20
"""Steps before a resume at which the checkpoint before it was saved."""

BATCH = 16
EVERYTHING = {
    **{p: {"every": 1} for p in ("parameters", "optimizer_state", "updates", "activations")},
    "communication": {"every": 1, "reducer": True},
    "gradients": {"every": 1, "before_reduction": True},
}
WITH_ALIGNMENT = [*STATISTICS, ALIGNMENT]
"""What is collected of tensors where everything is."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=5e-2, momentum=0.9),
}


class Run:
    """One model with its optimizer and data; a case harms it while it trains."""

    def __init__(self, case: Case, family: str, optimizer: str, seed: int, *, faulty: bool = True) -> None:
        self.case, self.family, self.seed, self.is_faulty = case, family, seed, faulty
        self.rank = dist.get_rank() if case.ranks > 1 else 0
        self.fault_step = 0 if case.from_start else fault_step(case, family, seed)
        self.steps = case.steps or STEPS
        self.optimizer_name = optimizer
        self.generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.size, self.accumulation = BATCH, 1
        self.step, self.notes = 0, {}
        self.monitor: Any = None
        self.declared: dict[str, float] = {}
        self.criterion: Callable[[Tensor, Tensor], Tensor] = loss_of
        self.scaler: Any = None
        self.clip: float | None = None
        self.clips_scaled, self.zeroes = False, True
        self._make(seed)

    def _make(self, seed: int) -> None:
        """Make model, data, optimizer and schedule, and let the case in."""
        torch.manual_seed(seed)
        self.data: Any
        self.model: Any
        if self.case.group:
            family = FAMILIES[self.family]
            self.model, self.data, self.criterion = family.model(), family.data(), family.loss
        else:
            self.model = Gpt() if self.family == "gpt" else Cnn()
            self.data = Text() if self.family == "gpt" else Images()
        self.plain = self.model
        self.case.prepare(self)
        if self.is_faulty or self.case.expect.silent:
            self.case.build(self)
        if self.case.ranks > 1 and self.plain is self.model:
            self.model = nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=0.05)
        self.optimizer = OPTIMIZERS[self.optimizer_name](self._groups())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def _groups(self) -> Any:
        """Return what is trained: in the open list in two groups, of which only the matrices decay."""
        trained = list(self.model.parameters())
        if not self.case.group:
            return trained
        decayed, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
        return [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]

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

    @property
    def places(self) -> dict[str, str]:
        """The names of the family's places."""
        return FAMILIES[self.family].places

    def place(self, word: str) -> Any:
        """Return the module or parameter that stands at a place of the family."""
        owner, _, last = self.places[word].rpartition(".")
        return getattr(self.plain.get_submodule(owner), last)

    def train(self, out: Path, collect: Any) -> None:
        """Train under the monitor."""
        config = {"output_dir": str(out), "collect": collect, "on_incident": {"dump": False}, **self.case.config}
        if collect is EVERYTHING:
            config["statistics"] = WITH_ALIGNMENT
        self.monitor = trainsentry.TrainMonitor(config).watch(self.model, self.optimizer, grad_scaler=self.scaler)
        with suppress(trainsentry.TrainingStopped):
            for step in range(self.steps):
                if self.case.resume is not None and step == self.fault_step:
                    self._resume(step, config)
                self.train_step(step)
        self.monitor.flush()
        if self.case.ranks > 1:
            dist.barrier()
            self.monitor.flush()
        self.monitor.close()
        if self.case.ranks > 1:
            dist.barrier()  # what every rank has written is read by the first

    def saved(self) -> dict[str, Any]:
        """Return a checkpoint: weights, buffers and the optimizer's state."""
        return copy.deepcopy({"model": self.plain.state_dict(), "optimizer": self.optimizer.state_dict()})

    def _resume(self, step: int, config: dict[str, Any] | None) -> None:
        """Save all and go on with it in a new model, optimizer and monitor, as a new process would."""
        checkpoint, schedule = self.saved(), self.schedule.state_dict()
        state = self.monitor.state_dict() if self.monitor is not None else None
        if self.monitor is not None:
            self.monitor.close()
        self._make(self.seed + 1)
        self.step = step
        if self.is_faulty and self.case.resume is not None:
            self.case.resume(self, checkpoint)
        self.plain.load_state_dict(checkpoint["model"], strict=False)
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.schedule.load_state_dict(schedule)
        if config is not None:
            self.monitor = trainsentry.TrainMonitor(config)
            self.monitor.load_state_dict(state)
            self.monitor.watch(self.model, self.optimizer)

    def train_alone(self) -> list[float]:
        """Train without a monitor; return the losses."""
        losses = []
        for step in range(self.steps):
            if self.case.resume is not None and step == self.fault_step:
                self._resume(step, None)
            losses.append(self.train_step(step))
        return losses

    def train_step(self, step: int) -> float:
        """Train one step; return its loss."""
        self.step = step
        active = self.is_faulty or self.case.expect.silent
        if self.case.resume is not None and step == max(self.fault_step - KEPT_BEFORE, 0):
            self.notes["old"] = self.saved()
        if active:
            self.case.before_step(self)
        total = sum(self._backward(active=active) for _ in range(self.accumulation))
        if active:
            self.case.before_update(self)
        if self.monitor is not None:
            self.monitor.log(loss=total, learning_rate=self.schedule.get_last_lr()[0], **self.declared)
        self._update()
        if active:
            self.case.after_update(self)
        if self.zeroes:
            self.optimizer.zero_grad()
        with suppress(AttributeError):
            self.schedule.step()
        return total

    def _backward(self, *, active: bool) -> float:
        """Train one micro-step; return its share of the loss."""
        inputs, targets = self.data.batch(self.size // self.accumulation, self.generator)
        if active and self.case.batch is not None:
            inputs, targets = self.case.batch(self, inputs, targets)
        predicted = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
        loss = self.criterion(predicted, targets)
        scaled = loss / self.accumulation
        if active and self.case.loss is not None:
            scaled = self.case.loss(self, scaled)
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        scaled.backward()
        return float(loss.detach()) / self.accumulation

    def _update(self) -> None:
        """Unscale and clip as far as this run does, and let the optimizer step."""
        if self.scaler is not None and not self.clips_scaled:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def fault_step(case: Case, family: str, seed: int) -> int:
    """Return the step at which the fault sets in; in the open list one that no default sampling hits."""
    if case.group:
        return FAULT_STEP + 1 + (zlib.crc32(f"{case.id} {family}".encode()) + seed) % 8
    return FAULT_STEP + seed % 7


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip a bit of one fp32 element, in place; torch counts no write, as it counts none of faulty memory."""
    flat = tensor.data.view(-1).view(torch.int32)
    flat[index] ^= 1 << bit if bit < 31 else -(2**31)

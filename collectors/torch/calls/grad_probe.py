"""Gradients of chosen parameters on disk before each update."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainsentry.collectors.calls.gradient_summary import Gradient, GradientSummary
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.rows.host_statistics import host_row
from trainsentry.collectors.torch.rows.local_tensor import local, stored_values

PART: Final = "grad_probe"


class GradientProbe:
    """Writes a summary before each update of a model; `wanted` are steps and parameters, nothing means all."""

    def __init__(
        self,
        model: nn.Module,
        summary: GradientSummary,
        wanted: tuple[Sequence[int], Sequence[str]],
        guard: Guard,
    ) -> None:
        self.summary = summary
        self.steps, names = set(wanted[0]), set(wanted[1])
        self.guard = guard
        self.step = 0
        self._parameters = {n: p for n, p in model.named_parameters() if not names or n in names}
        unknown = names - set(self._parameters)
        if unknown:
            raise ValueError(f"grad_probe.param_list: {min(unknown)!r}; allowed: names of the model's parameters")
        self._own = {id(p) for p in self._parameters.values()}
        self._handle = register_optimizer_step_pre_hook(self._before_update)

    def close(self) -> None:
        """Write no more."""
        self._handle.remove()

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        held = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in self._own for p in held):
            if not self.steps or self.step in self.steps:
                self.guard.run(PART, self._write)
            self.step += 1

    def _write(self) -> None:
        given = ((n, p.grad) for n, p in self._parameters.items() if p.grad is not None)
        self.summary.write(self.step, (_gradient(name, local(gradient).cpu()) for name, gradient in given))


def _gradient(name: str, gradient: Tensor) -> Gradient:
    stored, implicit = stored_values(gradient.resolve_conj().resolve_neg())
    values = stored if stored.dtype == torch.float64 else stored.float()
    row = np.asarray(host_row(stored, 0.0, implicit))
    return Gradient(name, values.numpy(), lambda: _bytes(stored), row, tuple(gradient.shape))


def _bytes(stored: Tensor) -> bytes:
    whole: bytes = stored.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return whole

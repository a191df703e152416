"""The debugger's grad_probe for torch: reads a model's gradients in a hook before each optimizer step."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainsentry.collectors.calls.gradient_summary import Gradient, GradientProbe, GradientSummary
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.hooks.any_step import is_of_checkpoint
from trainsentry.collectors.torch.rows.host_statistics import host_row
from trainsentry.collectors.torch.rows.local_tensor import local, stored_values


class ModelGradientProbe(GradientProbe):
    """Probes the gradients of a model; `wanted` are steps and parameters, empty for all."""

    def __init__(
        self,
        model: nn.Module,
        summary: GradientSummary,
        wanted: tuple[Sequence[int], Sequence[str]],
        guard: Guard,
    ) -> None:
        parameters = dict(model.named_parameters())
        super().__init__(summary, wanted, parameters, "the model's parameters", guard)
        self._parameters = {name: p for name, p in parameters.items() if self.chooses(name)}
        self._ids = {id(p) for p in self._parameters.values()}
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if is_of_checkpoint(optimizer):
            return
        updated = (p for group in optimizer.param_groups for p in group["params"])
        if any(id(p) in self._ids for p in updated):
            self.before_update(self._gradients)

    def _gradients(self) -> Iterator[Gradient]:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                yield _gradient(name, local(parameter.grad).cpu())


def _gradient(name: str, gradient: Tensor) -> Gradient:
    stored, implicit = stored_values(gradient.resolve_conj().resolve_neg())
    values = stored if stored.dtype == torch.float64 else stored.float()
    row = np.asarray(host_row(stored, 0.0, implicit))
    return Gradient(name, values.numpy(), lambda: _bytes(stored), row, tuple(gradient.shape))


def _bytes(stored: Tensor) -> bytes:
    raw: bytes = stored.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw

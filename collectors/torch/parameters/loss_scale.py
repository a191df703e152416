"""Reads the loss scale as a tensor, without waiting for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainsentry.collectors.torch.sharding.sharding import OuterOptimizer


class LossScale:
    """Reads the loss scale of a `GradScaler` or of an outer optimizer once a step."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self._outer: OuterOptimizer | None = None
        self._value: Tensor | None = None

    def use(self, scaler: Any, outer: Sequence[OuterOptimizer] = ()) -> None:
        """Set the scaler, or the outer optimizers, to read from now on."""
        self.scaler = scaler or self.scaler
        self._outer = next(iter(outer), self._outer)

    def forget(self) -> None:
        """Forget the step's value, so that the next step reads it again."""
        self._value = None

    def value(self, device: torch.device) -> Tensor | None:
        """Return the scale, a tensor of shape () on `device`; None where the loss is not scaled."""
        if self._value is None and self._outer is not None:
            scale = self._outer.loss_scale
            if isinstance(scale, Tensor):  # the outer optimizer changes it in place
                self._value = scale.to(device).reshape(()).clone()
            else:
                self._value = torch.full((), scale, device=device)
        if self._value is None and self.scaler is not None and self.scaler.is_enabled():
            self._value = self.scaler.scale(torch.ones((), device=device))
        return self._value

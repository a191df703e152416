"""The number by which the loss is multiplied, as a tensor that nobody waits for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainsentry.collectors.torch.sharding.deepspeed import loss_scale


class LossScale:
    """Knows the loss scale of a `GradScaler`, or of DeepSpeed's optimizer; asks for it once a step."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self._wrapper: Any = None
        self._value: Tensor | None = None

    def use(self, scaler: Any, wrappers: Sequence[Any] = ()) -> None:
        """Take a scaler, or DeepSpeed's optimizers, from here on."""
        self.scaler = scaler or self.scaler
        self._wrapper = next(iter(wrappers), self._wrapper)

    def forget(self) -> None:
        """Ask anew in the coming step."""
        self._value = None

    def value(self, device: torch.device) -> Tensor | None:
        """Return the scale, a tensor on `device` of shape (); None where the loss is not scaled."""
        if self._value is None and self._wrapper is not None:
            self._value = torch.full((), loss_scale(self._wrapper), device=device)
        if self._value is None and self.scaler is not None and self.scaler.is_enabled():
            self._value = self.scaler.scale(torch.ones((), device=device))
        return self._value

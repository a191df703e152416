"""What MindSpore's loss scalers say: the scale, and that a step was skipped."""

import math
from collections.abc import Sequence
from typing import Any

from mindspore import Tensor


class ScalerWatch:
    """Sees that a dynamic loss scaler has skipped a step: its scale has fallen since the last look.

    Nothing is wrapped: the scaler's methods may be part of a compiled step. At its lowest scale, where it cannot fall,
    a skip is not seen. On an accelerator a look waits for one number.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.last = _number(scaler)

    def skipped(self) -> int:
        """Return how many steps were skipped since the last call: each has divided the scale by the same factor."""
        before, self.last = self.last, _number(self.scaler)
        if before is None or self.last is None or not 0 < self.last < before:
            return 0
        factor = _number(self.scaler, "scale_factor")
        return max(1, round(math.log(before / self.last, factor))) if factor is not None and factor > 1 else 1


def _number(scaler: Any, name: str = "scale_value") -> float | None:
    value = getattr(scaler, name, None)
    if isinstance(value, Tensor):
        return float(value.asnumpy().reshape(-1)[0])
    return float(value) if isinstance(value, (int, float)) else None


def check_scaler(grad_scaler: Any) -> None:
    """Check that a loss scaler is one.

    Raises:
        TypeError: when it has not the methods of `mindspore.amp.LossScaler`.

    """
    needed: Sequence[str] = ("scale", "unscale", "adjust")
    if grad_scaler is not None and not all(callable(getattr(grad_scaler, m, None)) for m in needed):
        name = type(grad_scaler).__name__
        raise TypeError(f"watch(grad_scaler): got {name}, allowed: mindspore.amp.LossScaler or None")

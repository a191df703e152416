"""What MindSpore's loss scalers say: the scale, and that a step was skipped."""

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

    def has_skipped(self) -> bool:
        """Return whether the scale has fallen since the last call."""
        before, self.last = self.last, _number(self.scaler)
        return before is not None and self.last is not None and self.last < before


def _number(scaler: Any) -> float | None:
    value = getattr(scaler, "scale_value", None)
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

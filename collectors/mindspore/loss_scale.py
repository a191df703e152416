"""What MindSpore's loss scalers say: the scale, and that a step was skipped."""

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor


class ScalerWatch:
    """Sees the `adjust` of one loss scaler (`amp.DynamicLossScaler`), which is called once a step.

    With a result that is not finite the optimizer is not called in that step. The method is wrapped on the instance.
    """

    def __init__(self, scaler: Any, adjusted: Callable[[Any, bool], None]) -> None:
        self.scaler = scaler
        self._adjusted = adjusted
        self._original = scaler.adjust

        def adjust(finite: Any, *args: Any, **kwargs: Any) -> Any:
            self._adjusted(self.scaler, _truth(finite))  # before the scale of the step is changed
            return self._original(finite, *args, **kwargs)

        scaler.adjust = adjust

    def close(self) -> None:
        """Give the scaler its own method back."""
        vars(self.scaler).pop("adjust", None)


def _truth(finite: Any) -> bool:
    """Return whether a result was finite; the program has asked the same just before it called the optimizer."""
    return bool(finite.asnumpy()) if isinstance(finite, Tensor) else bool(finite)


def scale_of(scaler: Any) -> "float | Tensor | None":
    """Return a scaler's present scale."""
    value = getattr(scaler, "scale_value", None)
    return value if isinstance(value, (int, float, Tensor)) else None


def check_scaler(grad_scaler: Any) -> None:
    """Check that a loss scaler is one.

    Raises:
        TypeError: when it has not the methods of `mindspore.amp.LossScaler`.

    """
    needed: Sequence[str] = ("scale", "unscale", "adjust")
    if grad_scaler is not None and not all(callable(getattr(grad_scaler, m, None)) for m in needed):
        name = type(grad_scaler).__name__
        raise TypeError(f"watch(grad_scaler): got {name}, allowed: mindspore.amp.LossScaler or None")

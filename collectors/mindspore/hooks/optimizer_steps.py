"""Reports where each optimizer step begins and ends, and which steps a loss scaler has skipped."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, nn

from trainsentry.collectors.backend import StepListener
from trainsentry.collectors.mindspore.hooks.interception import unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.runtime import on_host, wait


class OptimizerSteps:
    """Reports where each optimizer's step begins and ends to a listener; `close` undoes everything.

    `called` counts the intercepted calls; inside a compiled step there are none. `gradients` are those of the call
    under way. Where a step `reads` nothing, it waits for nothing.
    """

    adopted_only = False

    def __init__(self, optimizers: Sequence[nn.Cell], listener: StepListener) -> None:
        self.optimizers = list(optimizers)
        self.listener = listener
        self.called = 0
        self._reported = 0
        self.gradients: Sequence[Any] = ()
        self.reads = True
        self.check_scaler: Callable[[], None] | None = None
        for optimizer in self.optimizers:
            watch_calls(optimizer, self)

    def close(self) -> None:
        """Stop intercepting the optimizers' calls."""
        for optimizer in self.optimizers:
            unwatch_calls(optimizer, self)
        self.optimizers.clear()

    def ended_step(self) -> bool:
        """Whether an update was reported since the last call of this method."""
        reported, self._reported = self.called > self._reported, self.called
        return reported

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report that an update begins."""
        self.called += 1
        given = args[0] if args else next(iter(kwargs.values()), ())
        self.gradients = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if self.reads and on_host():
            wait()  # raises errors of the user's own operations here, outside the guard
        if self.check_scaler is not None:
            self.check_scaler()
        self.listener.before_optimizer(cell, has_closure=False)

    def leave(self, cell: nn.Cell, output: Any) -> None:
        """Report that an update has ended."""
        del output
        if self.reads and on_host():
            wait()
        self.gradients = ()
        self.listener.after_optimizer(cell)


class ScalerWatch:
    """Detects that a dynamic loss scaler has skipped steps: its scale has fallen since the last check.

    Nothing is patched, as the scaler's methods may be part of a compiled step. At its lowest scale, which cannot fall,
    a skip goes unnoticed. On an accelerator each check waits for one number.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.last = _number(scaler)

    def skipped(self) -> int:
        """Return the number of steps skipped since the last call; each divides the scale by the same factor."""
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
    """Check the given loss scaler.

    Raises:
        TypeError: when it lacks the methods of `mindspore.amp.LossScaler`.

    """
    needed: Sequence[str] = ("scale", "unscale", "adjust")
    if grad_scaler is not None and not all(callable(getattr(grad_scaler, m, None)) for m in needed):
        name = type(grad_scaler).__name__
        raise TypeError(f"watch(grad_scaler): got {name}, allowed: mindspore.amp.LossScaler or None")

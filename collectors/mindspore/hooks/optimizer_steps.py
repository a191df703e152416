"""Where an optimizer's step begins and ends."""

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import nn

from trainsentry.collectors.backend import StepListener
from trainsentry.collectors.mindspore.hooks.interception import unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.runtime import on_host, wait


class OptimizerSteps:
    """Tells a listener where each optimizer's step begins and ends; `close` undoes everything.

    `called` counts the calls that were seen: inside a compiled step there are none. `gradients` are those of the call
    under way. Where a step `reads` nothing, nothing is waited for.
    """

    def __init__(self, optimizers: Sequence[nn.Cell], listener: StepListener) -> None:
        self.optimizers = list(optimizers)
        self.listener = listener
        self.called = 0
        self._told_of = 0
        self.gradients: Sequence[Any] = ()
        self.reads = True
        self.look_at_scaler: Callable[[], None] | None = None
        for optimizer in self.optimizers:
            watch_calls(optimizer, self)

    def close(self) -> None:
        """Leave every optimizer."""
        for optimizer in self.optimizers:
            unwatch_calls(optimizer, self)
        self.optimizers.clear()

    def have_told(self) -> bool:
        """Whether an update has been told of since this was asked last."""
        told, self._told_of = self.called > self._told_of, self.called
        return told

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of an update that is about to begin."""
        self.called += 1
        given = args[0] if args else next(iter(kwargs.values()), ())
        self.gradients = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if self.reads and on_host():
            wait()  # an error of the user's own operations is raised here, outside our guard
        if self.look_at_scaler is not None:
            self.look_at_scaler()
        self.listener.before_optimizer(cell, has_closure=False)

    def leave(self, cell: nn.Cell, output: Any) -> None:
        """Tell of an update that is over."""
        del output
        if self.reads and on_host():
            wait()
        self.gradients = ()
        self.listener.after_optimizer(cell)

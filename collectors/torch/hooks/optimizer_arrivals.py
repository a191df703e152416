"""Notices optimizers that step the watched model though they were not given to `watch`."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch.optim import Optimizer

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.torch.device.registry import stream_is_captured
from trainsentry.collectors.torch.hooks.any_step import AnyStepHandle, before_any_step

PART: Final = "other optimizers"

PATIENCE: Final = 20
"""Steps of an optimizer that was not given, without a step of one that was, before it is named."""


class Steps(Protocol):
    """The optimizers that are watched, as `OptimizerSteps` keeps them."""

    has_stepped: bool
    under_way: set[int]

    def owns(self, optimizer: Any) -> bool:
        """Whether an optimizer is watched."""

    def adopt(self, optimizer: Optimizer) -> None:
        """Watch an optimizer from the step on that it is about to take."""


@dataclass
class Arrivals:
    """Takes over an optimizer at its first step where `awaited`; otherwise names one that steps in place of the given.

    `holds` says whether an optimizer has parameters of the watched model; `came` is told of each that is taken over.
    """

    guard: Guard
    holds: Callable[[Optimizer], bool]
    came: Callable[[Optimizer], None]
    awaited: bool

    def listen(self, steps: Steps) -> AnyStepHandle:
        """Look at the steps of all optimizers of the process, until the returned handle is removed."""
        return before_any_step(_AnyStep(self, steps))


class _AnyStep:
    """Listens before any optimizer's step; an optimizer is examined once."""

    def __init__(self, arrivals: Arrivals, steps: Steps) -> None:
        # A listener of the whole process must not keep the watched model alive.
        self.arrivals = weakref.ref(arrivals)
        self.steps = weakref.ref(steps)
        self._others: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()

    def __call__(self, optimizer: Optimizer) -> None:
        steps, arrivals = self.steps(), self.arrivals()
        if steps is None or arrivals is None or steps.owns(optimizer) or self._others.get(optimizer) is False:
            return
        if steps.under_way or stream_is_captured():  # an optimizer inside a watched one's step is a part of it
            return
        arrivals.guard.run(PART, self._look, arrivals, steps, optimizer)

    def _look(self, arrivals: Arrivals, steps: Steps, optimizer: Optimizer) -> None:
        if optimizer not in self._others:
            self._others[optimizer] = arrivals.holds(optimizer)
        if not self._others[optimizer]:
            return
        if arrivals.awaited:
            steps.adopt(optimizer)
            arrivals.came(optimizer)
            return
        self._counts[type(optimizer).__name__] += 1
        if not steps.has_stepped and self._counts.total() == PATIENCE:
            self._name(arrivals.guard, type(optimizer).__name__)

    def _name(self, guard: Guard, kind: str) -> None:
        guard.warn_once(
            PART,
            f"no step was recorded: in {PATIENCE} steps another optimizer ({kind}) has trained the watched model, and "
            "the one given to watch() never stepped. Call watch(model, optimizer) with the optimizer that trains it.",
        )

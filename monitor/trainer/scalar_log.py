"""Checks the scalars that the training loop logs, and numbers the values of one name within a step."""

from collections import Counter
from typing import Any, Final

import numpy as np

from trainsentry.collectors.backend import ModelWatch
from trainsentry.collectors.guard import Guard

MAX_LOGS: Final = 64
"""Values of one name kept within a step, one per micro-step; later ones replace the last."""


class ScalarLog:
    """Passes logged scalars to the collectors; reports a value that is not a scalar, and leaves it out."""

    def __init__(self, watch: ModelWatch, guard: Guard) -> None:
        self.watch = watch
        self.guard = guard
        self._counts: Counter[str] = Counter()

    def take(self, scalars: dict[str, Any]) -> None:
        """Log values by name; the second value of a name within a step belongs to the second micro-step.

        Raises:
            TypeError: when the guard is strict and a value is not a scalar.

        """
        for name, value in scalars.items():
            if not _is_scalar(value):
                error = TypeError(f"log({name}=…): got {_shown(value)}, allowed: a number or a tensor of one element")
                if self.guard.strict:
                    raise error
                self.guard.refuse("log", error)
                continue
            self.watch.log(name, value, min(self._counts[name], MAX_LOGS - 1))
            self._counts[name] += 1

    def end_step(self) -> None:
        """Reset the counts for the next step."""
        self._counts.clear()


def _is_scalar(value: Any) -> bool:
    numel = getattr(value, "numel", None)
    if callable(numel):
        return bool(numel() == 1)
    return isinstance(value, (int, float, np.number, np.bool_)) or (isinstance(value, np.ndarray) and value.size == 1)


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else repr(value)[:80]
